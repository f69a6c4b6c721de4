"""Reference page of the source tree: all packages and modules, with the first sentence of their docstrings."""

import ast
import re
from pathlib import Path

from docs.generate.markdown import code, plain, table

_ROOT = Path(__file__).parents[2]
PACKAGES = ("bench", "analysis")


def page() -> str:
    """Return the page of the modules in bench and analysis."""
    head = (
        "# The tree\n\nThe folders and files of both packages, one level deep, with the first sentence of their "
        "docstrings. `bench` goes from a spec to a record, `analysis` from records to answers. `pyproject.toml` has "
        "the rules for imports, which `make lint` checks."
    )
    return "\n\n".join([head, *(_package(name) for name in PACKAGES)])


def _package(name: str) -> str:
    folders = sorted(path.parent for path in (_ROOT / name).glob("*/__init__.py"))
    files = sorted(path for path in (_ROOT / name).glob("*.py") if not path.name.startswith("__"))
    rows = [(code(f"{folder.name}/"), _said(folder / "__init__.py")) for folder in folders]
    rows += [(code(file.name), _said(file)) for file in files]
    return f"## {name}\n\n{table(('module', 'content'), rows)}"


def _said(file: Path) -> str:
    """Return the first sentence of a module's docstring."""
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = " ".join(doc.split("\n\n")[0].split())
    return plain(re.split(r"(?<=[.])\s", first)[0])
