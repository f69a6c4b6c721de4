"""A study in one archive: what a stranger needs to redraw every figure without a GPU, and to repeat any point.

names     which names in it say whose it is        veil    records and logs without them
points    group files and a command for each point  macros  its numbers for LaTeX
readme    what to do with it                        archive one file, equal bytes for equal content
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis import formats
from analysis.bundle import readme
from analysis.bundle.macros import macros
from analysis.bundle.points import Point, point
from analysis.bundle.veil import Veil, veil
from analysis.reading import Reading
from analysis.results import Results, judged
from analysis.scaling import best, curves
from analysis.table import plain
from bench import store
from bench.files import read_regular
from bench.record import Environment, RunRecord

RUNS, NUMBERS, POINTS, README = "runs", "numbers.tex", "points.csv", "README.md"

_KEPT = (store.RECORD, store.SPEC, store.CIRCUMSTANCE, store.ENVIRONMENT, store.INTERRUPTED, store.STEPS, store.LOG)
_NO_PACKAGES = ("zeroscale", "python", "os")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")  # what a file may be called, whoever unpacks it
_PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+")

_log = logging.getLogger(__name__)


class Attempt(NamedTuple):
    """One attempt as it is packed: its place below `runs/`, its record if it has one, and its files by name."""

    place: str
    record: RunRecord | None
    files: dict[str, bytes]


class Bundle(NamedTuple):
    """What is packed: a name for it, and the files by path."""

    name: str
    files: dict[str, bytes]


def bundle(found: Reading, paths: Sequence[Path], here: Mapping[str, str] | None = None) -> Bundle:
    """Return the bundle of what was `found` below `paths`; with names of this machine in `here`, by their kinds, it is
    anonymous. Raises UserError where a name cannot be taken out."""
    attempts = list(_attempts(found, paths))
    logs, hidden = [_text_of_log(attempt) for attempt in attempts], None
    if here is not None:
        hidden = veil(list(found.records.values()), logs, here)
        attempts = [_hidden(a, a.record, hidden) for a in attempts if a.record]
    records = {Path(RUNS, a.place, store.RECORD): a.record for a in attempts if a.record}
    results = judged(Reading(records, (), ()))
    studies = sorted({record.circumstance.study for record in records.values()})
    name = re.sub(r"[^A-Za-z0-9_-]", "_", studies[0]) if len(studies) == 1 else "zeroscale"
    points = {identity: point(spec) for identity, spec in results.specs.items()}
    example = next(iter(points.values())).command
    files = {Path(RUNS, a.place, file).as_posix(): content for a in attempts for file, content in a.files.items()}
    files |= _tables(results) | _points(results, points) | _environments(records.values())
    files |= {NUMBERS: macros(plain(results.summary)).encode()}
    files |= {README: readme.text(name, list(records.values()), example, anonymous=hidden is not None).encode()}
    if hidden:
        hidden.check(files)
    return Bundle(name, files)


def _attempts(found: Reading, paths: Sequence[Path]) -> Iterator[Attempt]:
    """Yield every attempt with its files, placed as below the folder that all `paths` share."""
    folders = [path if path.is_dir() else path.parent for path in paths]
    top = os.path.commonpath([folder.resolve() for folder in folders])
    records = {file.parent: record for file, record in found.records.items()}
    for folder in sorted({*records, *found.unfinished}):
        place = folder.resolve().relative_to(top).as_posix()
        yield Attempt(place, records.get(folder), _files(folder))


def _files(folder: Path) -> dict[str, bytes]:
    """Return what an attempt left, by name; what cannot be read is named and left out."""
    found = {}
    for name in _KEPT:
        try:
            found[name] = read_regular(folder / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("left out of the bundle: %s: %s", folder / name, error.strerror or error)
    return found


def _text_of_log(attempt: Attempt) -> str:
    return attempt.files.get(store.LOG, b"").decode(errors="replace")


def _hidden(attempt: Attempt, record: RunRecord, hidden: Veil) -> Attempt:
    """Return an attempt without names; all that says how it ran is written anew from its record."""
    bare = hidden.record(record)
    values = {store.RECORD: bare, store.SPEC: bare.spec, store.CIRCUMSTANCE: bare.circumstance}
    files = {name: store.to_json(value) for name, value in values.items()}
    if bare.environment:
        files[store.ENVIRONMENT] = store.to_json(bare.environment)
    if store.LOG in attempt.files:
        files[store.LOG] = hidden.text(_text_of_log(attempt)).encode()
    if store.STEPS in attempt.files and _only_numbers(attempt.files[store.STEPS]):
        files[store.STEPS] = attempt.files[store.STEPS]
    return Attempt(hidden.text(attempt.place), bare, files)


def _only_numbers(parquet: bytes) -> bool:
    import pyarrow.parquet
    from pyarrow import ArrowException, BufferReader, types

    try:
        schema = pyarrow.parquet.read_schema(BufferReader(parquet))
    except (OSError, ArrowException):  # torn
        return False
    kinds = (types.is_integer, types.is_floating, types.is_boolean)
    return not schema.metadata and all(any(kind(field.type) for kind in kinds) for field in schema)


def _tables(results: Results) -> dict[str, bytes]:
    """Return what figures are drawn from, as far as there is any of it."""
    tables = {
        "runs": results.table,
        "configurations": results.summary,
        "best": best.as_table(best.best(results)),
        "scaling": curves.as_table(curves.curves(results)),
    }
    return {f"tables/{name}.csv": formats.to_csv(table).encode() for name, table in tables.items() if len(table)}


def _points(results: Results, points: Mapping[str, Point]) -> dict[str, bytes]:
    """Return the commands, one row per configuration, and the group files that they name."""
    told = results.table.drop_duplicates("config_id")
    columns = ["config_id", "model", "engine", "precision", "nodes", "devices_per_node", "micro", "global_batch"]
    commands = pd.Series([points[identity].command for identity in told["config_id"]], dtype="string")
    rows = told[columns].reset_index(drop=True).assign(command=commands)
    files = {path: content for each in points.values() for path, content in each.files.items()}
    return files | {POINTS: formats.to_csv(rows).encode()}


def _environments(records: Iterable[RunRecord]) -> dict[str, bytes]:
    """Return what is known of each environment class, and its packages as constraints for pip."""
    classes: dict[str, Environment] = {}
    for record in records:
        if record.environment:
            classes.setdefault(record.environment.environment_id, record.environment)
    files: dict[str, bytes] = {}
    for name, one in classes.items():
        pins = [f"{package}=={version}" for package, version in one.versions.items() if version]
        pins = [pin for pin in pins if _PIN.fullmatch(pin) and pin.partition("==")[0] not in _NO_PACKAGES]
        if not _PLAIN.fullmatch(name):  # no id that zeroscale gives
            name = hashlib.sha256(name.encode()).hexdigest()[:8]
        files[f"environments/{name}.txt"] = "\n".join([*pins, ""]).encode()
        files[f"environments/{name}.json"] = json.dumps(one.model_dump(mode="json"), indent=1).encode() + b"\n"
    return files
