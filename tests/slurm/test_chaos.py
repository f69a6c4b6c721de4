"""Tests of `tests.slurm.chaos`, which injects random faults into sweeps. They check which faults are planned for each
seed, and the rules for outcomes. One test runs a short real round.

`make chaos` runs more rounds.
"""

from collections import Counter
from pathlib import Path

import pytest
from chaos.faults import list_kinds
from chaos.invariants import EXPECTED, judge
from chaos.marked import MARK
from chaos.running import Table, run_round
from chaos.schedule import HERE, MODES, ON_NODES, plan_round
from slurm_testbed import Testbed

pytestmark = pytest.mark.processes

PIECE = plan_round(4)
"""Planned round (a sweep with its faults) with points on one node. The faults kill the submitting command, a
coordinator and an srun, and disconnect a network link for two seconds."""


def test_rounds_are_reproducible_by_seed_and_cover_every_fault() -> None:
    rounds = [plan_round(seed) for seed in range(1, 201)]
    assert rounds == [plan_round(seed) for seed in range(1, 201)]
    done = Counter((planned.mode, fault.kind) for planned in rounds for fault in planned.faults)
    assert set(done) == {(mode, kind) for mode in MODES for kind in (HERE if mode == "local" else ON_NODES)}
    assert {*HERE, *ON_NODES} == set(EXPECTED) == set(list_kinds())


def test_outcome_must_match_the_injected_fault() -> None:
    assert judge("kill rank", "error", "rank 1 was killed by SIGKILL in steps at step 7")
    assert not judge("kill rank", "cancelled", "interrupted by SIGTERM") and not judge("kill rank", "error", "no idea")
    assert judge("requeue", "preempted", "the scheduler ended the job and requeued it")
    assert not judge("cut link briefly", "node_failure", "node 2 has sent no report for 10 s")


@pytest.mark.timeout(600)
@pytest.mark.thorough
def test_short_round_of_faults_violates_no_rule(
    drilled: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(drilled.folder / "slurm.conf"))
    monkeypatch.setenv(MARK, "")  # a round sets it
    table, planned = Table(), PIECE._replace(faults=PIECE.faults[:4])
    assert run_round(planned, drilled, tmp_path, table) == []
    assert {kind for kind, mode, _ in table if mode} == {fault.kind for fault in planned.faults}
