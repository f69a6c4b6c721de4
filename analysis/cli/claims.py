"""Compare each claim of three papers with the measurements: reproduced, contradicted, undecided or not testable.

  zeroscale claims results/runs/paper
  zeroscale claims results/runs --format md > claims.md

The claims are those of arXiv 2310.05350 (ZeRO stages), 2312.12705 (tensor and pipeline parallelism)
and 2106.02679 (layered accumulation, modular pipelines). results/published lists them with their
sources. The output begins with the rule for a test of a claim. A measurement that meets the rule
only in part, such as a tiny model on CPUs, is an analogue and never called a reproduction.
"""

import argparse
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from analysis.cli import add_format, add_paths, read_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.claims.verdicts import Entry


def arguments(parser: argparse.ArgumentParser) -> None:
    add_paths(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Return exit code 0, whatever the verdicts are. Files that are not records are named on standard error."""
    from analysis.claims import verdicts

    entries = verdicts.judge(read_records(args.paths))
    if args.format == "text":
        _print(entries)
    else:
        written = {"md": verdicts.to_markdown, "csv": verdicts.to_csv, "json": verdicts.to_json}[args.format](entries)
        sys.stdout.write(written)
    return 0


def _print(entries: "Sequence[Entry]") -> None:
    """Print the rule for testing a claim, then each claim with one line per property."""
    from analysis.claims.verdicts import HEAD, TEXT, cells
    from analysis.formats import find_width

    print(_wrap(TEXT, width=find_width()))
    for entry in entries:
        claim, text, *rest = cells(entry)
        print(f"\n{_wrap(text, f'{claim}  ')}")
        for label, words in zip(HEAD[2:], rest, strict=True):
            print(_wrap(words, f"    {label.lower():<10}"))


def _wrap(text: str, label: str = "", width: int | None = None) -> str:
    """Return a text with its label in front, wrapped to `width` characters. If `width` is None, the width of the
    terminal is used. Exception: if `width` is None and standard output is not a terminal, the text stays on one line,
    so that `grep` finds phrases."""
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    return textwrap.fill(text, width, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False)
