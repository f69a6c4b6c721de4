"""All comparisons, and the folder that they are written to."""

from pathlib import Path

from analysis.predictions import (
    Comparison,
    fit_boundaries,
    gpu,
    peak_memory,
    rehearsals,
    scaling_a100,
    step_times,
    zero_table,
)
from analysis.predictions.page import to_csv, to_markdown
from analysis.predictions.recorded import RecordedRuns
from bench.store import unwritable, write_atomically

PAGE = "README.md"


def compare_all(recorded: RecordedRuns) -> list[Comparison]:
    """Return every comparison, in the order of the page."""
    return [
        zero_table.compare(),
        *peak_memory.compare(recorded),
        *rehearsals.compare(recorded),
        fit_boundaries.compare(),
        *step_times.compare(recorded),
        scaling_a100.compare(),
        *gpu.compare(gpu.runs(recorded)),
    ]


def files(found: list[Comparison]) -> dict[str, str]:
    """Return the files by name: the page, and a table of each comparison."""
    return {PAGE: to_markdown(found)} | {f"{comparison.name}.csv": to_csv(comparison) for comparison in found}


def write(found: list[Comparison], folder: Path) -> None:
    """Write every file, each whole or not at all; UserError where the folder cannot be written to."""
    texts = files(found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(folder / name, text.encode())
    except OSError as error:
        raise unwritable(folder, error) from error
