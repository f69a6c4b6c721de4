"""Tests that the check of prose finds each kind of defect, and accepts plain sentences."""

import pytest

from tests.prose import find_in_source


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ('"""What a run has."""', "begins with 'What'"),
        ('"""Return 1."""\nprint("nobody waits")', "'nobody'"),
        ('"""Return the ' + "long " * 40 + 'text."""', "a sentence of 43 words"),
    ],
)
def test_each_kind_of_defect_is_found(source: str, finding: str) -> None:
    ((_, found),) = find_in_source(source)
    assert found.startswith(finding)


def test_plain_docstring_is_accepted() -> None:
    assert not list(find_in_source('def f():\n    """Return the job id of a run, or None."""\n    print("run failed")'))
