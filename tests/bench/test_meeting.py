"""Tests of how the supervisors of an allocation's nodes find and connect to each other. Unknown clients of their port
must not disturb them."""

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.measure.failures import Refused
from bench.measure.peers import RankPlace, check_places
from bench.runtime import transport
from bench.runtime.outcome import PauseTotals
from bench.runtime.transport import AgentClient, CoordinatorServer, Rendezvous, TokenListener
from bench.sweep.allocation.agents import JobAgents, build_meeting_path, join_leader

pytestmark = pytest.mark.processes

PATIENCE_S = 20.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


# -- allocations


def test_allocations_in_one_job_folder_meet_separately(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Several allocations can use the same job folder at the same time: the tasks of an array, or two starts of a
    requeued job. Their supervisors must not connect to each other."""
    allocations = ["37.0", "38.0", "38.1"]

    def conduct(allocation: str) -> Future[JobAgents]:
        return pool.submit(JobAgents, 2, "127.0.0.1", tmp_path, allocation, PATIENCE_S)

    def join(allocation: str, number: int) -> Future[transport.Connection]:
        return pool.submit(join_leader, tmp_path, allocation, number, f"{allocation}/{number}", PATIENCE_S)

    conducting = {allocation: conduct(allocation) for allocation in allocations}
    joining = [join(allocation, number) for number in (1, 2) for allocation in reversed(allocations)]
    for allocation, agents in conducting.items():
        assert agents.result().hosts == {number: f"{allocation}/{number}" for number in (1, 2)}
    assert all(not joined.result().closed for joined in joining)
    assert list(tmp_path.iterdir()) == [], "no file is left that could mislead the next"


def test_agent_of_another_allocation_is_refused(
    tmp_path: Path, pool: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    agents = pool.submit(JobAgents, 1, "127.0.0.1", tmp_path, "37.0", PATIENCE_S)
    wait_for(build_meeting_path(tmp_path, "37.0").exists)
    build_meeting_path(tmp_path, "38.0").symlink_to(build_meeting_path(tmp_path, "37.0"))
    stranger = join_leader(tmp_path, "38.0", 1, "hg4", PATIENCE_S)
    wait_for(lambda: stranger.take() == [] and stranger.closed)
    join_leader(tmp_path, "37.0", 1, "hg2", PATIENCE_S)
    assert agents.result().hosts == {1: "hg2"}
    assert "hg4 was refused: it belongs to allocation 38.0, but this allocation is 37.0" in capfd.readouterr().err


def test_leader_removes_its_meeting_file_if_no_agent_connects(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"supervisors \[1\] did not connect"):
        JobAgents(1, "127.0.0.1", tmp_path, "37.0", 0.1)
    assert list(tmp_path.iterdir()) == []


SEATS = [RankPlace("hg1", "37"), RankPlace("hg1", "37"), RankPlace("hg2", "37")]


def test_ranks_of_one_allocation_are_accepted() -> None:
    check_places(SEATS, "hg[1-2]")
    check_places(SEATS, "")
    check_places([RankPlace("here", "")], "")
    check_places([RankPlace("login", "37")], "hg[1-2]")  # Slurm's nodes have other names


@pytest.mark.parametrize(
    ("stranger", "nodelist", "why"),
    [
        (RankPlace("hg4", "38"), "hg[1-2]", "hg4 is of job 38, and the first node hg1 of 37"),
        (RankPlace("hg2", "37", 1), "hg[1-2]", "hg2 is of job 37, restart 1, and the first node hg1 of 37"),
        (RankPlace("hg4", "37"), "hg[1-2]", r"hg4 is not in this job's allocation, which has hg\[1-2\]"),
    ],
)
def test_run_over_two_allocations_is_refused(stranger: RankPlace, nodelist: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        check_places([*SEATS, stranger], nodelist)


# -- unknown clients

NOISE = {
    "nesting": b"[" * 1000 + b"\n",
    "much nesting": b"[" * 100_000 + b"\n",
    "no line": b"x" * (1 << 20),
    "no text": b"\xff\xfe\n",
    "no object": b"[[1, 2, 3]]\n",
    "a number": b"7" * 1000 + b"\n",
    "another token": b'{"token": "0123456789abcdef", "node": 1, "host": "evil"}\n',
    "a token of another kind": b'{"token": ["\xc3\xa4", {}], "node": 1}\n',
    "nothing": b"\n",
    "an object without anything": b"{}\n",
}


def knock(lead: CoordinatorServer | TokenListener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", lead.port), timeout=PATIENCE_S)


def hung_up(connection: socket.socket) -> bool:
    """Return True if the peer has closed this connection."""
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:  # the connection was reset, because it was closed with unread input
        return True


@pytest.fixture
def lead() -> Iterator[CoordinatorServer]:
    lead = CoordinatorServer(2, "127.0.0.1", 0.3)
    yield lead
    lead.close()


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE.keys())
def test_unknown_connections_are_dropped_and_agents_are_accepted(lead: CoordinatorServer, noise: bytes) -> None:
    with knock(lead) as stranger:
        threading.Thread(target=lambda: _send(stranger, noise), daemon=True).start()
        time.sleep(0.05)
        wait_for(lambda: lead.poll() == [] and hung_up(stranger))
        assert lead.agents == {}
        follower = AgentClient(Rendezvous("127.0.0.1", 0, lead.port, lead.token), 1, "hg2", 60.0)
        wait_for(lambda: lead.poll() == [] and 1 in lead.agents)
        assert lead.lost() is None
        follower.close()


def report(agent: AgentClient, *, done: bool = False, paused: tuple[float, float] = (0.0, 0.0)) -> None:
    agent.report([], [], done=done, interrupted_by=None, paused=PauseTotals(*paused))


def test_agent_that_leaves_a_silent_coordinator_reports_the_reason(lead: CoordinatorServer) -> None:
    """An agent (the supervisor of a node other than node 0) receives nothing from node 0 and so ends its ranks. The
    reason that it reports must take precedence over reports of lost ranks, which are only a consequence."""
    agent = AgentClient(Rendezvous("127.0.0.1", 0, lead.port, lead.token), 1, "hg2", 0.2)
    wait_for(lambda: lead.poll() == [] and 1 in lead.agents)
    assert lead.find_left() is None
    wait_for(agent.stop_request)
    report(agent, done=True)
    wait_for(lambda: lead.poll() == [] and lead.find_left())
    assert str(lead.lost()).startswith("node 1 (hg2) left: it has received nothing from node 0 for 0")
    agent.close()


def test_silence_is_counted_again_after_a_pause(lead: CoordinatorServer) -> None:
    agent = AgentClient(Rendezvous("127.0.0.1", 0, lead.port, lead.token), 1, "hg2", 0.3)
    wait_for(lambda: lead.poll() == [] and 1 in lead.agents)
    time.sleep(0.4)
    assert "has sent no report for 0" in str(lead.lost())
    lead.forgive_silence(0.4)
    agent.forgive_silence()
    assert lead.lost() is None and agent.stop_request() is None
    report(agent, paused=(0.4, 0.3))
    wait_for(lambda: lead.poll() == [] and lead.paused == PauseTotals(0.4, 0.3))
    agent.close()


def _send(connection: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):  # the peer has closed the connection, as expected
        connection.sendall(content)


def test_messages_sent_together_with_the_hello_are_all_read(lead: CoordinatorServer) -> None:
    report = {
        "ranks": [],
        "output": [[1, "x" * 900]] * 50,
        "done": True,
        "interrupted_by": None,
        "left": "",
        "paused": [0, 0],
    }
    hello = {"token": lead.token, "node": 1, "host": "hg2"}
    with knock(lead) as member:
        member.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in (hello, report, report)))
        output: list[tuple[int, bytes]] = []
        wait_for(lambda: not output.extend(lead.poll()) and len(output) == 100)  # type: ignore[func-returns-value]
        assert lead.agents[1].last.done


def test_silent_unknown_connection_is_dropped_after_a_time_limit(
    lead: CoordinatorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_HELLO_S", 0.5)
    with knock(lead) as silent, knock(lead) as slow:
        began = time.monotonic()
        while not hung_up(silent):
            lead.poll()
            _send(slow, b" ")
            assert time.monotonic() < began + PATIENCE_S
        assert time.monotonic() > began + 0.5
        wait_for(lambda: lead.poll() == [] and hung_up(slow))


def test_many_silent_connections_use_few_descriptors_and_end_no_run(lead: CoordinatorServer) -> None:
    crowd: list[socket.socket] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = descriptors()
    try:
        for _ in range(6):
            crowd += [knock(lead) for _ in range(16)]
            lead.poll()
        assert descriptors() - before - len(crowd) <= 20
        follower = AgentClient(Rendezvous("127.0.0.1", 0, lead.port, lead.token), 1, "hg2", 60.0)
        wait_for(lambda: lead.poll() == [] and 1 in lead.agents)
        crowd.append(knock(lead))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no further file descriptor can be opened
        assert lead.poll() == [] and lead.lost() is None
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        follower.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for connection in crowd:
            connection.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_leader_waits_for_its_agents_among_unknown_connections(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    agents = pool.submit(JobAgents, 1, "127.0.0.1", tmp_path, "37.0", PATIENCE_S)
    wait_for(build_meeting_path(tmp_path, "37.0").exists)
    port = json.loads(build_meeting_path(tmp_path, "37.0").read_bytes())["port"]
    for noise in NOISE.values():
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            threading.Thread(target=lambda s=stranger, n=noise: _send(s, n), daemon=True).start()  # type: ignore[misc]
            time.sleep(0.15)
    join_leader(tmp_path, "37.0", 1, "hg2", PATIENCE_S)
    assert agents.result().hosts == {1: "hg2"}
