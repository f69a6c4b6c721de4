"""Tests on a real Slurm in which a fault is injected while a point runs. After each fault, the point must have exactly
one record, and the sweep must continue with the next point."""

import json
import os
import signal

import pytest
from node_processes import stepping
from slurm_testbed import PATIENCE_S, Testbed
from sweeping import ENDLESS, QUICK, Study

from bench.core.quantities import find_slow_links, find_slow_ranks
from bench.core.record import RunRecord

pytestmark = pytest.mark.processes


def get_outcome(record: RunRecord | None) -> tuple[str, str]:
    assert record
    return record.outcome.kind, record.outcome.reason


@pytest.mark.timeout(400)
def test_each_fault_gives_its_record_and_the_sweep_continues(study: Study, drilled: Testbed) -> None:
    first, second = drilled.node(1), drilled.node(2)
    study.sweep(*ENDLESS, "nodes=2", "batch.micro=1,2,3,4", "launcher.time_limit_min=0.5")

    os.kill(stepping(second).pid, signal.SIGKILL)
    kind, reason = get_outcome(study.next_record())
    assert kind == "error" and "rank 1 was killed by SIGKILL in" in reason, reason

    cut_off = stepping(second)
    drilled("link", second, "--down")
    kind, reason = get_outcome(study.next_record())
    assert kind == "node_failure" and f"({second}) has sent no report" in reason, reason
    drilled("link", second, "--up")

    stepping(second, after=cut_off)
    drilled("controller", "stop")
    shown, errors = study.start("status", str(study.folder), "--json").communicate(timeout=PATIENCE_S)
    assert "Unable to contact" in errors and not study.new(), "nothing is concluded while the scheduler is unavailable"
    unavailable = json.loads(shown)
    assert "Unable to contact" in unavailable["scheduler_away"] and unavailable["jobs"] is unavailable["queue"] is None
    assert {point["state"] for point in unavailable["points"]} == {"running", "unknown"}, "none is called waiting"
    drilled("controller", "start")
    assert get_outcome(study.next_record()) == ("timeout", "the time limit of 0.5 min was reached")

    stepping(second)
    urgent = ("--partition=urgent", "--exclusive", f"--nodelist={first}", "--output=/dev/null")
    drilled.slurm("sbatch", *urgent, "--wrap=true")
    study.ended()
    record = study.next_record()
    assert get_outcome(record) == ("preempted", "the job was preempted")
    assert "PREEMPTED" in record.outcome.evidence["scheduler"]["words"]
    assert study.check() == ["waiting"] * 4


@pytest.mark.timed
@pytest.mark.timeout(300)
def test_slow_link_and_slow_rank_are_identified_and_the_slow_node_is_excluded(study: Study, drilled: Testbed) -> None:
    slow = drilled.node(3)
    drilled("link", slow, "--rate", "100mbit")
    study.sweep(*QUICK, "nodes=3", "batch.micro=1,2,3", ZEROSCALE_DRILL="rank=1 step=0 action=slow")
    study.ended()
    assert study.check() == ["waiting"] * 3, "a run with an injected fault answers nothing"
    assert "a run with an injected fault, which does not count" in " ".join(study.reasons())
    for record in study.records():
        seen = record.observations
        assert seen and seen.link and seen.drill
        assert find_slow_links(seen.link.nodes_bytes_per_s) == [2], seen.link
        assert find_slow_ranks(seen.outside_collectives_s) == [1], seen.outside_collectives_s
    (excluded,) = study.status()["excluded_nodes"]
    assert excluded["host"] == slow and len(excluded["runs"]) == 2, excluded

    assert "Requested node configuration is not available" in study("resume", str(study.folder), code=2)
    submission = study.sweep(*QUICK, "launcher.begin=now+1hour", "nodes=2,3", "batch.micro=1,2,3")
    (job,) = submission["submitted"]
    assert job["points"] == 3 and submission["left"] == 3, "points on three nodes wait, points on two do not"
    assert f" ExcNodeList={slow} " in drilled.slurm("scontrol", "show", "job", "--oneliner", job["job"])
    assert study.check() == ["pending"] * 3 + ["waiting"] * 3
