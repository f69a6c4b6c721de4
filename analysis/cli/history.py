"""Show where configurations became faster or slower over commits, versions or dates.

  zeroscale history results
  zeroscale history results/runs/nightly --by date --out results/reports/nightly
  zeroscale history results/ab-torch2.12-torch2.13 --by version

Any results folders will do, those of `zeroscale ab` among them: a value is the time per sample of one configuration on
one kind of device at one commit, set of versions or day (UTC), over all its repeats. Commits stand in the order that
git has in this folder, else in that of their first measurement. Eight of them are needed before a change can be told.

The output names every change with its size, its interval, the two places between which it happened, and what else
differs between them. With --out a page is written that opens offline, with a figure per configuration, and the changes
and values as CSV.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.cli import records
from bench.core import store
from bench.core.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    records.arguments(parser)
    parser.add_argument("--by", choices=("commit", "version", "date"), default="commit", help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write a page and its tables there")


def run(args: argparse.Namespace) -> int:
    """Return 0, whatever changed; what is no record is named on standard error."""
    from analysis.history import build_history
    from analysis.history.output import PAGE, render_page, render_tables, to_text

    history = build_history(records.read(args.paths), args.by, _sort_by_ancestry)
    if not history.series:
        rule = f"no run with a time is of a known {args.by}"
        raise UserError(" ".join(map(str, args.paths)), rule, "choose another --by, or measure first")
    sys.stdout.write(to_text(history))
    if args.out:
        _write(args.out, render_tables(history) | {PAGE: render_page(history).encode()})
        print(args.out / PAGE)
    return 0


def _sort_by_ancestry(commits: Sequence[str]) -> list[str]:
    """Return those of the commits that git knows in this folder, ancestors first; none where it knows nothing."""
    wanted = [one for one in dict.fromkeys(commits) if one and all(sign in "0123456789abcdef" for sign in one)]
    command = ["git", "rev-list", "--topo-order", "--reverse", "--ignore-missing", *wanted]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() if wanted else []
    except (OSError, subprocess.CalledProcessError):
        return []
    return [one for one in listed if one in set(wanted)]


def _write(folder: Path, files: dict[str, bytes]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            store.write_atomically(folder / name, content)
    except OSError as error:
        raise UserError(f"--out {folder}", f"cannot be written ({error.strerror})", "choose another folder") from error
