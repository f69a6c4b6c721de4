"""What docs/extend promises: a plug-in comes in by adding its files, and no other file is edited.

The files on its pages are written into a copy of the project, which then plans, runs, predicts, reads and reports.
"""

import io
import json
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

from bench import store
from bench.record import RunRecord

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "extend"
KINDS = ("metric", "figure", "engine")
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


# ------------------------------------------------------- an engine with half as many data ranks, and a loss on one rank

PIPED = ("machine=cpu", *QUICK, "engine=two_stages", "parallel.pipeline=2")


@pytest.fixture(scope="module")
def piped(house: House) -> dict[str, RunRecord]:
    """Real runs by engine: the pipeline on two ranks, and on one rank the reference with the same samples."""
    results = house.root / "piped"
    house.zeroscale("sweep", *PIPED, "--results", str(results))
    alone = ("machine=cpu", *QUICK, "engine=ddp", "devices_per_node=1")
    house.zeroscale("sweep", *alone, "--results", str(results))
    found = [store.read_record(path) for path in store.find_records([results])]
    return {record.spec.engine.name: record for record in found}


def test_a_plan_shows_the_layout_of_ranks(house: House) -> None:
    text = house.zeroscale("sweep", *PIPED, "batch.micro=2,4", "--dry-run", "--results", str(house.results))
    assert text.count("two_stages") == 2 and "micro 4 × 1 = global 4" in text, "two ranks and one data-parallel rank"


def test_a_loss_on_one_rank_is_the_loss_of_the_run_and_that_of_the_reference(piped: dict[str, RunRecord]) -> None:
    ours, alone = piped["two_stages"].observations, piped["ddp"].observations
    assert ours and ours.steps and alone and alone.steps
    assert len(ours.memory) == 2 and ours.parameters == alone.parameters == ours.trainable_parameters
    assert ours.steps.loss[:6] == pytest.approx(alone.steps.loss[:6], rel=1e-5)
    assert ours.steps.gradient_norm[:6] == pytest.approx(alone.steps.gradient_norm[:6], rel=1e-4)
    assert ours.tokens == alone.tokens, "both ranks work on the same samples"


def test_an_optional_member_is_recorded_where_the_facts_announce_it(piped: dict[str, RunRecord]) -> None:
    ours, alone = piped["two_stages"].observations, piped["ddp"].observations
    assert ours and ours.idle_s and len(ours.idle_s) == 2 and all(seconds and seconds > 0 for seconds in ours.idle_s)
    assert alone and alone.idle_s is None and ours.step_phases_s is None


def test_what_an_engine_does_not_say_is_not_predicted_and_not_rehearsed(house: House) -> None:
    assert "no prediction" in house.zeroscale("predict", *PIPED)
    told = house.zeroscale("rehearse", *PIPED, code=2)
    assert "engine=two_stages: cannot be rehearsed" in told and told.count("\n") == 1


def test_advice_leaves_out_an_engine_of_which_nothing_is_predicted(house: House) -> None:
    point = ("model=mt5_base", "machine=h200", "devices_per_node=8", "nodes=1")
    assert "two_stages" in house.zeroscale("advise", *point)
    told = house.zeroscale("advise", *point, "engine=two_stages", code=2)
    assert "no prediction" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("parallel.pipeline=1",), "parallel.pipeline=1: there are two stages; set parallel.pipeline=2"),
        (("parallel.tensor=2", "devices_per_node=4"), "parallel.tensor=2: engine two_stages has no tensor parallelism"),
        (("engine=ddp",), "parallel.pipeline=2: engine ddp has no pipeline"),
        (("model.loss_chunk_tokens=8",), "model.loss_chunk_tokens=8: a chunked loss is not made by the decoder alone"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_in_one_line(words: tuple[str, ...], told: str, house: House) -> None:
    error = house.zeroscale("sweep", *PIPED, *words, "--dry-run", code=2)
    assert told in error and error.count("\n") == 1


def test_table_and_report_show_an_engine_of_any_kind(house: House, piped: dict[str, RunRecord], tmp_path: Path) -> None:
    study = str(house.root / "piped" / "adhoc")
    text = house.zeroscale("table", study, "--columns", "engine,step_s,flags", "--format", "csv")
    table = pd.read_csv(io.StringIO(text)).set_index("engine")
    assert (table["step_s"] > 0).all() and "unverified" in table["flags"]["two_stages"]
    house.zeroscale("report", study, "--out", str(tmp_path))
    assert "two_stages" in (tmp_path / "report.html").read_text()


def test_doctor_knows_the_engine(house: House) -> None:
    findings = {found["subject"]: found["found"] for found in json.loads(house.zeroscale("doctor", "--json"))}
    assert "two_stages" in findings["engine plug-ins"].split(", ")
