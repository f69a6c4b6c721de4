"""Tests of the supervisors of a run. Small Python programs take the place of the ranks' training processes."""

import contextlib
import gc
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_supervisor_log import PATIENCE_S, Stalled

from bench.config import compose
from bench.core import store
from bench.core.processes import build_module_command
from bench.core.record import Circumstance, Limits, Network, RunRecord
from bench.runtime import node
from bench.runtime.coordinator import RunCoordinator
from bench.runtime.node import NodeAgent
from bench.runtime.outcome import HeartbeatWriter
from bench.runtime.process import StartRank, start_process
from bench.runtime.transport import Rendezvous

WAITS = "import time; time.sleep(60)"
pytestmark = pytest.mark.processes

_TRACES = """
import ctypes, sys, time
ctypes.CDLL(None).ptrace.argtypes = [ctypes.c_long] * 4
refused = ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0)
print("refused" if refused else "holds", flush=True)
time.sleep(600)
"""


def attempt(runs: Path, nodes: int = 1, devices_per_node: int = 2) -> Path:
    asked = compose.compose_request(
        compose.parse_single(["model=tiny", f"nodes={nodes}", f"devices_per_node={devices_per_node}"])
    )
    circumstance = Circumstance(
        study="s",
        repeat=0,
        attempt=0,
        machine=asked.machine,
        launcher={"name": "local"},
        limits=Limits(startup_s=60),
        network=Network(rendezvous_host="127.0.0.1"),
    )
    return store.open_attempt(runs, asked.spec, circumstance).folder


def running(program: str) -> StartRank:
    """Return a function that starts the Python code `program` in place of each rank."""
    return lambda command, environment, descriptors, output: start_process(
        [sys.executable, "-c", program, *command[len(build_module_command("")) :]], environment, descriptors, output
    )


def when(ready: Callable[[], object], action: Callable[[], object]) -> None:
    """Start a thread that waits until `ready()` returns True, and then calls `action`."""

    def wait() -> None:
        until = time.monotonic() + PATIENCE_S
        while not ready() and time.monotonic() < until:
            time.sleep(0.02)
        action()

    threading.Thread(target=wait, daemon=True).start()


def noticed(supervisor: RunCoordinator) -> bool:
    """Return True if the coordinator (the supervisor of node 0) has noticed the loss of a rank."""
    return supervisor._lost_at is not None


def test_rank_finds_its_descriptors_in_environment_variables(tmp_path: Path) -> None:
    reports = (
        'import os; os.write(int(os.environ[\'ZEROSCALE_FAILURE_PIPE\']), b\'{"outcome": "oom", "exception": "E", '
    )
    reports += '"message": "m", "traceback": ""}\\n\'); os.fstat(int(os.environ[\'ZEROSCALE_PULSE\'])); os._exit(1)'
    record = RunCoordinator(attempt(tmp_path, devices_per_node=1), handle_signals=False, start=running(reports)).run()
    assert record and (record.outcome.kind, record.outcome.reason) == ("oom", "rank 0 in start: E: m")


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """While this context is active, the process `pid` does not disappear when it is killed, like a process in an
    uninterruptible system call.

    For this, a tracer is attached to the process. A killed process with a tracer remains until the tracer calls `wait`
    for it.
    """
    with subprocess.Popen([sys.executable, "-c", _TRACES, str(pid)], stdout=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdout
        if tracer.stdout.readline() != "holds\n":
            pytest.skip("no process may be traced here")
        yield
        tracer.kill()


def test_rank_that_survives_sigkill_is_left_and_recorded(tmp_path: Path) -> None:
    folder = attempt(tmp_path)
    supervisor = RunCoordinator(folder, handle_signals=False, start=running(WAITS))
    records: list[RunRecord | None] = []
    thread = threading.Thread(target=lambda: records.append(supervisor.run()), daemon=True)
    thread.start()
    until = time.monotonic() + PATIENCE_S
    while not supervisor.node.running or len(supervisor.states()) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    stuck = supervisor.states()[1].pid
    with held(stuck):
        supervisor.interrupt(signal.SIGTERM)
        thread.join(PATIENCE_S)
        [record] = records
        assert record and record.outcome.kind == "cancelled"
        survivor = {"rank": 1, "pid": stuck, "host": socket.gethostname()}
        assert record.outcome.evidence["survivors"] == [survivor]
        assert [state.survived for state in supervisor.states()] == [False, True]


_ORPHAN = """
import os, signal, time
from bench.runtime.process import set_parent_death_signal

if os.fork() == 0:
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(0.01)
        set_parent_death_signal(signal.SIGKILL)
        print("lives on")
    os._exit(0)
os.wait()
print("alone")
"""


def test_child_ends_if_its_parent_died_before_the_death_signal_was_set() -> None:
    done = subprocess.run([sys.executable, "-uc", _ORPHAN], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout, done.stderr) == ("alone\n", "")


def test_start_that_fails_by_the_interrupting_signal_is_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> Any:
        supervisor.interrupt(signal.SIGTERM)
        raise ConnectionError("the fork server ended with -15")

    supervisor = RunCoordinator(attempt(tmp_path), handle_signals=False, start=fails)
    record = supervisor.run()
    assert record and (record.outcome.kind, record.outcome.reason) == ("cancelled", "interrupted by SIGTERM")
    assert capfd.readouterr().err == ""


def test_processes_of_a_rank_end_with_the_rank(tmp_path: Path) -> None:
    starts = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], stdout=2).pid)"
    folder = attempt(tmp_path, devices_per_node=1)
    RunCoordinator(folder, handle_signals=False, start=running(starts)).run()
    pid = int((folder / store.LOG).read_text().split()[1])
    until = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_endless_line_of_a_rank_uses_little_memory(tmp_path: Path) -> None:
    folder = attempt(tmp_path, devices_per_node=1)

    def logged() -> int:
        log = folder / store.LOG
        return log.stat().st_size if log.exists() else 0

    is_main = "import os\nwhile True: os.write(1, bytes(65536))"
    supervisor = RunCoordinator(folder, handle_signals=False, start=running(is_main))
    when(lambda: logged() > 2**21, lambda: supervisor.interrupt(signal.SIGTERM))
    tracemalloc.start()
    try:
        supervisor.run()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert logged() > 2**21 and peak < 2**25


def test_stalled_file_system_is_no_hang(tmp_path: Path) -> None:
    folder, stalled = attempt(tmp_path), Stalled()
    os.mkfifo(folder / store.LOG)
    talks = "import time\nfor _ in range(3000): print('x' * 100)\ntime.sleep(4)"

    def read_starts() -> str:
        return str(stalled.released.wait(PATIENCE_S))  # simulates a read of the study's folder that stalls

    supervisor = RunCoordinator(folder, handle_signals=False, start=running(talks), is_lost=read_starts)
    supervisor.heartbeat = HeartbeatWriter(folder, 0.5, stalled.replace)
    record = supervisor.run()
    assert record and record.outcome.reason == "every rank ended, and none wrote a record"
    assert not stalled.released.is_set()
    stalled.released.set()


def limited(folder: Path, **limits: float) -> Path:
    """Set time limits in the description of an attempt, and return its folder. `limits` are fields of Limits."""
    circumstance = store.read_value(folder / store.CIRCUMSTANCE, Circumstance)
    changed = circumstance.model_copy(update={"limits": Limits(startup_s=60, **limits)})
    store.write_json(folder / store.CIRCUMSTANCE, changed)
    return folder


@pytest.mark.parametrize(("steps", "outcome"), [(1, "error"), (2, "hang")])
def test_first_step_has_the_time_limit_of_the_start(tmp_path: Path, steps: int, outcome: str) -> None:
    beats = "import time; from bench.measure.channel import Channel; channel = Channel.open();"
    beats += f"[channel.beat('steps', 40 + step) for step in range({steps})]; time.sleep(4)"
    folder = limited(attempt(tmp_path, devices_per_node=1), hang_s=1.5)
    record = RunCoordinator(folder, handle_signals=False, start=running(beats)).run()
    assert record and record.outcome.kind == outcome, record.outcome.reason


def test_pause_of_a_rank_is_recorded(tmp_path: Path) -> None:
    supervisor = RunCoordinator(attempt(tmp_path), handle_signals=False, start=running("import time; time.sleep(3)"))

    def stop_rank() -> None:
        pid = supervisor.states()[1].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(pid, signal.SIGCONT)

    when(lambda: len(supervisor.states()) == 2, stop_rank)
    record = supervisor.run()
    assert record and record.outcome.paused_s > 1.5


def test_permanently_stopped_rank_is_named(tmp_path: Path) -> None:
    beats = (
        "import time; from bench.measure.channel import Channel; channel = Channel.open(); channel.beat('steps', 0);"
    )
    beats += "channel.beat('steps', 1); time.sleep(60)"
    folder = limited(attempt(tmp_path), hang_s=2)
    supervisor = RunCoordinator(folder, handle_signals=False, start=running(beats))

    def makes_steps() -> bool:
        return [state.step for state in supervisor.states()] == [1, 1]

    when(makes_steps, lambda: os.kill(supervisor.states()[1].pid, signal.SIGSTOP))
    record = supervisor.run()
    assert record and record.outcome.kind == "hang" and record.outcome.paused_s
    assert record.outcome.reason.endswith("stopped by a signal: rank 1 in steps at step 1")


_LOOKS = """
import time
from bench.runtime.outcome import PauseWatch
watch = PauseWatch()
print("looks", flush=True)
while not (paused_s := watch.sample((), in_steps=True)):
    time.sleep(0.2)
print(paused_s, watch.totals.in_steps_s, flush=True)
"""


def test_supervisor_measures_its_own_pause() -> None:
    with subprocess.Popen([sys.executable, "-c", _LOOKS], stdout=subprocess.PIPE, text=True) as looks:
        assert looks.stdout and looks.stdout.readline() == "looks\n"
        began = time.monotonic()
        looks.send_signal(signal.SIGSTOP)
        time.sleep(3)
        looks.send_signal(signal.SIGCONT)
        pauses_s = [float(word) for word in looks.stdout.readline().split()]
        assert pauses_s[0] == pauses_s[1] and 2.5 < pauses_s[0] < time.monotonic() - began + 1


@pytest.mark.parametrize("scheduled", [False, True])
def test_interruption_is_stored_before_the_ranks_end(tmp_path: Path, scheduled: bool) -> None:
    folder = attempt(tmp_path)
    sees = "import os, signal, sys, time; from pathlib import Path; folder = Path(sys.argv[1]);"
    sees += "signal.signal(15, lambda *_: os._exit(0 if (folder / 'interrupted.json').exists() else 9));"
    sees += f"(folder / os.environ['RANK']).touch(); {WAITS}"
    supervisor = RunCoordinator(folder, scheduled=scheduled, handle_signals=False, start=running(sees))
    when(lambda: all((folder / rank).exists() for rank in "01"), lambda: supervisor.interrupt(signal.SIGTERM))
    record = supervisor.run()
    noted = json.loads((folder / store.INTERRUPTED).read_text())
    assert noted["signal"] == "SIGTERM"
    assert noted["ranks"] == [{"rank": rank, "phase": "start", "step": -1} for rank in range(2)]
    assert [state.exit_code for state in supervisor.states()] == [0, 0]
    if scheduled:
        assert record is None
        assert not (folder / store.RECORD).exists(), "the record is written later, after a query of the scheduler"
    else:
        assert record and (record.outcome.kind, record.outcome.reason) == ("cancelled", "interrupted by SIGTERM")


def test_rank_that_gets_the_signal_first_is_interrupted_and_not_lost(tmp_path: Path) -> None:
    folder = attempt(tmp_path)
    supervisor = RunCoordinator(folder, handle_signals=False, start=running("import os; os.kill(os.getpid(), 15)"))
    when(lambda: noticed(supervisor), lambda: supervisor.interrupt(signal.SIGTERM))
    record = supervisor.run()
    assert record and record.outcome.kind == "cancelled"
    assert (folder / store.INTERRUPTED).exists()


def test_failure_caused_by_an_interrupted_rank_is_an_interruption(tmp_path: Path) -> None:
    """Rank 1 is ended by SIGTERM. The other rank then fails with a communication error, which is only a consequence.

    A scheduler causes this if it regards the first node as lost, and ends only the processes on other nodes.
    """
    folder = attempt(tmp_path)
    fails = "import os; os.environ['RANK'] == '1' and os.kill(os.getpid(), 15);"
    fails += 'os.write(int(os.environ[\'ZEROSCALE_FAILURE_PIPE\']), b\'{"outcome": "comm_error", "exception": "E", '
    fails += '"message": "Connection reset by peer", "traceback": ""}\\n\'); os._exit(1)'
    supervisor = RunCoordinator(folder, handle_signals=False, start=running(fails))
    when(lambda: noticed(supervisor), lambda: supervisor.interrupt(signal.SIGTERM))
    record = supervisor.run()
    assert record and record.outcome.kind == "cancelled"
    assert sorted(str(state.exit_code) for state in supervisor.states()) == ["-15", "1"]


def test_rank_lost_before_the_signal_decides_the_outcome(tmp_path: Path) -> None:
    folder = attempt(tmp_path)
    leaves = f"import os; os.environ['RANK'] == '0' and os._exit(3); {WAITS}"
    supervisor = RunCoordinator(folder, scheduled=True, handle_signals=False, start=running(leaves))
    when(lambda: noticed(supervisor), lambda: supervisor.interrupt(signal.SIGTERM))
    record = supervisor.run()
    assert record and record.outcome.reason == "rank 0 exited with 3 in start"
    assert not (folder / store.INTERRUPTED).exists()


class CoordinatorThread:
    """Coordinator (the supervisor of node 0) that runs in a thread. `point` is the address to which other supervisors
    connect."""

    record: RunRecord

    def __init__(self, folder: Path, program: str, **options: Any) -> None:
        points: list[Rendezvous] = []
        self.lead = RunCoordinator(
            folder,
            announce=points.append,
            handle_signals=False,
            start=running(program),
            **options,
        )
        self._thread = threading.Thread(target=lambda: setattr(self, "record", self.lead.run()))
        self._thread.start()
        while not points:
            time.sleep(0.01)
        self.point = points[0]

    def ended(self) -> str:
        self._thread.join(PATIENCE_S)
        return self.record.outcome.reason


def test_supervisors_meet_without_a_file_if_the_address_is_announced(tmp_path: Path) -> None:
    folder = attempt(tmp_path, nodes=2)
    says = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'])"
    coordinator = CoordinatorThread(folder, says)
    assert not (folder / store.RENDEZVOUS).exists()
    assert NodeAgent(folder, 1, coordinator.point, handle_signals=False, start=running(says)).run()
    assert coordinator.ended() == "every rank ended, and none wrote a record"
    assert sorted((folder / store.LOG).read_text().splitlines()) == ["[0] 0 0", "[1] 1 1", "[2] 2 0", "[3] 3 1"]


def test_supervisors_with_one_device_each_run_together(tmp_path: Path) -> None:
    folder = attempt(tmp_path, nodes=1, devices_per_node=2)
    says = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'])"
    coordinator = CoordinatorThread(folder, says, span="device")
    assert NodeAgent(folder, 1, coordinator.point, span="device", handle_signals=False, start=running(says)).run()
    assert coordinator.ended() == "every rank ended, and none wrote a record"
    assert sorted((folder / store.LOG).read_text().splitlines()) == ["[0] 0 0", "[1] 1 1"]


def test_interrupted_agent_interrupts_the_run(tmp_path: Path) -> None:
    folder = attempt(tmp_path, nodes=2)
    coordinator = CoordinatorThread(folder, WAITS)
    follow = NodeAgent(folder, 1, coordinator.point, handle_signals=False, start=running(WAITS))
    when(lambda: follow.node.running, lambda: follow.interrupt(signal.SIGTERM))
    follow.run()
    assert coordinator.ended() == "interrupted by SIGTERM"


def test_agent_reports_out_of_memory_kills_of_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()
    monkeypatch.setattr(node, "count_oom_kills", lambda: next(count))
    folder = attempt(tmp_path, nodes=2)
    dies = f"import os; os.environ['RANK'] == '3' and os.kill(os.getpid(), 9); {WAITS}"
    coordinator = CoordinatorThread(folder, dies)
    assert not NodeAgent(folder, 1, coordinator.point, handle_signals=False, start=running(dies)).run()
    assert coordinator.ended() == "rank 3 was killed by SIGKILL by the kernel's out-of-memory killer in start"
    assert list(coordinator.record.outcome.evidence["oom_kills"]) == [socket.gethostname()]


def test_agent_that_cannot_start_its_ranks_is_a_lost_node(tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise ConnectionError("the fork server is gone")

    folder = attempt(tmp_path, nodes=2)
    coordinator = CoordinatorThread(folder, WAITS)
    with pytest.raises(ConnectionError):
        NodeAgent(folder, 1, coordinator.point, handle_signals=False, start=fails).run()  # type: ignore[arg-type]
    assert "closed its connection" in coordinator.ended()


@pytest.mark.parametrize(("scheduled", "every_s"), [(False, 2.0), (True, 10.0)])
def test_heartbeats_on_a_shared_file_system_are_less_frequent(tmp_path: Path, scheduled: bool, every_s: float) -> None:
    made = RunCoordinator(attempt(tmp_path), handle_signals=False, scheduled=scheduled)
    assert made.heartbeat.every_s == every_s


def test_supervisor_closes_all_descriptors_after_each_run(tmp_path: Path) -> None:
    def one() -> int:
        RunCoordinator(attempt(tmp_path), handle_signals=False, start=running("pass")).run()
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # close objects of other tests now, and not during this test
    one()
    assert one() == one()
