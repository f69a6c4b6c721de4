"""Nodes that a study does not use any more, each in `excluded/<host>.json` with what showed it."""

from pathlib import Path

from pydantic import ValidationError

from bench import store
from bench.spec import Frozen

EXCLUDED = "excluded"


class Exclusion(Frozen):
    """A node that is not fit to measure on, and the runs that showed it."""

    host: str
    reason: str
    runs: tuple[str, ...]
    at: str  # ISO 8601, UTC


def write_exclusion(study_folder: Path, found: Exclusion) -> None:
    """Put a node on the study's list."""
    (study_folder / EXCLUDED).mkdir(exist_ok=True)
    store.write_json(study_folder / EXCLUDED / f"{found.host}.json", found)


def read_exclusions(study_folder: Path) -> list[Exclusion]:
    """Return the study's list; to use a node again, remove its file."""
    found = []
    for path in sorted((study_folder / EXCLUDED).glob("*.json")):
        try:
            found.append(Exclusion.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError):
            continue
    return found
