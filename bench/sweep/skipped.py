"""Answers without a run: `pruned` by what other runs show, or `infeasible` by a prediction."""

from pathlib import Path

from bench import store
from bench.record import Outcome
from bench.sweep.definition import RequestedRun


def write_outcome(study_folder: Path, requested: RequestedRun, outcome: Outcome) -> None:
    """Write the record of a point that need not run."""
    attempt = store.open_attempt(study_folder / requested.config_id, requested.spec, requested.circumstance)
    store.finalize(attempt.folder, outcome, "predicted" if outcome.kind == "infeasible" else "measured")
