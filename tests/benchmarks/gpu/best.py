"""What the records of a study say so far: which configurations are answered, and the fastest of each model."""

import json
from pathlib import Path
from typing import Any

import yaml

import analysis
from bench import store
from bench.record import FINAL

_OURS = ("machine", "launcher")
"""What whoever asks for a point again chooses anew."""


def answered(folder: Path) -> bool:
    """Whether a configuration has a final answer."""
    return any(attempt.outcome in FINAL for attempt in store.attempts(folder))


def study(folder: Path, repeats: int) -> Path | None:
    """Write a study of the fastest configuration of every model, `repeats` runs each; return its file, or None where
    nothing was measured. It has the name of the study in `folder`, so the first of these runs are there already."""
    if not folder.is_dir():
        return None
    runs = analysis.load(folder)
    good = runs[(runs["outcome"] == "ok") & (runs["evidence"] == "measured")]
    if good.empty:
        return None
    fastest = good.loc[good.groupby("model")["samples_per_s"].idxmax()]
    points = [_point(folder / str(row["config_id"]), row) for _, row in fastest.iterrows()]
    file = folder / "best.yaml"
    plain = {"name": folder.name, "repeats": repeats, "axes": {"point": points}}
    store.write_atomically(file, yaml.safe_dump(plain, sort_keys=False).encode())
    return file


def _point(folder: Path, row: Any) -> dict[str, Any]:
    """Return what was asked for, as overrides that go together."""
    record = json.loads((folder / f"{row['repeat']}.{row['attempt']}" / store.RECORD).read_text())
    pairs = (text.split("=", 1) for text in record["circumstance"]["overrides"])
    return {key: yaml.safe_load(value) for key, value in pairs if key not in _OURS}
