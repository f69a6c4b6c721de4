"""Tests of the predicted step time: its parts add up, the overlap of communication equals a hand calculation, ranks
slow each other down on a shared processor, and numbers that a machine file lacks are reported."""

import pytest

from bench.config import compose
from bench.core.errors import UserError
from bench.core.machine import Calibration, CollectiveKind, CollectiveTime, Machine, MatmulRate
from bench.core.spec import RunSpec
from bench.predict.step_time import StepTime, predict_step_time
from bench.predict.step_time.compute import describe_assumed_rate
from bench.predict.work import compute_flops_per_step

H200 = compose.compose_request([("machine", "h200"), ("devices_per_node", 8)], None).machine
POINT = ("model=mt5_base", "devices_per_node=8", "batch.micro=8", "launcher=slurm")


def spec(*overrides: str) -> RunSpec:
    return compose.compose_request(compose.parse_single([*POINT, *overrides]), None).spec


def with_links(bytes_per_s: float) -> Machine:
    return H200.model_copy(update={"intra_node_bytes_per_s": bytes_per_s, "inter_node_bytes_per_s": bytes_per_s})


def cpu(ranks: int, *slowdown: float, gather_s: float = 0.01) -> Machine:
    """Return a calibrated CPU machine with `ranks` ranks. Every collective takes `gather_s` seconds for any payload.
    `slowdown` are the factors by which 1, 2, … ranks on one processor slow each other down."""
    kinds: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    return Machine(
        name="bed",
        device="cpu",
        memory_bytes_per_s=1e10,
        calibration=Calibration(
            matmul=(MatmulRate(precision="fp32", m=128, k=128, n=128, tflops=0.1),),
            slowdown=slowdown,
            collectives=tuple(
                CollectiveTime(kind=kind, nodes=1, ranks=ranks, payload_bytes=size, s=gather_s)
                for kind in kinds
                for size in (1, 10**9)
            ),
        ),
    )


def on_cpu(engine: str, ranks: int) -> RunSpec:
    asked = ["model=tiny", f"engine={engine}", "precision=fp32", f"devices_per_node={ranks}", "machine=cpu"]
    return compose.compose_request(compose.parse_single(asked), None).spec


@pytest.mark.parametrize("engine", ["ddp", "zero0", "zero1", "zero2", "zero3"])
def test_parts_add_up_to_a_step_time_inside_its_interval(engine: str) -> None:
    found = predict_step_time(spec(f"engine={engine}"), H200)
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert found.low_s <= found.step_s <= found.high_s
    assert min(found.parts.values()) > 0


def test_passes_are_slower_than_the_matmul_ceiling() -> None:
    asked = spec("engine=zero1")
    found = predict_step_time(asked, H200)
    ceiling = 1e12 * H200.matmul_ceiling_tflops["bf16"]
    assert found.parts["forward"] + found.parts["backward"] > compute_flops_per_step(asked).hardware / 8 / ceiling
    assert found.mfu and found.mfu == pytest.approx(compute_flops_per_step(asked).model / found.step_s / (8 * 989e12))


def test_checkpointing_adds_recomputation_to_the_step() -> None:
    plain, again = (predict_step_time(spec(f"activation_checkpointing={on}"), H200) for on in ("false", "true"))
    assert "recomputation" not in plain.parts
    assert again.step_s - plain.step_s == pytest.approx(again.parts["recomputation"], rel=0.05)


def test_gradient_reduction_is_hidden_by_backward_except_for_the_last_bucket() -> None:
    fast = with_links(1e15)
    found = predict_step_time(spec("engine=ddp"), with_links(1e12))
    assert found.hidden_s > 0
    whole = found.hidden_s + found.parts["all-reduce"]
    embedding = 250_112 * 768 / 582_401_280  # the share of the embedding in all gradients; its bucket is complete last
    assert found.parts["all-reduce"] == pytest.approx(whole * embedding)
    assert predict_step_time(spec("engine=ddp"), fast).parts["backward"] == found.parts["backward"]


def test_hidden_communication_is_limited_by_backward_and_slow_links_bound_the_step() -> None:
    found = predict_step_time(spec("engine=ddp"), with_links(1e9))
    assert found.hidden_s <= found.parts["backward"]
    assert found.parts["all-reduce"] > found.parts["backward"]
    assert found.bound == "links inside a node"


def test_stage_0_has_no_hidden_communication() -> None:
    assert predict_step_time(spec("engine=zero0"), H200).hidden_s == 0


def test_accumulation_repeats_compute_and_reduction_of_stage_2_but_not_the_update() -> None:
    once, four = (predict_step_time(spec("engine=zero2", f"batch.accumulation={n}"), H200) for n in (1, 4))
    assert four.parts["forward"] == pytest.approx(4 * once.parts["forward"])
    assert four.parts["optimizer"] == once.parts["optimizer"]
    assert four.parts["all-reduce"] > once.parts["all-reduce"]


def test_rehearsed_time_replaces_calibrated_rates() -> None:
    found = predict_step_time(on_cpu("zero1", 2), cpu(2), "cpu", rehearsed_s=0.5)
    passes = [found.parts[name] for name in ("forward", "backward", "optimizer")]
    assert sum(passes) == pytest.approx(0.5)
    # 10 ms each for the one gradient bucket, the norm and the gather of weights; nothing overlaps on a CPU
    assert found.step_s == pytest.approx(0.5 + 0.03)


def test_ranks_on_one_processor_have_the_calibrated_slowdown() -> None:
    def computing(found: StepTime) -> float:
        return sum(found.parts[name] for name in ("forward", "backward", "optimizer"))

    alone = predict_step_time(on_cpu("zero0", 1), cpu(1, 1.0, 1.5), "cpu", rehearsed_s=0.2)
    two = predict_step_time(on_cpu("zero0", 2), cpu(2, 1.0, 1.5), "cpu", rehearsed_s=0.2)
    four = predict_step_time(on_cpu("zero0", 4), cpu(4, 1.0, 1.5), "cpu", rehearsed_s=0.2)
    assert [computing(t) for t in (alone, two, four)] == pytest.approx([0.2, 0.3, 0.6])


@pytest.mark.parametrize(("engine", "times"), [("zero0", 1), ("zero1", 1), ("fsdp", 2.65), ("zero2", 4), ("zero3", 4)])
def test_work_on_the_host_is_repeated_only_if_each_micro_step_handles_the_gradients(engine: str, times: int) -> None:
    """DeepSpeed's stages 2 and 3 reduce gradients in every micro-step, stages 0 and 1 only in the last one. About half
    of FSDP2's work is that of its optimizer."""

    def backward_s(engine: str, steps: int) -> float:
        alone = spec("model=mt5_large", f"engine={engine}", "devices_per_node=1", f"batch.accumulation={steps}")
        return predict_step_time(alone, H200).parts["backward"]

    once, four = (backward_s(engine, n) - backward_s("ddp", n) for n in (1, 4))
    assert four == pytest.approx(times * once, rel=0.05) and once > 0


def test_calibrated_products_are_at_most_as_fast_as_the_sustained_rate() -> None:
    measured = compose.compose_request(
        compose.parse_single(["machine=h200_measured", "launcher=slurm", "devices_per_node=1"])
    ).machine
    lasting = measured.sustained_tflops["bf16"]
    assert lasting < measured.matmul_ceiling_tflops["bf16"], "a burst is faster"
    halved = measured.model_copy(update={"sustained_tflops": {"bf16": lasting / 2}})
    point = spec("model=gpt2_xl", "engine=ddp", "devices_per_node=1", "batch.micro=8")
    usual, slow = (predict_step_time(point, machine).step_s for machine in (measured, halved))
    assert 1.3 * usual < slow < 2 * usual


def test_straggler_adds_a_part_to_the_step() -> None:
    plain, slowed = (predict_step_time(spec(), H200, straggler=factor) for factor in (1.0, 1.25))
    own = sum(plain.parts[name] for name in ("forward", "backward", "optimizer"))
    assert slowed.parts["stragglers"] == pytest.approx(own / 4)


def test_matrix_products_use_the_sustained_rate_or_else_the_ceiling_or_peak() -> None:
    def forward_s(**rates: dict[str, float]) -> float:
        plain = H200.model_dump() | {"sustained_tflops": {}, "matmul_ceiling_tflops": {}} | rates
        return predict_step_time(spec("engine=zero1"), Machine.model_validate(plain)).parts["forward"]

    both = forward_s(matmul_ceiling_tflops={"bf16": 800.0}, sustained_tflops={"bf16": 500.0})
    assert both == forward_s(sustained_tflops={"bf16": 500.0})
    assert both == forward_s(matmul_ceiling_tflops={"bf16": 500.0})  # an older file without a sustained rate
    assert forward_s(matmul_ceiling_tflops={"bf16": 800.0}) < both
    assert forward_s() == forward_s(sustained_tflops={"bf16": 0.775 * 0.8 * 989})  # only the peak is known


def test_assumed_rate_is_reported_and_no_interval_is_faster_than_the_peak() -> None:
    large = spec("model=llama_3_8b", "engine=fsdp", "precision=fp32", "batch.micro=4")
    found = predict_step_time(large, H200)
    # 0.93 of the peak, at the fast end of the interval, would be faster than the peak
    assert found.low_s == pytest.approx(compute_flops_per_step(large).model / (8 * 67e12))
    assert found.mfu and found.low_s < found.step_s < found.high_s
    words = "machine=h200 has neither sustained_tflops.fp32 nor matmul_ceiling_tflops.fp32: the rate of matrix "
    assert describe_assumed_rate(H200, "fp32", "cuda") == f"{words}products is assumed to be 0.93 × peak_tflops.fp32."
    assert describe_assumed_rate(H200, "bf16", "cuda") == ""
    bare = H200.model_copy(update={"sustained_tflops": {}, "matmul_ceiling_tflops": {}})
    assert "0.62 × peak_tflops.bf16" in describe_assumed_rate(bare, "bf16", "cuda")
    assert describe_assumed_rate(cpu(1), "fp32", "cpu") == ""


def test_attention_has_its_own_share_of_the_matmul_rate() -> None:
    slow = predict_step_time(spec(), H200.model_copy(update={"attention_of_matmul": 0.1}))
    assert slow.parts["forward"] > predict_step_time(spec(), H200).parts["forward"]


def test_machine_without_a_rate_is_refused() -> None:
    with pytest.raises(UserError, match=r"machine=auto has no peak_tflops\.bf16"):
        predict_step_time(spec(), Machine(name="auto"))
    with pytest.raises(UserError, match="inter_node_bytes_per_s"):
        predict_step_time(spec("nodes=2"), H200.model_copy(update={"inter_node_bytes_per_s": None}))


def test_step_time_with_offload_is_not_predicted() -> None:
    asked = spec("engine=zero2", "engine.offload_optimizer.device=cpu", "optimizer.implementation=native")
    with pytest.raises(UserError, match="not predicted; measure it"):
        predict_step_time(asked, H200)


def test_step_time_with_quantised_collectives_is_not_predicted() -> None:
    with pytest.raises(UserError, match="quantised"):
        predict_step_time(spec("engine=zero3", "engine.zero_quantized_weights=true"), H200)


def test_communication_has_its_own_relative_error() -> None:
    found = predict_step_time(spec("engine=zero0"), H200)
    computing = found.step_s - found.exposed_s
    assert found.step_s - found.low_s == pytest.approx(0.25 * computing + 0.23 * found.exposed_s)


@pytest.mark.parametrize("bytes_per_s", [1.25e10, 1e11, 4e11])
def test_what_bounds_a_step_shortens_it_most_when_it_becomes_faster(bytes_per_s: float) -> None:
    asked = spec("engine=fsdp", "nodes=4", "model=llama_2_7b", "sequence.tokens=2048", "batch.micro=1")
    machine = H200.model_copy(update={"inter_node_bytes_per_s": bytes_per_s})
    rates = {name: 2 * rate for name, rate in machine.sustained_tflops.items()}
    found = predict_step_time(asked, machine)
    with_links = predict_step_time(asked, machine.model_copy(update={"inter_node_bytes_per_s": 2 * bytes_per_s}))
    with_rates = predict_step_time(asked, machine.model_copy(update={"sustained_tflops": rates}))
    assert (found.bound == "links between nodes") == (with_links.step_s < with_rates.step_s)
