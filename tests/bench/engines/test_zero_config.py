"""Tests of the configuration that is built for DeepSpeed from a spec. They do not import torch."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import engines
from bench.core.spec import RunSpec
from bench.engines.deepspeed.facts import build_deepspeed_config
from bench.engines.deepspeed.options import Options

CONF = Path(__file__).parents[3] / "conf/engine"
PRESETS = sorted(path.stem for path in CONF.glob("*.yaml"))


def preset(name: str, **fields: Any) -> RunSpec:
    """Return a spec with the engine preset conf/engine/<name>.yaml. Engine options whose values equal the defaults are
    removed, as they are when a user's configuration is read."""
    plain = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert plain.pop("name") == name
    backend = plain.pop("backend")
    options = engines.load(backend).Options(**plain).model_dump(mode="json", exclude_defaults=True)
    given = {
        "model": {"name": "test", "shape": {}},
        "engine": {"name": name, "backend": backend, "options": options},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": 4, "accumulation": 3},
        "nodes": 2,
        "devices_per_node": 4,
    }
    return RunSpec.model_validate(given | fields)


def config(name: str = "zero2", more: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    spec = preset(name, **fields)
    return build_deepspeed_config(Options.model_validate(spec.engine.options | (more or {})), spec)


def test_ddp_and_every_zero_stage_have_a_preset() -> None:
    assert {"ddp", "zero0", "zero1", "zero2", "zero3"} <= set(PRESETS)


_LOOPED = {"parallel": {"pipeline": 2, "stages_per_rank": 2}, "batch": {"micro": 1, "accumulation": 4}}
PLACED = {"pipeline": {"parallel": {"pipeline": 2}}, "interleaved": _LOOPED, "modular": _LOOPED, "lga": _LOOPED}
"""Additional fields of the spec that pipeline presets need."""


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_pass_the_check_of_their_engine(name: str) -> None:
    spec = preset(name, **PLACED.get(name, {}))
    engine = engines.load(spec.engine.backend)
    for device in (None, "cpu", "cuda"):
        engine.check(engine.Options.model_validate(spec.engine.options), spec, device)


def test_presets_of_stages_1_to_3_have_equal_buckets_and_overlap() -> None:
    buckets = {preset(f"zero{stage}").engine.options["reduce_bucket_size"] for stage in (1, 2, 3)}
    overlap = {preset(f"zero{stage}").engine.options["overlap_comm"] for stage in (1, 2, 3)}
    assert (len(buckets), overlap) == (1, {True})


def test_batch_sizes_in_the_deepspeed_config_are_those_of_the_spec() -> None:
    given = config()
    assert given["train_batch_size"] == 4 * 3 * 8
    assert given["train_micro_batch_size_per_gpu"] == 4
    assert given["gradient_accumulation_steps"] == 3


@pytest.mark.parametrize("clipping", [0.0, 1.0, 2.5])
def test_deepspeed_config_always_has_gradient_clipping(clipping: float) -> None:
    assert config(optimizer={"gradient_clipping": clipping})["gradient_clipping"] == clipping


@pytest.mark.parametrize(("implementation", "torch_adam", "fused"), [
    ("torch", True, None), ("fused", True, True), ("native", False, None),
])  # fmt: skip
def test_deepspeed_config_has_every_setting_of_adamw(implementation: str, torch_adam: bool, fused: bool | None) -> None:
    given = config(optimizer={"implementation": implementation, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.2})
    params = given["optimizer"]["params"]
    assert given["optimizer"]["type"] == "AdamW"
    assert (params["torch_adam"], params.get("fused"), params["adam_w_mode"]) == (torch_adam, fused, True)
    assert (params["betas"], params["eps"], params["weight_decay"]) == ([0.8, 0.99], 1e-6, 0.2)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_data_types_default_to_the_precision(precision: str) -> None:
    given = config(precision=precision)
    assert [given[section]["enabled"] for section in ("bf16", "fp16")] == [precision == "bf16", precision == "fp16"]
    assert given["communication_data_type"] == given["data_types"]["grad_accum_dtype"] == precision


def test_data_types_are_configurable() -> None:
    given = config(more={"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}})
    assert given["communication_data_type"] == given["data_types"]["grad_accum_dtype"] == "fp32"


def test_deepspeed_config_disables_its_measurements_and_prints() -> None:
    given = config()
    assert not given["wall_clock_breakdown"]
    assert not given["flops_profiler"]["enabled"]
    assert "comms_logger" not in given, "the presence of this section enables the logger, whatever its values"
    assert given["timers"]["throughput"] == {"enabled": False, "synchronized": False}
    assert given["steps_per_print"] is None


@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_reads_the_zero_section_unchanged(stage: int) -> None:
    theirs = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    section = config(f"zero{stage}")["zero_optimization"]
    assert section["stage"] == stage
    read = theirs(**section).model_dump(mode="json", by_alias=True)
    assert {name: read[name] for name in section} == section


def test_offload_and_gather_options_are_in_the_deepspeed_config() -> None:
    offload = {"device": "nvme", "nvme_path": "/scratch", "ratio": 0.5}
    section = config("zero3", {"offload_optimizer": offload, "stage3_allgather_sequential": True})["zero_optimization"]
    assert section["offload_optimizer"] | offload == section["offload_optimizer"]
    assert section["stage3_allgather_sequential"] is True
    assert "offload_param" not in section
