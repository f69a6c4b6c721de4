"""Write tables and figures as one page that opens offline, with the files beside it.

  zeroscale report results/runs/smoke
  zeroscale report results/runs/smoke results/runs/adhoc --out results/reports/both

An older report in the folder is replaced.
"""

import argparse
from pathlib import Path

from bench.errors import UserError

_REPORTS = Path("results/reports")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[Path("results/runs")], metavar="DIR", help="default: results/runs"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"default: {_REPORTS}/<study>, or all for several")


def run(args: argparse.Namespace) -> int:
    """Return 0 when the report is written."""
    from analysis import reading, report

    found = reading.read(args.paths)
    reading.warn(found)
    if not found.records:
        raise UserError(" ".join(map(str, args.paths)), "no record below", "give a results folder, or measure first")
    studies = {record.circumstance.study for record in found.records.values()}
    out = args.out or _REPORTS / (studies.pop() if len(studies) == 1 else "all")
    print(report.write(found, out))
    return 0
