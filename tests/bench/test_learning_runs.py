"""Tests of trainings that are started as a user starts them. Some are killed before their end, and resumed from a
checkpoint."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from started_runs import PATIENCE_S, Command

from bench import cli
from bench.core import store
from bench.core.record import RunRecord

pytestmark = pytest.mark.processes
pytest.importorskip("datasets")

TRAINING = (
    "model=gpt2_tiny", "data=text", "data.max_bytes=200000", "machine=cpu", "precision=fp32", "sequence.tokens=32",
    "batch.global=8", "optimizer.lr=1e-3", "learning.tokens=15360", "learning.schedule=cosine",
    "learning.evaluate_every=5120", "learning.checkpoint_every=1280", "measure.inspect=false",
)  # fmt: skip
"""Overrides of a training with 60 steps and a checkpoint after every fifth step."""


def wait_for_checkpoint(run: Command) -> None:
    until = time.monotonic() + PATIENCE_S
    while not any(run.results.rglob("checkpoint-*")):
        assert run.process.poll() is None and time.monotonic() < until, run.process.communicate()
        time.sleep(0.02)


def read_last(results: Path) -> RunRecord:
    return [store.read_record(path) for path in store.find_records([results])][-1]


def test_killed_training_resumes_to_the_result_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed and resumed training has two ranks with DDP. Its result must equal the result of an uninterrupted
    training with the same global batch, on one rank with ZeRO."""
    two = ("engine=ddp", "devices_per_node=2", "batch.micro=2")
    one_rank = ("engine=zero1", "engine.reduce_bucket_size=1000000", "devices_per_node=1", "batch.micro=4")
    killed = Command(tmp_path / "killed", (*TRAINING, *two))
    wait_for_checkpoint(killed)
    beat = killed.heartbeat(lambda beat: bool(beat["ranks"]))
    os.kill(beat["ranks"][0]["pid"], signal.SIGKILL)
    assert killed.record().outcome.reason.startswith("rank 0 was killed by SIGKILL")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    again = (*TRAINING, *two, "--results", str(tmp_path / "killed"))
    assert cli.main(["sweep", *again]) == 0
    alone = Command(tmp_path / "alone", (*TRAINING, *one_rank))
    expected, found = alone.record().observations, read_last(tmp_path / "killed").observations
    assert expected and expected.evaluations and expected.steps
    assert found and found.evaluations and found.checkpoints and found.steps

    assert found.checkpoints[0].kind == "load"
    went_on_at = found.checkpoints[0].step
    assert went_on_at >= 5
    assert len(found.steps.loss) == 60 - went_on_at
    assert len(expected.steps.loss) == 60
    assert [one.step for one in found.evaluations] == [one.step for one in expected.evaluations] == [0, 20, 40, 60]
    for one, other in zip(found.evaluations, expected.evaluations, strict=True):
        assert one.target_tokens == other.target_tokens == 64 * 31
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
    losses = [one.loss or 0.0 for one in expected.evaluations]
    assert losses[0] == pytest.approx(5.7, abs=0.3), "before the first step all of 384 tokens are about as likely"
    assert losses[-1] < losses[0] - 1
    trained = [one.trained_s or 0.0 for one in found.evaluations]
    assert trained == sorted(trained)
    assert trained[-1] > sum(found.steps.step_s), "the seconds of the lost attempt count, up to its checkpoint"
    assert not list((tmp_path / "killed").rglob("*checkpoint-*")), "a completed training keeps no checkpoint"


@pytest.mark.thorough
def test_better_of_two_short_trainings_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    fields = (word.partition("=") for word in (*TRAINING, "engine=ddp", "devices_per_node=1", "batch.micro=8"))
    base = {key: yaml.safe_load(value) for key, _, value in fields if key not in ("optimizer.lr", "batch.global")}
    rungs = {"least": 5000, "factor": 2}
    search = {
        "objective": "validation_loss",
        "sampler": "grid",
        "rungs": rungs,
        "space": {"optimizer.lr": [1e-6, 1e-3]},
    }
    (tmp_path / "halved.yaml").write_text(json.dumps({"name": "halved", "base": base, "search": search}))
    assert cli.main(["search", f"study={tmp_path / 'halved.yaml'}", "--results", str(tmp_path)]) == 0
    records = [store.read_record(path) for path in store.find_records([tmp_path / "halved"])]
    by_end = {(record.spec.optimizer.lr, record.spec.learning.end_tokens): record.observations for record in records}
    assert set(by_end) == {(1e-6, 7680), (1e-3, 7680), (1e-3, 15360)}

    short, whole = by_end[1e-3, 7680], by_end[1e-3, 15360]
    assert short and short.evaluations and short.steps
    assert whole and whole.evaluations and whole.steps and whole.checkpoints
    assert (whole.checkpoints[0].kind, whole.checkpoints[0].step) == ("load", 30)
    assert (len(short.steps.loss), len(whole.steps.loss)) == (30, 30)
    assert [one.step for one in whole.evaluations] == [0, 20, 30, 40, 60]
    assert whole.evaluations[:3] == short.evaluations, "earlier evaluations are recorded again"
    losses = [one.loss or 0.0 for one in whole.evaluations]
    assert losses == sorted(losses, reverse=True)
    left = {path.parent.parent.name for path in tmp_path.rglob("checkpoint-*")}
    stopped = {record.config_id for record in records if record.spec.optimizer.lr == 1e-6}
    assert left == stopped, "completed and resumed trainings keep no checkpoint"


QUALITY = (
    "model=gpt2_tiny", "data=instructions", "machine=cpu", "precision=fp32", "measure.inspect=false",
    "learning.quality=[exact_match,token_f1]",
)  # fmt: skip


def test_quality_of_answers_is_measured_before_and_after_a_training(tmp_path: Path) -> None:
    """All samples have the same answer, so that the model learns it in a few steps. One training uses DDP and one FSDP,
    with two ranks each."""
    lines = [{"prompt": f"Is {number} a number?", "answer": "yes, it is"} for number in range(10, 99)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    few = (
        f"data.files=[{tmp_path}/lines.jsonl]", "devices_per_node=2", "batch.micro=4", "sequence.tokens=48",
        "learning.tokens=15360", "learning.evaluation_samples=8", "learning.held_out=0.2", "optimizer.lr=3e-3",
    )  # fmt: skip
    found = []
    for engine in ("ddp", "fsdp"):
        record = Command(tmp_path / engine, (*QUALITY, *few, f"engine={engine}")).record()
        assert record.observations and record.observations.evaluations, record.outcome
        found.append(record.observations.evaluations)
    for before, after in found:
        assert (before.step, before.quality) == (0, {"exact_match": 0.0, "token_f1": 0.0})
        assert (after.step, after.quality) == (40, {"exact_match": 1.0, "token_f1": 1.0})
        assert after.target_tokens == 8 * len("yes, it is⊣")
    assert found[1][1].loss == pytest.approx(found[0][1].loss, rel=1e-3)


@pytest.mark.thorough
def test_tiny_model_learns_to_reverse_letters(tmp_path: Path) -> None:
    size = ("devices_per_node=1", "batch.micro=32", "sequence.tokens=12", "learning.tokens=57600")
    rate = ("engine=ddp", "optimizer.lr=3e-3", "learning.schedule=cosine", "learning.warmup_tokens=7680")
    record = Command(tmp_path, (*QUALITY, *size, *rate)).record()
    assert record.observations and record.observations.evaluations
    before, after = (one.quality or {} for one in record.observations.evaluations)
    assert before["exact_match"] == 0.0
    assert after["exact_match"] > 0.9
