"""Faults that are injected into a sweep. `strike` injects one fault, undoes it, and returns the attempts that the fault
could affect."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from slurm_testbed import Testbed, wait_for
from test_drills_jobs import fill

from chaos.marked import Process, is_stepping, is_stopped
from chaos.schedule import PlannedFault
from chaos.sweep import OpenAttempt, Sweep

_BRIEFLY_S = 2.0
_LONG_S = 30.0  # longer than hang_s (13 s) and the limit for a silent node (10 s)
_SUSPENDED_S, _STALLED_S = 8.0, 18.0


class Strike(NamedTuple):
    """Result of an injected fault: its target, the attempts (tries at a run) that it could affect because they had no
    record yet, and `in_time`.

    `in_time` is True if the fault affected a running attempt. A fault that pauses ranks is in time only if at least one
    rank was paused during its steps.
    """

    target: str
    hit: list[OpenAttempt]
    in_time: bool


def strike(sweep: Sweep, fault: PlannedFault, disk: Path) -> Strike | None:
    """Wait for a target, inject a fault, and undo it. Return None if no target appears within a time limit. `disk`
    holds the results."""
    if fault.kind in _ROLES:
        return _strike_process(sweep, fault)
    if fault.kind in _OF_A_NODE:
        return _strike_node(sweep, fault)
    if fault.kind in _OF_A_JOB:
        return _strike_job(sweep, fault)
    return _strike_sweep(sweep, fault, disk)


_ROLES = {
    "kill rank": "rank", "kill member agent": "member agent", "kill coordinator": "coordinator",
    "kill fork server": "fork server", "kill srun": "srun", "stop rank briefly": "rank", "stop rank for long": "rank",
}  # fmt: skip


def _strike_process(sweep: Sweep, fault: PlannedFault) -> Strike | None:
    role = _ROLES[fault.kind]

    def find() -> list[Process]:
        at_work = {attempt.job for attempt in sweep.open_attempts()}
        stepping = {rank.job for rank in sweep.processes("rank") if is_stepping(rank)} & at_work
        return [found for found in sweep.processes(role) if found.job in stepping]

    if not sweep.wait_for_target(find, fault.choice):
        return None
    time.sleep(fault.after_s)
    if not (target := sweep.wait_for_target(find, fault.choice)):
        return None
    hit, in_steps = sweep.open_attempts([target.job]), True
    with contextlib.suppress(ProcessLookupError):
        if fault.kind.startswith("kill"):
            os.kill(target.pid, signal.SIGKILL)
        else:
            os.kill(target.pid, signal.SIGSTOP)
            in_steps = is_stepping(target)
            sweep.settle(hit, _BRIEFLY_S if "briefly" in fault.kind else _LONG_S)
            os.kill(target.pid, signal.SIGCONT)
    return Strike(_describe(role, target.node, target.job), hit, bool(hit) and in_steps)


def _describe(what: str, node: str, job: str) -> str:
    return f"{what}{f' on {node}' if node else ''}{f' of job {job}' if job else ''}"


_OF_A_NODE = {
    "slurmd down briefly", "slurmd down for long", "crash node", "cut link briefly", "cut link for long",
}  # fmt: skip


def _strike_node(sweep: Sweep, fault: PlannedFault) -> Strike | None:
    found = _wait_for_job(sweep, fault)
    if not found:
        return None
    _, nodes = found
    node = nodes[fault.choice // 7 % len(nodes)]
    hit = sweep.open_attempts([job for job, of_job in sweep.running_jobs() if node in of_job])
    bed, target = sweep.bed, node
    match fault.kind:
        case "slurmd down briefly":
            bed("slurmd", node, "stop")
            time.sleep(_BRIEFLY_S)
            bed("slurmd", node, "start")
        case "slurmd down for long":
            bed("slurmd", node, "stop")
            _give_up(bed, node)
            sweep.settle(hit, _LONG_S)
            _bring_back(bed, node)
        case "crash node":
            bed("slurmd", node, "crash")
            _give_up(bed, node)
            _bring_back(bed, node)
        case "cut link briefly" | "cut link for long":
            briefly = "briefly" in fault.kind
            cut_s = _cut_link(bed, node, lambda: time.sleep(_BRIEFLY_S) if briefly else sweep.settle(hit, _LONG_S))
            target = f"{node} for {cut_s:.1f} s"
    if "briefly" not in fault.kind:  # attempts that start while Slurm regards the job as lost end with the job
        hit += [more for more in sweep.open_attempts([attempt.job for attempt in hit]) if more not in hit]
    return Strike(target, hit, bool(hit))


def _cut_link(bed: Testbed, node: str, wait: Callable[[], None]) -> float:
    """Disconnect a node's network link while the function `wait` runs. Return the length of the interruption in
    seconds.

    The link is disconnected and reconnected with one `ip` call each.
    """
    port = ("ip", "-n", f"{bed.name}0", "link", "set", node)
    subprocess.run([*port, "down"], check=True)
    began = time.monotonic()
    try:
        wait()
    finally:
        subprocess.run([*port, "up"], check=True)
    return time.monotonic() - began


def _give_up(bed: Testbed, node: str) -> None:
    """Make Slurm declare a node down immediately, as it would do after SlurmdTimeout."""
    bed.slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=silent")


def _bring_back(bed: Testbed, node: str) -> None:
    bed("slurmd", node, "start")
    wait_for(lambda: "down" not in bed.state(node))


def _wait_for_job(sweep: Sweep, fault: PlannedFault) -> tuple[str, list[str]] | None:
    """Wait until a job has started a run, and then for another `fault.after_s` seconds. Return this job and its nodes.
    Return None if no job starts a run."""
    if sweep.wait_for_target(sweep.running_jobs, fault.choice):
        time.sleep(fault.after_s)
    return sweep.wait_for_target(sweep.running_jobs, fault.choice)


_OF_A_JOB = {
    "requeue": ("scontrol", "requeue"),
    "suspend": ("scontrol", "suspend"),
    "scancel": ("scancel",),
    "scancel with SIGKILL": ("scancel", "--signal=KILL"),
}


def _strike_job(sweep: Sweep, fault: PlannedFault) -> Strike | None:
    found = _wait_for_job(sweep, fault)
    while found and fault.kind == "suspend" and not _is_stepping(sweep, found[0]):
        time.sleep(0.2)
        found = _wait_for_job(sweep, fault)
    if not found:
        return None
    hit, target, in_steps = sweep.open_attempts([found[0]]), f"job {found[0]}", True
    with contextlib.suppress(AssertionError):  # it has ended meanwhile
        sweep.bed.slurm(*_OF_A_JOB[fault.kind], found[0])
        if fault.kind == "suspend":
            asked_at = time.monotonic()
            in_steps = _wait_until_stopped(sweep, found[0])
            target += f" for {_SUSPENDED_S:g} s, stopped {time.monotonic() - asked_at:.1f} s after it was asked"
            time.sleep(_SUSPENDED_S)
            sweep.bed.slurm("scontrol", "resume", found[0])
    return Strike(target, hit, bool(hit) and in_steps)


def _wait_until_stopped(sweep: Sweep, job: str) -> bool:
    """Wait until Slurm has paused all ranks of a job. Return True if at least one rank was paused during its steps.

    Slurm takes two seconds or more to pause the ranks, and the steps may end meanwhile.
    """
    until = time.monotonic() + _LONG_S
    while time.monotonic() < until:
        ranks = [rank for rank in sweep.processes("rank") if rank.job == job]
        if all(map(is_stopped, ranks)):
            return any(map(is_stepping, ranks))
        time.sleep(0.2)
    return False


def _strike_sweep(sweep: Sweep, fault: PlannedFault, disk: Path) -> Strike | None:
    """Inject a fault into something other than nodes, jobs or ranks: the Slurm controller, the disk, or a `zeroscale`
    command."""
    if fault.kind == "kill the sweep command" and not sweep.local:
        time.sleep(fault.after_s)
        began = sweep.command.poll() is None
        sweep.command.kill()
        sweep.command.wait()
        sweep.begin()
        return Strike(f"after {fault.after_s:g} s", [], began)
    if not sweep.wait_for_target(sweep.open_attempts, fault.choice):
        return None
    time.sleep(fault.after_s)
    hit, under_way = sweep.open_attempts(), sweep.command.poll() is None
    target = _MADE[fault.kind](sweep, disk)
    return Strike(target, hit, bool(hit) and (under_way or "sweep command" not in fault.kind))


def _is_stepping(sweep: Sweep, job: str) -> bool:
    return any(rank.job == job and is_stepping(rank) for rank in sweep.processes("rank"))


def _stop_controller(sweep: Sweep, disk: Path) -> str:
    sweep.bed("controller", "stop")
    time.sleep(_BRIEFLY_S)
    sweep.bed("controller", "start")
    return "slurmctld"


def _kill_controller(sweep: Sweep, disk: Path) -> str:
    ledger = json.loads((sweep.bed.folder / "state.json").read_text())
    os.kill(ledger["processes"]["slurmctld"]["pid"], signal.SIGKILL)
    time.sleep(_BRIEFLY_S)
    sweep.bed("controller", "start")
    return "slurmctld"


def _fill_disk(sweep: Sweep, disk: Path) -> str:
    fill(disk)
    time.sleep(3 * _BRIEFLY_S)
    (disk / "ballast").unlink()
    return "the disk with the results"


def _stall_file_system(sweep: Sweep, disk: Path) -> str:
    sweep.stall.touch()
    time.sleep(_STALLED_S)
    sweep.stall.unlink()
    return f"the folder of the study for {_STALLED_S:g} s"


def _resume_twice(sweep: Sweep, disk: Path) -> str:
    both = [sweep.start("resume", str(sweep.folder), "--json") for _ in range(2)]
    for command in both:
        with contextlib.suppress(Exception):
            command.communicate(timeout=120)
    return f"both exit codes {sorted(str(command.poll()) for command in both)}"


def _end_command(number: signal.Signals) -> Callable[[Sweep, Path], str]:
    def end(sweep: Sweep, disk: Path) -> str:
        sweep.command.send_signal(number)
        with contextlib.suppress(Exception):
            sweep.command.communicate(timeout=60)
        return number.name

    return end


_MADE: dict[str, Callable[[Sweep, Path], str]] = {
    "controller stopped": _stop_controller,
    "controller killed": _kill_controller,
    "fill disk": _fill_disk,
    "stall file system": _stall_file_system,
    "two resumes at once": _resume_twice,
    "kill the sweep command": _end_command(signal.SIGKILL),
    "interrupt the sweep command": _end_command(signal.SIGINT),
}


def list_kinds() -> Iterator[str]:
    """Yield the names of all kinds of faults."""
    yield from (*_ROLES, *sorted(_OF_A_NODE), *_OF_A_JOB, *_MADE)
