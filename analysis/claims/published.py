"""Numbers and claims from papers, with their sources: the CSV files of `results/published`."""

import csv
from pathlib import Path
from typing import NamedTuple

from bench.errors import UserError, suggest_nearest


class Published(NamedTuple):
    """One file: where its numbers come from and in which setting, and its cells as they are printed there."""

    source: str
    rows: tuple[dict[str, str], ...]


def folder() -> Path:
    """Return the folder of the files: in a checkout beside the packages, in a wheel inside `analysis`."""
    inside = Path(__file__).parents[1] / "published"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "results" / "published"


def names() -> list[str]:
    """Return the names of the files, without their ending."""
    return sorted(path.stem for path in folder().glob("*.csv"))


def read(name: str) -> Published:
    """Read one file by its name; comment lines at its head are its source. UserError where there is none."""
    path = folder() / f"{name}.csv"
    if not path.is_file():
        raise UserError(name, f"no such file in {folder()}", suggest_nearest(name, names()))
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ") for line in lines if line.startswith("#")]
    return Published(" ".join(comments), tuple(csv.DictReader(lines[len(comments) :])))
