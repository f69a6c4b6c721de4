"""Tests that a spec which an engine cannot run raises an error before any rank starts."""

import subprocess
import sys
from typing import Any, Literal, get_args

import pytest

from bench import engines
from bench.core.engine_facts import EngineFacts, Member
from bench.core.errors import UserError
from bench.core.spec import EngineSpec, RunSpec

Case = tuple[str, dict[str, Any], dict[str, Any], str]
NATIVE = {"optimizer": {"implementation": "native"}}
CPU = {"offload_optimizer": {"device": "cpu"}}
NVME = {"offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"}}
REQUIRED: dict[int, dict[str, Any]] = {
    0: {},
    1: {"reduce_bucket_size": 1000, "overlap_comm": True},
    2: {"reduce_bucket_size": 1000, "overlap_comm": True},
    3: {
        "reduce_bucket_size": 1000,
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": 1000,
        "stage3_param_persistence_threshold": 1000,
        "stage3_max_live_parameters": 1000,
        "stage3_max_reuse_distance": 1000,
    },
}


def check(
    engine: str, options: dict[str, Any], fields: dict[str, Any], device: Literal["cpu", "cuda"] | None = None
) -> None:
    backend = "ddp" if engine == "ddp" else "deepspeed"
    given = {"bucket_cap_mb": 25} if engine == "ddp" else REQUIRED[options.get("stage", int(engine[4]))]
    options = given | ({} if engine == "ddp" else {"stage": int(engine[4])}) | options
    spec = RunSpec.model_validate({
        "model": {"name": "test", "shape": {}},
        "engine": {"name": engine, "backend": backend, "options": options},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": 1, "accumulation": 2},
        "devices_per_node": 4,
        **fields,
    })  # fmt: skip
    file = engines.load(backend)
    file.check(file.Options.model_validate(options), spec, device)


ALLOWED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ddp", {}, {"precision": "fp16"}),
    ("zero1", {}, {"precision": "fp16"}),
    ("zero0", {"data_types": {"grad_accum_dtype": "bf16"}}, {}),
    ("zero2", CPU, NATIVE),
    ("zero2", CPU | {"zero_force_ds_cpu_optimizer": False}, {}),
    ("zero2", {"offload_optimizer": {"device": "none"}}, {}),
    ("zero3", {"offload_optimizer": {"device": "nvme", "nvme_path": "/scratch", "ratio": 0.5}}, NATIVE),
    ("zero3", {"zero_hpz_partition_size": 2}, {}),
    ("zero2", {"reduce_scatter": False, "gradient_predivide_factor": 2.0}, {}),
    ("zero1", {"compute_grad_norm": False}, {"optimizer": {"gradient_clipping": 0}}),
    ("zero2", CPU | {"zenflow": {"update_interval": 2}}, NATIVE),
    ("zero2", CPU | {"zero_force_ds_cpu_optimizer": False}, {"optimizer": {"name": "adamw_8bit"}}),
    ("zero0", {}, {"optimizer": {"name": "adafactor"}}),
    ("ddp", {}, {"optimizer": {"name": "adafactor"}}),
]
REFUSED: list[Case] = [
    ("ddp", {}, NATIVE, "no native optimizer"),
    ("zero1", {"stage": 2}, {}, "contradicts engine=zero1; set engine=zero2"),
    ("zero0", {}, {"precision": "fp16"}, "divides gradients by a loss scale"),
    ("zero0", {"data_types": {"grad_accum_dtype": "fp32"}}, {}, "accumulates gradients in the run's precision"),
    ("zero1", {"bf16": {"bf16_master_weights_and_grads": True}}, {"precision": "fp32"}, "with precision=fp32"),
    ("zero0", {"bf16": {"bf16_master_weights_and_grads": True}}, {}, "supports only fp32 master weights"),
    ("zero1", {"fp16": {"fp16_master_weights_and_grads": True}}, {}, "set precision=fp16"),
    ("zero1", {"bf16": {"bf16_optimizer_states": True}}, {}, "needs bf16 master weights"),
    ("zero2", {"gradient_predivide_factor": 2.0}, {}, "divides gradients only after their sum"),
    ("zero3", {"prescale_gradients": True}, {}, "set engine.reduce_scatter=false"),
    ("zero1", {"compute_grad_norm": False}, {}, "clipping needs the gradient norm"),
    ("zero1", {"legacy_stage1": True}, {}, "removed it"),
    ("zero3", {"offload_param": {"device": "nvme"}}, {}, "set engine.offload_param.nvme_path"),
    ("zero3", {"offload_optimizer": {"device": "nvme"}}, NATIVE, "set engine.offload_optimizer.nvme_path"),
    ("zero2", NVME, NATIVE, "need stage 3"),
    ("zero3", {"offload_param": {"device": "nvme", "nvme_path": "swap"}}, {}, "nvme_path=swap: a relative path"),
    ("zero3", NVME | {"zero_force_ds_cpu_optimizer": False}, {"optimizer": {"name": "adamw_8bit"}},
     "optimizer.name=adamw_8bit with engine.offload_optimizer: DeepSpeed swaps and splits only fp32 states"),
    ("zero2", CPU, {"optimizer": {"name": "adamw_8bit"}}, "slow on a CPU; set optimizer.name=adamw, or set"),
    ("zero1", {}, {"optimizer": {"name": "adafactor"}}, "need whole matrices, and a rank of engine zero1 has a part"),
    ("zero1", {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, NATIVE, "need stage 3"),
    ("zero2", CPU, {}, "slow on a CPU"),
    ("zero3", {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "zero_force_ds_cpu_optimizer": False}, {},
     "needs DeepSpeed's CPUAdam"),
    ("zero2", {"zenflow": {"update_interval": 2}}, NATIVE, "divides AdamW's update"),
    ("zero2", CPU | {"zenflow": {"update_interval": 4}}, NATIVE, "set engine.zenflow.update_interval=2"),
    ("zero3", {"zero_hpz_partition_size": 3}, {}, "does not divide the 4 ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "options", "fields"), ALLOWED)
def test_supported_specs_pass_the_check(engine: str, options: dict[str, Any], fields: dict[str, Any]) -> None:
    check(engine, options, fields, device="cuda")


@pytest.mark.parametrize(("engine", "options", "fields", "message"), REFUSED)
def test_unsupported_specs_are_refused(
    engine: str, options: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check(engine, options, fields)


@pytest.mark.parametrize(("options", "fields", "message"), [
    ({}, {"precision": "fp16"}, "fp16 on a CPU"),
    ({"zero_quantized_weights": True}, {}, "engine.zero_quantized_weights on a CPU"),
    ({"zero_quantized_gradients": True}, {}, "runs on GPUs only"),
])  # fmt: skip
def test_options_that_need_a_gpu_are_refused_on_a_cpu(
    options: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    check("zero3", options, fields, device=None)
    check("zero3", options, fields, device="cuda")
    with pytest.raises(UserError, match=message):
        check("zero3", options, fields, device="cpu")


def test_unknown_engine_is_refused() -> None:
    with pytest.raises(UserError, match="no such file in bench/engines"):
        engines.load("precision")
    with pytest.raises(UserError, match="did you mean deepspeed"):
        engines.load("deepsped")


@pytest.mark.processes
def test_loading_an_engine_imports_no_torch() -> None:
    program = (
        "import sys; from bench import engines\n"
        "for name in ('ddp', 'deepspeed'): engines.load(name)\n"
        "assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=250)


class WithRequired:
    """Engine without optional methods."""

    def train_step(self, micro_batches: object) -> None: ...
    def gradient_norm(self) -> None: ...
    def skipped_steps(self) -> int:
        return 0

    def config(self) -> dict[str, object]:
        return {}


class WithIdleTime(WithRequired):
    """Engine whose only optional method is `idle_s`. It lacks the methods `save` and `load`."""

    def idle_s(self) -> float:
        return 0.0


def test_engine_without_an_announced_member_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def announced(*members: Member) -> None:
        facts = EngineFacts(label="toy", members=frozenset(members))
        monkeypatch.setattr(engines, "facts", lambda spec: facts)

    spec = RunSpec.model_construct(engine=EngineSpec(name="toy", backend="toy"))
    announced("idle_s")
    engines.check_members(WithIdleTime(), spec)
    announced("idle_s", "save", "load")
    with pytest.raises(UserError, match=r"engine\.backend=toy: facts.py lists load, save, but WithIdleTime does not"):
        engines.check_members(WithIdleTime(), spec)
    with pytest.raises(
        UserError, match="build returned NoneType, which does not define config, gradient_norm, skipped"
    ):
        engines.check_members(None, spec)


def test_every_optional_member_has_a_declaration() -> None:
    described = {name for name in vars(engines.OptionalMembers) if not name.startswith("_")}
    assert described == set(get_args(Member))
