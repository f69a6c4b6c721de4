"""The trials of a search whose points start by a queue: asked for ahead, as many as may be under way at a time."""

from pathlib import Path

from bench.search.planning import restore_search
from bench.sweep import definition
from bench.sweep.definition import SweepDefinition, Trial
from bench.sweep.submission.lost import finalize_lost, keep_ends
from bench.sweep.submission.state import read_state
from bench.sweep.trial_results import TrialReader


def add_trials(folder: Path, sweep: SweepDefinition) -> int:
    """Write down trials until as many as `parallel` have no answer, or the search is at its end; return how many."""
    state = read_state(folder)
    if finalize_lost(state) or keep_ends(state):
        state = read_state(folder)
    planned = restore_search(sweep)
    reader = TrialReader(folder, state.tried, sweep.rules.budget.attempts)
    given_up = {status.key.config_id for status in state.statuses if status.state == "given up"}
    added, section = 0, planned.pool.section
    while True:
        results = reader.read_results()
        waiting = sum(result.outcome is None and result.trial.point.config_id not in given_up for result in results)
        if waiting >= section.parallel or not (proposal := planned.proposer.propose(results)):
            return added
        number = len(results)
        added += definition.write_trial(folder, Trial(number=number, **proposal._asdict()))
