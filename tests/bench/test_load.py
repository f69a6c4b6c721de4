"""Tests of the measured background load: the CPU time that processes outside of the run use. It is compared with hand
calculations for a simulated /proc, and with real processes that compute."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from started_runs import QUICK, Command

from analysis.flags import list_flags
from bench.cli import options
from bench.core import store
from bench.core.quantities import BUSY_SHARE, compute_background_load
from bench.core.record import NodeLoad, RunRecord
from bench.core.terminal import Progress
from bench.measure.control_group import read_quota_cores, read_throttled_s
from bench.measure.surroundings import CommandMonitor, HostMonitor, ProcessLocation, compute_load
from bench.sweep import local_attempt
from tests import warm

HERE = ProcessLocation.of_this_process()
SPIN = "import os\nif os.fork():\n    os._exit(0)\nprint(os.getpid(), flush=True)\nwhile True: pass"


class Machine:
    """Simulated /proc of a machine with seven cores. The run may use cores 0 and 1. Times are in ticks of 10 ms."""

    def __init__(self, root: Path) -> None:
        self.root, self.processes = root, dict[int, list[int]]()
        (root / "proc").mkdir(parents=True)

    def process(self, number: int, parent: int, session: int, ticks: int, ended: int = 0) -> None:
        """Write the stat file of the process with the id `number`. `ticks` is the CPU time of the process itself.
        `ended` is the CPU time of those child processes that have ended."""
        folder = self.root / "proc" / str(number)
        folder.mkdir(exist_ok=True)
        fields = [parent, number, session, 0, -1, 0, 0, 0, 0, 0, ticks, 0, ended, 0]
        (folder / "stat").write_text(f"{number} (a) name) S {' '.join(map(str, fields))} 20 0 1\n")

    def counted(self, user: int, stolen: int, idle: int, elsewhere: int = 0) -> None:
        """Write the kernel's counters of CPU time. `user`, `stolen` and `idle` are sums over the cores 0 and 1.
        `elsewhere` is the user time of each of the five cores that the run may not use."""
        lines = [f"cpu{core} {user // 2} 0 0 {idle // 2} 0 0 0 {stolen // 2} 0 0" for core in (0, 1)]
        lines += [f"cpu{core} {elsewhere} 0 0 0 0 0 0 0 0 0" for core in range(2, 7)]
        (self.root / "proc/stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 5"]) + "\n")


def read(machine: Machine, *sessions: int) -> HostMonitor:
    return HostMonitor([HERE._replace(session=session, cores=(0, 1)) for session in sessions], machine.root)


def test_processes_of_the_run_are_not_background_load(tmp_path: Path) -> None:
    """In 10 s, two cores have 20 s of CPU time.

    Processes of the run use 13.5 s, threads of the kernel 0.5 s, and other processes (the background load) 4 s. Other
    guests of the hypervisor take 1 s, and the cores are idle for 1 s.
    """
    machine = Machine(tmp_path)
    monitor = read(machine, 100, 200)
    for moment, scale in enumerate((0, 1)):
        machine.counted(user=1800 * scale, stolen=100 * scale, idle=100 * scale, elsewhere=700 * scale)
        machine.process(1, 0, 1, 0)
        machine.process(2, 0, 0, 0)
        machine.process(9, 2, 0, 50 * scale)  # a thread of the kernel
        machine.process(50, 1, 50, 100 * scale, ended=9000 * scale)  # the supervisor, with its reaped children's time
        machine.process(100, 50, 100, 500 * scale, ended=200 * scale)  # a rank, with an ended loader
        machine.process(101, 100, 100, 150 * scale)  # a loader
        machine.process(102, 100, 102, 100 * scale)  # a compiler started by a rank, in its own session
        machine.process(200, 1, 200, 300 * scale)  # a rank of another node of the run, on the same machine
        machine.process(300, 50, 300, 400 * scale)  # background load, although it has the supervisor as parent
        if moment == 0:
            before = monitor.sample()
    after = monitor.sample()
    assert before and after
    load = compute_load(3, before, after.__class__(**{**vars(after), "at": before.at + 10}))
    assert load and load.node == 3
    assert load.others_share == pytest.approx(4 / 20)
    assert load.stolen_share == pytest.approx(1 / 20)
    assert compute_background_load(load) == pytest.approx(5 / 20)


def test_background_load_is_unknown_if_a_rank_is_invisible(tmp_path: Path) -> None:
    """Two ranks of a run are on one machine in different containers. Each rank cannot see the process ids of the other
    rank. So the CPU time of the other rank would count as background load."""
    machine = Machine(tmp_path)
    machine.counted(user=10, stolen=0, idle=10)
    apart = HostMonitor([HERE, HERE._replace(processes=HERE.processes + 1)], tmp_path)
    before = apart.sample()
    machine.counted(user=20, stolen=0, idle=20)
    load = compute_load(0, before, apart.sample())
    assert load and load.others_share is None and load.stolen_share == 0


def test_pressure_and_throttling_are_differences_over_the_window(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.counted(user=0, stolen=0, idle=0)
    (tmp_path / "proc/pressure").mkdir()
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    group = tmp_path / "sys/fs/cgroup/jobs/mine"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("max 100000\n")
    (group.parent / "cpu.max").write_text("150000 100000\n")
    pressure = tmp_path / "proc/pressure/memory"
    monitor = read(machine, 100)
    pressure.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\nfull avg10=0.00 total=7\n")
    (group / "cpu.stat").write_text("usage_usec 5\nthrottled_usec 250000\n")
    before = monitor.sample()
    pressure.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=3000000\nfull avg10=0.00 total=7\n")
    (group / "cpu.stat").write_text("usage_usec 5\nthrottled_usec 1000000\n")
    after = monitor.sample()
    assert before and after
    load = compute_load(0, before, after.__class__(**{**vars(after), "at": before.at + 8}))
    assert load and load.memory_pressure_share == pytest.approx(2 / 8) and load.cpu_pressure_share is None
    assert load.throttled_s == pytest.approx(0.75)
    assert read_throttled_s(tmp_path) == 1.0
    assert read_quota_cores(tmp_path) == 1.5, "of a group around it"


def test_load_is_unknown_without_kernel_counters(tmp_path: Path) -> None:
    assert read(Machine(tmp_path), 1).sample() is None
    assert compute_load(0, None, None) is None


@pytest.fixture
def spinning() -> Iterator[list[int]]:
    """Ids of processes that compute all the time, one for each core. Their parent process has ended, so that they count
    as processes outside of the run."""
    found = []
    for _ in os.sched_getaffinity(0):
        words = [sys.executable, "-c", SPIN]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        with warm.orphaning(), subprocess.Popen(words, **options) as started:
            assert started.stdout
            found.append(int(started.stdout.readline()))
            started.stdout.close()
    yield found
    for number in found:
        os.kill(number, signal.SIGKILL)


def seconds_of(numbers: list[int]) -> float:
    fields = [Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split() for number in numbers]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def test_background_load_equals_the_kernels_counters(spinning: list[int]) -> None:
    monitor = HostMonitor([HERE])
    before, at, used = monitor.sample(), time.monotonic(), seconds_of(spinning)
    time.sleep(2)
    used, seconds = seconds_of(spinning) - used, time.monotonic() - at
    load = compute_load(0, before, monitor.sample())
    assert load and load.others_share is not None
    assert load.others_share >= 0.9 * used / (seconds * len(HERE.cores)) > 0, "other background load may come on top"


def test_command_does_not_count_as_its_own_background_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the process of the command itself computes for 8 s, which must not count. Then another process of its
    session computes for 8 s, which counts."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    machine, session = Machine(tmp_path), os.getsid(0)
    machine.counted(user=0, stolen=0, idle=0)
    for number, parent in ((os.getpid(), session), (os.getpid() + 1, session)):
        machine.process(number, parent, session, 0)
    own, both = CommandMonitor(tmp_path), CommandMonitor(tmp_path)
    machine.counted(user=800, stolen=0, idle=800)
    machine.process(os.getpid(), session, session, 800)
    assert own.explain_busy() == ""
    machine.counted(user=1600, stolen=0, idle=1600)
    machine.process(os.getpid() + 1, session, session, 800)
    assert re.fullmatch(r"background load takes \d+ % of its cores", both.explain_busy())
    assert CommandMonitor(tmp_path / "nothing").explain_busy() == "", "a system without these counters"


def test_busy_machine_gets_one_warning_before_the_first_run(
    spinning: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # a lock of its own
    shown: list[str] = []

    def warn(launcher: dict[str, Any]) -> str:
        warning = options.BusyWarning()
        time.sleep(0.5)
        follow = warning.before(lambda progress: shown.append(progress.what), launcher)
        for step in ("starting", "steps 1"):
            follow(Progress(step))
        return capsys.readouterr().err

    (line,) = warn({"lock": True}).splitlines()
    assert line.startswith("zeroscale: this machine is busy: background load takes ")
    assert line.endswith("add launcher.quiet_within_s=600") and shown == ["starting", "steps 1"]
    assert warn({"quiet_within_s": 60}) == "", "the run waits for a quiet machine"
    with local_attempt.alone(print):
        assert warn({"lock": True}) != "", "a sweep holds the lock itself when its first run starts"
        path = local_attempt.path(os.environ)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 1}))
        assert warn({"lock": True}) == "", "the run waits for another local run, which is the load"
        assert warn({"lock": False}) != ""


def quiet() -> bool:
    """Measure for 3 s. Return True if this machine currently has little background load."""
    monitor = HostMonitor([HERE])
    before = monitor.sample()
    time.sleep(3)
    load = compute_load(0, before, monitor.sample())
    return load is not None and (compute_background_load(load) or 0) < BUSY_SHARE / 2


def record_of(tmp_path: Path, *more: str) -> RunRecord:
    return Command(tmp_path / "runs", [*QUICK, "engine=ddp", "measure.window_s=2", *more]).record()


@pytest.mark.processes
def test_run_with_background_load_is_flagged_with_its_share(tmp_path: Path, spinning: list[int]) -> None:
    record = record_of(tmp_path)
    assert record.outcome.kind == "ok" and record.observations and record.observations.load
    (load,) = record.observations.load
    assert load.others_share is not None and load.others_share > BUSY_SHARE
    assert "busy" in list_flags(record)


@pytest.mark.processes
def test_run_that_requires_a_quiet_machine_ends_under_background_load(tmp_path: Path, spinning: list[int]) -> None:
    record = record_of(tmp_path, "launcher.quiet_within_s=2")
    assert record.outcome.kind == "error" and not record.outcome.final
    assert "did not end within 2 s" in record.outcome.reason and "background load takes" in record.outcome.reason
    (folder,) = (path.parent.parent for path in store.find_records([tmp_path / "runs"]))
    assert [attempt.excused for attempt in store.list_attempts(folder)] == [True], "it costs no attempt of the point"


@pytest.mark.processes
@pytest.mark.timed
def test_run_without_background_load_is_not_flagged(tmp_path: Path) -> None:
    if not quiet():
        pytest.skip("this machine has background load")
    record = record_of(tmp_path, "launcher.quiet_within_s=60")
    assert record.outcome.kind == "ok", record.outcome.reason
    if not quiet():
        pytest.skip("this machine has background load")
    assert record.observations and record.observations.load
    (load,) = record.observations.load
    if (load.stolen_share or 0) > BUSY_SHARE / 2:
        pytest.skip("the hypervisor gives CPU time to other guests")
    assert "busy" not in list_flags(record)


def test_known_shares_of_node_load_are_added() -> None:
    assert compute_background_load(NodeLoad(node=0)) is None
    assert compute_background_load(NodeLoad(node=0, stolen_share=0.25)) == 0.25
