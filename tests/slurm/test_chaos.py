"""Random faults over sweeps: what a seed does, and how outcomes are judged; `make chaos` runs them."""

from collections import Counter

import pytest
from chaos.faults import list_kinds
from chaos.invariants import EXPECTED, judge
from chaos.schedule import HERE, MODES, ON_NODES, plan_round

pytestmark = pytest.mark.processes


def test_a_seed_does_the_same_everywhere_and_all_seeds_do_everything() -> None:
    rounds = [plan_round(seed) for seed in range(1, 201)]
    assert rounds == [plan_round(seed) for seed in range(1, 201)]
    done = Counter((planned.mode, fault.kind) for planned in rounds for fault in planned.faults)
    assert set(done) == {(mode, kind) for mode in MODES for kind in (HERE if mode == "local" else ON_NODES)}
    assert {*HERE, *ON_NODES} == set(EXPECTED) == set(list_kinds())


def test_an_outcome_has_to_be_the_one_of_the_fault_that_was_made() -> None:
    assert judge("kill rank", "error", "rank 1 was killed by SIGKILL in steps at step 7")
    assert not judge("kill rank", "cancelled", "interrupted by SIGTERM") and not judge("kill rank", "error", "no idea")
    assert judge("requeue", "preempted", "the job was asked to end and put back into the queue")
    assert not judge("cut link briefly", "node_failure", "node 2 has not been heard of for 10 s")
