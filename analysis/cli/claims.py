"""Put each claim of three sources beside what was measured: reproduced, contradicted, cannot be told or not testable.

  zeroscale claims results/runs/paper
  zeroscale claims results/runs --format md > claims.md

The claims are those of arXiv 2310.05350 (ZeRO stages), 2312.12705 (tensor and pipeline parallelism) and 2106.02679
(layered accumulation, modular pipelines), in results/published with their source. What keeps the rule below in
part only, such as a tiny model on CPUs, is an analogue and never called a reproduction.
"""

import argparse
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from analysis.cli import records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.claims.verdicts import Entry


def arguments(parser: argparse.ArgumentParser) -> None:
    records.arguments(parser)
    parser.add_argument("--format", choices=("text", "md", "csv", "json"), default="text", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Return 0, whatever the verdicts are; what is no record is named on standard error."""
    from analysis.claims import verdicts

    entries = verdicts.judge(records.read(args.paths))
    if args.format == "text":
        _print(entries)
    else:
        written = {"md": verdicts.to_markdown, "csv": verdicts.to_csv, "json": verdicts.to_json}[args.format](entries)
        sys.stdout.write(written)
    return 0


def _print(entries: "Sequence[Entry]") -> None:
    """Print the rule and the entries, a line for each thing that is said of one."""
    from analysis.claims.verdicts import HEAD, TEXT, cells

    print(_wrapped(TEXT))
    for entry in entries:
        claim, text, *rest = cells(entry)
        print(f"\n{_wrapped(text, f'{claim}  ')}")
        for label, words in zip(HEAD[2:], rest, strict=True):
            print(_wrapped(words, f"    {label.lower():<10}"))


def _wrapped(text: str, label: str = "") -> str:
    """Return a labelled text as wide as the terminal, or on one line where the output goes elsewhere."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    return textwrap.fill(text, width, initial_indent=label, subsequent_indent=" " * len(label))
