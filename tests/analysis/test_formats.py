import csv
import io
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from exact_csv import read_csv
from records import failed, results, run, run_table, save, spec, steps

from analysis import formats
from analysis.columns import list_columns
from analysis.formats import (
    MISSING,
    BriefNames,
    format_cell,
    format_interval_of,
    format_ratio_change,
    format_significant,
    format_size,
)
from analysis.table import list_rows
from bench.cli import main

NASTY = 'rank 0: "a, b"\n<script>alert(1)</script> | `x` \\ *y* NA'


def table() -> pd.DataFrame:
    """Return a run table with values that programs easily misread: an id like a number, a model called nan, a text with
    all separators, and long floats."""
    odd = spec(model={"name": "nan"}, activation_checkpointing=True)
    return run_table(
        [
            run(steps=steps(tuple(0.1 + 1 / (3 + i) for i in range(40)))),
            run(odd).model_copy(update={"config_id": "123e456789"}),
            failed("oom", reason=NASTY, torch=None),
        ]
    )


def test_csv_round_trip_keeps_the_table(tmp_path: Path) -> None:
    written = tmp_path / "runs.csv"
    written.write_text(formats.to_csv(table()))
    pd.testing.assert_frame_equal(read_csv(written), table(), check_exact=True)


FOREIGN = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "'quoted", "a\rb", "a\nb", "a\r\nb", 'a"b', "\x1b[31mred")


def test_csv_cells_are_no_formulas_and_break_no_lines(tmp_path: Path) -> None:
    """Spreadsheets evaluate text that begins with =, +, - or @, and some readers end a line at a lone CR. The CSV must
    avoid both, and still return the same texts when it is read."""
    frame = run_table([failed("oom", reason=reason) for reason in FOREIGN])
    text = formats.to_csv(frame)
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert len(rows) == len(FOREIGN)
    assert not any(cell.startswith(("=", "+", "@", "\t", "\r")) for row in rows for cell in row.values())
    assert all(re.search(r'"[^"]*\r', line) for line in text.split("\n") if "\r" in line), "quoted"
    (tmp_path / "runs.csv").write_bytes(text.encode())
    pd.testing.assert_frame_equal(read_csv(tmp_path / "runs.csv"), frame, check_exact=True)


def test_printed_tables_contain_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, failed("oom", reason="\x1b[2J\x1b]0;title\x07red\x9b31m"))
    assert main(["table", str(tmp_path)]) == 0
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 3, "nothing can be compared"
    printed = capsys.readouterr().out
    assert "red" in printed and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", printed)


def test_csv_round_trip_keeps_an_empty_table(tmp_path: Path) -> None:
    written = tmp_path / "runs.csv"
    written.write_text(formats.to_csv(run_table([])))
    pd.testing.assert_frame_equal(read_csv(written), run_table([]))


def test_json_is_exact_and_has_null_for_missing_values() -> None:
    rows = json.loads(formats.to_json(table()))
    assert rows == list_rows(table())
    assert rows[2]["tokens_per_s"] is None
    assert rows[2]["environment_id"] is None
    assert rows[1]["activation_checkpointing"] is True
    assert rows[0]["padding_tokens"] == 4


def test_markdown_keeps_every_cell_in_its_column() -> None:
    lines = formats.to_markdown(table()).splitlines()
    assert len(lines) == 2 + 3
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(list_columns()) + 1}
    assert "<script" not in re.sub(r"\\.", "", lines[-1])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1.0, "1.000"), (0.0499960001, "0.05000"), (0.05, "0.05000"), (1234567.0, "1,235,000"),
        (12.3456, "12.35"), (-0.5, "-0.5000"), (1e-7, "1.000e-07"), (2.5e17, "2.500e+17"), (9999.9, "10,000"),
    ],
)  # fmt: skip
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert format_significant(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1, "1.000 B"), (1023, "1,023 B"), (1024, "1.000 KiB"), (80 * 2**30, "80.00 GiB")]
)
def test_sizes_have_binary_units(value: int, text: str) -> None:
    assert format_size(value) == text


def test_missing_cells_are_a_dash() -> None:
    assert {format_cell(column, None) for column in list_columns().values()} == {MISSING}


@pytest.mark.parametrize(
    ("value", "low", "high", "printed"),
    [
        (8697, 8346, 8958, "8,700 (8,350 to 8,960)"),
        (0.26761, 0.26012, 0.27199, "0.268 (0.260 to 0.272)"),
        (0.26761, 0.267601, 0.267622, "0.267610 (0.267601 to 0.267622)"),
        (3.0, -11.0, 17.0, "3 (−11 to 17)"),
        (2.0, 2.0, 2.0, "2.000 (2.000 to 2.000)"),
        (2.0, 1.0, float("inf"), "2.000 (1.000 to inf)"),
    ],
)
def test_digits_of_a_number_follow_the_width_of_its_interval(
    value: float, low: float, high: float, printed: str
) -> None:
    assert format_interval_of(value, low, high) == printed


def test_ratio_is_printed_as_a_change_in_percent() -> None:
    assert format_ratio_change(1.0512, 1.0401, 1.0629) == "+5.1 % (+4.0 to +6.3)"
    assert format_ratio_change(0.348, 0.308, 0.412) == "−65 % (−69 to −59)"
    assert format_ratio_change(0.5) == "−50 %"


def test_brief_names_have_the_accumulation_only_if_it_varies_at_one_micro_batch() -> None:
    def name(*batches: tuple[str, int, int]) -> list[str]:
        records = [run(spec(engine, batch={"micro": micro, "accumulation": n})) for engine, micro, n in batches]
        rows = list_rows(results(*records).summary)
        names = BriefNames(rows)
        return sorted(names.of(row) for row in rows)

    assert name(("zero1", 2, 4), ("zero2", 2, 4)) == ["zero1", "zero2"]
    assert name(("zero1", 2, 4), ("zero2", 4, 2)) == ["zero1 (micro 2)", "zero2 (micro 4)"]
    assert name(("zero1", 2, 4), ("zero2", 2, 1)) == ["zero1 (accumulation 4)", "zero2 (accumulation 1)"]
