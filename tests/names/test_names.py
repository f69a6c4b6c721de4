"""One word for one thing: what `renames.csv` took away does not come back, and a class name stands once in the tree."""

import ast
import csv
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("bench", "analysis", "slurm") for path in (ROOT / folder).rglob("*.py"))
ROWS = [row for row in csv.reader((ROOT / "tests/names/renames.csv").read_text().splitlines()) if row[0] != "kind"]

# Words of our own, where the field has others: no part of an identifier.
BANNED = {
    "asked",
    "crew",
    "drill",
    "foretold",
    "heed",
    "kin",
    "kinships",
    "planted",
    "standings",
    "told",
    "unrun",
    "untold",
    "veil",
}

# Names of what stands in files: keys of records, sweeps and jobs.
INTERFACE = {"asked_at", "crew_port", "drill", "kin", "_kin"}

# What plug-ins define under the name that their contract asks for.
OF_CONTRACTS = {"Options", "Shape"}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax tree of every file by its path from the root."""
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in FILES}


@functools.cache
def words() -> dict[str, set[str]]:
    """Return where each word of an identifier stands: `path: identifier`."""
    found = defaultdict(set)
    for path, tree in trees().items():
        for name in identifiers(tree):
            for word in name.lower().split("_"):
                found[word].add(f"{path}: {name}")
    return found


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a file gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@pytest.mark.parametrize("word", sorted(BANNED))
def test_no_identifier_is_made_of_a_word_of_our_own(word: str) -> None:
    assert {place for place in words()[word] if place.split(": ")[1] not in INTERFACE} == set()


def test_no_module_that_moved_is_at_its_old_place() -> None:
    came = {new for kind, _, _, new in ROWS if kind == "module"}
    gone = [
        old
        for kind, _, old, _ in ROWS
        if kind == "module" and old not in came and not any(new.startswith(old + ".") for new in came)
    ]
    assert gone
    for old in gone:
        place = ROOT.joinpath(*old.split("."))
        assert not place.with_suffix(".py").exists() and not (place / "__init__.py").exists(), old


def test_what_was_renamed_stays_renamed() -> None:
    """Where the table took a name out of a module, that module defines it no more."""
    moved = {old: new for kind, _, old, new in ROWS if kind == "module"}
    defined = {
        (".".join(path.with_suffix("").parts).removesuffix(".__init__"), node.name)
        for path, tree in trees().items()
        for node in ast.iter_child_nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    back = [
        (scope, old) for kind, scope, old, _ in ROWS if kind == "name" and (moved.get(scope, scope), old) in defined
    ]
    assert not back


def test_a_class_name_stands_once() -> None:
    places = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in OF_CONTRACTS:
                places[node.name].append(str(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
