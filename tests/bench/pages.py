"""Reader for the plug-in files that the pages of docs/extend show as code blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "extend"
KINDS = ("metric", "figure", "family", "objective", "data", "launcher", "engine")
_FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def files(kind: str) -> dict[str, str]:
    """Return the files that a page in docs/extend shows, as a dict from path to text. `kind` is the kind of plug-in
    that the page describes, such as `engine`."""
    return dict(_FILE.findall((PAGES / f"{kind}.md").read_text()))


def write(root: Path, *kinds: str) -> None:
    """Write plug-in files into the folder `root`, which may contain a copy of the project. The files are the code
    blocks of the pages in docs/extend for these kinds of plug-ins (such as `engine`)."""
    for kind in kinds:
        for name, text in files(kind).items():
            path = root / name
            assert not path.exists(), f"{name} edits a file that is there"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
