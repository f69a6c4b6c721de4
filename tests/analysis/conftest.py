"""Pytest adds the folder of this file to the import path, so that tests in subfolders can import `records`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.metrics import load_metrics
from tests.bench.installed_packages import Install, forget, installing


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Function that installs a plug-in package of one module for the duration of a test, as in tests/bench."""
    (site := tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(site)
    load_metrics.cache_clear()
    with installing(site) as install:
        yield install
    monkeypatch.undo()
    forget()
    load_metrics.cache_clear()
