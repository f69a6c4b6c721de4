"""Tests of the text forms of numbers and amounts."""

import pytest

from bench.core.formatting import format_interval, format_number
from bench.predict.advice import format_hours_interval


@pytest.mark.parametrize(
    ("value", "text"), [(0.0012345, "0.00123"), (12.345, "12.3"), (999.6, "1,000"), (1_366_414, "1,370,000"), (0, "0")]
)
def test_number_has_three_significant_digits(value: float, text: str) -> None:
    assert format_number(value) == text


def test_number_precedes_its_range() -> None:
    assert format_interval(1_366_414, 677_085, 1_369_733) == "1,370,000 (677,000–1,370,000)"


def test_hours_and_their_range_have_one_unit() -> None:
    assert format_hours_interval(40.7, 40.6, 82.1) == "1.7 (1.69–3.42) days"
    assert format_hours_interval(2.5, 2.25, 3.125) == "2.5 (2.25–3.12) h"
