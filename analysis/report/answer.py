"""What a set of runs answers: by question, the fastest configuration and those not told apart from it."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from analysis.questions import Question, by_question
from analysis.summary import Row


class Answer(NamedTuple):
    """The answer to one question, in rows of the summary."""

    question: Question
    fastest: Row | None  # by tokens per second; None where no run ended ok
    tied: tuple[Row, ...]  # whose interval reaches that of the fastest, or has none; the fastest of them first
    leanest: Row | None  # by peak allocated bytes; of equals the fastest
    failed: int  # configurations without a good run


def answers(summary: pd.DataFrame) -> list[Answer]:
    """Return one answer per question. Overlapping intervals leave two configurations undecided; that they do not
    overlap is a hint and not yet a test."""
    return [_answer(question, rows) for question, rows in by_question(summary)]


def _answer(question: Question, rows: Sequence[Row]) -> Answer:
    timed = sorted((row for row in rows if row["tokens_per_s"] is not None), key=lambda row: -row["tokens_per_s"])
    sized = [row for row in rows if row["peak_allocated_bytes"] is not None]
    fastest = timed[0] if timed else None
    return Answer(
        question=question,
        fastest=fastest,
        tied=tuple(row for row in timed[1:] if fastest and _reaches(row, fastest)),
        leanest=min(sized, key=lambda row: (row["peak_allocated_bytes"], -(row["tokens_per_s"] or 0)), default=None),
        failed=sum(row["n"] == 0 for row in rows),
    )


def _reaches(row: Row, fastest: Row) -> bool:
    high, low = row["tokens_per_s_high"], fastest["tokens_per_s_low"]
    return high is None or low is None or high >= low
