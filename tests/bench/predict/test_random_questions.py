"""Random configurations and machine files get a consistent prediction, or an error of one line.

This test runs a few; `python -m tests.benchmarks.prediction --random 3000` runs more.
"""

from collections import Counter
from pathlib import Path

from tests.bench.predict.random_questions import draw_questions, find_faults

QUESTIONS = 20


def test_random_questions_get_an_answer_or_a_line(tmp_path: Path) -> None:
    found = [find_faults(question) for question in draw_questions(20, QUESTIONS, tmp_path)]
    assert [str(fault) for _, faults in found for fault in faults] == []
    outcomes = Counter(outcome for outcome, _ in found)
    assert min(outcomes["answered"], outcomes["refused"]) >= QUESTIONS / 10  # both outcomes occur
