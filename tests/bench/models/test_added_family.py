"""Tests of the example plug-ins on the pages of docs/extend: a model family, an objective and a data source. They are
compared with torch and transformers."""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pages import write
from saved_tensors import kept_by_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, GPTBigCodeConfig

from bench import data, models, objectives
from bench.core import plugins
from bench.core.network import IGNORED, count_parameters
from bench.core.spec import RunSpec
from bench.predict.memory import activations
from bench.predict.work import compute_recomputed_flops, compute_training_flops
from bench.predict.workload import build_workload

SIZES = {"width": 48, "layers": 3, "heads": 4, "vocab": 96, "positions": 64}
TOKENS = 20
ADDED = ((models, "decoder"), (objectives, "continuation"), (data, "counting"))


@pytest.fixture(scope="module")
def plugins_importable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make the example plug-ins importable for the duration of the tests."""
    root = tmp_path_factory.mktemp("pages")
    write(root, "family", "objective", "data")
    with pytest.MonkeyPatch.context() as patch:
        for package, _ in ADDED:
            added = root.joinpath(*package.__name__.split("."))
            patch.setattr(package, "__path__", [*package.__path__, str(added)])
        plugins._list_shipped.cache_clear()
        yield
    added_names = tuple(f"{package.__name__}.{name}" for package, name in ADDED)
    for name in [name for name in sys.modules if name.startswith(added_names)]:
        del sys.modules[name]
    plugins._list_shipped.cache_clear()
    plugins._import_complete.cache_clear()


@pytest.fixture
def gpt(plugins_importable: None) -> Any:
    """Module that builds models of the example family."""
    return importlib.import_module("bench.models.decoder.build")


def small(**more: Any) -> RunSpec:
    """Return the spec of a small model in which width, layers, heads, vocabulary and positions all differ, so that a
    confusion of two sizes changes the result. `more` are further fields."""
    return RunSpec.model_validate({
        "model": {"name": "small", "family": "decoder", "shape": SIZES}, "engine": {"name": "ddp", "backend": "ddp"},
        "data": {"name": "synthetic", "source": "synthetic"}, "objective": "causal_lm", "sequence": {"tokens": TOKENS},
        "batch": {"micro": 3}, "precision": "fp32", **more,
    })  # fmt: skip


def loss_of(model: Any) -> torch.Tensor:
    tokens = torch.arange(3 * TOKENS).reshape(3, TOKENS) % SIZES["vocab"]
    found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return found


def test_described_parameters_of_the_example_family_equal_built_and_published_numbers(gpt: Any) -> None:
    spec = small()
    described = models.build_network(spec.model)
    assert described and count_parameters(described) == sum(p.numel() for p in gpt.build(spec).parameters())
    family = models.load(models.find_family({"model_type": "gpt_bigcode"}))
    published = family.stacks(family.from_hugging_face(GPTBigCodeConfig(multi_query=False).to_dict()))
    assert published and count_parameters(published) == 124_439_808


def test_example_family_has_the_loss_of_transformers_gpt2(gpt: Any) -> None:
    ours = gpt.build(small())
    config = GPT2Config(
        n_embd=48, n_layer=3, n_head=4, vocab_size=96, n_positions=64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    theirs = GPT2LMHeadModel(config)
    with torch.no_grad():
        for (name, source), target in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            target.copy_(source.T if ".c_" in name and source.dim() == 2 else source)
    assert loss_of(ours).item() == pytest.approx(loss_of(theirs).item(), rel=1e-6)


def test_evaluation_of_the_example_family_has_no_dropout_and_draws_no_random_numbers(gpt: Any) -> None:
    dropping, whole = (
        gpt.build(small(model={"name": "small", "family": "decoder", "shape": SIZES, "dropout": p})) for p in (0.5, 0.0)
    )
    for model in (dropping, whole):
        gpt.initialise(model, small())
    trained = {loss_of(dropping).item() for _ in range(3)}
    assert len(trained) == 3
    before = torch.get_rng_state()
    with torch.no_grad():
        assert loss_of(dropping.eval()).item() == loss_of(whole).item() not in trained
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_described_flops_of_the_example_family_equal_the_count_of_torch(gpt: Any, checkpointing: bool) -> None:
    """Attention is eager, because torch does not count the CPU's fused kernel. A fused kernel also recomputes the
    attention scores in backward. Model FLOPs do not include this recomputation."""
    spec = small(activation_checkpointing=checkpointing)
    model, described = gpt.build(spec), models.build_network(spec.model)
    gpt.initialise(model, spec)
    assert described
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss_of(model).backward()
    again = compute_recomputed_flops(described, spec.sequence, precision="fp32") if checkpointing else 0
    assert 3 * (compute_training_flops(described, spec.sequence) + again) == counter.get_total_flops()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_described_activation_bytes_equal_the_tensors_saved_by_autograd(
    gpt: Any, precision: str, dropout: float, checkpointing: bool
) -> None:
    model = {"name": "small", "family": "decoder", "shape": SIZES, "dropout": dropout}
    spec = small(precision=precision, activation_checkpointing=checkpointing, model=model)
    built = gpt.build(spec).to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    gpt.initialise(built, spec)
    described = models.build_network(spec.model)
    assert described
    segments = activations.list_segments(described, build_workload(spec, "cpu"))
    saved = sum(segment.saved * times for block, times in segments for segment in block)
    if checkpointing:  # a checkpoint keeps its random state, which autograd does not count as a saved tensor
        saved -= SIZES["layers"] * activations.RANDOM_STATE["cpu"]
    divisor = 4  # bytes of the loss's divisor, one fp32 number
    assert kept_by_autograd(built, lambda: loss_of(built)) == saved + divisor


@pytest.mark.usefixtures("plugins_importable")
def test_example_objective_masks_labels_and_example_source_counts() -> None:
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
