"""What docs/extend promises: a plug-in comes in by adding its files, and no other file is edited.

The files on its pages are written into a copy of the project, which then plans, runs, predicts, reads and reports.
"""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
from started_runs import ENDLESS, PATIENCE_S, QUICK

from bench import store

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "extend"
KINDS = ("metric", "figure", "launcher")
_FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


class House(NamedTuple):
    """A copy of the project with the plug-ins of the pages, and a folder for results."""

    root: Path
    results: Path

    def zeroscale(self, *words: str, code: int = 0) -> str:
        """Run a verb as a user does, and return what it prints; errors, too, where it is to fail."""
        environment = {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-P", "-m", "bench.cli", *words],
            cwd=self.root, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == code, (words, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + (done.stderr if code else "")


def files(kind: str) -> dict[str, str]:
    """Return the files on the page of a kind, by path."""
    return dict(_FILE.findall((PAGES / f"{kind}.md").read_text()))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    root = tmp_path_factory.mktemp("house")
    for folder in ("bench", "analysis", "conf", "slurm"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for kind in KINDS:
        for name, text in files(kind).items():
            path = root / name
            assert not path.exists(), f"{name} edits a file that is there"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return House(root, root / "my")


@pytest.fixture(scope="module")
def runs(house: House) -> Path:
    """Two real runs, which differ in their micro-batch."""
    house.zeroscale("sweep", *QUICK, "batch.micro=2,4", "machine=cpu", "--results", str(house.results))
    return house.results / "adhoc"


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_is_linked_and_shows_whole_files(kind: str) -> None:
    assert f"({kind}.md)" in (PAGES / "README.md").read_text()
    assert files(kind)


def test_a_metric_is_a_column_of_the_table(house: House, runs: Path) -> None:
    text = house.zeroscale("table", str(runs), "--columns", "micro,tokens_per_device_s", "--format", "csv")
    table = pd.read_csv(io.StringIO(text))
    assert (table["tokens_per_device_s"] > 0).all() and len(table) == 2


def test_a_figure_is_a_picture_of_the_report(house: House, runs: Path, tmp_path: Path) -> None:
    house.zeroscale("report", str(runs), "--out", str(tmp_path))
    assert "Step time over micro-batch" in (tmp_path / "report.html").read_text()


SPOOLED = ("launcher=spool", "machine=cpu", "engine=ddp")
POINTS = (*QUICK, *SPOOLED, "batch.micro=2,4")


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The queue of the page's launcher. Nothing that it ever started is left when the tests end."""
    folder = tmp_path_factory.mktemp("spool")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROSCALE_SPOOL", str(folder))
        yield folder
    left = started_by(folder)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def started_by(spool: Path) -> list[int]:
    """Return the processes of jobs of a queue, which have its folder in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"ZEROSCALE_SPOOL={spool}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # somebody else's, or it has ended
            continue
    return found


@pytest.fixture(scope="module")
def queued(house: House, spool: Path) -> Path:
    """Two real runs, each in a job of its own, and the autopilot's job after them."""
    results = house.root / "queued"
    told = house.zeroscale("sweep", *POINTS, "launcher.mode=point", "--autopilot", "--results", str(results))
    assert told.count("1 point, 1 node × 2") == 2 and "the autopilot, when jobs have ended" in told
    house.zeroscale("status", str(results / "adhoc"), "--wait")
    return results / "adhoc"


def test_a_launcher_shows_the_script_of_a_job_and_queues_nothing(house: House, spool: Path) -> None:
    told = house.zeroscale("sweep", *POINTS, "--dry-run")
    assert "-m bench.allocation" in told and "2 points in 1 job" in told
    assert list(spool.glob("adhoc-*-*")) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("launcher.mode=array",), "launcher.mode=array: launcher=spool has no job arrays; set launcher.mode=packed"),
        (("nodes=2",), "nodes=2: launcher=spool has one node; set nodes=1"),
        (("--nice", "5"), "launcher.nice: no such key"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused_in_one_line(house: House, words: tuple[str, ...], line: str) -> None:
    (told,) = house.zeroscale("sweep", *POINTS, *words, "--dry-run", code=2).splitlines()
    assert line in told


def test_a_launcher_without_a_script_of_its_own_hands_none_over(house: House, tmp_path: Path) -> None:
    words = ("model=mt5_base", "machine=h200", "devices_per_node=8", "nodes=1", "engine=zero2", "launcher=spool")
    told = house.zeroscale("advise", *words, "--export", str(tmp_path / "new"), code=2)
    assert "launcher=spool: writes no job script that starts without zeroscale" in told


def test_queued_runs_are_rows_of_the_table_in_the_jobs_that_ran_them(house: House, spool: Path, queued: Path) -> None:
    text = house.zeroscale("table", str(queued), "--columns", "micro,outcome,allocation,step_s", "--format", "csv")
    table = pd.read_csv(io.StringIO(text))
    assert table["outcome"].tolist() == ["ok", "ok"] and (table["step_s"] > 0).all()
    assert sorted(table["allocation"]) == sorted(
        path.name for path in spool.glob("adhoc-*") if "-autopilot-" not in path.name
    )


def test_a_study_that_was_queued_is_answered_and_nothing_is_left_to_do(house: House, queued: Path) -> None:
    assert "2 points: 2 ok" in house.zeroscale("status", str(queued))
    assert "nothing to submit" in house.zeroscale("resume", str(queued))
    assert "no job of this sweep is in the queue" in house.zeroscale("cancel", str(queued))


def test_queued_runs_are_reported(house: House, queued: Path, tmp_path: Path) -> None:
    house.zeroscale("report", str(queued), "--out", str(tmp_path))
    assert "Step time over micro-batch" in (tmp_path / "report.html").read_text()


def test_the_doctor_looks_at_a_house_with_more_in_it(house: House, spool: Path) -> None:
    assert "processor" in house.zeroscale("doctor")


def test_a_queued_study_is_cancelled_and_goes_on(house: House, spool: Path) -> None:
    results, study = house.root / "cancelled", str(house.root / "cancelled" / "adhoc")
    house.zeroscale("sweep", *ENDLESS, *SPOOLED, "--results", str(results))
    for attempt in (0, 1):
        wait_until_it_runs(house, study)
        assert started_by(spool)
        assert "cancelled: adhoc-" in house.zeroscale("cancel", study)
        assert "1 waiting" in house.zeroscale("status", study, "--wait", code=1)
        records = [store.read_record(path) for path in store.find_records([results])]
        assert [(record.outcome.kind, record.outcome.reason) for record in records] == [
            ("cancelled", "the job was cancelled")
        ] * (attempt + 1)
        assert started_by(spool) == []
        if attempt == 0:
            assert "1 point, 1 node × 2" in house.zeroscale("resume", study)


def wait_until_it_runs(house: House, study: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not house.zeroscale("status", study, code=1).startswith("running"):
        assert time.monotonic() < until
        time.sleep(1)
