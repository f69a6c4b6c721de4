"""Here so that the tests in the folders below find `records`: pytest puts a conftest's folder on the path."""

import pytest


@pytest.fixture
def svg_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw every figure as a page shows it; the same figure as a file for print takes most of the time."""
    monkeypatch.setattr("analysis.figures.FORMATS", ("svg",))
