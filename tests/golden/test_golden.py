"""Golden test: the current output of the command equals the stored digests, so a refactoring has not changed it."""

import pytest

from tests.golden import digests
from tests.golden.cases import cases

CASES = cases(whole=False)
COMMANDS = {name.split()[0] for name in CASES}
OFTEN = {name for command in COMMANDS for name in [name for name in CASES if name.split()[0] == command][::3]}
"""Names of the cases that `make test` runs: every third case of each command. `make test-all` runs all cases."""


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
)
def test_output_of_the_command_is_unchanged(name: str) -> None:
    """If this test fails, write the outputs of both revisions with `make golden` and compare them."""
    assert digests.digest(CASES[name]()) == digests.read()[name]


def test_every_case_has_a_digest() -> None:
    assert digests.read().keys() == cases(whole=True).keys()
