"""The study on one GPU, as far as it goes without one: what it would call, what it skips, what it packs."""

import shutil
import signal
import sys
import tarfile
import time
from pathlib import Path

import pytest

import analysis
from bench import store
from bench.config import compose
from bench.gpu_study import __main__ as study
from bench.gpu_study import best, parts, wheels
from bench.gpu_study.session import StudySession
from bench.study import expand_study, order_runs

RECORDED = Path(__file__).parents[1] / "data/runs/smoke"


def session(folder: Path, *, trial: bool = False, left_s: float = 60) -> StudySession:
    return StudySession(folder / "runs", folder / "reports", "h200", trial, time.monotonic() + left_s)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would be called; nothing is."""
    seen: list[str] = []

    def note(self: StudySession, *words: str, **_: object) -> bool:
        seen.append(" ".join(words))
        return True

    monkeypatch.setattr(StudySession, "call", note)
    monkeypatch.setattr(StudySession, "ask", lambda self, *words: "")
    return seen


def test_a_part_whose_answer_is_there_is_not_called_again(tmp_path: Path, called: list[str]) -> None:
    for name in ("check", "overhead", "plain_mt5_large"):
        (tmp_path / "reports").mkdir(exist_ok=True)
        (tmp_path / "reports" / f"{name}.txt").write_text("answered")
    here = session(tmp_path)
    assert parts.run_tests(here) and parts.measure_overhead(here) and parts.run_plain_loops(here)
    assert [text.split()[:4] for text in called] == [["-P", "-m", "bench.gpu_study.plain", "model=mt5_xl"]]


def test_a_part_that_needs_a_checkout_says_so_where_there_is_none(
    tmp_path: Path, called: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not parts.run_tests(session(tmp_path)) and not parts.measure_overhead(session(tmp_path))
    told = capsys.readouterr().out.splitlines()
    assert called == [] and len(told) == 2
    assert told[0].endswith(
        "check: needs tests/bench/test_cuda.py, which an installed package does not hold; call it in a checkout"
    )


def test_a_trial_measures_no_model_but_the_tiny_one(tmp_path: Path, called: list[str]) -> None:
    shutil.copytree(RECORDED, tmp_path / "runs" / "single_gpu")
    here = session(tmp_path, trial=True)
    for name in ("sweep", "tuning", "clock", "plain", "rehearsals", "overhead", "xxl"):
        assert parts.PARTS[name](here)
    for text in called:
        assert "model=tiny" in text or "--dry-run" in text or "overhead" in text, text


def test_blocks_and_pinned_batches_are_compared_at_one_point(tmp_path: Path, called: list[str]) -> None:
    here = session(tmp_path)
    assert parts.compare_clocks(here)
    study = compose.read_study(str(tmp_path / "runs" / "clock.yaml"))
    points = [compose.compose_request(list(pairs)).spec for pairs in expand_study(study, [("machine", ["cpu"])])]
    assert {(point.data.pin_memory, point.measure.block_steps) for point in points} == {
        (False, 5), (False, 50), (True, 5), (True, 50),
    }  # fmt: skip
    assert len(order_runs(range(4), study)) == 12


def test_the_best_of_every_model_is_asked_for_again_as_it_was(tmp_path: Path) -> None:
    shutil.copytree(RECORDED, tmp_path / "smoke")
    file = best.write_study(session(tmp_path), tmp_path / "smoke", repeats=3)
    assert file is not None
    found = compose.read_study(str(file))
    ((*pairs,),) = expand_study(found, [("machine", ["cpu"])])
    again = compose.compose_request(pairs)
    runs = analysis.load(tmp_path / "smoke")
    fastest = runs.loc[runs["samples_per_s"].idxmax(), "config_id"]
    spec = store.read_record(next((tmp_path / "smoke" / fastest).glob("*/record.json"))).spec
    [point] = compose.compose_points(found, [("machine", ["cpu"])]).points
    today = point.composed.spec  # of another window and another mean of the loss than the recorded runs
    assert today == spec.model_copy(update={"measure": today.measure, "loss_mean": today.loss_mean})
    assert again.machine.name == "cpu"
    assert order_runs([0], found) == [(0, 0), (1, 0), (2, 0)]


def test_nothing_is_begun_when_the_time_is_over_and_what_runs_is_ended_in_good_order(tmp_path: Path) -> None:
    assert not session(tmp_path, left_s=0).zeroscale("--help")
    composed = tmp_path / "asked"
    program = (
        "import pathlib, signal, sys, time\n"
        f"composed = pathlib.Path({str(composed)!r})\n"
        "signal.signal(signal.SIGINT, lambda *_: (composed.write_text('to end'), sys.exit(1)))\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])\n"
        "time.sleep(60)"
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # what comes before it can be heard has to wait
    try:
        assert not session(tmp_path, left_s=1).call("-c", program)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    assert composed.read_text() == "to end"


def test_an_answer_is_kept_only_after_a_success(tmp_path: Path) -> None:
    here, report = session(tmp_path), tmp_path / "reports" / "told.txt"
    assert not here.call("-c", "print('half'); raise SystemExit(3)", output=report)
    assert not report.exists()
    assert here.call("-c", "print('whole')", output=report)
    assert report.read_text() == "whole\n"


def test_what_is_packed_can_be_gone_on_with_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, packed = tmp_path / "here", tmp_path / "packed.tar.gz"
    shutil.copytree(RECORDED, here / "runs" / "single_gpu")
    (here / "reports").mkdir()
    (here / "reports" / "overhead.txt").write_text("1 %")
    monkeypatch.setitem(parts.PARTS, "check", lambda session: True)
    folders = ["--results", str(here / "runs"), "--reports", str(here / "reports")]
    monkeypatch.setattr(sys, "argv", ["study", "check", *folders, "--pack", str(packed)])
    assert study.main() == 0
    with tarfile.open(packed) as archive:
        assert len(archive.getnames()) > 20
    there = tmp_path / "there"
    (there / "reports").mkdir(parents=True)
    (there / "reports" / "overhead.txt").write_text("of this place")
    folders = ["--results", str(there / "runs"), "--reports", str(there / "reports")]
    monkeypatch.setattr(sys, "argv", ["study", "check", *folders, "--from", str(packed)])
    assert study.main() == 0
    records = [path.relative_to(here) for path in here.rglob("record.json")]
    assert records and all((there / path).is_file() for path in records)
    assert (there / "reports" / "overhead.txt").read_text() == "of this place", "what is there stays"


def test_a_machine_that_has_torch_is_sent_neither_torch_nor_what_torch_needs() -> None:
    needed = {text.split("==")[0] for text in wheels.list_required("3.12", {})}
    assert {"deepspeed", "hydra-core", "omegaconf", "antlr4-python3-runtime", "pydantic", "matplotlib"} <= needed
    assert not {"torch", "triton", "transformers", "tokenizers", "sympy", "zeroscale"} & needed
    assert not {name for name in needed if name.startswith("nvidia-") and name != "nvidia-ml-py"}


def test_what_a_machine_has_is_sent_only_where_its_version_does_not_suit() -> None:
    needed = {
        text.split("==")[0]
        for text in wheels.list_required("3.12", {"scipy": "1.15.1", "pydantic": "1.0", "numpy": ""})
    }
    assert "pydantic" in needed
    assert not {"scipy", "numpy"} & needed


def test_a_study_cut_short_after_eight_points_has_every_model_with_the_reference_and_with_zero() -> None:
    composed = compose.read_study("single_gpu")
    points = compose.compose_points(composed, []).points
    begun = [points[index].composed.spec for _, index in order_runs([point.turn for point in points], composed)[:8]]
    assert {(spec.model.name, spec.engine.name) for spec in begun} == {
        (model, engine) for model in composed.axes["model"] for engine in ("ddp", "zero2")
    }
