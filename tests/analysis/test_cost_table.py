"""Tests of the costs of configurations. The expected costs are computed by hand: two devices at a price of 3.6 per hour
cost 0.002 per second.

The function `run()` returns a run of 52.5 s: five warm-up steps of 9.9 s and thirty timed steps of 0.1 s.
"""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import failed, machine, results, run, save, scattered, spec, steps, trained

from analysis import formats
from analysis.cli import table as table_verb
from analysis.costs import (
    build_text_cells,
    compute_allocated_time,
    count_evaluated_once,
    list_remarks,
    tabulate_costs,
)
from analysis.results import read
from analysis.table import list_rows
from bench.cli import main
from bench.core.record import RunRecord
from bench.sweep import jobs

DATA = Path(__file__).parents[1] / "data"
MEASURED = Path(__file__).parents[2] / "results" / "measured"
PRICED = machine().model_copy(update={"price_per_device_hour": 3.6})
PHASES = {"start": 10.0, "model": 20.0}
PER_SECOND = 0.002
PRECISIONS = ("bf16", "fp32")


def cost_row(*records: RunRecord, **more: Any) -> SimpleNamespace:
    (only,) = list_rows(tabulate_costs(results(*records), **more))
    return SimpleNamespace(**only)


def timed(**more: Any) -> RunRecord:
    return run(machine=PRICED, phases_s=PHASES, **more)


def crashed(seconds: float, **more: Any) -> RunRecord:
    """Return a failed attempt (one try at a run). Its record has the seconds of its phases, here only the start, and no
    step."""
    outcome = failed("error").outcome
    lost = run(machine=PRICED, phases_s={"start": seconds}, steps=None, tokens=None, **more)
    return lost.model_copy(update={"outcome": outcome})


def test_cost_of_a_run_includes_its_start_and_failed_attempts() -> None:
    found = cost_row(crashed(100.0), timed(attempt=1))
    assert (found.runs, found.finished, found.untimed) == (2, 1, 0)
    seconds = 100 + 30 + 52.5
    assert found.device_hours == pytest.approx(2 * seconds / 3600)
    assert found.cost == found.cost_per_run == pytest.approx(PER_SECOND * seconds)
    assert found.start_share == pytest.approx(130 / seconds)
    assert found.failed_share == pytest.approx(100 / seconds)
    assert found.cost_per_run_low is None, "a single repeat has no interval"


def test_lost_attempts_without_times_are_counted_and_reported() -> None:
    table = tabulate_costs(results(failed("node_failure", machine=PRICED), timed(attempt=1)))
    (found,) = list_rows(table)
    assert (found["runs"], found["untimed"]) == (2, 1)
    assert found["cost"] == pytest.approx(PER_SECOND * 82.5)
    remarks = list_remarks(table, None, None)
    assert any("Attempts of unknown duration: 1." in line for line in remarks)
    assert any("did not end ok took at least 0 %" in line for line in remarks)
    headings, (cells,), _ = build_text_cells(table)
    assert cells[headings.index("per run")] == "≥ 0.165"


@pytest.mark.parametrize("name", ["interrupted.json", "heartbeat.json"])
def test_interrupted_attempts_count_until_their_signal_or_last_heartbeat(tmp_path: Path, name: str) -> None:
    cut = failed("cancelled", machine=PRICED)
    began = cut.circumstance.model_copy(update={"started_at": "2026-11-26T19:15:27+00:00"})
    study = save(tmp_path, cut.model_copy(update={"circumstance": began}), timed(attempt=1))
    (folder,) = (path.parent for path in tmp_path.rglob("record.json") if '"cancelled"' in path.read_text())
    (folder / name).write_text(json.dumps({"at": "2026-11-26T19:16:07+00:00"}))
    (found,) = list_rows(tabulate_costs(read([study])))
    assert (found["untimed"], found["cost_per_run"]) == (0, pytest.approx(PER_SECOND * (40 + 82.5)))
    assert found["failed_share"] == pytest.approx(40 / 122.5)
    assert found["start_share"] == pytest.approx(30 / 82.5)


def test_the_interval_of_a_run_is_over_its_repeats() -> None:
    several = [timed(repeat=n, steps=steps((0.1 * (n + 1),) * 30)) for n in range(3)]
    found = cost_row(*several)
    # each repeat: 30 s of start, 49.5 s of warm-up, then 3, 6 and 9 s of timed steps
    assert (found.cost_per_run_low, found.cost_per_run, found.cost_per_run_high) == pytest.approx(
        tuple(PER_SECOND * (79.5 + seconds) for seconds in (3, 6, 9))
    )
    # a step has 40 tokens
    per_million = [PER_SECOND * 1e6 / 40 * step_s for step_s in (0.1, 0.2, 0.3)]
    ends = (found.cost_per_million_tokens_low, found.cost_per_million_tokens, found.cost_per_million_tokens_high)
    assert ends == pytest.approx(tuple(per_million))


def test_a_single_run_has_the_interval_of_its_steps_for_a_million_tokens() -> None:
    record = timed(steps=steps(scattered(0.09, 0.1, 0.11)))
    found = cost_row(record)
    row = list_rows(results(record).table)[0]
    assert found.cost_per_million_tokens == pytest.approx(5.0)
    assert found.cost_per_million_tokens_low == pytest.approx(PER_SECOND * 1e6 / row["tokens_per_s_high"])
    assert found.cost_per_million_tokens_high == pytest.approx(PER_SECOND * 1e6 / row["tokens_per_s_low"])
    assert found.cost_per_million_tokens_low < 5.0 < found.cost_per_million_tokens_high


def train(seed: int, losses: tuple[float, float, float], earlier_s: float = 0.0, **more: Any) -> RunRecord:
    """Return a training of 30 steps of 1 s with three evaluations of 2 s each, after 0, 10 and 30 steps. `losses` are
    their results. `earlier_s` is training time before this run, as after a resume."""
    evaluations = [
        {"step": n, "loss": loss, "target_tokens": 9, "seconds": 2.0, "trained_s": n + earlier_s * (n > 0)}
        for n, loss in zip((0, 10, 30), losses, strict=True)
    ]
    return timed_spec(seed, steps=steps((1.0,) * 30, cut=0), evaluations=evaluations, **more)


def timed_spec(seed: int, **more: Any) -> RunRecord:
    return run(spec(seed=seed), machine=PRICED, phases_s=PHASES, **more)


def test_cost_to_a_loss_has_its_interval_over_the_seeds() -> None:
    runs = [train(0, (9, 3.9, 3.5)), train(1, (9, 4.1, 3.6)), train(2, (9, 4.0, 3.4))]
    found = cost_row(*runs, loss=4.0)
    # seeds 0 and 2 reach the target loss at the second evaluation, seed 1 at the third
    early, late = 30 + 10 + 2 * 2, 30 + 30 + 3 * 2
    assert (found.finished, found.reached) == (3, 3)
    assert (found.cost_to_loss_low, found.cost_to_loss, found.cost_to_loss_high) == pytest.approx(
        (PER_SECOND * early, PER_SECOND * early, PER_SECOND * late)
    )
    missing = cost_row(*runs, loss=3.5)
    assert (missing.reached, missing.cost_to_loss) == (2, None)


@pytest.mark.parametrize(("every", "bounds"), [(None, 1), (200, 1), (40, 0)])
def test_cost_to_a_loss_that_was_only_evaluated_at_the_end_is_called_an_upper_bound(
    every: int | None, bounds: int
) -> None:
    found = results(trained(3.9, 0.1, asked={"learning": {"tokens": 200, "evaluate_every": every}}), run())
    assert count_evaluated_once(found) == bounds
    lines = list_remarks(tabulate_costs(found, 2.5, 4.0), None, 2.5, bounds)
    assert any(line.startswith("Configurations: 1 of 2 were evaluated only") for line in lines) == bool(bounds)


def test_steps_of_earlier_attempts_of_a_resumed_training_count_once() -> None:
    resumed = train(0, (9, 5, 4.0), earlier_s=50.0, attempt=1)
    found = cost_row(crashed(100.0), resumed, loss=4.0)
    # the first evaluation was in the crashed attempt
    assert found.cost_to_loss == found.cost_per_run == pytest.approx(PER_SECOND * (100 + 30 + 30 + 2 * 2))
    unknown = cost_row(failed("node_failure", spec(seed=0), machine=PRICED), resumed, loss=4.0)
    assert unknown.cost_to_loss == pytest.approx(PER_SECOND * (30 + 50 + 30 + 3 * 2))
    fresh = cost_row(crashed(100.0), train(0, (9, 5, 4.0), attempt=1), loss=4.0)
    assert fresh.cost_to_loss == pytest.approx(PER_SECOND * (100 + 30 + 30 + 3 * 2))


def test_a_given_price_replaces_that_of_the_records_and_without_a_price_costs_are_missing() -> None:
    assert cost_row(timed(), price=7.2).cost == pytest.approx(2 * PER_SECOND * 82.5)
    table = tabulate_costs(results(run(phases_s=PHASES)))
    assert list_rows(table)[0]["cost"] is None
    assert any("e.g. --price 2.5" in line for line in list_remarks(table, None, None))


def test_time_of_jobs_includes_what_no_record_has(tmp_path: Path) -> None:
    shutil.copytree(DATA / "submitted", tmp_path / "runs")
    study = tmp_path / "runs" / "adhoc"
    files = [study / "df17bb44ce" / "0.0" / "record.json"]
    assert compute_allocated_time(files) is None
    first, second = (job.folder for job in jobs.list_submitted(study)[0][:2])
    devices = [jobs.read(folder).list_specs(None)[0].devices_per_node for folder in (first, second)]
    jobs.end_allocation(jobs.begin_allocation(first, jobs.AllocationPeriod("1", None, 0, 3, 1000.0, None)), 2800.0)
    jobs.begin_allocation(second, jobs.AllocationPeriod("2", None, 0, 1, 1000.0, None))
    held = compute_allocated_time(files)
    assert held and (held.periods, held.open) == (2, 1)
    assert held.device_hours == pytest.approx(devices[0] * 3 * 0.5)


def test_table_verb_shows_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(save(tmp_path, timed(), timed(repeat=1)))
    assert main(["table", runs, "--costs", "--price", "7.2"]) == 0
    out = capsys.readouterr().out
    assert "2 of 2" in out and "0.33 (0.33–0.33)" in out
    assert main(["table", runs, "--costs", "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("model,engine,variant,machine,world_size")
    refused = {("--loss", "3"): "no meaning without --costs", ("--costs", "--loss", "3"): "no run is a training"}
    for words, told in refused.items():
        assert main(["table", runs, *words]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--price", "--loss"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_invalid_numbers_are_refused_before_records_are_read(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table_verb, "read_records", lambda _: pytest.fail("records were read"))
    assert main(["table", "--costs", option, value]) == 2
    assert f"{option} {value}: must be a positive finite number" in capsys.readouterr().err


def test_rows_are_in_natural_order_and_no_two_rows_have_equal_names() -> None:
    rates = [spec(optimizer={"lr": lr}) for lr in (0.01, 1e-5, 0.002)]
    # a column of the summary, but not of this table, distinguishes these configurations
    precisions = [spec("zero2", precision=name, batch={"micro": micro}) for micro in (16, 4) for name in PRECISIONS]
    table = list_rows(tabulate_costs(results(*map(run, [*precisions, *rates]))))
    assert [(row["engine"], row["variant"], row["micro"]) for row in table] == [
        *(("zero1", f"optimizer.lr={lr}", 2) for lr in ("1e-05", "0.002", "0.01")),
        *(("zero2", f"precision={name}", micro) for name in PRECISIONS for micro in (4, 16)),
    ]


@pytest.mark.parametrize(
    ("study", "width"), [("finetune_cpu", 100), ("finetune_cpu", 60), ("learning", 100), ("testbed", 100)]
)
def test_a_narrow_table_omits_columns_and_cuts_no_word_or_number(
    study: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(formats, "WIDTH", width)
    words = ["table", str(MEASURED / f"{study}.zip"), "--costs", "--price", "2.5"]
    words += [] if study == "testbed" else ["--loss", "2"]
    assert main([*words, "--wide"]) == 0
    wide = capsys.readouterr().out
    assert main(words) == 0
    narrow, note = capsys.readouterr()
    assert set(narrow.split()) <= set(wide.split())
    table = narrow.partition("An attempt counts")[0].splitlines()
    assert max(map(len, table)) <= width
    head, *wide_head = (re.split(" {2,}", text.splitlines()[0]) for text in (narrow, wide))
    omitted = [name for name in wide_head[0] if name not in head]
    named = [name for name in omitted if name in note]
    rest = f"and {len(omitted) - 3} more" if len(omitted) > 4 else ""
    assert len(named) == (3 if rest else len(omitted)) and rest in note and bool(omitted) == ("not shown" in note)
    if study == "finetune_cpu":
        assert head[:3] == ["adapter", "variant", "micro"]
        assert len({tuple(line.split()[:3]) for line in table[1:]}) == len(table) - 1 == 12


def test_missing_costs_of_a_million_tokens_are_explained() -> None:
    busy = run(spec("zero2"), machine=PRICED, phases_s=PHASES, known_busy="measured next to a build")
    table = tabulate_costs(results(timed(), busy))
    assert list(table["cost_per_million_tokens"].isna()) == [False, True]
    found = [line for line in list_remarks(table, None, None) if "per million tokens: 1 of 2. All" in line]
    assert "background load" in found[0]
    assert not any("million tokens" in line for line in list_remarks(tabulate_costs(results(timed())), None, None))
