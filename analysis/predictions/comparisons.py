"""All comparisons, and the folder that they are written to."""

from pathlib import Path

from analysis.predictions import (
    PredictionComparison,
    fit_boundaries,
    frontier,
    frontier_log,
    gpu,
    peak_memory,
    published_steps,
    published_times,
    rehearsals,
    scaling_a100,
    step_times,
    zero_table,
)
from analysis.predictions.page import to_csv, to_markdown
from analysis.predictions.recorded import RecordedRuns
from bench.store import build_unwritable_error, write_atomically

PAGE = "README.md"


def compare_all(recorded: RecordedRuns) -> list[PredictionComparison]:
    """Return every comparison, in the order of the page."""
    return [
        zero_table.compare(),
        *peak_memory.compare(recorded),
        *rehearsals.compare(recorded),
        fit_boundaries.compare(),
        *step_times.compare(recorded),
        scaling_a100.compare(),
        *published_steps.compare(),
        *published_times.compare(),
        *frontier.compare(),
        *frontier_log.compare(recorded),
        *gpu.compare(gpu.read_runs(recorded)),
    ]


def render_files(found: list[PredictionComparison]) -> dict[str, str]:
    """Return the files by name: the page, and a table of each comparison."""
    return {PAGE: to_markdown(found)} | {f"{comparison.name}.csv": to_csv(comparison) for comparison in found}


def write_ledger(found: list[PredictionComparison], folder: Path) -> None:
    """Write every file, each whole or not at all; UserError where the folder cannot be written to."""
    files = render_files(found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomically(folder / name, text.encode())
    except OSError as error:
        raise build_unwritable_error(folder, error) from error
