"""Inject random faults into sweeps of tiny points.

  make chaos CHAOS="--seeds 1-20"      as root, because it needs a testbed

The program prints one line per fault, one line per broken rule, and a table of faults and outcomes. The exit code is 1
if a rule was broken. A seed determines the faults and their targets. It does not determine during which step of a run a
fault happens, because step times vary.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurm_testbed import Testbed

from chaos.running import Table, run_round
from chaos.schedule import MODES, plan_round

_QUICK = "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1"
_NODES = 4
_ROOM = "96m"  # size of the disk for the results, so small that it is soon full. A run reserves 4 MB


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1-4", help="such as 7, 1-20 or 3,5,8-10 (%(default)s)")
    parser.add_argument("--modes", default=",".join(MODES), help="that take turns by seed (%(default)s)")
    parser.add_argument("--keep", type=Path, help="a folder for the results of rounds that broke a rule")
    parser.add_argument("--max-s", type=float, help="begin no round after so many seconds")
    parser.add_argument("--dry-run", action="store_true", help="say what the seeds do, and do nothing")
    args = parser.parse_args(argv)
    rounds = [plan_round(seed, args.modes.split(",")) for seed in parse_seeds(args.seeds)]
    if args.dry_run:
        print("\n".join(planned.format_line() for planned in rounds))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises an exception, so that the testbed is removed
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT for background processes
    table, broken, began = Table(), [], time.monotonic()
    with make_cluster() as (bed, disk):
        for planned in rounds:
            if args.max_s and time.monotonic() - began > args.max_s:
                print(f"seed {planned.seed} and those after it were not run: {args.max_s:g} s are over")
                break
            found = run_round(planned, bed, disk, table)
            broken += [f"seed {planned.seed}: {what}" for what in found]
            results = disk / f"s{planned.seed}"
            if found and args.keep and results.exists():
                shutil.copytree(results, args.keep / results.name, dirs_exist_ok=True)
            shutil.rmtree(results, ignore_errors=True)
    print(format_table(table))
    print("\n".join(broken) or "no rule was broken")
    return 1 if broken else 0


def parse_seeds(text: str) -> list[int]:
    """Return the seeds in an expression such as `3,5,8-10`."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


@contextmanager
def make_cluster() -> Iterator[tuple[Testbed, Path]]:
    """Yield a testbed (a small Slurm cluster on this machine) and a small disk for the results.

    The disk is mounted before the nodes start, because later mounts are not visible on the nodes.
    """
    bed, disk = Testbed("c"), Path(tempfile.mkdtemp(prefix="zeroscale-chaos-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_ROOM}", "none", disk], check=True)
    try:
        again = f"AuthInfo=socket={bed.folder}/munge/socket,cred_expire=5"
        lines = (_QUICK, again, "MessageTimeout=4")
        confs = [word for line in lines for word in ("--conf", line)]
        limits = ("--slurmd-timeout-s", "60", "--kill-wait-s", "5")
        bed.up("--nodes", str(_NODES), "--rate", "1gbit", *limits, *confs)
        os.environ["SLURM_CONF"] = str(bed.folder / "slurm.conf")
        yield bed, disk
    finally:
        bed("down")
        subprocess.run(["umount", "--lazy", disk], check=True)
        disk.rmdir()


def format_table(table: Table) -> str:
    """Return a Markdown table with one row per kind of fault: the number of faults in each mode, and the outcomes of
    the attempts that they could affect."""
    lines = [
        "",
        f"| fault | {' | '.join(MODES)} | outcomes of the attempts in its reach |",
        "|---" * (len(MODES) + 2) + "|",
    ]
    for kind in dict.fromkeys(kind for kind, _, _ in sorted(table)):
        counted = ", ".join(f"{n} {outcome}" for (of, _, outcome), n in sorted(table.items()) if of == kind and outcome)
        made = " | ".join(str(table[kind, mode, ""]) for mode in MODES)
        lines.append(f"| {kind} | {made} | {counted} |")
    total = sum(n for (_, mode, _), n in table.items() if mode)
    return "\n".join([*lines, f"{total} faults"])


if __name__ == "__main__":
    sys.exit(main())
