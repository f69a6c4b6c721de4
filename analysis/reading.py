"""Read the records of results folders; what cannot be read is named and counted, never dropped in silence."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench.record import RunRecord
from bench.store import CIRCUMSTANCE, RECORD, Unreadable, find_records, read_record

_log = logging.getLogger(__name__)


class Reading(NamedTuple):
    """What was found at some paths."""

    records: dict[Path, RunRecord]  # by file, in the order in which people look for them
    skipped: tuple[Unreadable, ...]  # corrupt or foreign files, each with its reason
    unfinished: tuple[Path, ...]  # attempts without a record: still running, or killed with everything around them


def read(paths: Iterable[Path]) -> Reading:
    """Read every `record.json` at or below `paths`, each file once; UserError for a path that is not there."""
    given = list(paths)
    files = {file.resolve(): file for file in reversed(list(find_records(given)))}
    records: dict[Path, RunRecord] = {}
    skipped: list[Unreadable] = []
    for file in reversed(files.values()):
        try:
            records[file] = read_record(file)
        except Unreadable as error:
            skipped.append(error)
        except FileNotFoundError:
            skipped.append(Unreadable(file, "vanished while it was read"))
    ordered = dict(sorted(records.items(), key=lambda item: _place(item[1])))
    return Reading(ordered, tuple(skipped), tuple(_unfinished(given)))


def warn(reading: Reading) -> None:
    """Say on standard error what `reading` holds no row for."""
    if reading.skipped:
        files = len(reading.skipped) + len(reading.records)
        _log.warning("skipped as no record: %d of %d files", len(reading.skipped), files)
        for skipped in reading.skipped:
            _log.warning("  %s", skipped)
    if reading.unfinished:
        _log.warning("without a record yet: %d attempts", len(reading.unfinished))
        for folder in reading.unfinished:
            _log.warning("  %s", folder)


def _place(record: RunRecord) -> tuple[Any, ...]:
    """Where a run stands in a table: folders are named by a hash, and their order says nothing."""
    spec, around = record.spec, record.circumstance
    choice = (spec.precision, spec.engine.name, spec.batch.micro, spec.accumulation, record.config_id)
    return around.study, spec.model.name, spec.nodes, spec.devices_per_node, *choice, around.repeat, around.attempt


def _unfinished(paths: Iterable[Path]) -> Iterable[Path]:
    started = {file.parent for path in paths if path.is_dir() for file in path.rglob(CIRCUMSTANCE)}
    return sorted(folder for folder in started if not (folder / RECORD).exists())
