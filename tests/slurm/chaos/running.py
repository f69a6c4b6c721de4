"""Function that runs one round of faults: from the first command of a sweep until the testbed is clean for the next
round."""

import subprocess
import time
from collections import Counter
from pathlib import Path

from slurm_testbed import Testbed, wait_for

from bench.core import store
from chaos.faults import Strike, strike
from chaos.invariants import has_struck, list_broken, list_untrue
from chaos.marked import list_processes
from chaos.schedule import PlannedFault, Round
from chaos.sweep import Sweep

_END_S = 60.0  # Slurm takes long to end a job on a lost node
_TRIES = 4  # maximum number of tries to inject a fault before the affected run has ended
Table = Counter[tuple[str, str, str]]
"""Counters with two kinds of keys. (kind of fault, mode, "") counts injected faults. (kind of fault, "", outcome)
counts how often runs that these faults could affect had this outcome."""


def run_round(planned: Round, bed: Testbed, disk: Path, table: Table) -> list[str]:
    """Run a planned round: one sweep into which faults are injected. It runs on the testbed `bed`. Count the faults and
    the outcomes of attempts in `table`. If a rule for sweeps was broken, the returned list has its description. Results
    are written to the folder `disk`."""
    print(planned.format_line(), flush=True)
    began, sweep = time.monotonic(), Sweep(bed, disk / f"s{planned.seed}", planned)
    broken: list[str] = []
    try:
        for fault in planned.faults:
            broken += _make(sweep, fault, disk, table)
        if not sweep.finish():
            broken.append("the sweep did not come to its end")
        _wait_until_gone(sweep)
        broken += list_broken(sweep)
    except (AssertionError, subprocess.TimeoutExpired) as error:  # a Slurm command failed or took too long
        broken.append(f"not judged: {str(error)[:300]}")
    finally:
        _clear(sweep)
    line = "; ".join(broken) or "every rule held"
    print(f"  seed {planned.seed} took {time.monotonic() - began:.0f} s: {line}", flush=True)
    return broken


def _make(sweep: Sweep, fault: PlannedFault, disk: Path, table: Table) -> list[str]:
    """Inject a fault, and try again if it came too late. Count the fault and its outcomes in `table`, and return
    descriptions of unexpected outcomes."""
    for _ in range(_TRIES):
        began = time.monotonic()
        if not (made := strike(sweep, fault, disk)):
            return [f"{fault.kind}: nothing came to be struck"]
        sweep.settle(made.hit)
        outcomes, untrue = _list_outcomes(made), list(list_untrue(fault.kind, made))
        struck = has_struck(fault.kind, made)
        if struck:
            table[fault.kind, sweep.planned.mode, ""] += 1
            table.update((fault.kind, "", outcome.partition(":")[0]) for outcome in outcomes)
        sign = "BROKEN" if untrue else "as expected" if struck else "too late"
        line = f"{fault.kind} ({made.target}) -> {'; '.join(outcomes)} [{sign}]"
        print(f"  {line} {time.monotonic() - began:.0f} s", flush=True)
        if untrue or struck:
            return untrue
    return []


def _list_outcomes(made: Strike) -> list[str]:
    found = []
    for attempt in made.hit:
        path = attempt.folder / store.RECORD
        outcome = store.read_record(path).outcome if path.exists() else None
        found.append(f"{outcome.kind}: {outcome.reason[:150]}" if outcome else "no record")
    return found or ["no attempt"]


def _wait_until_gone(sweep: Sweep) -> None:
    """Wait until all processes and jobs of the sweep have ended, up to a time limit. They may still run for a while
    after the last record has been written."""
    until = time.monotonic() + _END_S
    while time.monotonic() < until and (list_processes(sweep.mark) or sweep.bed.slurm("squeue", "--noheader").strip()):
        time.sleep(0.5)


def _clear(sweep: Sweep) -> None:
    """Clean the testbed for the next round. This is called even after errors in this round."""
    sweep.bed("controller", "start")
    sweep.bed("link", "all", "--rate", "1gbit", "--up")
    for node in sweep.bed.status["nodes"]:
        sweep.bed("slurmd", node, "start")
    sweep.bed.slurm("scancel", "--user=root")
    for left in list_processes(sweep.mark):
        if not left.job:
            subprocess.run(["kill", "-9", str(left.pid)], stderr=subprocess.DEVNULL)
    sweep.command.wait(30)
    wait_for(lambda: not sweep.bed.slurm("squeue", "--noheader").strip())
    wait_for(lambda: not list_processes(sweep.mark))
