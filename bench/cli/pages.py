"""The option `--page`, with which a verb writes its answer as an HTML page: its declaration, the check of its path, and
the writing of the page."""

import argparse
from pathlib import Path

from bench.core import store
from bench.core.errors import UserError


def add_page(parser: argparse.ArgumentParser) -> None:
    help_text = "also write the result as an HTML page with figures, which opens offline; an older page is replaced"
    parser.add_argument("--page", type=Path, metavar="FILE.html", help=help_text)


def check_path(path: Path) -> None:
    """Raise UserError if the path is a folder, if its parent folder does not exist, or if it does not end in .html or
    .htm."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--page {path}", "must end in .html", "rename the page")
    if path.is_dir():
        raise UserError(f"--page {path}", "is a folder", "name a file in this folder")
    if not path.parent.is_dir():
        raise UserError(
            f"--page {path}", f"the folder {path.parent} does not exist", "create the folder, or choose another file"
        )


def write(path: Path, page: str, *, quiet: bool) -> None:
    """Write an HTML page, and print its path unless `quiet`."""
    try:
        # Write atomically, because a browser may have the older page open.
        store.write_atomically(path, page.encode())
    except OSError as error:
        raise UserError(f"--page {path}", f"cannot be written ({error.strerror})", "choose another file") from error
    if not quiet:
        print(f"\npage: {path}")
