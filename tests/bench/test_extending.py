"""What docs/extend promises: a plug-in comes in by adding its files, and no other file is edited.

The files on its pages are written into a copy of the project, which then plans, runs, predicts, reads and reports.
"""

import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
from started_runs import PATIENCE_S, QUICK
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from bench import data, models, objectives, plugins, store
from bench.predict.flops import recomputed_flops, training_flops
from bench.predict.memory import activations
from bench.predict.workload import workload
from bench.record import RunRecord
from bench.spec import RunSpec
from bench.stacks import parameter_count
from bench.tokens import IGNORED

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "extend"
KINDS = ("metric", "figure", "family", "objective", "data")
_FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


class House(NamedTuple):
    """A copy of the project with the plug-ins of the pages, and a folder for results."""

    root: Path
    results: Path
    packages: tuple[Path, ...] = ()  # folders in which somebody installed something

    def zeroscale(self, *words: str, code: int = 0) -> str:
        """Run a verb as a user does, and return what it prints; errors, too, where it is to fail."""
        path = os.pathsep.join(map(str, (self.root, *self.packages)))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
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


# ------------------------------------------------------------- a family, an objective and a data source, all together

CPU = ("machine=cpu", *(word for word in QUICK if not word.startswith(("model=", "sequence.", "batch."))))
COUNTING = (
    *CPU, "model=gpt_tiny", "objective=continuation", "data=counting", "sequence.tokens=64", "batch.micro=4",
    "optimizer.lr=3e-3",
)  # fmt: skip
ENGINES = {
    "ddp": ("engine=ddp", "activation_checkpointing=true"),
    "zero2": ("engine=zero2", "engine.reduce_bucket_size=200000"),  # the usual bucket hides all other memory
    "zero3": ("engine=zero3", "engine.reduce_bucket_size=200000"),
}


@pytest.fixture(scope="module")
def counting(house: House) -> dict[str, RunRecord]:
    """Real runs of two ranks by engine."""
    results = house.root / "counting"
    for words in ENGINES.values():
        house.zeroscale("sweep", *COUNTING, *words, "--results", str(results))
    found = [store.read_record(path) for path in store.find_records([results])]
    return {record.spec.engine.name: record for record in found}


def test_a_plan_shows_family_objective_and_source(house: House) -> None:
    text = house.zeroscale("sweep", *COUNTING, "engine=ddp,zero3", "--dry-run", "--results", str(house.results))
    assert text.count("64 tokens  counting  continuation") == text.count("gpt_tiny") == 2


def test_every_engine_begins_with_the_same_weights_and_samples_and_learns(counting: dict[str, RunRecord]) -> None:
    losses = [record.observations.steps.loss for record in counting.values() if record.observations]
    assert len(losses) == len(ENGINES)
    for first, *_, last in losses:
        assert first == pytest.approx(losses[0][0], rel=1e-6)
        assert last < first - 1


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_of_a_described_family_is_what_its_runs_take(
    engine: str, house: House, counting: dict[str, RunRecord]
) -> None:
    (predicted,) = json.loads(house.zeroscale("predict", *COUNTING, *ENGINES[engine], "--json"))
    observed = counting[engine].observations
    assert observed and predicted["config_id"] == counting[engine].config_id
    assert predicted["peak_bytes"] == pytest.approx(max(m.peak_allocated_bytes or 0 for m in observed.memory), rel=0.05)
    assert predicted["resident_bytes"] == pytest.approx(max(m.resident_bytes or 0 for m in observed.memory), rel=0.001)


def test_time_and_advice_of_a_described_family_are_told(house: House) -> None:
    words = ("model=gpt_tiny", "objective=causal_lm", "sequence.tokens=64", "machine=h200", "devices_per_node=8")
    (predicted,) = json.loads(house.zeroscale("predict", *words, "engine=zero1", "--json"))
    assert predicted["time"]["step_s"] > 0 and predicted["fits"]
    assert "gpt_tiny" in house.zeroscale("advise", *words, "nodes=1")


def test_table_and_report_show_what_was_added(house: House, counting: dict[str, RunRecord], tmp_path: Path) -> None:
    columns = "model,objective,data,lengths,engine,tokens_per_s,model_tflops_per_device"
    text = house.zeroscale("table", str(house.root / "counting"), "--columns", columns, "--format", "csv")
    table = pd.read_csv(io.StringIO(text))
    assert table[["model", "objective", "data", "lengths"]].drop_duplicates().values.tolist() == [
        ["gpt_tiny", "continuation", "counting", "64 tokens"]
    ]
    assert (table[["tokens_per_s", "model_tflops_per_device"]] > 0).all(axis=None)
    house.zeroscale("report", str(house.root / "counting"), "--out", str(tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert "gpt_tiny" in page and "continuation" in page


def test_doctor_names_what_was_added(house: House) -> None:
    findings = {found["subject"]: found["found"] for found in json.loads(house.zeroscale("doctor", "--json"))}
    for kind, name in (("family", "gpt"), ("objective", "continuation"), ("data", "counting")):
        assert name in findings[f"{kind} plug-ins"].split(", ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("sequence.tokens=512",), "sequence.tokens=512: the model has 256 positions; "),
        (("model.attention=eager",), "model.attention=eager: family gpt knows nothing but the usual one"),
        (("model.shape.heads=5",), "model.shape.heads=5: does not divide width=128"),
        (("model=tiny",), "objective=continuation: a model of family t5 learns from encoder and decoder tokens"),
        (("model.shape.vocab=2",), "a vocabulary of 2: ids 0 and 1 are no numbers"),
        (("data.steps=2",), "data.steps: no such key; did you mean step?"),
    ],
)
def test_what_was_added_refuses_in_one_line(words: tuple[str, ...], told: str, house: House) -> None:
    kept = [word for word in COUNTING if not any(word.split("=")[0] == new.split("=")[0] for new in words)]
    error = house.zeroscale("sweep", *kept, *words, "engine=ddp", "--dry-run", code=2)
    assert told in error and error.count("\n") == 1


def test_text_serves_an_objective_that_it_does_not_know(house: House) -> None:
    words = (word.replace("data=counting", "data=text") for word in COUNTING)
    assert "text  continuation" in house.zeroscale("sweep", *words, "engine=ddp", "--dry-run")


# ----------------------------------------------------------------------------------- a family's description, by torch

SIZES = {"width": 48, "layers": 3, "heads": 4, "vocab": 96, "positions": 64}
TOKENS = 20
ADDED = ((models, "gpt"), (objectives, "continuation"), (data, "counting"))


@pytest.fixture(scope="module")
def inside(house: House) -> Iterator[None]:
    """What was added can be imported here."""
    added = [f"{package.__name__}.{name}" for package, name in ADDED]
    with pytest.MonkeyPatch.context() as patch:
        for package, _ in ADDED:
            patch.setattr(
                package, "__path__", [*package.__path__, str(house.root.joinpath(*package.__name__.split(".")))]
            )
        plugins._shipped.cache_clear()
        yield
    for name in [name for name in sys.modules if name.startswith(tuple(added))]:
        del sys.modules[name]
    plugins._shipped.cache_clear()
    plugins._complete.cache_clear()


@pytest.fixture
def gpt(inside: None) -> Any:
    """What builds the page's family."""
    return importlib.import_module("bench.models.gpt.build")


def small(**more: Any) -> RunSpec:
    """A spec of a model in which no two sizes are the same."""
    return RunSpec.model_validate({
        "model": {"name": "small", "family": "gpt", "shape": SIZES}, "engine": {"name": "ddp", "backend": "ddp"},
        "data": {"name": "synthetic", "source": "synthetic"}, "objective": "causal_lm", "sequence": {"tokens": TOKENS},
        "batch": {"micro": 3}, "precision": "fp32", **more,
    })  # fmt: skip


def loss_of(model: Any) -> torch.Tensor:
    tokens = torch.arange(3 * TOKENS).reshape(3, TOKENS) % SIZES["vocab"]
    found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return found


def test_the_described_parameters_are_those_that_are_built_and_those_that_gpt2_has(gpt: Any) -> None:
    spec = small()
    described = models.network(spec.model)
    assert described and parameter_count(described) == sum(p.numel() for p in gpt.build(spec).parameters())
    family = models.load(models.family_of({"model_type": "gpt2"}))
    published = family.stacks(family.from_hugging_face(GPT2Config().to_dict()))
    assert published and parameter_count(published) == 124_439_808


def test_it_computes_what_transformers_gpt2_does(gpt: Any) -> None:
    ours = gpt.build(small())
    config = GPT2Config(
        n_embd=48, n_layer=3, n_head=4, vocab_size=96, n_positions=64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    theirs = GPT2LMHeadModel(config)
    with torch.no_grad():
        for (name, source), target in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            target.copy_(source.T if ".c_" in name and source.dim() == 2 else source)
    assert loss_of(ours).item() == pytest.approx(loss_of(theirs).item(), rel=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_described_flops_are_those_that_torch_counts(gpt: Any, checkpointing: bool) -> None:
    """With attention written out: a fused kernel computes its scores again in backward, which model FLOPs leave out,
    and torch does not count the one of a CPU at all."""
    spec = small(activation_checkpointing=checkpointing)
    model, described = gpt.build(spec), models.network(spec.model)
    gpt.initialise(model, spec)
    assert described
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss_of(model).backward()
    again = recomputed_flops(described, spec.sequence, precision="fp32") if checkpointing else 0
    assert 3 * (training_flops(described, spec.sequence) + again) == counter.get_total_flops()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_described_activations_are_to_the_byte_what_autograd_keeps(
    gpt: Any, precision: str, dropout: float, checkpointing: bool
) -> None:
    model = {"name": "small", "family": "gpt", "shape": SIZES, "dropout": dropout}
    spec = small(precision=precision, activation_checkpointing=checkpointing, model=model)
    built = gpt.build(spec).to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    gpt.initialise(built, spec)
    described = models.network(spec.model)
    assert described
    segments = activations.segments(described, workload(spec, "cpu"))
    saved = sum(segment.saved * times for block, times in segments for segment in block)
    if checkpointing:  # a checkpoint keeps its random state, which is no tensor that autograd saves
        saved -= SIZES["layers"] * activations.RANDOM_STATE["cpu"]
    divisor = 4  # of the loss, one number
    assert kept_by_autograd(built) == saved + divisor


@pytest.mark.usefixtures("inside")
def test_an_objective_hides_what_it_says_and_a_source_counts() -> None:
    source = {"name": "counting", "source": "counting", "options": {"step": 3}}
    spec = small(objective="continuation", data=source, sequence={"tokens": 9}, devices_per_node=2)
    batches = [next(data.load("counting").micro_batches(spec, rank)) for rank in (0, 1)]
    for tensors, padding in batches:
        tokens, labels = tensors["input_ids"], tensors["labels"]
        assert set((tokens.diff(dim=1) % 94).flatten().tolist()) == {3}, "94 numbers behind the ids of pad and EOS"
        assert (labels[:, :4] == IGNORED).all() and torch.equal(labels[:, 4:], tokens[:, 4:])
        assert padding == {"tokens": 0}
    alone = small(objective="continuation", data=source, sequence={"tokens": 9}, batch={"micro": 6})
    together = torch.cat([tensors["input_ids"] for tensors, _ in batches])
    assert torch.equal(next(data.load("counting").micro_batches(alone, 0)).tensors["input_ids"], together)


def kept_by_autograd(model: Any) -> int:
    """Bytes of the distinct storages, weights aside, that a forward pass saves for backward."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage  # held, so that no address is given out twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert loss_of(model).requires_grad
    return sum(storage.nbytes() for storage in storages.values())


def test_a_family_reads_configs_of_its_kind_and_another_is_measured_and_not_predicted(
    house: House, tmp_path: Path
) -> None:
    for kind in ("gpt2", "opt"):
        config = {"model_type": kind, "n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 64}
        (tmp_path / f"{kind}.json").write_text(json.dumps(config))
    told = {}
    for kind in ("gpt2", "opt"):
        words = (f"model.config_file={tmp_path / kind}.json", "model=hugging_face", f"model.name={kind}")
        told[kind] = house.zeroscale("predict", *CPU, *words, "objective=causal_lm", "sequence.tokens=64", "engine=ddp")
    assert "A device needs" in told["gpt2"]
    assert "no prediction" in told["opt"]


# --------------------------------------------------------------------------------------- from an installed package

SUMMED = """
from bench.tokens import IGNORED, PAD, TokenKind
KINDS = (TokenKind("tokens", 256, {"input_ids": PAD, "labels": IGNORED}),)
REDUCTION = "sum"
"""


@pytest.fixture(scope="module")
def elsewhere(house: House, tmp_path_factory: pytest.TempPathFactory) -> House:
    """The same project where somebody installed a package with an objective."""
    site = tmp_path_factory.mktemp("site")
    (site / "summed.py").write_text(SUMMED)
    info = site / "somebodys_objective-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-objective\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[zeroscale.objective]\nsummed_lm = summed\n")
    (site / "conf" / "objective").mkdir(parents=True)
    (site / "conf" / "objective" / "summed_lm.yaml").write_text("name: summed_lm\n")
    return house._replace(results=site / "results", packages=(site,))


def test_an_installed_package_brings_an_objective_through_every_verb(elsewhere: House, tmp_path: Path) -> None:
    own = ("--config-dir", str(elsewhere.packages[0] / "conf"))
    words = (*(word for word in COUNTING if not word.startswith("objective=")), "objective=summed_lm", "engine=ddp")
    results = ("--results", str(elsewhere.results))
    assert "summed_lm" in elsewhere.zeroscale("sweep", *words, *own, *results, "--dry-run")
    assert "A device needs" in elsewhere.zeroscale("predict", *words, *own)
    assert "causal_lm, continuation, seq2seq, span_corruption, summed_lm" in elsewhere.zeroscale("doctor")
    elsewhere.zeroscale("sweep", *words, *own, *results)
    (record,) = (store.read_record(path) for path in store.find_records([elsewhere.results]))
    assert record.outcome.kind == "ok" and record.observations and record.observations.steps
    first = record.observations.steps.loss[0]
    assert first and first / (4 * 63) == pytest.approx(5.95, abs=0.1)  # ln 384, of every token but the first
    assert "summed_lm" in elsewhere.zeroscale("table", str(elsewhere.results), "--format", "csv")
    elsewhere.zeroscale("report", str(elsewhere.results), "--out", str(tmp_path))
    assert "summed_lm" in (tmp_path / "report.html").read_text()


def test_a_family_that_takes_means_alone_refuses_such_an_objective(elsewhere: House, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "opt", "vocab_size": 96}')
    model = ("model=hugging_face", f"model.config_file={tmp_path}/config.json", "model.name=opt")
    own = ("--config-dir", str(elsewhere.packages[0] / "conf"))
    error = elsewhere.zeroscale("predict", *CPU, *model, "objective=summed_lm", "engine=ddp", *own, code=2)
    assert "objective=summed_lm: its loss is a sum over tokens, and transformers takes their mean" in error
