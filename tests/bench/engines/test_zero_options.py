"""Tests that our options for DeepSpeed have the names, types and defaults of DeepSpeed's own options. If a new version
of DeepSpeed adds, renames or changes an option, these tests fail."""

import typing
from types import UnionType
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from bench.engines.deepspeed import options as ours
from bench.engines.deepspeed.options import STAGES, WRITTEN_OUT, Options, Zero

deepspeed_config = pytest.importorskip("deepspeed.runtime.zero.config")
precision_config = pytest.importorskip("deepspeed.runtime.precision_config")
zenflow_config = pytest.importorskip("deepspeed.runtime.zenflow.zenflow_config")

DELIBERATE = {"stage", *WRITTEN_OUT}  # options that have no default on purpose
PAIRS: list[tuple[type[BaseModel], Any, set[str]]] = [
    (ours.Zero, deepspeed_config.DeepSpeedZeroConfig, set()),
    (ours.OffloadParam, deepspeed_config.DeepSpeedZeroOffloadParamConfig, set()),
    (ours.OffloadOptimizer, deepspeed_config.DeepSpeedZeroOffloadOptimizerConfig, set()),
    (ours.LeafModule, deepspeed_config.DeepSpeedZeroLeafModuleConfig, set()),
    (ours.ZenFlow, zenflow_config.ZenFlowConfig, {"steps_per_epoch"}),  # set by DeepSpeed while it runs
    (ours.Bf16, precision_config.DeepSpeedBF16Config, {"enabled"}),  # `enabled` follows from the run's precision
    # auto_cast is irrelevant, since inputs are integers
    (ours.Fp16, precision_config.DeepSpeedFP16Config, {"enabled", "auto_cast"}),
]
each = pytest.mark.parametrize(("mine", "theirs", "left_out"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))


def fields(model: Any, left_out: set[str]) -> dict[str, Any]:
    """Return the fields of a config class, by their names in a config.json. Deprecated fields and the names in
    `left_out` are omitted."""
    return {
        field.alias or name: field
        for name, field in model.model_fields.items()
        if name not in left_out and not (field.json_schema_extra or {}).get("deprecated")
    }


def plain(default: Any) -> Any:
    """Return a default value as JSON represents it."""
    if isinstance(default, BaseModel):
        default = default.model_dump(mode="json")
    if isinstance(default, dict):
        return {key: plain(value) for key, value in default.items()}
    if isinstance(default, tuple | list):
        return [plain(value) for value in default]
    return default


def kinds(annotation: Any) -> set[str]:
    """Return the names of the plain types (such as int) that a type annotation allows. A nested config class counts as
    dict, and an enumeration as the type of its values."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return {type(value).__name__ for value in typing.get_args(annotation)}
    if origin in (typing.Union, UnionType):
        return set().union(*map(kinds, typing.get_args(annotation)))
    if origin in (list, tuple):
        return {"list"}
    if origin is typing.Annotated:
        return kinds(typing.get_args(annotation)[0])
    if issubclass(annotation, BaseModel):
        return {"dict"}
    return {next((kind for kind in (bool, int, float, str) if issubclass(annotation, kind)), annotation).__name__}


@each
def test_options_have_deepspeeds_names(mine: type[BaseModel], theirs: Any, left_out: set[str]) -> None:
    assert set(mine.model_fields) == set(fields(theirs, left_out))


@each
def test_option_defaults_are_deepspeeds(mine: type[BaseModel], theirs: Any, left_out: set[str]) -> None:
    expected = {
        name: plain(field.get_default(call_default_factory=True)) for name, field in fields(theirs, left_out).items()
    }
    actual = {name: plain(field.get_default()) for name, field in mine.model_fields.items()}
    for name in DELIBERATE & set(actual):
        del expected[name], actual[name]
    assert actual == expected


@each
def test_option_types_are_deepspeeds(mine: type[BaseModel], theirs: Any, left_out: set[str]) -> None:
    expected = {
        name: kinds(field.annotation) - {"NoneType", "Path"} for name, field in fields(theirs, left_out).items()
    }
    actual = {name: kinds(field.annotation) - {"NoneType"} for name, field in mine.model_fields.items()}
    for name in {"nvme_path"} & set(actual):
        assert actual.pop(name) == {"str"}
        assert expected.pop(name) == set()  # the type is Path
    assert actual == expected


def test_every_option_has_its_stages_or_no_effect_in_a_run() -> None:
    idle = {
        "load_from_fp32_weights", "elastic_checkpoint", "stage3_gather_16bit_weights_on_model_save", "legacy_stage1",
        "pipeline_loading_checkpoint", "log_trace_cache_warnings", "enable_sanity_checks",
    }  # fmt: skip
    assert set(STAGES) | idle | {"stage"} == set(Zero.model_fields)
    assert set(STAGES) >= WRITTEN_OUT


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_options_that_affect_comparisons_have_no_default(stage: int) -> None:
    given: dict[str, Any] = {name: 1 for name in WRITTEN_OUT if stage in STAGES[name]}
    Options(stage=stage, **given)
    for name in given:
        with pytest.raises(ValidationError, match=f"{name} is missing"):
            Options(stage=stage, **{key: value for key, value in given.items() if key != name})


@pytest.mark.parametrize(("stage", "name", "value"), [
    (0, "reduce_bucket_size", 1000), (0, "overlap_comm", False), (0, "offload_optimizer", {"device": "cpu"}),
    (1, "offload_param", {"device": "cpu"}), (2, "stage3_max_live_parameters", 0), (1, "zero_hpz_partition_size", 2),
    (3, "round_robin_gradients", True), (3, "allgather_bucket_size", 1000),
])  # fmt: skip
def test_option_of_another_stage_is_refused(stage: int, name: str, value: Any) -> None:
    given = {other: 1 for other in WRITTEN_OUT if stage in STAGES[other]}
    with pytest.raises(ValidationError, match=f"{name}=.* has no effect at stage {stage}"):
        Options.model_validate({"stage": stage, **given, name: value})


def test_normalised_options_are_those_that_differ_from_the_defaults() -> None:
    options = Options(stage=1, reduce_bucket_size=5e7, overlap_comm=False, round_robin_gradients=False)  # type: ignore[arg-type]
    kept = options.model_dump(mode="json", exclude_defaults=True)
    assert kept == {"stage": 1, "reduce_bucket_size": 50_000_000, "overlap_comm": False}
    assert Options.model_validate(kept) == options
