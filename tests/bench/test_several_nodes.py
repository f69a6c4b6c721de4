"""Tests of runs on several nodes, with a supervisor for each node.

All supervisors run on this machine and communicate over loopback. They are started as `srun` would start them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from started_runs import ENDLESS, PATIENCE_S, QUICK, alive, survivors

from bench.config import compose
from bench.core import store
from bench.core.record import Circumstance, Limits, Network, RunRecord

pytestmark = pytest.mark.processes


class Nodes:
    """The supervisors of a run on several simulated nodes, one process for each node."""

    def __init__(self, runs: Path, overrides: tuple[str, ...], nodes: int, hang_s: float, **environment: str) -> None:
        asked = compose.compose_request(compose.parse_single([*overrides, f"nodes={nodes}", "devices_per_node=1"]))
        circumstance = Circumstance(
            study="s",
            repeat=0,
            attempt=0,
            machine=asked.machine,
            limits=Limits(hang_s=hang_s, startup_s=PATIENCE_S),
            network=Network(rendezvous_host="127.0.0.1", interface="lo"),
        )
        self.folder = store.open_attempt(runs, asked.spec, circumstance).folder
        self.supervisors = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.runtime", str(self.folder), str(node)],
                env=os.environ
                | {"OMP_NUM_THREADS": "1"}
                | {name: value.format(node=node) for name, value in environment.items()},
            )
            for node in range(nodes)
        ]

    def stepping(self) -> list[int]:
        """Wait until every rank has begun its steps. Return the process ids of the ranks, in the order of ranks."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            time.sleep(0.1)
            path = self.folder / store.HEARTBEAT
            ranks = json.loads(path.read_text())["ranks"] if path.exists() else []
            if len(ranks) == len(self.supervisors) and all(rank["step"] >= 0 for rank in ranks):
                return [rank["pid"] for rank in ranks]
        raise AssertionError("the run did not get there in time")

    def record(self) -> RunRecord:
        for supervisor in self.supervisors:
            supervisor.wait(timeout=PATIENCE_S)
        return store.read_record(self.folder / store.RECORD)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    started: list[Nodes] = []

    def start(overrides: tuple[str, ...], nodes: int = 2, hang_s: float = 300, **environment: str) -> Nodes:
        started.append(Nodes(tmp_path, overrides, nodes, hang_s, **environment))
        return started[-1]

    yield start
    for run in started:
        for supervisor in run.supervisors:
            supervisor.kill()
            supervisor.wait()


def test_one_run_is_measured_on_two_nodes(nodes: Callable[..., Nodes]) -> None:
    run = nodes((*QUICK, "engine=zero2"))
    record = run.record()
    assert record.outcome.kind == "ok", record.outcome
    assert [supervisor.returncode for supervisor in run.supervisors] == [0, 0]
    assert record.observations
    assert [memory.rank for memory in record.observations.memory] == [0, 1]
    assert record.observations.link
    one, other = record.observations.link.nodes_bytes_per_s
    assert one and one == other, "two nodes are one pair"
    assert not (run.folder / store.RENDEZVOUS).exists()
    assert len(list(run.folder.iterdir())) <= 10


def test_run_over_two_allocations_is_refused_before_it_measures(nodes: Callable[..., Nodes]) -> None:
    record = nodes((*QUICK, "engine=ddp"), SLURM_JOB_ID="3{node}").record()
    assert record.outcome.kind == "error" and not record.observations
    assert "Refused: " in record.outcome.reason and " is of job 31, and the first node " in record.outcome.reason


def test_killed_rank_on_the_second_node_is_named(nodes: Callable[..., Nodes]) -> None:
    run = nodes((*ENDLESS, "engine=ddp"))
    pids = run.stepping()
    os.kill(pids[1], signal.SIGKILL)
    record = run.record()
    assert record.outcome.kind == "error"
    assert record.outcome.reason.startswith("rank 1 was killed by SIGKILL in ")
    assert not alive(pids)


def test_exception_on_the_second_node_is_reported_to_the_first(nodes: Callable[..., Nodes]) -> None:
    record = nodes((*ENDLESS, "engine=ddp"), ZEROSCALE_DRILL="rank=1 step=2 action=raise").record()
    assert record.outcome.kind == "error"
    assert record.outcome.reason == "rank 1 in fetch at step 2: RuntimeError: drill: rank 1 raises at step 2"


@pytest.mark.timed
def test_hang_has_the_stacks_of_every_node(nodes: Callable[..., Nodes]) -> None:
    drill = "rank=1 step=2 action=sleep"
    record = nodes((*ENDLESS, "engine=ddp"), hang_s=6, ZEROSCALE_DRILL=drill).record()
    assert record.outcome.kind == "hang"
    assert record.outcome.reason.endswith("furthest behind: rank 1 in fetch at step 2")
    assert "in inject" in record.outcome.evidence["stacks"]["1"]


def test_killed_supervisor_of_a_node_is_a_node_failure(nodes: Callable[..., Nodes]) -> None:
    run = nodes((*ENDLESS, "engine=ddp"))
    pids = run.stepping()
    run.supervisors[1].kill()
    record = run.record()
    assert record.outcome.kind == "node_failure"
    assert "node 1" in record.outcome.reason and "closed its connection" in record.outcome.reason
    assert not survivors(pids)


def test_interrupted_coordinator_ends_every_node(nodes: Callable[..., Nodes]) -> None:
    run = nodes((*ENDLESS, "engine=ddp"))
    pids = run.stepping()
    run.supervisors[0].send_signal(signal.SIGTERM)
    record = run.record()
    assert record.outcome.kind == "cancelled"
    assert not alive(pids)
