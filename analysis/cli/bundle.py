"""Pack a study into one file: records, tables, group files, environments, commands and a LaTeX file of its numbers.

  zeroscale bundle results/runs/paper
  zeroscale bundle results/runs/paper --anonymous --out for-review.tar.gz

Who unpacks it redraws every figure without a GPU (`zeroscale report runs`) and repeats any point (`points.csv`); its
README says how. Equal records make equal bytes. `--anonymous` replaces the names of hosts, users, clusters, accounts,
jobs and paths, in logs too, and leaves out site options and the git commit.
"""

import argparse
import socket
from pathlib import Path

from analysis.cli import records
from bench.errors import UserError

_BUNDLES = Path("results/bundles")


def arguments(parser: argparse.ArgumentParser) -> None:
    records.arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: {_BUNDLES}/<study>.tar.gz")
    parser.add_argument("--anonymous", action="store_true", help="for a blind review: no names in it")


def run(args: argparse.Namespace) -> int:
    """Return 0 when the archive is written."""
    from analysis import reading, results
    from analysis.bundle import archive, build_bundle
    from bench.store import write_atomically

    found = reading.read_records(args.paths)
    results.warn(found)
    if not found.records:
        raise records.missing(args.paths)
    name, files = build_bundle(found, args.paths, _list_local_names() if args.anonymous else None)
    out = args.out or _BUNDLES / f"{name}{'-anonymous' if args.anonymous else ''}.tar.gz"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, archive.pack_archive(name, files))
    except OSError as error:
        raise UserError(str(out), f"cannot be written ({error.strerror})", "choose another --out") from error
    print(out)
    return 0


def _list_local_names() -> dict[str, str]:
    """Return the names that this machine itself knows, which a record need not hold in a field of their own."""
    return {socket.gethostname(): "host", Path.home().name: "user"}
