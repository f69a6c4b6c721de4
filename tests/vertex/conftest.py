"""Fixtures for tests of launcher=vertex with a stand-in for the service on this machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vertex_server import VertexServer


@pytest.fixture
def service(tmp_path: Path) -> "Iterator[VertexServer]":
    """A stand-in for the service that starts no processes. A test sets the states of its jobs."""
    from vertex_server import VertexServer

    server = VertexServer(tmp_path / "machines", runs=False, environment={})
    yield server
    server.close()
