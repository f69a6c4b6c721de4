"""The option `--page`, with which a verb writes its answer as an HTML page: its declaration, the check of its path, and
the writing of the page."""

import argparse
from pathlib import Path

from bench.core import store
from bench.core.errors import UserError


def add_page(parser: argparse.ArgumentParser) -> None:
    help_text = "write the answer as a page with figures, which opens offline; replaces an older page"
    parser.add_argument("--page", type=Path, metavar="FILE.html", help=help_text)


def check_path(path: Path) -> None:
    """Raise UserError if the path is a folder, if its parent folder does not exist, or if it does not end in .html or
    .htm."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--page {path}", "not the name of a page", "let it end in .html")
    if path.is_dir():
        raise UserError(f"--page {path}", "a folder", "name a file in it")
    if not path.parent.is_dir():
        raise UserError(f"--page {path}", f"there is no folder {path.parent}", "create it, or choose another file")


def write(path: Path, page: str, *, quiet: bool) -> None:
    """Write an HTML page, and print its path unless `quiet`."""
    try:
        # Write atomically, because a browser may have the older page open.
        store.write_atomically(path, page.encode())
    except OSError as error:
        raise UserError(f"--page {path}", f"cannot be written ({error.strerror})", "choose another file") from error
    if not quiet:
        print(f"\npage: {path}")
