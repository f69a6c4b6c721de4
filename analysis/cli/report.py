"""Write a report: a page of tables and figures that opens offline, and the tables as files next to it.

  zeroscale report results/runs/smoke
  zeroscale report results/runs/smoke results/runs/adhoc --out results/reports/both
  zeroscale report results/runs/paper --price 2.5

An older report in the folder is replaced.
"""

import argparse
from pathlib import Path

from analysis.cli import add_out, add_paths, choose_out, read_records

_REPORTS = Path("results/reports")


def arguments(parser: argparse.ArgumentParser) -> None:
    add_paths(parser)
    add_out(parser, _REPORTS)
    price = "price per device and hour, in any currency, for the column of costs"
    parser.add_argument("--price", type=float, metavar="P", help=price)


def run(args: argparse.Namespace) -> int:
    """Return exit code 0 once the report is written."""
    from analysis.metrics.cost import check_price
    from bench.core import processes, terminal

    check_price(args.price)
    # Without garbage collection the imports of matplotlib and pandas take a quarter less time.
    with processes.importing():
        from analysis import report

    with terminal.progress(quiet=False) as follow:
        follow("reading records")
        found = read_records(args.paths, follow)
        out = choose_out(args.out, _REPORTS, found)
        page = report.write_report(found, out, args.price, lambda what, share: follow(terminal.Progress(what, share)))
    print(page)
    return 0
