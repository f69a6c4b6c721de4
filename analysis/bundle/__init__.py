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
from analysis.bundle.anonymize import Anonymizer, build_anonymizer
from analysis.bundle.macros import render_macros
from analysis.bundle.points import RepeatCommand, build_repeat_command
from analysis.reading import Reading
from analysis.results import Results, judge_records
from analysis.scaling import best, curves
from analysis.table import list_rows
from bench import store
from bench.files import read_regular
from bench.private import mask_tokens
from bench.record import Environment, RunRecord

RUNS, NUMBERS, POINTS, README = "runs", "numbers.tex", "points.csv", "README.md"

_KEPT = (store.RECORD, store.SPEC, store.CIRCUMSTANCE, store.ENVIRONMENT, store.INTERRUPTED, store.STEPS, store.LOG)
_NO_PACKAGES = ("zeroscale", "python", "os")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")  # what a file may be called, whoever unpacks it
_PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+")

_log = logging.getLogger(__name__)


class PackedAttempt(NamedTuple):
    """One attempt as it is packed: its place below `runs/`, its record if it has one, and its files by name."""

    place: str
    record: RunRecord | None
    files: dict[str, bytes]


class Bundle(NamedTuple):
    """What is packed: a name for it, and the files by path."""

    name: str
    files: dict[str, bytes]


def build_bundle(found: Reading, paths: Sequence[Path], local_names: Mapping[str, str] | None = None) -> Bundle:
    """Return the bundle of what was `found` below `paths`; with names of this machine in `here`, by their kinds, it is
    anonymous. Raises UserError where a name cannot be taken out."""
    attempts = list(_list_attempts(found, paths))
    logs, anonymizer = [_decode_log(attempt) for attempt in attempts], None
    if local_names is not None:
        anonymizer = build_anonymizer(list(found.records.values()), logs, local_names)
        attempts = [_anonymize_attempt(a, a.record, anonymizer) for a in attempts if a.record]
    records = {Path(RUNS, a.place, store.RECORD): a.record for a in attempts if a.record}
    results = judge_records(Reading(records, (), ()))
    studies = sorted({record.circumstance.study for record in records.values()})
    name = re.sub(r"[^A-Za-z0-9_-]", "_", studies[0]) if len(studies) == 1 else "zeroscale"
    points = {identity: build_repeat_command(spec) for identity, spec in results.specs.items()}
    example = next(iter(points.values())).command
    files = {Path(RUNS, a.place, file).as_posix(): content for a in attempts for file, content in a.files.items()}
    files |= _render_tables(results) | _render_points(results, points) | _render_environments(records.values())
    files |= {NUMBERS: render_macros(list_rows(results.summary)).encode()}
    files |= {
        README: readme.render_readme(name, list(records.values()), example, anonymous=anonymizer is not None).encode()
    }
    if anonymizer:
        anonymizer.check(files)
    return Bundle(name, files)


def _list_attempts(found: Reading, paths: Sequence[Path]) -> Iterator[PackedAttempt]:
    """Yield every attempt with its files, placed as below the folder that all `paths` share."""
    folders = [path if path.is_dir() else path.parent for path in paths]
    top = os.path.commonpath([folder.resolve() for folder in folders])
    records = {file.parent: record for file, record in found.records.items()}
    for folder in sorted({*records, *found.unfinished}):
        place = folder.resolve().relative_to(top).as_posix()
        yield PackedAttempt(place, records.get(folder), _read_files(folder))


def _read_files(folder: Path) -> dict[str, bytes]:
    """Return what an attempt left, by name; what cannot be read is named and left out."""
    found = {}
    for name in _KEPT:
        try:
            content = read_regular(folder / name)
            found[name] = content if name == store.STEPS else mask_tokens(content)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("left out of the bundle: %s: %s", folder / name, error.strerror or error)
    return found


def _decode_log(attempt: PackedAttempt) -> str:
    return attempt.files.get(store.LOG, b"").decode(errors="replace")


def _anonymize_attempt(attempt: PackedAttempt, record: RunRecord, anonymizer: Anonymizer) -> PackedAttempt:
    """Return an attempt without names; all that says how it ran is written anew from its record."""
    bare = anonymizer.record(record)
    values = {store.RECORD: bare, store.SPEC: bare.spec, store.CIRCUMSTANCE: bare.circumstance}
    files = {name: store.to_json(value) for name, value in values.items()}
    if bare.environment:
        files[store.ENVIRONMENT] = store.to_json(bare.environment)
    if store.LOG in attempt.files:
        files[store.LOG] = anonymizer.text(_decode_log(attempt)).encode()
    if store.STEPS in attempt.files and _has_only_numbers(attempt.files[store.STEPS]):
        files[store.STEPS] = attempt.files[store.STEPS]
    return PackedAttempt(anonymizer.text(attempt.place), bare, files)


def _has_only_numbers(parquet: bytes) -> bool:
    import pyarrow.parquet
    from pyarrow import ArrowException, BufferReader, types

    try:
        schema = pyarrow.parquet.read_schema(BufferReader(parquet))
    except (OSError, ArrowException):  # torn
        return False
    kinds = (types.is_integer, types.is_floating, types.is_boolean)
    return not schema.metadata and all(any(kind(field.type) for kind in kinds) for field in schema)


def _render_tables(results: Results) -> dict[str, bytes]:
    """Return what figures are drawn from, as far as there is any of it."""
    tables = {
        "runs": results.table,
        "configurations": results.summary,
        "best": best.as_table(best.best(results)),
        "scaling": curves.build_curve_table(curves.build_curves(results)),
    }
    return {f"tables/{name}.csv": formats.to_csv(table).encode() for name, table in tables.items() if len(table)}


def _render_points(results: Results, points: Mapping[str, RepeatCommand]) -> dict[str, bytes]:
    """Return the commands, one row per configuration, and the group files that they name."""
    unique_rows = results.table.drop_duplicates("config_id")
    columns = ["config_id", "model", "engine", "precision", "nodes", "devices_per_node", "micro", "global_batch"]
    commands = pd.Series([points[identity].command for identity in unique_rows["config_id"]], dtype="string")
    rows = unique_rows[columns].reset_index(drop=True).assign(command=commands)
    files = {path: content for each in points.values() for path, content in each.files.items()}
    return files | {POINTS: formats.to_csv(rows).encode()}


def _render_environments(records: Iterable[RunRecord]) -> dict[str, bytes]:
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
