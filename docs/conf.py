"""Configuration of Sphinx, which builds a site from the pages (`make docs`). Pages are Markdown, and every link in them
is checked.

Pages outside docs/, which stand next to the folders that they describe, are copied to docs/_pages. Notebooks are run,
and written to docs/_pages as pages with their outputs.
"""

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

project = "zeroscale"
extensions = ["myst_parser"]
exclude_patterns = ["_site", "generate"]
html_theme = "furo"  # contains its styles and scripts, so pages load nothing
html_title = "zeroscale"
html_copy_source = False
html_show_copyright = False
myst_heading_anchors = 3
nitpicky = True

_DOCS = Path(__file__).resolve().parent
_ROOT = _DOCS.parent
sys.path.insert(0, str(_ROOT))

from docs.generate import notebooks  # noqa: E402

_COPIES = {
    "slurm/README.md": "slurm.md",
    "slurm/testbed/README.md": "testbed.md",
    "results/measured/README.md": "recorded_runs.md",
    "results/predictions/README.md": "predictions.md",
    "results/published/README.md": "published.md",
}
"""Pages outside of docs/, and their names in docs/_pages."""


def setup(app: Sphinx) -> None:
    """Copy the pages outside docs/, run the notebooks, and change links to these pages into links to the copies."""
    for source, name in _COPIES.items():
        copy = _DOCS / "_pages" / name
        copy.parent.mkdir(exist_ok=True)
        text = _linked((_ROOT / source).read_text(encoding="utf-8"), (_ROOT / source).parent, copy.parent)
        if not copy.exists() or copy.read_text(encoding="utf-8") != text:  # Sphinx skips unchanged files
            copy.write_text(text, encoding="utf-8")
    notebooks.write_pages(_DOCS / "_pages")
    app.connect("source-read", _read)


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    """Change links of a page that lead to files outside docs/, such as slurm/README.md, to the copies of these files on
    the site. Links of the copies themselves were changed when they were copied."""
    folder = (_DOCS / name).parent
    if folder.name != "_pages":
        source[0] = _linked(source[0], folder, folder)


def _linked(text: str, written: Path, read: Path) -> str:
    """Return the text of a page whose file is in the folder `written`, with its relative links changed so that they
    work from the folder `read`."""

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = Path(os.path.normpath(written / target))
        if path.is_relative_to(_ROOT) and (copy := _COPIES.get(str(path.relative_to(_ROOT)))):
            path = _DOCS / "_pages" / copy
        elif not path.is_relative_to(_DOCS):
            # A file becomes a download. The site has no folders and no uncopied pages, so only the link's label stays.
            there = path.is_file() and path.suffix != ".md"
            return f"[{label}](path:{os.path.relpath(path, read)})" if there else label
        return f"[{label}]({os.path.relpath(path, read)}{anchor})"

    return re.sub(r"\[([^\[\]]*)\]\((?![a-z]+:|#)([^()\s#]+)(#[^()\s]*)?\)", link, text)
