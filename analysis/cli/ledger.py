"""Put each claim of the study beside what was measured: reproduced, contradicted, or not testable here, and why.

  zeroscale ledger results/runs/paper
  zeroscale ledger results/runs --format md > ledger.md
  zeroscale ledger --predictions
  zeroscale ledger --predictions repository/results --out here

The claims are those of arXiv 2310.05350, in results/published with their source. What keeps the rule below in part
only, such as a tiny model on CPUs, is an analogue and never called a reproduction.

With --predictions: put each prediction of memory and time beside what came true, signed errors and no point left out,
as a page and a table per comparison. It reads recorded runs, which an installed package does not hold: give it the
folder `results` of a checkout, or call it in one.
"""

import argparse
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from bench.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.ledger import Entry


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="DIR",
        help="runs to weigh the claims by (results/runs); with --predictions the folder results of a checkout",
    )  # fmt: skip
    parser.add_argument("--format", choices=("text", "md", "csv", "json"), default="text", help="default: %(default)s")
    parser.add_argument(
        "--predictions", action="store_true", help="weigh the predictions instead, and write the ledger"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the predictions' ledger; default: results/predictions"
    )


def run(args: argparse.Namespace) -> int:
    """Return 0, whatever the verdicts are; what is no record is named on standard error."""
    return _predictions(args) if args.predictions else _claims(args)


def _predictions(args: argparse.Namespace) -> int:
    """Write the ledger of predictions, and print a line for each comparison."""
    from analysis.predictions import ledger, page, recorded

    if len(args.paths) > 1:
        raise UserError(str(args.paths[1]), "--predictions reads one folder of results", "leave it out")
    folder = args.out or Path("results/predictions")
    found = ledger.comparisons(recorded.find(*args.paths))
    ledger.write(found, folder)
    print("\n".join([*map(page.to_text, found), f"written: {folder / ledger.PAGE}"]))
    return 0


def _claims(args: argparse.Namespace) -> int:
    """Print the verdict on each claim."""
    from analysis import results
    from analysis.ledger import forms, ledger

    if args.out:
        raise UserError(f"--out {args.out}", "is the folder of --predictions", "give both or neither")
    paths = args.paths or [Path("results/runs")]
    found = results.read(paths)
    results.warn(found)
    if found.table.empty:
        raise UserError(" ".join(map(str, paths)), "no record below", "give a results folder, or measure first")
    entries = ledger(found)
    if args.format == "text":
        _print(entries)
    else:
        written = {"md": forms.to_markdown, "csv": forms.to_csv, "json": forms.to_json}[args.format](entries)
        sys.stdout.write(written)
    return 0


def _print(entries: "Sequence[Entry]") -> None:
    """Print the rule and the entries, a line for each thing that is said of one."""
    from analysis.ledger import rule
    from analysis.ledger.forms import HEAD, cells

    print(_wrapped(rule.TEXT))
    for entry in entries:
        claim, text, *rest = cells(entry)
        print(f"\n{_wrapped(text, f'{claim}  ')}")
        for label, words in zip(HEAD[2:], rest, strict=True):
            print(_wrapped(words, f"    {label.lower():<10}"))


def _wrapped(text: str, label: str = "") -> str:
    """Return a labelled text as wide as the terminal, or on one line where the output goes elsewhere."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    return textwrap.fill(text, width, initial_indent=label, subsequent_indent=" " * len(label))
