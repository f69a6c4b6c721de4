"""One round from its first command to the testbed left as the next wants it."""

import subprocess
import time
from collections import Counter
from pathlib import Path

from slurm_testbed import Testbed, wait_for

from bench import store
from chaos.faults import Strike, strike
from chaos.invariants import list_broken, list_untrue
from chaos.marked import list_processes
from chaos.schedule import Round
from chaos.sweep import Sweep

_END_S = 60.0  # Slurm itself takes its time over a job that ends on a node that was lost
Table = Counter[tuple[str, str]]
"""How often a fault (first) had an outcome (second)."""


def run_round(planned: Round, bed: Testbed, disk: Path, table: Table) -> list[str]:
    """Run a round, count its outcomes and return the rules that were broken."""
    print(planned.format_line(), flush=True)
    began, sweep = time.monotonic(), Sweep(bed, disk / f"s{planned.seed}", planned)
    broken: list[str] = []
    try:
        for fault in planned.faults:
            made = strike(sweep, fault, disk)
            if made is None:
                print(f"  {fault.kind}: nothing left to strike", flush=True)
                continue
            sweep.settle(made.hit)
            outcomes = _list_outcomes(made)
            table.update((fault.kind, outcome.partition(":")[0]) for outcome in outcomes)
            untrue = list(list_untrue(fault.kind, made))
            broken += untrue
            sign = "BROKEN" if untrue else "as expected"
            print(f"  {fault.kind} ({made.target}) -> {'; '.join(outcomes)} [{sign}]", flush=True)
        if not sweep.finish():
            broken.append("the sweep did not come to its end")
        if not broken:
            _wait_until_gone(sweep)
        broken += list_broken(sweep)
    except AssertionError as error:  # the testbed, or Slurm, did not do as it was told in time
        broken.append(f"not judged: {str(error)[:300]}")
    finally:
        _clear(sweep)
    said = "; ".join(broken) or "every rule held"
    print(f"  seed {planned.seed} took {time.monotonic() - began:.0f} s: {said}", flush=True)
    return broken


def _list_outcomes(made: Strike) -> list[str]:
    found = []
    for attempt in made.hit:
        path = attempt.folder / store.RECORD
        outcome = store.read_record(path).outcome if path.exists() else None
        found.append(f"{outcome.kind}: {outcome.reason[:150]}" if outcome else "no record")
    return found or ["no attempt hit"]


def _wait_until_gone(sweep: Sweep) -> None:
    """Give processes and jobs a moment to end after their last record."""
    until = time.monotonic() + _END_S
    while time.monotonic() < until and (list_processes(sweep.mark) or sweep.bed.slurm("squeue", "--noheader").strip()):
        time.sleep(0.5)


def _clear(sweep: Sweep) -> None:
    """Leave the testbed as the next round wants it, whatever went wrong in this one."""
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
