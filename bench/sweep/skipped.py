"""Answers without a run: `pruned` by what other runs show, or `infeasible` by a prediction."""

from pathlib import Path

from bench import store
from bench.record import FINAL, Outcome, OutcomeKind
from bench.sweep.definition import RequestedRun

NEVER_RAN: frozenset[OutcomeKind] = frozenset({"pruned", "infeasible"})


def list_accepted_outcomes(*, prune: bool) -> frozenset[OutcomeKind]:
    """Return the outcomes that answer a point for good; where everything is to be measured, those of real runs."""
    return FINAL if prune else FINAL - NEVER_RAN


def write_outcome(study_folder: Path, requested: RequestedRun, outcome: Outcome) -> None:
    """Write the record of a point that need not run."""
    attempt = store.open_attempt(study_folder / requested.config_id, requested.spec, requested.circumstance)
    store.finalize(attempt.folder, outcome, "predicted" if outcome.kind == "infeasible" else "measured")
