"""Put each prediction of memory and time beside what came true, signed errors and no point left out.

  zeroscale predictions
  zeroscale predictions repository/results --out here

It writes a page, and a table per comparison. It reads recorded runs, which an installed package does not hold: give it
the folder `results` of a checkout, or call it in one.
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    help_text = "the folder results of a checkout; default: that of this checkout, or ./results"
    parser.add_argument("results", nargs="?", type=Path, metavar="DIR", help=help_text)
    parser.add_argument(
        "--out", type=Path, default=Path("results/predictions"), metavar="DIR", help="default: %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 when the page is written, whatever came of the predictions; a line is printed for each comparison."""
    from analysis.predictions import comparisons, page, recorded

    found = comparisons.compare_all(recorded.find_recorded_runs(args.results))
    comparisons.write_ledger(found, args.out)
    print("\n".join([*map(page.to_text, found), f"written: {args.out / comparisons.PAGE}"]))
    return 0
