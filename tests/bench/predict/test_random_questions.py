"""Test with random configurations and machine files. Each must give a consistent prediction, or an error of one line.

The test draws only a few. `python -m tests.benchmarks.prediction --random 3000` draws more.
"""

from collections import Counter
from pathlib import Path

from tests.bench.predict.random_questions import draw_questions, find_faults

QUESTIONS = 20


def test_random_commands_give_consistent_results_or_one_line_errors(tmp_path: Path) -> None:
    found = [find_faults(question) for question in draw_questions(20, QUESTIONS, tmp_path)]
    assert [str(fault) for _, faults in found for fault in faults] == []
    outcomes = Counter(outcome for outcome, _ in found)
    assert min(outcomes["answered"], outcomes["refused"]) >= QUESTIONS / 10  # both outcomes occur
