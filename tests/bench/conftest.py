import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from installed_packages import Install, forget, installing
from started_runs import Command

from bench.cli import main


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Function that installs a plug-in package of one module for the duration of a test. Its arguments are the group of
    the entry point, the entry point (`name = module`), and the module's source text."""
    monkeypatch.syspath_prepend(tmp_path)
    with installing(tmp_path) as install:
        yield install
    monkeypatch.undo()
    forget()


@pytest.fixture
def zeroscale_run(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Function that starts `zeroscale run` with the given overrides in a separate process. Processes that still run
    after the test are killed."""
    commands: list[Command] = []

    def start(*overrides: str, results: Path = tmp_path / "runs", **options: Any) -> Command:
        commands.append(Command(results, overrides, **options))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)  # kills the supervisor, whose ranks end with it
            command.process.wait()


@pytest.fixture
def run_advise(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Function that runs `zeroscale advise` in an empty folder, so that it finds no recorded runs. The function returns
    the printed output. With `fails=True`, the command must be refused. Then the function returns the command's error
    message of one line."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, fails: bool = False) -> str:
        assert main(["advise", *words]) == (2 if fails else 0)
        printed = capsys.readouterr()
        assert not fails or (printed.out, printed.err.count("\n")) == ("", 1)
        return printed.err if fails else printed.out

    return run
