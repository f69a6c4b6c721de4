"""Moving code about changes no answer."""

import pytest

from tests.golden import digests
from tests.golden.cases import cases

CASES = cases(whole=False)


@pytest.mark.parametrize("name", CASES)
def test_the_command_answers_as_before(name: str) -> None:
    """Where it does not, write the texts of both revisions and compare them: `make golden`."""
    assert digests.digest(CASES[name]()) == digests.read()[name]


def test_every_case_has_a_digest() -> None:
    assert digests.read().keys() == cases(whole=True).keys()
