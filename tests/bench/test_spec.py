import json
from typing import Any

import pytest
from pydantic import ValidationError

from bench.config.decode import decode_model
from bench.core.errors import UserError
from bench.core.spec import RunSpec, canonical, config_id


def spec(**fields: Any) -> RunSpec:
    plain: dict[str, Any] = {
        "model": {"name": "tiny", "shape": {"d_model": 128}},
        "engine": {"name": "ddp", "backend": "ddp"},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": 2},
        "devices_per_node": 4,
    }
    return RunSpec.model_validate(plain | fields)


def test_global_batch_and_its_accumulation_are_the_same_point() -> None:
    by_global = spec(batch={"micro": 2, "global": 24})
    by_accumulation = spec(batch={"micro": 2, "accumulation": 3})
    assert by_global.accumulation == 3
    assert by_accumulation.global_batch == 24
    assert config_id(by_global) == config_id(by_accumulation)


@pytest.mark.parametrize(
    "batch", [{"micro": 2, "global": 12}, {"micro": 2, "global": 4}, {"micro": 2, "accumulation": 2, "global": 8}]
)
def test_global_batch_that_does_not_divide_among_ranks_is_refused_with_a_remedy(batch: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=r"batch\.global=\d+ is not .* 4 ranks; set a multiple of 8"):
        spec(batch=batch)


def test_identity_omits_defaults_so_new_fields_keep_old_ids() -> None:
    assert config_id(spec(seed=0)) == config_id(spec())
    assert "seed" not in canonical(spec())
    assert config_id(spec(seed=1)) != config_id(spec())


def test_config_id_with_version_2_of_the_defaults_is_fixed() -> None:
    """If this test fails, a default value of the spec has changed. This changes the ids of all earlier runs. Restore
    the default value, or raise the version number of the defaults."""
    assert config_id(spec()) == "c7c3b3c193"


def test_source_of_a_shape_is_not_part_of_the_identity() -> None:
    cited = spec(model={"name": "tiny", "shape": {"d_model": 128}, "source": "a paper"})
    assert config_id(cited) == config_id(spec())


def test_spec_equals_its_decoded_json() -> None:
    once = spec(batch={"micro": 2, "global": 24}, precision="fp32")
    assert RunSpec.model_validate_json(once.model_dump_json(by_alias=True)) == once


OLD_PROTOCOL = {
    "warmup_steps": 5, "warmup_max_steps": 60, "block_steps": 5, "min_steps": 30, "min_s": 20.0, "max_steps": 500,
    "max_s": 300.0, "width": 0.02, "inspect": True,
}  # fmt: skip
"""Measurement protocol as stored in records of versions 1 and 2."""


def test_spec_with_an_older_protocol_keeps_its_id_and_json() -> None:
    """A spec whose measurement protocol (the settings in `measure`) is the older one keeps version 1 of all default
    values. Its id is a hash of the fields that differ from these defaults. The expected ids were computed when version
    1 was current."""
    old, shorter = spec(measure=OLD_PROTOCOL), spec(measure=OLD_PROTOCOL | {"min_s": 2.0, "width": 0.05})
    assert (config_id(old), config_id(shorter)) == ("56ea551d27", "5981b2839e")
    assert old.model_dump(mode="json")["measure"] == OLD_PROTOCOL
    assert RunSpec.model_validate_json(shorter.model_dump_json(by_alias=True)) == shorter
    assert config_id(spec()) != config_id(old), "a window of a fixed length is another measurement"


def test_spec_with_an_older_protocol_has_the_loss_mean_of_version_1() -> None:
    """All runs with the older measurement protocol averaged the loss over micro-batches. Their records lack the field
    `loss_mean`, so it must be read as `micro_batches`."""
    old = spec(measure=OLD_PROTOCOL)
    assert (old.loss_mean, spec().loss_mean) == ("micro_batches", "tokens")
    assert RunSpec.model_validate_json(old.model_dump_json(by_alias=True)) == old
    written = spec(measure=OLD_PROTOCOL, loss_mean="micro_batches")
    assert written == old and config_id(written) == config_id(old)
    other = spec(measure=OLD_PROTOCOL, loss_mean="tokens")
    assert config_id(other) != config_id(old) and json.loads(canonical(other))["loss_mean"] == "tokens"


def test_error_in_the_protocol_names_the_key_as_written() -> None:
    with pytest.raises(UserError, match=r"^measure\.block_steps=0: "):
        decode_model(RunSpec, spec().model_dump(by_alias=True) | {"measure": {"block_steps": 0}})
    with pytest.raises(UserError, match=r"^measure\.windows_s: no such key; did you mean measure\.window_s"):
        decode_model(RunSpec, spec().model_dump(by_alias=True) | {"measure": {"windows_s": 3}})


@pytest.mark.parametrize(
    ("sequence", "kept"),
    [
        ({}, None),
        ({"encoder": 512, "decoder": 128}, None),
        ({"decoder": 64}, {"decoder": 64}),
        ({"encoder": 512, "decoder": 64}, {"decoder": 64}),
        ({"encoder": 3, "decoder": 4}, {"encoder": 3, "decoder": 4}),
    ],
)
def test_identity_omits_default_lengths_of_span_corruption(
    sequence: dict[str, int], kept: dict[str, int] | None
) -> None:
    """The ids of old records must stay the same, although sequence lengths were separate fields then. As in old
    records, only lengths that differ from their defaults are part of an id."""
    found = spec(sequence=sequence)
    assert found.sequence == {"encoder": 512, "decoder": 128} | sequence
    assert list(found.sequence) == ["encoder", "decoder"]
    assert json.loads(canonical(found)).get("sequence") == kept


def test_ids_from_before_objectives_and_layouts_are_unchanged() -> None:
    """The expected ids were computed by an earlier version of the code, whose specs lacked the fields `objective` and
    `parallel`."""
    assert config_id(spec(sequence={"decoder": 64}, measure=OLD_PROTOCOL)) == "da82cc1bbb"
    assert config_id(spec(sequence={"encoder": 3, "decoder": 4}, measure=OLD_PROTOCOL)) == "1d1555711c"


def test_default_objective_and_layout_are_not_written() -> None:
    written = spec(objective="span_corruption", parallel={"tensor": 1}).model_dump()
    assert written == spec().model_dump()
    assert written.keys().isdisjoint({"objective", "parallel"})


def test_other_objective_and_layout_are_written() -> None:
    other = spec(objective="causal_lm", sequence={"tokens": 1024}, parallel={"tensor": 2})
    assert json.loads(canonical(other)) | {"objective": "causal_lm", "sequence": {"tokens": 1024}} == json.loads(
        canonical(other)
    )
    assert json.loads(canonical(other))["parallel"] == {"tensor": 2}
    assert RunSpec.model_validate_json(other.model_dump_json(by_alias=True)) == other


def test_lengths_must_be_those_of_the_objective() -> None:
    with pytest.raises(
        ValidationError, match="sequence has encoder, decoder, tokens, but objective=span_corruption needs"
    ):
        spec(sequence={"tokens": 5})
    with pytest.raises(ValidationError, match="objective=causal_lm needs sequence"):
        spec(objective="causal_lm")


def test_global_batch_counts_data_parallel_ranks_only() -> None:
    found = spec(nodes=2, batch={"micro": 3, "accumulation": 5}, parallel={"tensor": 2, "pipeline": 2})
    assert (found.world_size, found.data_parallel, found.global_batch) == (8, 2, 3 * 5 * 2)
    by_global = spec(nodes=2, batch={"micro": 3, "global": 30}, parallel={"tensor": 2, "pipeline": 2})
    assert config_id(by_global) == config_id(found)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"parallel": {"tensor": 3}},
            r"tensor=3 × parallel\.pipeline=1: does not divide the 4 ranks; set a divisor",
        ),
        ({"parallel": {"tensor": 8}}, "does not divide the 4 ranks; set a divisor of 4, or use a multiple of 8 ranks"),
        ({"parallel": {"sequence": True}}, "parallel.tensor=1; remove it, or set parallel.tensor=2"),
        (
            {"parallel": {"tensor": 2, "sequence": True}, "sequence": {"decoder": 7}},
            "sequence.decoder=7: is not divisible by parallel.tensor=2; set a multiple of 2",
        ),
        (
            {"parallel": {"pipeline": 2}, "batch": {"micro": 2, "global": 6}},
            "batch.global=6 is not batch.micro=2 × accumulation=any × 2 data-parallel ranks; set a multiple of 4",
        ),
    ],
)
def test_impossible_layout_is_refused_with_value_rule_and_remedy(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        spec(**fields)
