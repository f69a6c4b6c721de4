"""Runs as TensorBoard's event files: `<study>/<run>/`, with scalars by step, hyperparameters and the tags as text."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.export import import_library
from analysis.export.run import ExportedRun

_EVENTS = "events.out.tfevents.*"


def write(runs: Sequence[ExportedRun], out: Path) -> int:
    """Write `runs` below `out` and return how many; one that is there already is replaced."""
    tensorboardx = import_library("tensorboardX", "tensorboardX", "tensorboard")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".new-") as aside:
        for run in runs:
            with tensorboardx.SummaryWriter(str(Path(aside, run.study, run.name))) as writer:
                _write_run(writer, run)
        for run in runs:
            _replace_events(out / run.study / run.name, Path(aside, run.study, run.name))
    return len(runs)


def _write_run(writer: Any, run: ExportedRun) -> None:
    summary = import_library("tensorboardX.summary", "tensorboardX", "tensorboard")
    quantities = {f"run/{name}": value for name, value in run.metrics.items()}
    for part in summary.hparams(run.parameters, quantities):
        writer.file_writer.add_summary(part, walltime=run.started_s)
    for name, value in quantities.items():
        writer.add_scalar(name, value, 0, walltime=run.started_s)
    for name, series in run.series.items():
        for step, value in series:
            writer.add_scalar(f"steps/{name}", value, step, walltime=run.started_s)
    for name, text in run.tags.items():
        writer.add_text(name, _format_literal(text), 0, walltime=run.started_s)


def _format_literal(text: str) -> str:
    """Show text as it is: TensorBoard takes it for Markdown, and it comes from a record."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _replace_events(folder: Path, new: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    older = list(folder.glob(_EVENTS))
    for file in new.glob(_EVENTS):
        file.replace(folder / file.name)
        older = [path for path in older if path.name != file.name]
    for path in older:
        path.unlink()
