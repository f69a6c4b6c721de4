"""Tests of the output on a terminal and in a pipe. Tables have the same columns on both. The remaining time is shown
only on a terminal."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.calibrate import DOING, starting
from bench.core import terminal
from bench.core.spec import MeasureSpec
from bench.core.terminal import Progress
from bench.sweep.local_attempt import AttemptWatch


def test_columns_fit_their_longest_cell_without_trailing_blanks() -> None:
    rows = [["", "GB"], ["weights [fp32]", "12"], ["x", "3.5"], ["a note", "", "and why"]]
    assert terminal.align(rows, right={1}, indent=1).splitlines() == [
        "                  GB",
        " weights [fp32]   12",
        " x               3.5",
        " a note               and why",
    ]
    assert terminal.align([["a", "b"]], least=(4, 3), right={1}, gap=0) == "a     b"


def test_long_cells_are_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert terminal.align([["word " * 50, "end"]]) == f"{'word ' * 50}  end"


def test_lines_wrap_between_columns_and_short_lines_stay() -> None:
    columns = [
        "2a31ec6b6d",
        "mt5_xxl     ",
        "1 × 8 devices",
        "micro 64 × 1 = global 512",
        "1024/256 tokens",
        "a long name of data",
    ]
    line = "  ".join(columns)
    first, second = terminal.wrap_columns(line).splitlines()
    assert len(line) > 100 >= len(first) and second == "    a long name of data" and line.startswith(first)
    reason = "    error: " + "word " * 40
    wrapped = terminal.wrap_columns(f"{line[:90]}\n{reason}").splitlines()
    assert (
        wrapped[0] == line[:90]
        and max(map(len, wrapped)) <= 100
        and all(part.startswith("    ") for part in wrapped[1:])
    )
    assert " ".join(" ".join(wrapped[1:]).split()) == reason.strip(), "no word is lost"


def test_number_and_percent_sign_stay_on_one_line() -> None:
    for length in range(90, 101):
        assert not any(part.strip().startswith("%") for part in terminal.wrap("x" * length + " 5 % more").splitlines())


@pytest.mark.parametrize(
    "words", [["echo", *(f"key{n}=a b{n}" for n in range(40))], ["echo", "$HOME", "x" * 150, "'", "\\"], ["echo"]]
)
def test_wrapped_command_is_equal_for_a_shell(words: list[str]) -> None:
    text = terminal.wrap_command(["printf", "%s\\n", *words])
    assert all(len(line) <= 100 or "x" * 150 in line for line in text.splitlines())
    read = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
    assert read.stdout.splitlines() == words


_SHOWS = """
from bench.core import terminal
from bench.core.terminal import Progress
with terminal.progress(quiet=False) as follow:
    follow(Progress("steps 7 of a point whose line is far too long for any terminal " * 3, 0.25, "at most 40 s left"))
    terminal.build_printer(quiet=False)("[1/2] a point")
"""


def test_progress_goes_to_the_terminal_and_output_to_its_stream() -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", _SHOWS], stdout=subprocess.PIPE, stderr=theirs, env=environment, check=True, timeout=120
    )
    os.close(theirs)
    shown = b""
    while part := _read(ours):
        shown += part
    os.close(ours)
    assert done.stdout == b"[1/2] a point\n"
    text = shown.decode()
    assert "steps 7" in text and "at most 40 s left" in text and "…" in text


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # Linux raises EIO once the other end is closed
        return b""


def test_output_to_a_file_has_no_progress() -> None:
    done = subprocess.run([sys.executable, "-c", _SHOWS], capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[1/2] a point\n", "")


def test_log_has_a_line_at_the_start_of_each_point_and_one_per_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = iter([0, 1, 30, 62, 100, 110])
    log = terminal.LogProgress(clock=lambda: next(now_s))
    for shown in (
        Progress("starting", 0.0, "", "[1/2] ddp"),
        Progress("steps 3", 0.2, "", "[1/2] ddp"),
        Progress("steps 7", 0.4, "at most 40 s left", "[1/2] ddp"),
        Progress("steps 9", 0.45, "at most 5 s left", "[1/2] ddp"),
        Progress("starting", 0.5, "about 60 s left", "[2/2] zero1"),
    ):
        log.show(shown)
    assert capsys.readouterr().err.splitlines() == [
        "[1/2] ddp  starting",
        "[1/2] ddp  steps 7  40 %  at most 40 s left",
        "[2/2] zero1  starting  about 60 s left",
    ]


def test_progress_of_a_run_is_relative_to_its_longest_duration() -> None:
    protocol = MeasureSpec(warmup_steps=10, gpu_warmup_s=0, min_steps=20, window_s=0, max_s=1000)
    watch = AttemptWatch(Path("nowhere"), protocol)
    assert watch.of_step(0, 100.0, "steps") == Progress("steps 0")
    # At most 30 steps of half a second each, of which ten are done.
    assert watch.of_step(10, 105.0, "steps") == Progress("steps 10", pytest.approx(1 / 3), "at most 10 s left")
    # With slow steps, the window ends after two seconds.
    watch = AttemptWatch(Path("nowhere"), protocol.model_copy(update={"max_s": 2.0}))
    watch.of_step(0, 0.0, "fetch")
    assert watch.of_step(10, 10.0, "fetch") == Progress("fetch 10", pytest.approx(10 / 12), "at most 2 s left")
    assert watch.of_step(20, 20.0, "fetch") == Progress("fetch 20", 0.99, "at most 0 s left"), "it goes on all the same"


def _show_on_terminal(command: list[str], folder: Path) -> tuple[str, str]:
    """Run a command whose standard error is a pseudo-terminal. Return its standard output, and its standard error,
    which has the progress lines."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "140", "PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.cli", *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    shown = b""
    while part := _read(ours):
        shown += part
    os.close(ours)
    printed, _ = child.communicate(timeout=240)
    assert child.returncode == 0, shown.decode()
    return printed.decode(), shown.decode()


@pytest.mark.processes
def test_progress_of_a_run_shows_steps_and_time_left(tmp_path: Path) -> None:
    protocol = ["measure.window_s=8", "measure.min_steps=30"]
    small = ["machine=cpu", "devices_per_node=1", "batch.micro=1", "sequence.encoder=32", "sequence.decoder=8"]
    printed, shown = _show_on_terminal(["run", *small, *protocol], tmp_path)
    assert "ok: " in printed and "left" not in printed
    assert "left" in shown and "━" in shown


def test_progress_of_a_calibration_shows_its_time_left(tmp_path: Path) -> None:
    (tmp_path / DOING).write_text("matmul")
    shown: list[Progress] = []
    with starting._show_progress(tmp_path, 60.0, shown.append):
        time.sleep(0.8)
    assert shown[0].what == "matmul" and shown[0].left.startswith("about ") and 0 < (shown[0].share or 0) < 0.1
