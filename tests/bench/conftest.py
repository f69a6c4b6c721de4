import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from started_runs import Command


@pytest.fixture
def zeroscale_run(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start `zeroscale run`; whatever is left of it is ended after the test."""
    commands: list[Command] = []

    def start(*overrides: str, results: Path = tmp_path / "runs", **options: Any) -> Command:
        commands.append(Command(results, overrides, **options))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)  # its supervisor ends the ranks
            command.process.wait()
