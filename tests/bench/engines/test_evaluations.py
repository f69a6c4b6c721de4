"""Tests of dropout and evaluations on real ranks over gloo, compared with one process. Dropout is drawn from each
rank's seed. Evaluations and generated answers between steps have no dropout, draw no random numbers, and do not change
the training."""

from pathlib import Path

import pytest
from pipeline_ranks import EVALUATED
from pipeline_runs import compare_to_one_process, run_jobs, train_alone
from pipeline_specs import drop, pad, spec

from bench.core.spec import RunSpec

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

FEW = {"ddp": spec("t5", "", 1, data=2, preset="ddp")}
ALL = {
    "zero0": spec("gpt", "", 1, data=2, preset="zero0"),
    "zero1": spec("t5", "", 1, data=2, preset="zero1"),
    "zero2": spec("eager", "", 1, data=2, preset="zero2"),
    "zero3": pad(spec("t5", "", 1, data=2, preset="zero3")),
    "fsdp": pad(spec("gpt", "", 1, data=2, preset="fsdp")),
}


def check(jobs: dict[str, RunSpec], folder: Path) -> None:
    jobs = {label: drop(job) for label, job in jobs.items()}
    for label, ranks in run_jobs(jobs, folder).items():
        assert all(rank["evaluations"].keys() == set(EVALUATED) for rank in ranks)
        alone = train_alone(jobs[label])["answers"]
        for data, rank in enumerate(ranks):
            assert {step: answers.tolist() for step, answers in rank["answers"].items()} == {
                step: of_ranks[data] for step, of_ranks in alone.items()
            }, label
        *shares, unequal = compare_to_one_process(jobs[label], ranks)
        assert max(shares) < 1e-6 and unequal == [], (label, shares, unequal)


def test_ddp_with_dropout_equals_one_process_and_evaluates_without_dropout(tmp_path: Path) -> None:
    check(FEW, tmp_path)
    with_dropout, without = (train_alone(job) for job in (drop(FEW["ddp"]), FEW["ddp"]))
    assert with_dropout["losses"] != pytest.approx(without["losses"], rel=1e-3), "dropout changes the training"
    assert with_dropout["evaluations"][0] == without["evaluations"][0], "evaluations have no dropout"


@pytest.mark.thorough
def test_engines_with_dropout_equal_one_process_and_evaluate_without_dropout(tmp_path: Path) -> None:
    check(ALL, tmp_path)
