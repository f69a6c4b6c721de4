"""Files of the code blocks on the pages of docs/extend."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "extend"
KINDS = ("metric", "figure", "family", "objective", "data", "launcher", "engine")
_FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def files(kind: str) -> dict[str, str]:
    """Return the files on the page of a kind of plug-in, by path."""
    return dict(_FILE.findall((PAGES / f"{kind}.md").read_text()))


def write(root: Path, *kinds: str) -> None:
    """Write the files of these pages into a copy of the project, or into an empty folder."""
    for kind in kinds:
        for name, text in files(kind).items():
            path = root / name
            assert not path.exists(), f"{name} edits a file that is there"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
