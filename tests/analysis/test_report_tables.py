"""Tests of the table files next to the report's page, and of the details of single runs on the page."""

import json
from pathlib import Path

import pandas as pd
import pytest
from exact_csv import read_csv
from records import MIB, failed, memory, results, run, save, scattered, spec, steps, trained

from analysis import results as reading
from analysis.formats import LONG, format_markdown_table, format_within, to_latex
from analysis.report import contents, render_tables
from analysis.report.contents import (
    Evidence,
    build_details,
    build_page_table,
    find_facets,
    find_place,
    find_text_limit,
    format_record,
    read_evidence,
    read_tail,
    select_runs,
)
from analysis.report.findings import compute_findings
from analysis.report.page import title_page
from analysis.report.tables import (
    build_best_table,
    build_configurations_table,
    build_crossovers_table,
    build_runs_table,
    build_scaling_table,
)
from analysis.results import Results
from analysis.scaling.best import best
from analysis.scaling.curves import build_curves
from analysis.table import list_rows
from bench.core.files import pack
from bench.core.spec import RunSpec

QUIET = steps(scattered(0.09, 0.1, 0.11))


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    of = results(
        run(spec("ddp"), steps=QUIET), failed("oom", spec("zero3"), reason="50 % | full_up"), run(spec("ddp", nodes=2))
    )
    return {name: content.decode() for name, content in render_tables(compute_findings(of)).items()}


def test_csv_of_runs_is_exact(files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(files["runs.csv"])
    again = read_csv(tmp_path / "runs.csv")
    assert again["step_s"].tolist()[:1] == [0.1] and again["outcome"].tolist() == ["ok", "oom", "ok"]


DECODER = {
    "model": {"family": "gpt", "shape": {"width": 4, "layers": 1, "heads": 1, "inner": 8, "vocab": 16, "positions": 8}},
    "objective": "causal_lm", "sequence": {"tokens": 8},
}  # fmt: skip


@pytest.mark.parametrize(
    ("specs", "unit"),
    [
        ([spec("ddp", **DECODER)], "tokens/s, with padding"),
        ([spec("ddp", **DECODER), spec("ddp")], "tokens/s, of all kinds, with padding"),
    ],
)
def test_unit_of_a_rate_names_the_counted_tokens(specs: list[RunSpec], unit: str) -> None:
    of = render_tables(compute_findings(results(*(run(one, steps=QUIET) for one in specs))))
    assert f"throughput ({unit})" in of["configurations.md"].decode().splitlines()[0]


def test_markdown_tables_have_units_rounded_numbers_and_failures(files: dict[str, str]) -> None:
    head, _, *rows = files["configurations.md"].splitlines()
    assert "step time (s)" in head and "throughput (tokens/s, encoder + decoder, with padding)" in head
    (ddp,) = (row for row in rows if "| ddp | 1 × 2 |" in row)
    assert "| 0.100 (0.090 to 0.110) |" in ddp
    (oom,) = (row for row in rows if "zero3" in row)
    assert "| oom | 0 | oom | – |" in oom, "the outcome stands in place of the first number"


def test_numbers_and_their_intervals_have_the_digits_of_the_width_of_the_interval() -> None:
    """A number and the ends of its interval are rounded to the same digit, so that no rounded number lies outside its
    rounded interval. The width of the interval determines this digit."""
    assert format_within(0.12345, 0.1231, 0.1239) == ("0.12345", "0.12310", "0.12390")
    assert format_within(44_321, 44_300, 44_350) == ("44,321", "44,300", "44,350")
    assert format_within(1.7341, 1.7331, 1.7512) == ("1.734", "1.733", "1.751")
    assert format_within(0.12345, 0.10, 0.15) == ("0.123", "0.100", "0.150")
    assert format_within(12.0, 7.0, 21.0) == ("12", "7", "21")
    assert format_within(0.5, 0.5, 0.5) == ("0.5000", "0.5000", "0.5000")


def of_models(*models: str) -> Results:
    """Return runs of the engines zero1 and ddp with each of these models. ddp is faster and needs less memory."""
    return results(
        *(
            run(spec(engine, model={"name": name}), steps=steps(scattered(0.9 * s, s, 1.1 * s)), memory=memory(2, peak))
            for name in models
            for engine, s, peak in (("zero1", 0.2, 3000 * MIB), ("ddp", 0.1, 300 * MIB))
        )
    )


def test_rows_of_several_models_are_grouped_under_headings() -> None:
    rows = list_rows(of_models("b", "a").summary)
    table = build_configurations_table([*rows[::2], *rows[1::2]])
    page = build_page_table(table, [[row] for row in (*rows[::2], *rows[1::2])], [], 4, opens=True)
    labels = [heading.label for heading in page.head]
    engine, peak = labels.index("engine"), labels.index("peak memory")
    assert "model" not in labels and "model" in [heading.label for heading in table.head]
    shown = [(group.heading, [row.cells[engine].text for row in group.rows]) for group in page.groups]
    assert shown == [("b", ["zero1", "ddp"]), ("a", ["zero1", "ddp"])]
    assert [row.opens for group in page.groups for row in group.rows] == [f"configurations {n}" for n in (0, 2, 1, 3)]
    assert (page.head[peak].unit, [row.cells[peak].text for row in page.groups[0].rows]) == ("GiB", ["2.93", "0.294"])


def test_rows_of_one_model_have_no_heading_and_no_model_column() -> None:
    rows = list_rows(of_models("a").summary)
    page = build_page_table(build_configurations_table(rows), [[row] for row in rows], [], 2)
    assert [group.heading for group in page.groups] == [""]
    assert "model" not in [heading.label for heading in page.head]


def test_sizes_of_different_magnitude_have_a_unit_in_each_cell() -> None:
    far = [run(spec(engine), memory=memory(2, peak)) for engine, peak in (("ddp", MIB), ("zero1", 2048 * MIB))]
    table = build_configurations_table(list_rows(results(*far).summary))
    place = [heading.label for heading in table.head].index("peak memory")
    assert (table.head[place].unit, [row[place].text for row in table.rows]) == ("", ["2.00 MiB", "2.00 GiB"])


def test_note_of_a_table_explains_its_intervals() -> None:
    three = [run(spec("ddp"), repeat=n, steps=steps(scattered(0.09, 0.1, 0.11))) for n in range(3)]
    once = run(spec("zero1"), steps=QUIET)
    note = build_configurations_table(list_rows(results(once, *three).summary)).note.replace("\xa0", " ")
    assert note == "intervals for n = 1: from the steps of one run, indicative; n = 3: 75 %, range of repeats"


def test_best_table_lists_three_rivals_and_counts_the_rest() -> None:
    equal = [
        run(spec(f"zero{stage}", micro), repeat=n, steps=steps((s * by * micro / 2,) * 30))
        for stage, s in enumerate((0.1, 0.1001, 0.1002))
        for micro in (2, 4)
        for n, by in enumerate((0.999, 1.0, 1.001))
    ]
    found = best(results(*equal))
    (row,) = build_best_table(found, []).rows
    (others,) = (cell.text for cell in row if cell.text.startswith("equal within 3 %: "))
    assert others.count("micro") == 3 and others.endswith(" and 2 more")


def test_title_lists_up_to_three_studies_and_the_question_of_a_single_study() -> None:
    assert title_page(["a"], ["Which?"]) == "a: Which?"
    assert title_page(["a"], []) == "a"
    assert title_page(["a", "b", "c"], ["Which?", "How?"]) == "a, b, c"
    assert title_page(["a", "b", "c", "d", "e"], []) == "a, b, c and 2 more"


def test_scaling_tables_exist_only_if_node_counts_differ(files: dict[str, str]) -> None:
    assert {"scaling.csv", "scaling.md", "scaling.tex"} <= files.keys()
    assert not any(name.startswith(("scal", "cross")) for name in render_tables(compute_findings(results(run()))))


def test_latex_table_has_booktabs_rules_and_escaped_text() -> None:
    shown = to_latex(["a_b", "n"], [["50 % & {x}", "1"], ["\\input{/etc/passwd} $~^#", "2"]], [False, True])
    comment, *lines = shown.splitlines()
    assert comment == "% needs \\usepackage{booktabs}"
    assert lines[0] == "\\begin{tabular}{lr}" and lines[-1] == "\\end{tabular}"
    assert [line for line in lines if "rule" in line] == ["\\toprule", "\\midrule", "\\bottomrule"]
    assert "a\\_b & n \\\\" in lines
    assert "50 \\% \\& \\{x\\} & 1 \\\\" in lines
    assert "\\textbackslash input\\{/etc/passwd\\} \\$\\textasciitilde \\textasciicircum \\# & 2 \\\\" in lines


def test_long_latex_table_uses_longtable() -> None:
    shown = to_latex(["n"], [[str(n)] for n in range(LONG + 1)], [True])
    assert "\\begin{longtable}{r}" in shown and "\\usepackage{booktabs,longtable}" in shown


def test_text_of_a_markdown_cell_is_escaped() -> None:
    assert format_markdown_table(["a"], [["x | <b>\ny"]], [True]) == "| a |\n| ---: |\n| x \\| \\<b\\> y |\n"


def test_tail_of_a_log_consists_of_complete_lines(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_bytes(b"".join(b"%d \xff\n" % number for number in range(50_000)))
    assert read_tail(log, 2) == "49998 \ufffd\n49999 \ufffd"
    assert read_tail(log, 10**6).splitlines()[0].split()[0].isdigit()
    assert read_tail(tmp_path / "none") == ""
    (tmp_path / "log.zip").write_bytes(pack({"run.log": log.read_bytes()}))
    assert read_tail(tmp_path / "log.zip" / "run.log", 10**6) == read_tail(log, 10**6)


def test_formatted_record_has_series_on_one_line_and_truncates_long_series() -> None:
    shown = format_record(run(steps=steps((0.25,) * 60, cut=0)))
    plain = json.loads(shown)
    assert plain["observations"]["steps"]["step_s"][:2] == [0.25, 0.25]
    assert plain["observations"]["steps"]["step_s"][-1] == "… 20 more in record.json"
    assert any(line.strip().startswith('"step_s": [ 0.25, 0.25,') for line in shown.splitlines())


def test_row_of_a_deleted_record_remains_without_details(tmp_path: Path) -> None:
    of = reading.read([save(tmp_path, run())])
    next(tmp_path.rglob("record.json")).unlink()
    left = read_evidence(of, 0)
    assert left.record is None and left.folder.name == "0.0"
    (shown,) = build_details([], list_rows(of.table), [left])["runs"]
    assert shown[3] == ""


def test_details_of_undisturbed_ok_runs_are_omitted_first_above_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [run(), run(spec("zero1")), failed("oom", spec("zero2"))]
    table = list_rows(results(*records).table)
    rows = [row | {"flags": flags} for row, flags in zip(table, ("", "busy", ""), strict=True)]
    left = [Evidence(Path(), one, "") for one in records]
    lengths = [len(format_record(one)) for one in records]

    def find_kept(limit: int) -> list[bool]:
        monkeypatch.setattr("analysis.report.contents.find_text_limit", lambda runs: limit)
        return [shown[3] is not None for shown in build_details([], rows, left)["runs"]]

    assert find_kept(lengths[2]) == [False, False, True]
    assert find_kept(lengths[1] + lengths[2]) == [False, True, True]


def test_page_of_few_runs_has_room_for_all_their_records() -> None:
    assert find_text_limit(72) > 1_000_000 and find_text_limit(414) == find_text_limit(5_000) == 200_000


def test_tables_of_trainings_have_held_out_losses_and_open_the_runs_of_all_seeds() -> None:
    of = results(*(trained(loss, 0.1, seed) for seed, loss in enumerate((2.0, 2.1, 2.2))))
    configurations, runs = list_rows(of.summary), list_rows(of.table)
    for table, losses in (
        (build_configurations_table(configurations), ["2.10 (1.85 to 2.35)"]),
        (build_runs_table(runs), ["2.00", "2.10", "2.20"]),
    ):
        (place,) = [place for place, heading in enumerate(table.head) if heading.text == "held-out loss (nats)"]
        assert [row[place].full for row in sorted(table.rows, key=lambda row: row[place].key)] == losses
    none = [Evidence(Path(), None, "")] * 3
    ((_, opened, count),) = build_details(configurations, runs, none, of.configuration_ids)["configurations"]
    assert (sorted(opened), count) == ([0, 1, 2], 3)


def test_selection_of_runs_keeps_the_first_of_every_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MOST_ROWS", 3)
    rows = list_rows(results(*(run(spec(engine), repeat=n) for engine in ("ddp", "zero1") for n in range(3))).table)
    assert [(rows[one]["engine"], rows[one]["repeat"]) for one in select_runs(rows)] == [
        ("ddp", 0), ("ddp", 1), ("zero1", 0),
    ]  # fmt: skip


def test_truncated_tables_state_the_number_of_omitted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.report.MOST_ROWS", 1)
    files = render_tables(compute_findings(results(run(), run(repeat=1), run(repeat=2))))
    assert files["runs.md"].decode().splitlines()[-1] == "2 more rows are in runs.csv."
    assert files["runs.tex"].decode().splitlines()[0] == "% 2 more rows are in runs.csv."
    assert isinstance(pd.DataFrame(), pd.DataFrame) and len(files["runs.csv"].splitlines()) == 1 + 3


def test_crossovers_have_their_own_table() -> None:
    """On one node, a step of ZeRO-3 takes 1.2 times as long as one of ZeRO-2. With more nodes, step times of ZeRO-3
    grow less than those of ZeRO-2. Therefore ZeRO-3 is faster from three nodes on."""
    seconds = {"zero2": (1.0, 1.12, 1.26, 1.42, 1.8), "zero3": (1.2, 1.212, 1.224, 1.236, 1.26)}
    runs = [
        run(spec(engine, nodes=nodes, ranks=1), repeat=repeat, steps=steps((s * by,) * 30))
        for engine, of_engine in seconds.items()
        for nodes, s in zip((1, 2, 3, 4, 6), of_engine, strict=True)
        for repeat, by in enumerate((0.999, 1.0, 1.001))
    ]
    files = {name: content.decode() for name, content in render_tables(compute_findings(results(*runs))).items()}
    assert "zero3 overtakes zero2 between 2 and 3 nodes" in files["crossovers.md"]
    assert files["crossovers.csv"].count("zero3 overtakes zero2") == 5
    assert "toprule" in files["crossovers.tex"]


def test_a_filter_keeps_a_crossover_if_it_matches_any_row_of_it() -> None:
    records = [run(spec(engine, nodes=nodes, ranks=1)) for engine in ("zero2", "zero3") for nodes in (1, 2)]
    found = compute_findings(results(*records))
    (crossover,), facets = found.crossovers, find_facets(found.rows)
    table = build_page_table(build_crossovers_table([crossover]), [crossover.rows], facets, 1)
    assert [facet.column for facet in facets] == ["engine", "nodes"]
    assert table.groups[0].rows[0].facets == "0|1,0|1"


def test_facets_are_columns_that_differ_and_rows_have_indices_into_them() -> None:
    rows = list_rows(results(run(spec("ddp")), run(spec("ddp", 4)), failed("oom", spec("zero1", 4))).table)
    facets = find_facets(rows)
    assert [(facet.column, facet.texts) for facet in facets] == [
        ("engine", ("ddp", "zero1")), ("micro", ("2", "4")), ("outcome", ("ok", "oom")),
    ]  # fmt: skip
    assert [find_place([row], facets) for row in rows] == ["0,0,0", "0,1,0", "1,1,1"]


def test_speed_ups_without_repeats_are_marked_as_within_runs() -> None:
    def list_speed_ups(repeats: int) -> list[str]:
        seconds = {1: scattered(0.19, 0.2, 0.21), 2: scattered(0.09, 0.1, 0.11)}
        of = results(
            *(run(spec(nodes=n, ranks=1), repeat=k, steps=steps(s)) for n, s in seconds.items() for k in range(repeats))
        )
        table = build_scaling_table(build_curves(of))
        (place,) = [place for place, heading in enumerate(table.head) if heading.text == "speed-up"]
        return [table.note, *(row[place].full for row in table.rows)]

    note, _, marked = list_speed_ups(1)
    assert marked.endswith(", within runs)") and "as marked" in note
    note, _, unmarked = list_speed_ups(3)
    assert "within" not in unmarked and "as marked" not in note
