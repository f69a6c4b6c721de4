from typing import Any

import pytest
from pydantic import ValidationError

from bench.spec import RunSpec, canonical, config_id


def spec(**fields: Any) -> RunSpec:
    plain: dict[str, Any] = {
        "model": {"name": "tiny", "shape": {"d_model": 128}},
        "engine": {"name": "ddp", "backend": "ddp"},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": 2},
        "devices_per_node": 4,
    }
    return RunSpec.model_validate(plain | fields)


def test_a_global_batch_and_its_accumulation_are_the_same_point() -> None:
    by_global = spec(batch={"micro": 2, "global": 24})
    by_accumulation = spec(batch={"micro": 2, "accumulation": 3})
    assert by_global.accumulation == 3
    assert by_accumulation.global_batch == 24
    assert config_id(by_global) == config_id(by_accumulation)


@pytest.mark.parametrize(
    "batch", [{"micro": 2, "global": 12}, {"micro": 2, "global": 4}, {"micro": 2, "accumulation": 2, "global": 8}]
)
def test_a_global_batch_that_the_ranks_cannot_make_is_refused_with_value_rule_and_remedy(batch: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=r"batch\.global=\d+ is not .* 4 ranks; choose a multiple of 8"):
        spec(batch=batch)


def test_identity_leaves_defaults_out_so_that_a_new_field_renames_no_old_run() -> None:
    assert config_id(spec(seed=0)) == config_id(spec())
    assert "seed" not in canonical(spec())
    assert config_id(spec(seed=1)) != config_id(spec())


def test_identity_by_version_1_of_the_defaults_is_frozen() -> None:
    """A default that changed would rename every run that was ever made: raise the version of the defaults instead."""
    assert config_id(spec()) == "56ea551d27"


def test_where_a_shape_comes_from_is_no_part_of_what_is_measured() -> None:
    cited = spec(model={"name": "tiny", "shape": {"d_model": 128}, "source": "a paper"})
    assert config_id(cited) == config_id(spec())


def test_a_spec_survives_its_own_json() -> None:
    once = spec(batch={"micro": 2, "global": 24}, precision="fp32")
    assert RunSpec.model_validate_json(once.model_dump_json(by_alias=True)) == once


def test_the_protocol_refuses_a_warm_up_that_cannot_end() -> None:
    with pytest.raises(ValidationError, match=r"warmup_steps=9 exceeds measure\.warmup_max_steps=5"):
        spec(measure={"warmup_steps": 9, "warmup_max_steps": 5})
