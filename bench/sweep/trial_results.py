"""The trials of a search with what came of them, as the study's folder shows it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from bench import store
from bench.quantities import RunQuantities, compute_node_hours, derive_quantities
from bench.store import RunAttempt
from bench.sweep import definition
from bench.sweep.definition import SweepDefinition, Trial
from bench.sweep.policy import TrialResult, explain_given_up, find_answer


def read_trial_results(folder: Path, search: SweepDefinition) -> list[TrialResult]:
    """Return every trial of the search in a folder, in order, with what came of it."""
    attempts = search.rules.budget.attempts
    return TrialReader(folder, lambda config_id: store.list_attempts(folder / config_id), attempts).read_results()


class TrialReader:
    """Reads each record once: a search looks at all of its trials before it asks for another."""

    def __init__(self, folder: Path, tried: Callable[[str], Sequence[RunAttempt]], attempts: int) -> None:
        """`tried` returns the attempts at a configuration, `attempts` is how often one may fail."""
        self._folder, self._tried, self._attempts = folder, tried, attempts
        self._records: dict[Path, tuple[RunQuantities | None, float]] = {}

    def read_results(self) -> list[TrialResult]:
        """Return every trial in order; those under way, or to be tried again, have no outcome yet."""
        return [self._read_result(trial) for trial in definition.read_trials(self._folder)]

    def _read_result(self, trial: Trial) -> TrialResult:
        at = trial.point.machine
        done = [a for a in self._tried(trial.point.config_id) if a.outcome and (a.repeat, a.machine) == (0, at)]
        spent = sum(self._read_record(attempt)[1] for attempt in done)
        answer = find_answer(done, prune=True)
        if answer is None and done and explain_given_up(done, self._attempts):
            answer = done[-1]
        if answer is None:
            return TrialResult(trial, node_hours=spent)
        return TrialResult(trial, answer.outcome, self._read_record(answer)[0], spent, answer.environment_id)

    def _read_record(self, attempt: RunAttempt) -> tuple[RunQuantities | None, float]:
        if attempt.folder not in self._records:
            try:
                record = store.read_record(attempt.folder / store.RECORD)
                found = derive_quantities(record), compute_node_hours(record) or 0.0
            except (OSError, store.Unreadable):
                found = None, 0.0
            self._records[attempt.folder] = found
        return self._records[attempt.folder]
