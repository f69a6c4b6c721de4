"""Fixtures for tests of launcher=vertex on a service of this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.aiplatform_v1", reason="needs the extra vertex")

from server import VertexServer


@pytest.fixture
def service(tmp_path: Path) -> Iterator[VertexServer]:
    """A service that starts no processes. A test sets the states of its jobs."""
    server = VertexServer(tmp_path / "machines", runs=False, environment={})
    yield server
    server.close()
