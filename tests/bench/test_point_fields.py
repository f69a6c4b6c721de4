"""Tests of a table of the fields of a point. The code ignores some fields for some purposes. For example, some fields
are not part of the id of a configuration. The table lists these purposes for each field, and must agree with the code.
"""

from typing import Any

import pytest

from analysis.questions import describe_protocol, describe_variants
from bench.core.point_fields import FIELDS, flatten, is_shown, select
from bench.core.spec import AdapterSpec, LearningSpec, RunSpec, config_id
from bench.predict.neighbours import format_decisive

ONE: dict[str, Any] = {
    "model": {"name": "tiny", "shape": {"d_model": 64}},
    "engine": {"name": "zero2", "backend": "deepspeed", "options": {"stage": 2}},
    "data": {"name": "synthetic", "source": "synthetic"},
    "batch": {"micro": 4, "accumulation": 2},
    "devices_per_node": 4,
}
OTHER: dict[str, Any] = {
    "model.name": "small", "model.shape.d_model": 128, "model.family": "gpt", "model.parameters": 7,
    "model.source": "a paper", "model.attention": "eager", "model.dropout": 0.1, "model.loss_chunk_tokens": 64,
    "model.compile": "blocks", "model.checkpoint": "x",
    "engine.name": "zero3", "engine.backend": "ddp", "engine.options.stage": 3,
    "data.name": "text", "data.source": "text", "data.workers": 1, "data.prefetch": 3, "data.pin_memory": True,
    "batch.micro": 8, "batch.accumulation": 4, "nodes": 2, "devices_per_node": 8, "sequence.encoder": 64,
    "sequence.decoder": 32, "parallel.tensor": 2, "precision": "fp32", "activation_checkpointing": True,
    "optimizer.implementation": "fused", "optimizer.lr": 0.1, "optimizer.betas": [0.8, 0.9], "optimizer.eps": 0.1,
    "optimizer.weight_decay": 0.1, "optimizer.gradient_clipping": 0.5, "learning.tokens": 1_000_000, "seed": 1,
    "adapter.rank": 8, "adapter.frozen": "^encoder",
    "measure.max_s": 9.0, "measure.inspect": False,
}  # fmt: skip
"""For each field of a point, a value that differs from the value in ONE."""
APART = {"model.name", "engine.name", "parallel.tensor", "learning.tokens"}
"""Fields that have their own columns, or whose change also changes other fields."""


def changed(field: str) -> RunSpec:
    """Return a copy of the spec ONE in which this field has another value."""
    plain = RunSpec.model_validate(ONE).model_dump(mode="json", by_alias=True)
    plain["batch"].pop("global")
    *way, name = field.split(".")
    inner = plain
    for part in way:
        inner = inner.setdefault(part, {})
    inner[name] = OTHER[field]
    return RunSpec.model_validate(plain)


def row(field: str) -> Any:
    """Return the entry of a field in the table FIELDS. The entry states whether the config_id, the losses and the step
    time depend on the field. A field without an entry of its own has the entry of its group (such as `data`). If the
    group has no entry either, return None: config_id, losses and step time all depend on the field."""
    return FIELDS.get(field) or FIELDS.get(field.partition(".")[0])


@pytest.mark.parametrize("field", OTHER)
def test_changed_field_affects_exactly_the_properties_in_its_role(field: str) -> None:
    one, other = RunSpec.model_validate(ONE), changed(field)
    role = row(field)
    assert (config_id(one) != config_id(other)) == (role is None or role.identity)
    assert (format_decisive(one) != format_decisive(other)) == (role is None or role.step_time)
    losses = [select(spec.model_dump(mode="json", by_alias=True), "losses") for spec in (one, other)]
    # With the same micro-batch, another layout or accumulation changes the global batch, and therefore the losses.
    makes_batch = field in ("parallel.tensor", "batch.accumulation")
    assert (losses[0] != losses[1]) == (role is None or role.losses or makes_batch)


@pytest.mark.parametrize(
    "field", sorted(OTHER.keys() - {"model.name", "engine.name", "parallel.tensor", "learning.tokens"})
)
def test_field_without_a_column_is_named_as_variant_or_protocol(field: str) -> None:
    specs = {"one": RunSpec.model_validate(ONE), "other": changed(field)}
    variants = {text.partition("=")[0] for text in describe_variants(specs).values()} - {""}
    of_protocol = field.startswith("measure.")
    assert bool(describe_protocol(specs.values())) == of_protocol
    shown = is_shown(field) or field == "model.source" or of_protocol
    assert variants == (set() if shown else {field.removeprefix("engine.options.").removeprefix("model.")})


def test_every_role_has_an_existing_field_and_stays_within_its_group() -> None:
    known = {
        "objective",
        "loss_mean",
        "parallel.tensor",
        "model.source",
        *(f"adapter.{name}" for name in AdapterSpec.model_fields),
        "model.checkpoint",
        *(f"learning.{name}" for name in LearningSpec.model_fields),
        *(name for name, _ in flatten(RunSpec.model_validate(ONE))),
    }
    for name, role in FIELDS.items():
        assert any(field == name or field.startswith(f"{name}.") for field in known), name
        group = FIELDS.get(name.partition(".")[0], role)
        assert all(whole or not part for whole, part in zip(group[:3], role[:3], strict=True)), name
