"""Tests that all engines give the same training of adapters on frozen weights. Frozen weights must have no optimizer
state, and their gradients must not be reduced."""

from typing import Any

import pytest
from started_ranks import Seen, start_ranks
from test_engines_agree import RANKS, SHAPE, spec

from bench import engines
from bench.core.errors import UserError
from bench.core.spec import RunSpec

RANK = 4
LORA: dict[str, Any] = {"name": "lora", "rank": RANK, "alpha": 32}
NF4 = LORA | {"quantization": "nf4", "double_quantization": True}
INT8 = LORA | {"quantization": "int8"}
WHOLE, PARTITIONING = ("ddp", "zero0"), ("zero1", "zero2", "zero3", "fsdp")
"""WHOLE has engines in which each rank holds the optimizer state of all trained parameters. PARTITIONING has engines in
which each rank holds only a partition of the optimizer state."""
ENGINES = (*WHOLE, *PARTITIONING)
RECOMPUTING, PACKED = ("ddp", "zero3", "fsdp"), ("ddp", "zero2", "zero3", "fsdp")
"""Engines that are tested with activation checkpointing, and with quantised weights."""
JOBS = {
    "ddp full": spec("ddp"),
    **{f"{name} lora": spec(name, adapter=LORA) for name in ENGINES},
    **{f"{name} lora checkpointed": spec(name, adapter=LORA, activation_checkpointing=True) for name in RECOMPUTING},
    **{f"{name} nf4": spec(name, adapter=NF4) for name in PACKED},
    **{f"{name} int8": spec(name, adapter=INT8) for name in ("ddp", "zero1")},
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    fsdp = {label: job for label, job in JOBS.items() if label.startswith("fsdp")}
    rest = {label: job for label, job in JOBS.items() if label not in fsdp}
    first, second = (
        start_ranks("engine_ranks.py", jobs, RANKS, tmp_path_factory.mktemp("ranks")) for jobs in (rest, fsdp)
    )
    return [one | other for one, other in zip(first, second, strict=True)]


@pytest.fixture
def trained() -> int:
    """Number of trained elements, which are those of all adapters. An adapter has rank × (inputs + outputs) elements,
    and every matrix of every block has an adapter."""
    width, inner, ff = SHAPE["d_model"], SHAPE["heads"] * SHAPE["d_kv"], SHAPE["d_ff"]
    attention, mlp = 4 * (width + inner), 3 * (width + ff)
    return RANK * (SHAPE["encoder_layers"] * (attention + mlp) + SHAPE["decoder_layers"] * (2 * attention + mlp))


pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.parametrize("label", [label for label in JOBS if label not in ("ddp full", "ddp lora")])
def test_losses_and_norms_with_adapters_equal_those_of_ddp(seen: Seen, label: str) -> None:
    form = label.split()[1]
    for rank in seen:
        assert rank[label]["losses"] == pytest.approx(rank[f"ddp {form}"]["losses"], rel=1e-5)
        assert rank[label]["norms"] == pytest.approx(rank[f"ddp {form}"]["norms"], rel=2e-5)


def test_first_loss_with_adapters_is_close_to_that_of_the_full_model(seen: Seen) -> None:
    first = {kind: seen[0][f"ddp {kind}"]["losses"][0] for kind in ("full", "lora", "nf4", "int8")}
    assert first["lora"] == pytest.approx(first["full"], rel=1e-6)
    assert first["nf4"] != pytest.approx(first["full"], rel=1e-4), "its matrices are rounded to 16 values"
    assert first["nf4"] == pytest.approx(first["full"], rel=0.1)
    assert first["int8"] == pytest.approx(first["full"], rel=0.01)


@pytest.mark.parametrize("label", [label for label in JOBS if label.endswith(("lora", "nf4"))])
def test_only_adapters_are_trained_and_have_optimizer_state(seen: Seen, label: str, trained: int) -> None:
    assert all(".lora_" in name for name in seen[0][label]["changed"])
    assert seen[0][label]["trained"] == trained
    moments = [rank[label]["moments"] for rank in seen]
    if label.split()[0] in WHOLE:
        assert moments == [trained] * RANKS
    else:
        assert trained <= sum(moments) <= 1.05 * trained, "with padding"
        assert max(moments) < 0.6 * trained


@pytest.mark.parametrize("engine", ENGINES)
def test_collectives_reduce_only_gradients_of_adapters(seen: Seen, engine: str, trained: int) -> None:
    collectives, gradients = seen[0][f"{engine} lora"]["collectives"], 4 * trained
    reduced = sum(collectives.get(kind, (0, 0))[1] for kind in ("all_reduce", "reduce_scatter", "reduce"))
    assert gradients <= reduced <= 2.1 * gradients, "once or once per micro-step, with scalars and padding"
    assert 2.1 * gradients < seen[0]["ddp full"]["collectives"]["all_reduce"][1]


@pytest.mark.parametrize(("engine", "adapter", "more", "reason"), [
    ("pipeline", LORA, {}, "one flat tensor"),
    ("pipeline", {"frozen": "^encoder"}, {}, "one flat tensor"),
    ("zero3", INT8, {}, "whole copy"),
    ("fsdp", INT8, {}, "whole copy"),
    ("zero3", NF4, {"zero_quantized_weights": True}, "a second time"),
    ("ddp", {"frozen": "("}, {}, "not a regular expression"),
])  # fmt: skip
def test_unsupported_frozen_weights_are_refused(
    engine: str, adapter: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        engines.check_adapter(RunSpec.model_validate(spec(engine, more=more, adapter=adapter)))
    assert "\n" not in str(refused.value)
    engines.check_adapter(RunSpec.model_validate(spec(engine, more=more)))
