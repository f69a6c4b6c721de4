import json
from pathlib import Path

import pytest
from records import failed, run, save, spec, steps

from analysis import formats
from bench.cli import main
from bench.core.record import Evaluation, RunRecord

MEASURED = Path(__file__).parents[2] / "results" / "measured"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    long = "rank 0: " + "out of memory " * 20
    enough = steps((0.1,) * 601)  # 60.1 s, which is not short
    good = run(spec("ddp"), steps=enough), run(steps=enough)
    return save(tmp_path / "results" / "runs", *good, failed("oom", spec("zero3"), reason=long))


def test_text_table_fits_100_columns_and_has_every_reason_in_full(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", str(runs)]) == 0
    out, error = capsys.readouterr()
    header = out.splitlines()[0]
    assert max(map(len, out.splitlines())) <= 100
    assert "reason" not in header.split()
    table, reasons = out.split("\n\n")
    names, *lines = reasons.splitlines()
    assert set(names.split()) <= {*header.split(), "reason"} and names.split()[-1] == "reason"
    assert "zero3" in lines[0] or lines[0].split()[0] in table
    assert out.count("memory") == 20 + header.count("memory"), "folded, not cut"
    assert "add --wide" in error


@pytest.mark.parametrize("width", (100, 80, 60))
def test_narrow_table_with_a_long_reason_breaks_no_heading_number_or_short_word(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table shows fine-tunings with many columns, and a failed run whose reason is a page long. With --wide,
    the table has the complete texts."""
    failure = save(tmp_path, failed("infeasible", reason="several words " * 60))
    paths = [str(failure), str(MEASURED / "finetune_cpu.zip")]
    assert main(["table", *paths, "--wide"]) == 0
    wide, note = capsys.readouterr()
    assert "exact_match_before" in wide.splitlines()[0].split() and not note
    monkeypatch.setattr(formats, "WIDTH", width)
    assert main(["table", *paths]) == 0
    narrow, note = capsys.readouterr()
    assert set(narrow.split()) - {"…"} <= set(wide.split())
    assert max(map(len, narrow.splitlines())) <= max(width, 72), "72 columns: the widths below which nothing is broken"
    assert narrow.count("several") < 48 and "several" in narrow and "…" in narrow
    assert "reason: long texts are cut; for the full texts, add --wide or --format csv" in note
    shown = narrow.splitlines()[0].split()
    assert ("exact_match_before" in shown, "exact_match_before" in note) == (width == 100, width != 100)


def fine_tuning(adapter: str = "lora") -> RunRecord:
    """Return a record of a training with the quality of answers before and after it."""
    of = spec("ddp", ranks=2, learning={"tokens": 10_000}, adapter={"name": adapter, "rank": 4, "alpha": 8})
    ends = [Evaluation(step=step, loss=6.0 - step, target_tokens=50, seconds=0.1, trained_s=step,
                       quality={"exact_match": step / 9, "token_f1": step / 8}) for step in (0, 5)]  # fmt: skip
    return run(of, evaluations=tuple(ends))


@pytest.mark.parametrize("others", ("none", "a measurement", "a measurement and a failure", "recorded runs"))
def test_table_with_a_training_shows_its_losses_and_which_run_it_is(
    others: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table shows the losses of a training, and columns that identify the training among other runs.
    `results/runs/adhoc` has all runs that belong to no study, so trainings and other runs are often in one table."""
    more = [run(spec("zero3"))] * ("measurement" in others)
    more += [failed("host_oom", spec("zero1"), reason="rank 0: " + "out of memory " * 20)] * ("failure" in others)
    paths = [str(save(tmp_path, fine_tuning(), *more))]
    paths += [str(MEASURED / f"{name}.zip") for name in ("finetune_cpu", "learning") if others == "recorded runs"]
    assert main(["table", *paths]) == 0
    out, note = capsys.readouterr()
    header, *rows = out.splitlines()
    names = header.split()
    assert {"validation_loss", "exact_match_before", "exact_match"} < set(names), header
    assert {"engine", "config_id"} & set(names), header
    assert max(map(len, [header, *rows])) <= 100
    assert note.splitlines()[-1].count(",") <= 4, "a long list of columns is shortened"


def test_numbers_of_tokens_that_differ_are_shown_next_to_held_out_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainings of a search with rungs end after different numbers of tokens, so their losses differ in meaning."""
    records = [
        run(
            spec("ddp", learning={"tokens": tokens}, optimizer={"lr": lr}, data={"name": "text", "source": "text"}),
            evaluations=(Evaluation(step=tokens // 512, loss=3.0, target_tokens=50, seconds=0.1, trained_s=1.0),),
        )
        for tokens, lr in ((2048, 0.0187872), (6144, 0.000598068))
    ]
    assert main(["table", str(save(tmp_path, *records))]) == 0
    header = capsys.readouterr().out.splitlines()[0].split()
    assert {"learning_rate", "tokens_trained", "validation_loss"} <= set(header)


def test_wide_text_table_has_all_main_columns_and_one_line_per_run(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", str(runs), "--wide"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "config_id", "model", "engine", "precision", "world_size", "micro", "outcome", "sample_s", "step_s",
        "tokens_per_s", "peak_allocated_bytes", "reason",
    ], "neither mfu nor flags: no run has any"  # fmt: skip
    assert len(rows) == 3
    assert "11.00 MiB" in rows[0]
    assert "out of memory " * 20 in rows[2] + " "


def test_rich_markup_in_a_record_is_printed_literally(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["table", str(save(tmp_path, failed("error", reason="[bold]not markup[/bold]")))])
    assert "[bold]not markup[/bold]" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["md", "csv", "json"])
def test_table_has_the_requested_columns_in_the_requested_order(
    runs: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", str(runs), "--format", form, "--columns", "outcome, engine"]) == 0
    printed = capsys.readouterr().out
    expected = {
        "md": "| outcome | engine |\n| --- | --- |\n| ok | ddp |\n| ok | zero1 |\n| oom | zero3 |\n",
        "csv": "outcome,engine\nok,ddp\nok,zero1\noom,zero3\n",
    }
    rows = [{"outcome": o, "engine": e} for o, e in (("ok", "ddp"), ("ok", "zero1"), ("oom", "zero3"))]
    assert json.loads(printed) == rows if form == "json" else printed == expected[form]


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["--columns", "engine,flag"], "--columns flag: no such column; did you mean flags?"),
        (["--columns", "token_f1"], "--columns token_f1: optional column, of which no run here has a value; remove it"),
        (["nowhere"], "nowhere: no such file or folder"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(
    runs: Path, words: list[str], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", str(runs), *words]) == 2
    assert printed in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["table", "report"])
def test_folder_without_records_is_an_error(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "record.json").write_text("{}")
    assert main([verb, str(tmp_path)]) == 2
    assert "contains no record" in capsys.readouterr().err


def test_skipped_files_are_reported_and_other_runs_are_printed(
    runs: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (runs / "record.json").write_text("{}")
    assert main(["table", str(runs), "--format", "csv"]) == 0
    assert capsys.readouterr().out.count("\n") == 4
    assert str(runs / "record.json") in caplog.text


def test_report_is_written_to_the_folder_of_its_study(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 0
    assert capsys.readouterr().out == "results/reports/smoke/report.html\n"
    save(runs, run(study="other"))
    assert main(["report"]) == 0
    assert capsys.readouterr().out == "results/reports/all/report.html\n"
    assert main(["report", str(runs / "other"), "--out", "here"]) == 0
    assert (tmp_path / "here" / "report.html").is_file()


def test_report_with_a_price_contains_costs(runs: Path, tmp_path: Path) -> None:
    assert main(["report", str(runs), "--price", "3.6", "--out", str(tmp_path / "here")]) == 0
    printed = (tmp_path / "here" / "runs.md").read_text()
    assert "| cost of a million tokens |" in printed
    assert "| 5.00 |" in printed, "400 tokens/s on 2 devices, 3.6 an hour each"


def test_invalid_price_is_refused_without_writing_a_report(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(runs), "--price", "0", "--out", str(tmp_path / "here")]) == 2
    assert "--price 0: must be a positive finite number" in capsys.readouterr().err
    assert not (tmp_path / "here").exists()
