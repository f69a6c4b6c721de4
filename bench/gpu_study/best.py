"""What the records of a study say so far: which configurations are answered, and the fastest of each model."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import yaml

from bench import store
from bench.gpu_study.session import StudySession
from bench.record import FINAL

_OURS = ("machine", "launcher")
"""What whoever asks for a point again chooses anew."""


def is_answered(folder: Path) -> bool:
    """Whether a configuration has a final answer."""
    return any(attempt.outcome in FINAL for attempt in store.list_attempts(folder))


def write_study(session: StudySession, folder: Path, repeats: int) -> Path | None:
    """Write a study of the fastest configuration of every model, `repeats` runs each; return its file, or None where
    nothing was measured. It has the name of the study in `folder`, so the first of these runs are there already."""
    if not folder.is_dir():
        return None
    fastest = _find_fastest(session.ask("table", str(folder), "--format", "csv"))
    if not fastest:
        return None
    points = [_list_overrides(folder / row["config_id"], row) for row in fastest]
    file = folder / "best.yaml"
    plain = {"name": folder.name, "repeats": repeats, "axes": {"point": points}}
    store.write_atomically(file, yaml.safe_dump(plain, sort_keys=False).encode())
    return file


def _find_fastest(table: str) -> list[dict[str, str]]:
    """Return the row of the fastest run of every model, by name, of a run table as CSV."""
    fastest: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO(table)):
        if (row["outcome"], row["evidence"]) != ("ok", "measured") or not row["samples_per_s"]:
            continue
        known = fastest.setdefault(row["model"], row)
        if float(row["samples_per_s"]) > float(known["samples_per_s"]):
            fastest[row["model"]] = row
    return [row for _, row in sorted(fastest.items())]


def _list_overrides(folder: Path, row: dict[str, str]) -> dict[str, Any]:
    """Return what was asked for, as overrides that go together."""
    record = json.loads((folder / f"{row['repeat']}.{row['attempt']}" / store.RECORD).read_text())
    pairs = (text.split("=", 1) for text in record["circumstance"]["overrides"])
    return {key: yaml.safe_load(value) for key, value in pairs if key not in _OURS}
