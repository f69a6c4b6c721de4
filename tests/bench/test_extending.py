"""What docs/extend promises: a plug-in comes in by adding its files, and no other file is edited.

The files on its pages are written into a copy of the project, which then plans, runs, predicts, reads and reports.
"""

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
from started_runs import PATIENCE_S, QUICK

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "extend"
KINDS = ("metric", "figure")
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
