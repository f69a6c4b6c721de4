"""Tests of predicted host memory. The expected values are calculated by hand from the bytes per parameter that
DeepSpeed keeps on hosts. The sum of these bytes over all nodes is the same for any number of nodes."""

import pytest

from bench.config import compose
from bench.core.spec import RunSpec
from bench.predict.memory import PROCESS_BYTES, HostMemory, format_host_memory, predict_host_memory, predict_memory

XXL = 12_921_057_280
OFFLOAD = ("engine.offload_optimizer.device=cpu", "optimizer.implementation=native")


def asked(*overrides: str) -> RunSpec:
    return compose.compose_request(compose.parse_single(["devices_per_node=2", *overrides, "launcher=slurm"])).spec


def low(needed: HostMemory | None, *names: str) -> int:
    assert needed is not None
    return sum(needed.terms[name][0] for name in names)


def test_mt5_xxl_offloads_155_gb_of_fp32_states_and_its_gradients() -> None:
    spec = asked("model=mt5_xxl", "engine=zero2", "devices_per_node=8", *OFFLOAD)
    needed = predict_host_memory(spec)
    assert low(needed, "master weights", "optimizer moments") == pytest.approx(12 * XXL, rel=1e-6)
    assert low(needed, "master weights", "optimizer moments") == pytest.approx(155e9, rel=0.001)
    assert low(needed, "gradients") == pytest.approx(4 * XXL, rel=1e-6)
    # the updated bf16 weights of every rank, and the gradient of one embedding on each of 8 ranks
    assert low(needed, "offload buffers") == pytest.approx(2 * XXL + 8 * 2 * 250_112 * 4096, rel=1e-6)


def test_partial_offload_divides_16_bytes_per_parameter_between_device_and_host() -> None:
    """DeepSpeed has 20 bytes per parameter in bf16. The 2 bytes of weights are on the device, and 2 bytes of gradients
    on the host. Of the other 16 bytes, the host has the configured share (`ratio`), and the device the rest."""
    words = (
        "model=mt5_xxl",
        "engine=zero3",
        "devices_per_node=1",
        *OFFLOAD,
        "engine.offload_optimizer.pin_memory=false",
    )
    spec = asked(*words, "engine.offload_optimizer.ratio=0.25")
    needed = predict_host_memory(spec)
    assert needed is not None
    assert needed.low - low(needed, "processes") == pytest.approx((2 + 16 * 0.25) * XXL, rel=1e-3)
    standing = predict_memory(spec).resident - 2 * 50_000_000  # minus the bucket
    assert standing == pytest.approx((2 + 16 * 0.75) * XXL, rel=1e-3)


def test_host_memory_per_node_falls_with_the_number_of_nodes() -> None:
    words = ("model=mt5_xl", "engine=zero2", "devices_per_node=8", *OFFLOAD)
    one, four = (predict_host_memory(asked(*words, f"nodes={nodes}")) for nodes in (1, 4))
    assert low(one, "optimizer moments") == pytest.approx(4 * low(four, "optimizer moments"), rel=1e-5)
    assert low(one, "processes") == low(four, "processes") == 8 * PROCESS_BYTES["cuda"][0]


def test_flan_t5_xxl_in_fp32_with_both_offloads_takes_24_bytes_per_parameter() -> None:
    """In fp32, the host has six tensors of 4 bytes per parameter, 267 GB in total. Their names in stage3.py of
    DeepSpeed 0.19.8 are: weights (param_groups_fp16_flat_cpu_memory), master weights (a clone in
    _create_fp32_partitions), two moments, accumulated gradients (grad_partitions_flat_buffer), and the gradients that
    AdamW reads (fp32_partitioned_groups_flat[i].grad)."""
    spec = asked(
        "model=t5_v1_1_xxl", "engine=zero3", "precision=fp32", "devices_per_node=8", *OFFLOAD,
        "engine.offload_param.device=cpu",
    )  # fmt: skip
    needed = predict_host_memory(spec)
    assert needed is not None
    assert needed.low - low(needed, "processes") == pytest.approx(267e9, rel=0.002)


def test_pinned_memory_may_be_rounded_up_to_a_power_of_two() -> None:
    pinned, pageable = (
        predict_host_memory(
            asked("model=mt5_xl", "engine=zero2", *OFFLOAD, f"engine.offload_optimizer.pin_memory={pin}")
        )
        for pin in ("true", "false")
    )
    assert pinned is not None
    assert pageable is not None
    part = 4 * 3_742_619_648 // 2  # divided between two ranks
    assert pinned.terms["gradients"] == (2 * part, 2 * 2**33)
    assert pageable.terms["gradients"] == (2 * part, 2 * part)
    # optimizer moments are never pinned
    assert pinned.terms["optimizer moments"] == pageable.terms["optimizer moments"]


@pytest.mark.parametrize("engine", ["ddp", "zero0", "zero2", "zero3"])
def test_host_memory_without_offload_is_that_of_processes(engine: str) -> None:
    needed = predict_host_memory(asked("model=mt5_xxl", f"engine={engine}", "devices_per_node=8"))
    assert needed == HostMemory({"processes": (8 * PROCESS_BYTES["cuda"][0], 8 * PROCESS_BYTES["cuda"][1])})


@pytest.mark.parametrize(("room", "low", "high"), [(80e9, 0, 0), (53e9, 0, 4), (42.5e9, 4, 4)])
def test_stage_2_flattens_weights_on_the_host_if_the_device_has_no_room(room: float, low: int, high: int) -> None:
    """Before training, DeepSpeed copies all weights into one flat tensor, so that two copies exist for a moment. If the
    device's memory, `room`, is too small for both copies, the host holds them: 2 copies × 2 bytes × 12.9e9 parameters
    for each of 8 ranks, 413 GB. `low` and `high` are the ends of the predicted range, in bytes per parameter and rank.
    """
    spec = asked("model=mt5_xxl", "engine=zero2", "nodes=8", "devices_per_node=8")
    needed = predict_host_memory(spec, "cuda", int(room))
    assert needed is not None
    flat = needed.terms.get("flattening", (0, 0))
    assert flat == pytest.approx((8 * low * XXL, 8 * high * XXL), rel=1e-6)


def test_host_memory_of_a_cpu_machine_includes_the_tensors_of_all_ranks() -> None:
    spec = asked("model=tiny", "engine=zero2", "devices_per_node=4", "machine=cpu")
    peak = max(phase.total for phase in predict_memory(spec, "cpu").phases)
    assert low(predict_host_memory(spec, "cpu"), "tensors") == 4 * peak


def test_host_memory_with_nvme_offload_is_unknown() -> None:
    spec = asked(
        "model=tiny", "engine=zero3", "engine.offload_optimizer.device=nvme", "engine.offload_optimizer.nvme_path=/x",
        "optimizer.implementation=native",
    )  # fmt: skip
    assert predict_host_memory(spec) is None
    assert format_host_memory(None, 8, 10**12) == "The host memory of a node is unknown."


def test_host_memory_message_has_the_terms_and_the_fit() -> None:
    needed = HostMemory({"processes": (8 * 10**9, 16 * 10**9), "gradients": (52 * 10**9, 52 * 10**9)})
    assert (
        format_host_memory(needed, 8, None)
        == "A node's host needs 60–68 GB for 8 ranks (processes 8–16, gradients 52)."
    )
    assert format_host_memory(needed, 8, 64 * 10**9).endswith("; it has 64 GB: may fit.")
    assert format_host_memory(needed, 8, 50 * 10**9).endswith("; it has 50 GB: does not fit.")
    assert format_host_memory(needed, 8, 100 * 10**9).endswith("; it has 100 GB: fits.")
