"""Tests that plug-ins are added by new files alone, as docs/extend promises, without a change of any other file.

The example files that the pages of docs/extend show are written into a copy of the project. Then the copy plans, runs,
predicts, reads and reports.
"""

import io
import json
import os
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
from installed_packages import installing
from pages import KINDS, PAGES, ROOT, files, write
from started_runs import ENDLESS, PATIENCE_S, QUICK, T5

from bench.core import store
from bench.core.record import RunRecord
from tests import warm
from tests.report_data import read_data

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


class ProjectCopy(NamedTuple):
    """A copy of the project with the plug-ins from the pages of docs/extend, and a folder for its results."""

    root: Path
    results: Path
    packages: tuple[Path, ...] = ()  # folders with installed plug-in packages

    def zeroscale(self, *words: str, code: int = 0) -> str:
        """Run a command (such as `run`) as a user does and return its output. `code` is the expected exit code. If it
        is not 0, the returned text includes the error messages."""
        path = os.pathsep.join(map(str, (self.root, *self.packages)))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-P", "-m", "bench.cli", *words],
            cwd=self.root, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == code, (words, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + (done.stderr if code else "")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> ProjectCopy:
    root = tmp_path_factory.mktemp("project")
    for folder in ("bench", "analysis", "conf", "slurm"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    write(root, *KINDS)
    warm.serve(str(root))
    return ProjectCopy(root, root / "my")


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_is_linked_and_contains_complete_files(kind: str) -> None:
    assert f"({kind}.md)" in (PAGES / "README.md").read_text()
    assert files(kind)


# ------------------------------------------------------------- a family, an objective and a data source, all together

CPU = ("machine=cpu", *(word for word in QUICK if not word.startswith(("model=", "sequence.", "batch."))))
COUNTING = (
    *CPU, "model=decoder_tiny", "objective=continuation", "data=counting", "sequence.tokens=64", "batch.micro=4",
    "optimizer.lr=3e-3",
)  # fmt: skip
BUCKET = "engine.reduce_bucket_size=200000"  # the default bucket would be larger than all other memory
ENGINES = {
    "ddp": ("engine=ddp", "activation_checkpointing=true"),
    "zero2": ("engine=zero2", BUCKET),
    "zero3": ("engine=zero3", BUCKET),
}


@pytest.fixture(scope="module")
def counting(project: ProjectCopy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    """Records of real runs with an example data source on two ranks, by engine. The run with DDP was started as a user
    starts it. The runs with zero2 and zero3 were points of one job, which forks their ranks from a process that has
    already imported all modules."""
    results = project.root / "counting"
    project.zeroscale("sweep", *COUNTING, *ENGINES["ddp"], "--results", str(results))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROSCALE_SPOOL", str(tmp_path_factory.mktemp("spool_of_counting")))
        job = ("engine=zero2,zero3", BUCKET, "launcher=spool")
        assert "2 runs, 1 node × 2" in project.zeroscale("sweep", *COUNTING, *job, "--results", str(results))
        project.zeroscale("status", str(results / "adhoc"), "--wait")
    found = [store.read_record(path) for path in store.find_records([results])]
    return {record.spec.engine.name: record for record in found}


def test_plan_shows_family_objective_and_data_source(project: ProjectCopy) -> None:
    text = project.zeroscale("sweep", *COUNTING, "engine=ddp,zero3", "--dry-run", "--results", str(project.results))
    assert " ".join(text.split()).count("64 tokens counting continuation") == text.count("  decoder_tiny ") == 2


def test_engines_train_the_added_family_from_equal_weights_and_samples(counting: dict[str, RunRecord]) -> None:
    losses = [record.observations.steps.loss for record in counting.values() if record.observations]
    assert len(losses) == len(ENGINES)
    for first, *_, last in losses:
        assert first == pytest.approx(losses[0][0], rel=1e-6)
        assert last < first - 1


@pytest.mark.parametrize("engine", ENGINES)
def test_predicted_memory_of_a_described_family_equals_its_runs(
    engine: str, project: ProjectCopy, counting: dict[str, RunRecord]
) -> None:
    (predicted,) = json.loads(project.zeroscale("predict", *COUNTING, *ENGINES[engine], "--json"))
    observed = counting[engine].observations
    assert observed and predicted["config_id"] == counting[engine].config_id
    assert predicted["peak_bytes"] == pytest.approx(max(m.peak_allocated_bytes or 0 for m in observed.memory), rel=0.05)
    assert predicted["resident_bytes"] == pytest.approx(max(m.resident_bytes or 0 for m in observed.memory), rel=0.001)


def test_described_family_has_predicted_time_and_advice(project: ProjectCopy) -> None:
    words = ("model=decoder_tiny", "objective=causal_lm", "sequence.tokens=64", "machine=h200", "devices_per_node=8")
    (predicted,) = json.loads(project.zeroscale("predict", *words, "engine=zero1", "--json"))
    assert predicted["time"]["step_s"] > 0 and predicted["fits"]
    assert "decoder_tiny" in project.zeroscale("advise", *words, "nodes=1")


def test_table_and_report_show_the_added_plugins(
    project: ProjectCopy, counting: dict[str, RunRecord], tmp_path: Path
) -> None:
    columns = "model,objective,data,lengths,engine,tokens_per_s,model_tflops_per_device"
    text = project.zeroscale("table", str(project.root / "counting"), "--columns", columns, "--format", "csv")
    table = pd.read_csv(io.StringIO(text))
    assert table[["model", "objective", "data", "lengths"]].drop_duplicates().values.tolist() == [
        ["decoder_tiny", "continuation", "counting", "64 tokens"]
    ]
    assert (table[["tokens_per_s", "model_tflops_per_device"]] > 0).all(axis=None)
    project.zeroscale("report", str(project.root / "counting"), "--out", str(tmp_path))
    shown = json.dumps(read_data(tmp_path / "report.html")["runs"])
    assert "decoder_tiny" in shown and "continuation" in shown


@pytest.fixture(scope="module")
def findings(project: ProjectCopy) -> dict[str, str]:
    """Results of the checks of `zeroscale doctor` in the copy of the project with all plug-ins, by subject."""
    return {found["subject"]: found["found"] for found in json.loads(project.zeroscale("doctor", "--json"))}


def test_doctor_lists_the_added_plugins(findings: dict[str, str]) -> None:
    for kind, name in (("family", "decoder"), ("objective", "continuation"), ("data", "counting")):
        assert name in findings[f"{kind} plug-ins"].split(", ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("sequence.tokens=512",), "sequence.tokens=512: the model has 256 positions; "),
        (("model.attention=eager",), "model.attention=eager: family decoder supports only the default"),
        (("model.shape.heads=5",), "model.shape.heads=5: does not divide width=128"),
        (("model=tiny",), "objective=continuation: a model of family t5 learns from encoder and decoder tokens"),
        (("model.shape.vocab=2",), "a vocabulary of 2: ids 0 and 1 are padding and end, not numbers"),
        (("data.steps=2",), "data.steps: no such key; did you mean data.step?"),
    ],
)
def test_added_plugins_refuse_in_one_line(words: tuple[str, ...], expected: str, project: ProjectCopy) -> None:
    kept = [word for word in COUNTING if not any(word.split("=")[0] == new.split("=")[0] for new in words)]
    error = project.zeroscale("sweep", *kept, *words, "engine=ddp", "--dry-run", code=2)
    assert expected in error and error.count("\n") == 1


def test_text_data_support_an_added_objective(project: ProjectCopy) -> None:
    words = (word.replace("data=counting", "data=text") for word in COUNTING)
    assert "text continuation" in " ".join(project.zeroscale("sweep", *words, "engine=ddp", "--dry-run").split())


def test_family_reads_its_hugging_face_configs_and_others_are_only_measured(
    project: ProjectCopy, tmp_path: Path
) -> None:
    sizes = {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 64, "multi_query": False}
    for kind in ("gpt_bigcode", "opt"):
        config = {"model_type": kind, **sizes}
        (tmp_path / f"{kind}.json").write_text(json.dumps(config))
    output = {}
    for kind in ("gpt_bigcode", "opt"):
        words = (f"model.config_file={tmp_path / kind}.json", "model=hugging_face", f"model.name={kind}")
        output[kind] = project.zeroscale(
            "predict", *CPU, *words, "objective=causal_lm", "sequence.tokens=64", "engine=ddp"
        )
    assert "A device needs" in output["gpt_bigcode"]
    assert "no prediction" in output["opt"]


# --------------------------------------------------------------------------------------- from an installed package

SUMMED = """
from bench.core.network import IGNORED, PAD, TokenKind
KINDS = (TokenKind("tokens", 256, {"input_ids": PAD, "labels": IGNORED}),)
REDUCTION = "sum"
"""


@pytest.fixture(scope="module")
def with_package(project: ProjectCopy, tmp_path_factory: pytest.TempPathFactory) -> ProjectCopy:
    """The copy of the project, next to which an additional package is installed. Its plug-in is an objective."""
    site = tmp_path_factory.mktemp("site")
    with installing(site) as install:
        install("zeroscale.objective", "summed_lm = summed", SUMMED)
    (site / "conf" / "objective").mkdir(parents=True)
    (site / "conf" / "objective" / "summed_lm.yaml").write_text("name: summed_lm\n")
    return project._replace(results=site / "results", packages=(site,))


def test_objective_of_an_installed_package_works_in_every_verb(with_package: ProjectCopy, tmp_path: Path) -> None:
    own = ("--config-dir", str(with_package.packages[0] / "conf"))
    words = (*(word for word in COUNTING if not word.startswith("objective=")), "objective=summed_lm", "engine=ddp")
    results = ("--results", str(with_package.results))
    assert "summed_lm" in with_package.zeroscale("sweep", *words, *own, *results, "--dry-run")
    assert "A device needs" in with_package.zeroscale("predict", *words, *own)
    found = " ".join(with_package.zeroscale("doctor").split())
    assert "causal_lm, causal_lm_documents, continuation, seq2seq, span_corruption, summed_lm" in found
    assert "processor" in found
    with_package.zeroscale("sweep", *words, *own, *results)
    (record,) = (store.read_record(path) for path in store.find_records([with_package.results]))
    assert record.outcome.kind == "ok" and record.observations and record.observations.steps
    first = record.observations.steps.loss[0]
    assert first and first / (4 * 63) == pytest.approx(5.95, abs=0.1)  # ln 384 per token, for every token but the first
    assert "summed_lm" in with_package.zeroscale("table", str(with_package.results), "--format", "csv")
    with_package.zeroscale("report", str(with_package.results), "--out", str(tmp_path))
    assert "summed_lm" in json.dumps(read_data(tmp_path / "report.html")["runs"])


def test_family_with_mean_losses_refuses_an_objective_with_sums(with_package: ProjectCopy, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "opt", "vocab_size": 96}')
    model = ("model=hugging_face", f"model.config_file={tmp_path}/config.json", "model.name=opt")
    own = ("--config-dir", str(with_package.packages[0] / "conf"))
    error = with_package.zeroscale("predict", *CPU, *model, "objective=summed_lm", "engine=ddp", *own, code=2)
    assert "objective=summed_lm: its loss is a sum over tokens, and transformers takes their mean" in error


SPOOLED = ("launcher=spool", "machine=cpu", "engine=ddp")
POINTS = (*QUICK, *SPOOLED, "batch.micro=2,4")


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of the job queue of the example launcher in docs/extend. After the tests, no process of the queue may be
    left. If there is one, it is killed, and the fixture fails."""
    folder = tmp_path_factory.mktemp("spool")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROSCALE_SPOOL", str(folder))
        yield folder
    left = started_by(folder)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def started_by(spool: Path) -> list[int]:
    """Return the ids of all processes that were started by jobs of a queue. `spool` is the queue's folder. A process
    that was started by a job has the path of `spool` in its environment variables."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"ZEROSCALE_SPOOL={spool}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # another user's process, or a process that has ended
            continue
    return found


@pytest.fixture(scope="module")
def queued(project: ProjectCopy, spool: Path) -> Path:
    """Folder of a study whose jobs have all ended. Two jobs of the example launcher made one real run each. Then a job
    of the autopilot ran, which would have submitted unfinished runs again."""
    results = project.root / "queued"
    output = project.zeroscale("sweep", *POINTS, "launcher.mode=point", "--autopilot", "--results", str(results))
    assert output.count("1 run, 1 node × 2") == 2 and "the autopilot, which starts when" in output
    project.zeroscale("status", str(results / "adhoc"), "--wait")
    return results / "adhoc"


def test_dry_run_shows_the_script_of_a_job_without_submission(project: ProjectCopy, spool: Path) -> None:
    output = project.zeroscale("sweep", *POINTS, "--dry-run")
    assert "-m bench.sweep.allocation" in output and "2 points in 1 job" in output
    assert list(spool.glob("adhoc-*-*")) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("launcher.mode=array",), "launcher.mode=array: launcher=spool has no job arrays; set launcher.mode=packed"),
        (("nodes=2",), "nodes=2: launcher=spool has one node; set nodes=1"),
        (("--nice", "5"), "launcher.nice: no such key"),
    ],
)
def test_unsupported_launcher_request_is_refused_in_one_line(
    project: ProjectCopy, words: tuple[str, ...], line: str
) -> None:
    (output,) = project.zeroscale("sweep", *POINTS, *words, "--dry-run", code=2).splitlines()
    assert line in output


def test_table_rows_of_queued_runs_name_their_jobs(project: ProjectCopy, spool: Path, queued: Path) -> None:
    text = project.zeroscale("table", str(queued), "--columns", "micro,outcome,allocation,step_s", "--format", "csv")
    table = pd.read_csv(io.StringIO(text))
    assert table["outcome"].tolist() == ["ok", "ok"] and (table["step_s"] > 0).all()
    assert sorted(table["allocation"]) == sorted(
        path.name for path in spool.glob("adhoc-*") if "-autopilot-" not in path.name
    )


def test_queued_study_is_complete_after_its_jobs(project: ProjectCopy, queued: Path) -> None:
    assert "2 runs: 2 ok" in project.zeroscale("status", str(queued))
    assert "nothing to submit" in project.zeroscale("resume", str(queued))
    assert "no job of this sweep is in the queue" in project.zeroscale("cancel", str(queued))


def test_added_metric_is_a_table_column(project: ProjectCopy, queued: Path) -> None:
    text = project.zeroscale("table", str(queued), "--columns", "micro,tokens_per_device_s", "--format", "csv")
    table = pd.read_csv(io.StringIO(text))
    assert (table["tokens_per_device_s"] > 0).all() and len(table) == 2


def test_added_figure_is_in_the_report_of_queued_runs(project: ProjectCopy, queued: Path, tmp_path: Path) -> None:
    project.zeroscale("report", str(queued), "--out", str(tmp_path))
    assert "Step time over micro-batch" in (tmp_path / "report.html").read_text()


def test_cancelled_queued_study_can_be_resumed(project: ProjectCopy, spool: Path) -> None:
    results, study = project.root / "cancelled", str(project.root / "cancelled" / "adhoc")
    project.zeroscale("sweep", *ENDLESS, *SPOOLED, "--results", str(results))
    for attempt in (0, 1):
        wait_until_it_runs(project, study)
        assert started_by(spool)
        assert "cancelled: adhoc-" in project.zeroscale("cancel", study)
        assert "1 waiting" in project.zeroscale("status", study, "--wait", code=1)
        records = [store.read_record(path) for path in store.find_records([results])]
        assert [(record.outcome.kind, record.outcome.reason) for record in records] == [
            ("cancelled", "the job was cancelled")
        ] * (attempt + 1)
        assert started_by(spool) == []
        if attempt == 0:
            assert "1 run, 1 node × 2" in project.zeroscale("resume", study)


def wait_until_it_runs(project: ProjectCopy, study: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not project.zeroscale("status", study, code=1).startswith("running"):
        assert time.monotonic() < until
        time.sleep(1)


# ------------------------------------------------------- an engine with half as many data ranks, and a loss on one rank

PIPED = ("machine=cpu", *T5, "engine=two_stages", "parallel.pipeline=2")


@pytest.fixture(scope="module")
def piped(project: ProjectCopy) -> dict[str, RunRecord]:
    """Records of two real runs with the same samples, by engine: a pipeline on two ranks, and the reference engine on
    one rank."""
    results = project.root / "piped"
    project.zeroscale("sweep", *PIPED, "--results", str(results))
    alone = ("machine=cpu", *T5, "engine=ddp", "devices_per_node=1")
    project.zeroscale("sweep", *alone, "--results", str(results))
    found = [store.read_record(path) for path in store.find_records([results])]
    return {record.spec.engine.name: record for record in found}


def test_dry_run_shows_the_layout_of_ranks(project: ProjectCopy) -> None:
    text = project.zeroscale("sweep", *PIPED, "batch.micro=2,4", "--dry-run", "--results", str(project.results))
    assert text.count("pipeline 2") == 2 and "micro 4 × 1 = global 4" in text, "two ranks and one data-parallel rank"
    why = "engine.backend=two_stages: no prediction of its memory"
    assert why in " ".join(text.split())


def test_loss_of_a_single_rank_is_that_of_the_run_and_equals_the_reference(piped: dict[str, RunRecord]) -> None:
    ours, alone = piped["two_stages"].observations, piped["ddp"].observations
    assert ours and ours.steps and alone and alone.steps
    assert len(ours.memory) == 2 and ours.parameters == alone.parameters == ours.trainable_parameters
    assert ours.steps.loss[:6] == pytest.approx(alone.steps.loss[:6], rel=1e-5)
    assert ours.steps.gradient_norm[:6] == pytest.approx(alone.steps.gradient_norm[:6], rel=1e-4)
    assert ours.tokens == alone.tokens, "both ranks work on the same samples"


def test_optional_member_is_recorded_if_the_facts_declare_it(piped: dict[str, RunRecord]) -> None:
    ours, alone = piped["two_stages"].observations, piped["ddp"].observations
    assert ours and ours.idle_s and len(ours.idle_s) == 2 and all(seconds and seconds > 0 for seconds in ours.idle_s)
    assert alone and alone.idle_s is None and ours.step_phases_s is None


def test_engine_without_declared_costs_is_not_predicted_or_rehearsed(project: ProjectCopy) -> None:
    assert "no prediction" in project.zeroscale("predict", *PIPED)
    output = project.zeroscale("rehearse", *PIPED, code=2)
    assert "engine=two_stages: cannot be rehearsed" in output and output.count("\n") == 1


def test_advice_omits_an_engine_without_predictions(project: ProjectCopy) -> None:
    point = ("model=mt5_base", "machine=h200", "devices_per_node=8", "nodes=1")
    assert "two_stages" in project.zeroscale("advise", *point)
    output = project.zeroscale("advise", *point, "engine=two_stages", "parallel.pipeline=2", code=2)
    assert "no prediction" in output and output.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("parallel.pipeline=1",), "parallel.pipeline=1: there are two stages; set parallel.pipeline=2"),
        (("parallel.tensor=2", "devices_per_node=4"), "parallel.tensor=2: engine two_stages does not support"),
        (("engine=ddp",), "parallel.pipeline=2: engine ddp does not support pipeline"),
        (("model.loss_chunk_tokens=8",), "model.loss_chunk_tokens=8: the engine does not support a chunked loss"),
    ],
)
def test_unsupported_engine_request_is_refused_in_one_line(
    words: tuple[str, ...], expected: str, project: ProjectCopy
) -> None:
    error = project.zeroscale("sweep", *PIPED, *words, "--dry-run", code=2)
    assert expected in error and error.count("\n") == 1


def test_table_and_report_show_the_added_engine(
    project: ProjectCopy, piped: dict[str, RunRecord], tmp_path: Path
) -> None:
    study = str(project.root / "piped" / "adhoc")
    text = project.zeroscale("table", study, "--columns", "engine,step_s,flags", "--format", "csv")
    table = pd.read_csv(io.StringIO(text)).set_index("engine")
    assert (table["step_s"] > 0).all() and "unverified" in table["flags"]["two_stages"]
    project.zeroscale("report", study, "--out", str(tmp_path))
    assert "two_stages" in (tmp_path / "report.html").read_text()


def test_doctor_lists_the_added_engine(findings: dict[str, str]) -> None:
    assert "two_stages" in findings["engine plug-ins"].split(", ")
