"""Show where configurations became faster or slower over commits, versions or dates.

  zeroscale history results
  zeroscale history results/runs/nightly --by date --out results/reports/nightly
  zeroscale history results/ab-torch2.12-torch2.13 --by version

It reads any results folders, including those of `zeroscale ab`. A value is the time per sample of
one configuration on one kind of device, over all its repeats at one commit, set of versions or day
(UTC). Commits are sorted as in the git repository of the current folder, or else by their first
measurement. A change can be detected if a configuration has at least eight values.

Every change is listed with its size, its interval, the two values between which it happened, and
other differences between them. --out writes a page that opens offline, with a figure per
configuration, and writes changes and values as CSV.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.cli import add_paths, read_records, reporting_unwritable
from bench.core import store
from bench.core.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    add_paths(parser)
    axis = "axis of the history; default: %(default)s"
    parser.add_argument("--by", choices=("commit", "version", "date"), default="commit", help=axis)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write an HTML page and CSV tables into this folder")


def run(args: argparse.Namespace) -> int:
    """Return exit code 0, whether or not changes are found. Files that are not records are named on standard error."""
    from analysis.history import build_history
    from analysis.history.output import PAGE, describe_excluded, render_page, render_tables, to_text

    history = build_history(read_records(args.paths), args.by, _sort_by_ancestry)
    if not history.series:
        excluded = describe_excluded(history)
        rule = f"contains no usable run; excluded: {excluded}" if excluded else "contains no measured run"
        remedy = "measure again on an idle machine" if history.flagged else "measure first"
        remedy = f"choose another --by, or {remedy}" if history.nowhere else remedy
        raise UserError(" ".join(map(str, args.paths)), rule, remedy)
    sys.stdout.write(to_text(history))
    if args.out:
        with reporting_unwritable(args.out):
            args.out.mkdir(parents=True, exist_ok=True)
            for name, content in (render_tables(history) | {PAGE: render_page(history).encode()}).items():
                store.write_atomically(args.out / name, content)
        print(args.out / PAGE)
    return 0


def _sort_by_ancestry(commits: Sequence[str]) -> list[str]:
    """Return the commits of the git repository in the current folder, ancestors first. Empty without a repository."""
    # Commits come from records, which may be forged. Only hexadecimal names are passed to git, so that git cannot read
    # a name as an option.
    wanted = [one for one in dict.fromkeys(commits) if one and all(sign in "0123456789abcdef" for sign in one)]
    command = ["git", "rev-list", "--topo-order", "--reverse", "--ignore-missing", *wanted]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() if wanted else []
    except (OSError, subprocess.CalledProcessError):
        return []
    return [one for one in listed if one in wanted]
