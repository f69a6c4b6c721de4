"""Tests of the loss as a mean over all target tokens of a step. This loss must not depend on the division of samples
into micro-batches."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch import distributed

from bench import data, objectives
from bench.core.spec import RunSpec, config_id
from bench.engines.ddp.engine import build as build_ddp
from bench.engines.distributed.ranks import count_targets, weigh
from bench.measure.collectives import CollectiveCounter
from bench.models.t5 import build as t5

SAMPLES = 8
PADDED = {"name": "text", "source": "text", "options": {"packing": False}}
SYNTHETIC = {"name": "synthetic", "source": "synthetic"}
OPTIONS = {"bucket_cap_mb": 25, "gradient_as_bucket_view": True, "static_graph": False}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Create a process group that contains only this process, for the duration of the tests."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def spec(micro: int, **more: Any) -> RunSpec:
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "encoder_layers": 2, "decoder_layers": 2, "heads": 4, "vocab": 128,
             "gated": True, "activation": "gelu_new", "separate_head": True}  # fmt: skip
    return RunSpec.model_validate({
        "model": {"name": "test", "shape": shape}, "engine": {"name": "ddp", "backend": "ddp", "options": OPTIONS},
        "data": PADDED, "batch": {"micro": micro, "accumulation": SAMPLES // micro},
        "sequence": {"encoder": 12, "decoder": 6}, "precision": "fp32",
        "optimizer": {"lr": 1e-3, "gradient_clipping": 0.5}, **more,
    })  # fmt: skip


def micro_batches(
    of: RunSpec, step: int, *, padded: bool = True, without: Sequence[int] = ()
) -> list[dict[str, torch.Tensor]]:
    """Return the micro-batches of a step. The samples are the same for every micro-batch size. Samples have 1 to 6
    target tokens. If `padded` is false, all samples have 6 target tokens. Samples whose index is in `without` have
    none."""
    generator = torch.Generator().manual_seed(step)
    inputs, labels = (torch.randint(2, 128, (SAMPLES, length), generator=generator) for length in (12, 6))
    for sample in range(SAMPLES if padded else 0):
        labels[sample, 1 + (5 * sample) % 6 :] = -100
    labels[list(without)] = -100
    parts = zip(inputs.split(of.batch.micro), labels.split(of.batch.micro), strict=True)
    return [{"input_ids": one, "labels": other} for one, other in parts]


def train(of: RunSpec, **samples: Any) -> list[float]:
    """Train for three steps. Return six numbers: the loss and the gradient norm of the first, the second and the third
    step. `samples` are keyword arguments of the function `micro_batches`."""
    module = t5.build(of)
    t5.initialise(module, of)
    engine, found = build_ddp(module, of), list[float]()
    for step in range(3):
        found.append(float(engine.train_step(micro_batches(of, step, **samples))))
        norm = engine.gradient_norm()
        assert norm is not None
        found.append(float(norm))
    return found


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_losses_and_norms_do_not_depend_on_the_micro_batch_size(micro: int) -> None:
    whole = train(spec(SAMPLES))  # one micro-batch: torch itself computes the mean over all target tokens
    assert train(spec(micro)) == pytest.approx(whole, rel=2e-6)
    means = train(spec(micro, loss_mean="micro_batches"))
    assert means != pytest.approx(whole, rel=1e-3), "a mean of means gives a different step"


@pytest.mark.parametrize("chunked", [{}, {"loss_chunk_tokens": 4}])
def test_micro_batch_without_targets_does_not_change_the_loss(chunked: dict[str, int]) -> None:
    """If only some samples of a micro-batch lack target tokens, torch's mean ignores these samples. If all samples of a
    micro-batch lack target tokens, torch's mean is 0 / 0 = NaN. The NaN must not reach the loss of the step."""
    model = {**spec(1).model.model_dump(mode="json", by_alias=True), **chunked}
    whole = train(spec(SAMPLES), without=(0, 2, 3, 7))
    for micro in (1, 2):
        assert train(spec(micro, model=model), without=(0, 2, 3, 7)) == pytest.approx(whole, rel=2e-6)


def test_loss_weights_of_micro_batches_equal_a_computation_by_hand() -> None:
    """A step of three micro-batches has 4 target tokens: 3, 0 and 1. A weight is the number of micro-batches times the
    share of the target tokens: 3 · 3 / 4, 0 and 3 · 1 / 4."""
    first, second, third = (torch.full((1, 6), -100) for _ in range(3))
    first[0, :3], third[0, 1] = 5, 7
    batches = [{"labels": labels} for labels in (first, second, third)]
    weighed = list(weigh(batches, spec(1)))
    assert [float(one.weight) for one in weighed if one.weight is not None] == [3 * 3 / 4, 0, 3 * 1 / 4]
    assert [int((one.tensors["labels"] != -100).sum()) for one in weighed] == [3, 1, 1], "so that its mean is a number"
    assert [int((one["labels"] != -100).sum()) for one in batches] == [3, 0, 1], "the data are left as they are"


def test_both_loss_means_are_equal_for_equal_numbers_of_targets() -> None:
    means = train(spec(2, loss_mean="micro_batches"), padded=False)
    assert train(spec(2), padded=False) == pytest.approx(means, rel=2e-6)


@pytest.mark.parametrize("fields", [{"loss_mean": "micro_batches"}, {"data": SYNTHETIC}])
def test_step_without_target_count_reads_one_micro_batch_and_adds_no_collective(fields: dict[str, Any]) -> None:
    counted, taken = spec(1, **fields), iter(micro_batches(spec(1), 0))
    with CollectiveCounter(wait=lambda: None) as counter:
        next(weigh(taken, counted))
    assert len(list(taken)) == SAMPLES - 1 and not counter.calls


def test_step_with_padding_adds_one_all_reduce_of_one_number() -> None:
    with CollectiveCounter(wait=lambda: None) as counter:
        list(weigh(micro_batches(spec(1), 0), spec(1)))
    assert (counter.calls, counter.payload_bytes) == ({"all_reduce": 1}, {"all_reduce": 8})


@pytest.mark.parametrize(("objective", "sequence"), [
    ("span_corruption", {"encoder": 40, "decoder": 12}), ("span_corruption", {"encoder": 12, "decoder": 40}),
    ("causal_lm", {"tokens": 32}), ("causal_lm_documents", {"tokens": 32}),
])  # fmt: skip
@pytest.mark.parametrize("packing", [True, False])
def test_number_of_targets_is_constant_when_the_objective_does_not_weigh_them(
    objective: str, sequence: dict[str, int], packing: bool
) -> None:
    model = {"name": "test", "shape": {**spec(1).model.shape, "vocab": 512}}
    text = {"name": "text", "source": "text", "options": {"packing": packing, "tokenizer": "byt5"}}
    read = spec(2, objective=objective, sequence=sequence, data=text, model=model)
    is_claimed = not objectives.weighs_targets(read)
    assert is_claimed == (packing and objective != "causal_lm_documents")
    kinds, batches = objectives.load(objective).KINDS, islice(data.load("text").micro_batches(read, 0), 40)
    counts = {int(count_targets(kinds, batch.tensors)) for batch in batches}
    assert len(counts) == 1 or not is_claimed, counts


def test_loss_mean_is_part_of_the_config_id() -> None:
    tokens, means = spec(2), spec(2, loss_mean="micro_batches")
    assert (tokens.model_dump()["loss_mean"], means.model_dump()["loss_mean"]) == ("tokens", "micro_batches")
    assert config_id(tokens) != config_id(means)
