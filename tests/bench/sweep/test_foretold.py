"""Tests of the predictions that a dry run of `zeroscale sweep` prints: memory, step time and node-hours."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from sweeps import attempt, point, spec, sweep

from bench import api, cli
from bench.cli.sweep import PredictionText
from bench.core.errors import UserError
from bench.core.machine import Machine
from bench.core.spec import RunSpec
from bench.sweep import jobs
from bench.sweep.forecast import Forecast, MemoryForecast, StepForecast, compute_minutes
from bench.sweep.submitting import SubmitResult

GPUS = (
    "model=mt5_xxl",
    "machine=a100_80",
    "devices_per_node=8",
    "launcher=slurm",
    "launcher.gpus=--gres=gpu:{devices}",
)
GB = 10**9


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["sweep", *words, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_dry_run_prints_its_summary_and_a_prediction_of_every_point(capsys: pytest.CaptureFixture[str]) -> None:
    told = dry(capsys, *GPUS, "engine=zero0,zero3", "--list").splitlines()
    assert told[0].startswith("2 points in 1 job, ")
    assert told[1].startswith("predicted: ") and "node-hours for 1 run" in told[1]
    assert told[2] == "predicted memory far exceeds the device's: 1 run, recorded as infeasible; --no-prune runs them"
    [zero0], [zero3] = (
        [place for place, line in enumerate(told) if f" {name} " in line] for name in ("zero0", "zero3")
    )
    assert "GB of 85 (far out of memory, infeasible)" in told[zero0 + 2], "16 bytes for each of 13e9 parameters"
    assert " s a step (" in told[zero3 + 2] and " min" in told[zero3 + 2]
    assert "job" not in told[zero0 + 1] and told[zero3 + 1].endswith("job 1")
    (repeats,) = [
        place for place, line in enumerate(told) if line.startswith("a single run per point is only indicative; 5 ")
    ]
    assert shlex.split("\n".join(told[repeats + 1 :]))[-2:] == ["--repeats", "5"]


def test_dry_run_counts_infeasible_points_and_lists_them_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*GPUS, "engine=zero0,zero3")
    assert " zero0 " not in dry(capsys, *words) and " zero0 " in dry(capsys, *words, "--list")


@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_dry_run_counts_the_runs_left_if_some_are_answered(
    launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=tiny", "engine=ddp,zero2", "machine=cpu", "devices_per_node=2", "measure=smoke", "precision=fp32"]
    words += ["sequence.encoder=128", "sequence.decoder=32", f"launcher={launcher}", "--repeats", "2"]
    nothing = "nothing started" if launcher == "local" else "nothing submitted"

    def summary() -> str:
        return " ".join(dry(capsys, *words, "--results", str(tmp_path)).split())

    assert "answered" not in summary()
    wanted = list(api.plan(overrides=words[:-2], repeats=2).sweep.wanted())
    for number, one in enumerate(wanted, 1):
        attempt(tmp_path / "adhoc", RunSpec.model_validate(one.point.spec), "ok", one.key.repeat, busy=number == 1)
        left = f"{4 - number} left to run" if number < 4 else f"none left to run; {nothing} "
        assert summary().startswith(f"4 runs of 2 points: {number} already have a result, {left}")
    assert summary().count("2 runs, 2 already with a result") == 2, "by point"
    if launcher == "local":
        assert "1 answer was made on a busy machine" in summary() and "--repeats 5 launcher.quiet_within_s" in summary()


def test_dry_run_refuses_a_results_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["sweep", *GPUS, "--dry-run", "--results", str(tmp_path / "file")]) == 2
    told = "file/adhoc: cannot be written to (Not a directory); name a folder in which you may write\n"
    assert capsys.readouterr().err.endswith(told)


def test_dry_run_tells_that_the_budget_is_spent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "small.yaml"
    base = "{model: tiny, machine: cpu, devices_per_node: 2, launcher: slurm}"
    study.write_text(f"name: small\nbase: {base}\nbudget: {{node_hours: 0.05}}\n")
    job = tmp_path / "small" / jobs.FOLDER / "small-1"
    job.mkdir(parents=True)
    jobs.write_handle(job, "7")
    for hours, told in ((0.01, False), (0.05, True)):
        period = jobs.AllocationPeriod("7", None, told, 1, 100.0, 100.0 + 3600 * hours)
        jobs.begin_allocation(job, period)
        printed = dry(capsys, f"study={study}", "--results", str(tmp_path))
        spent = "the budget is spent: 0.06 of 0.05 node-hours; repeat `zeroscale sweep` with a higher budget.node_hours"
        assert (spent in " ".join(printed.split())) == told


def test_dry_run_of_many_points_is_a_table_and_lists_points_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*GPUS, "engine=zero3", f"seed={','.join(map(str, range(21)))}")
    told, _, _ = dry(capsys, *words).partition("── script")
    assert told.splitlines()[2:4] == [
        "model    nodes  devices per node  runs  infeasible",
        "mt5_xxl      1                 8    21           0",
    ]
    assert max(map(len, told.splitlines())) <= 100
    listed, _, _ = dry(capsys, *words, "--list").partition("── script")
    assert listed.count("mt5_xxl") == 21 and max(map(len, listed.splitlines())) <= 100


@pytest.mark.parametrize("engine", ["zero1", "zero2"])
def test_mt5_xxl_is_feasible_on_8_nodes_of_a100_40_at_the_lower_stages(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step needs 38.8 to 41.2 GB per device, slightly less than a device has. With a second copy of the weights on
    the device, the points would not fit. But if the device lacks memory, DeepSpeed makes the second copy on the host.
    So the predicted device memory must not include this copy."""
    words = (f"engine={engine}", "nodes=8", "batch.micro=1")
    told = dry(capsys, "model=mt5_xxl", "machine=a100_40", *GPUS[2:], *words)
    assert "infeasible" not in told and "does not fit" not in told


def test_no_prune_keeps_infeasible_points_and_prints_their_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    told = dry(capsys, *GPUS, "engine=zero0", "--no-prune")
    assert "GB of 85 (does not fit)" in told and "infeasible" not in told


def test_unknown_predictions_are_printed_as_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    told = dry(capsys, "model=tiny", "machine=auto", "devices_per_node=2", "launcher=slurm")
    assert "predicted: memory unknown; step time unknown" in told
    assert "limit 20 min" in told and "node-hours for" not in told
    [plain] = json.loads(dry(capsys, "model=tiny", "machine=auto", "devices_per_node=2", "launcher=slurm", "--json"))
    nothing = ("memory_bytes", "machine_memory_bytes", "fits", "step_s", "minutes")
    assert plain["predicted"] == {"infeasible": False, **dict.fromkeys(nothing)}


def test_ranks_on_the_local_processor_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU, all ranks use the host's memory. Each needs memory for its tensors, and 0.4 to 0.7 GB for its
    process."""
    words = ("model=tiny", "machine=cpu", "devices_per_node=3", "precision=fp32")
    for memory_bytes, fits in ((100 * GB, "fits"), (1 * GB, "does not fit")):
        monkeypatch.setattr("bench.cli.sweep.environment.read_host_memory_bytes", lambda size=memory_bytes: size)
        [found] = re.findall(
            r"predicted: ([\d.]+) GB per rank, (.+) GB of (.+) on this machine with 3 ranks \((.+)\);",
            dry(capsys, *words, "--no-prune"),
        )
        tensors, (low, high) = float(found[0]), map(float, found[1].split("–"))
        assert (low, high) == pytest.approx((3 * (tensors + 0.4), 3 * (tensors + 0.7)), rel=0.01)
        assert (found[2], found[3]) == (f"{memory_bytes / GB:g}", fits)


def foretold(limit_min: float, nodes: int = 4, **forecast: Any) -> PredictionText:
    known = {"room": MemoryForecast(low_bytes=9 * GB, high_bytes=11 * GB, tensor_bytes=8 * GB), **forecast}
    one = point(spec(nodes=nodes), limit_min).model_copy(update={"forecast": Forecast(**known)})
    machine = Machine(name="cpu", device="cpu", memory_bytes=10 * GB)
    return PredictionText(sweep([one], repeats=2).model_copy(update={"machines": {"cpu": machine}}))


def test_predicted_node_hours_count_all_repeats_on_all_nodes() -> None:
    told = foretold(60, step=StepForecast(low_s=1, s=1.5, high_s=2))
    taken = compute_minutes(spec().measure, 1, 2)
    low, high = 2 * 4 * taken.low / 60, 2 * 4 * taken.high / 60
    assert list(told.summary()) == [f"predicted: {low:.3g}–{high:.3g} node-hours for 2 runs"]
    assert told.line(0).startswith("    predicted: 9–11 GB of 10 (may fit); 1.5 s a step (1–2), ")
    assert told.plain(0)["fits"] is None and told.plain(0)["minutes"] == taken._asdict()


def test_submission_warns_of_a_time_limit_that_may_be_too_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "bench.sweep.submitting.submit_pending",
        lambda folder, **_: SubmitResult([], 0, {}, [], "", None),
    )
    slow = ("engine=zero3", "batch.micro=64", "sequence.encoder=4096", "launcher.time_limit_min=5")
    assert cli.main(["sweep", *GPUS, *slow, "--no-prune", "--results", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.err == "1 run may need more than the time limit: raise launcher.time_limit_min\n"
    assert told.out.startswith("nothing to submit: ")


def test_summary_warns_of_a_time_limit_that_may_be_too_short() -> None:
    told = list(foretold(2, step=StepForecast(low_s=1, s=1.5, high_s=2)).summary())
    assert told[-1] == "2 runs may need more than the time limit: raise launcher.time_limit_min"


def test_budget_on_the_command_line_replaces_that_of_the_study() -> None:
    made = api.plan(None, ["model=tiny", "machine=cpu", "budget.attempts=6"])
    assert (made.sweep.rules.budget.attempts, made.sweep.rules.budget.node_hours) == (6, None)
    for wrong, told in (("budget.attempts=0", "must be an integer > 0"), ("budget.hours=2", "no such key")):
        with pytest.raises(UserError, match=told):
            api.plan(None, ["model=tiny", "machine=cpu", wrong])


def test_command_for_repeats_has_the_options_of_the_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["model=tiny", "machine=cpu", "devices_per_node=2", "launcher=slurm", "batch.micro=1,2"]
    given = "--max-queued 3 --nice 10 --begin now+5hours --notify true --no-prune --autopilot"
    assert cli.main(["sweep", *words, *given.split(), "--results", str(tmp_path), "--dry-run"]) == 0
    printed = shlex.split(capsys.readouterr().out.rpartition("zeroscale sweep ")[2].replace("\\\n", ""))
    assert printed == [*words, "--repeats", "5", "--results", str(tmp_path), *given.split()]


def test_invalid_drill_is_refused_before_a_job_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSCALE_DRILL", "rank=1 step=3 action=explode")
    with pytest.raises(UserError, match="no such action; choose from sleep, raise"):
        api.plan(None, ["model=tiny", "machine=cpu"])
