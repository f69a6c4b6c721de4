"""Tests of the predicted step time of a pipeline. Idle time is compared with hand calculations, and the exchanges of
tensor parallelism with a closed form. Other tests check relations that hold on every machine."""

from typing import Any

import pytest
from simulated_steps import simulate_schedule

from bench import engines, models
from bench.config import compose
from bench.core.engine_costs import PipelineCosts
from bench.core.spec import RunSpec
from bench.engines.distributed.schedule import PipelineSize, ScheduleName, build_computation, build_schedule
from bench.engines.distributed.simulation import list_moments
from bench.engines.pipeline import costs
from bench.predict.memory import predict_memory
from bench.predict.memory.stages import TensorSlices
from bench.predict.step_time import StepTime, predict_step_time
from bench.predict.step_time.pipeline import list_exchanges
from bench.predict.work import compute_blocks
from bench.predict.workload import Software, build_workload, get_network

FORWARD_S, BACKWARD_S = 1.0, 2.0


def build(*words: str) -> RunSpec:
    given = ["machine=a100_80", "model=gpt_22b", "devices_per_node=8", "batch.micro=1", *words]
    return compose.compose_request(compose.parse_single(given)).spec


MACHINE = compose.compose_request([("machine", "a100_80"), ("devices_per_node", 8)], None).machine


def find_costs(spec: RunSpec) -> PipelineCosts:
    predict_costs, network = engines.facts(spec).pipeline, models.build_network(spec.model)
    assert predict_costs and network
    return predict_costs(spec, network, "cuda", False)


def predict(*words: str) -> StepTime:
    return predict_step_time(build(*words), MACHINE)


@pytest.mark.parametrize(("words", "stages"), [
    (["engine=pipeline", "engine.schedule=1f1b"], 1), (["engine=pipeline", "engine.schedule=gpipe"], 1),
    (["engine=interleaved", "parallel.stages_per_rank=3"], 3), (["engine=modular", "parallel.stages_per_rank=3"], 3),
])  # fmt: skip
@pytest.mark.parametrize("micro_batches", [8, 24])
def test_step_of_equal_stages_has_the_bubble_of_the_closed_form(
    words: list[str], stages: int, micro_batches: int
) -> None:
    """With p ranks, v stages per rank and m micro-batches, a step takes (v m + p - 1) (f + b). Here f and b are the
    seconds that one stage needs for the forward and the backward of a micro-batch."""
    spec = build(*words, "parallel.pipeline=4", f"batch.accumulation={micro_batches}")
    forward_s, backward_s = [FORWARD_S] * 4 * stages, [BACKWARD_S] * 4 * stages
    ends_s = find_costs(spec).simulate(forward_s, backward_s, lambda source, target: 0.0)
    assert max(ends_s) == pytest.approx((stages * micro_batches + 3) * (FORWARD_S + BACKWARD_S))


def test_gpipe_step_includes_one_transfer_time_in_each_direction() -> None:
    spec = build("engine=pipeline", "engine.schedule=gpipe", "parallel.pipeline=2", "batch.accumulation=8")
    ends_s = find_costs(spec).simulate([FORWARD_S] * 2, [BACKWARD_S] * 2, lambda source, target: 0.25)
    assert ends_s == pytest.approx((9 * 3 + 0.5, 9 * 3 + 0.25 - BACKWARD_S))


def test_parts_of_a_pipeline_step_add_up_and_idle_time_is_the_bubble() -> None:
    """Ranks are idle only while the pipeline fills and drains. So idle seconds are equal for 4 and for 64
    micro-batches."""
    few, many = (
        predict("engine=pipeline", "parallel.pipeline=4", f"batch.accumulation={number}") for number in (4, 64)
    )
    assert many.parts["idle"] == pytest.approx(few.parts["idle"], rel=0.05)
    assert many.parts["forward"] == pytest.approx(16 * few.parts["forward"])
    stage_s = (few.parts["forward"] + few.parts["backward"]) / 4
    assert few.parts["idle"] == pytest.approx(3 * stage_s, rel=0.1)
    assert few.step_s == pytest.approx(sum(few.parts.values()))
    passing_s = [sum(time.parts[name] for name in ("forward", "backward", "idle")) for time in (few, many)]
    assert passing_s[1] / passing_s[0] == pytest.approx((64 + 3) / (4 + 3), rel=0.03)


def test_several_stages_per_rank_reduce_idle_time_by_less_than_their_number() -> None:
    words = ("parallel.pipeline=4", "batch.accumulation=8")
    plain = predict("engine=pipeline", *words).parts["idle"]
    looped = predict("engine=interleaved", "parallel.stages_per_rank=4", *words).parts["idle"]
    assert 1 / 4 < looped / plain < 0.5


def test_fused_kernels_have_the_traffic_and_launches_of_compiled_blocks() -> None:
    spec = build("engine=pipeline", "parallel.pipeline=2", "model.attention=eager")
    network, load = get_network(spec), build_workload(spec, "cuda")
    by_python = load._replace(software=Software(fused=True, started_unfused=True))
    plain, compiled, fused, traced = (
        compute_blocks(network, one)
        for one in (load, load._replace(compiled=True), load._replace(software=Software(fused=True)), by_python)
    )
    assert (fused.traffic_bytes, fused.operations) == (compiled.traffic_bytes, compiled.operations)
    assert (traced.traffic_bytes, traced.operations) == (compiled.traffic_bytes, plain.operations)
    assert compiled.operations < plain.operations
    assert fused.traffic_bytes < plain.traffic_bytes and fused.matmuls == plain.matmuls
    slow, quick = (predict_step_time(spec, MACHINE, software=Software(fused=made)).step_s for made in (False, True))
    assert quick < slow


def test_last_stage_without_checkpointing_has_no_recomputation() -> None:
    words = ("engine=pipeline", "engine.cut=blocks", "batch.accumulation=8")
    kept = Software(last_again=False)
    for ranks in 1, 2:  # one stage is the last one
        plain = build(*words, f"parallel.pipeline={ranks}", f"parallel.tensor={3 - ranks}")
        again = plain.model_copy(update={"activation_checkpointing": True})
        at_once, later, everywhere = (
            predict_step_time(spec, MACHINE, software=software).step_s
            for spec, software in ((plain, kept), (again, kept), (again, Software()))
        )
        assert everywhere > at_once
        assert later == pytest.approx(at_once) if ranks == 1 else at_once < later <= everywhere


@pytest.mark.parametrize("words", [["model=mt5_base"], ["model=gpt_22b"]])
def test_tensor_parallel_exchanges_of_a_pass_equal_the_closed_form(words: list[str]) -> None:
    """Each sub-layer all-reduces its output in forward, and the gradient of its input in backward. With checkpointing,
    the recomputation of a block repeats the all-reduces of its forward, except the one of its last sub-layer."""
    given = ["engine=pipeline", "parallel.tensor=4", *words]
    network = get_network(build(*given))
    layers = {stack.name: stack.layers for stack in network.stacks}
    encoder, decoder = layers.get("encoder", 0), layers.get("decoder", 0)
    closed = {
        False: 4 * encoder + 7 * decoder + 3 + 2 if encoder else 4 * sum(layers.values()) + 2 + 2,
        True: 5 * encoder + 9 * decoder + 3 + 2 if encoder else 5 * sum(layers.values()) + 2 + 2,
    }
    for checkpointing, calls in closed.items():
        spec = build(*given, f"activation_checkpointing={checkpointing}")
        [part] = find_costs(spec).parts
        found = list_exchanges(network, build_workload(spec, "cuda"), part, TensorSlices(4))
        assert sum(one.calls for one in found) == calls


def test_tensor_parallelism_reduces_compute_and_adds_all_reduces_mostly_between_nodes() -> None:
    whole, four, sixteen = (predict("engine=pipeline", *words) for words in (
        ["parallel.pipeline=2"], ["parallel.pipeline=2", "parallel.tensor=4"], ["parallel.tensor=16", "nodes=2"],
    ))  # fmt: skip
    assert whole.parts["forward"] / 4 < four.parts["forward"] < whole.parts["forward"] / 3
    assert 5 * whole.parts.get("all-reduce", 0.0) < four.parts["all-reduce"] < sixteen.parts["all-reduce"] / 2


def test_layered_gathers_take_the_same_time_for_any_number_of_micro_batches() -> None:
    few, many = (
        predict("engine=lga", "parallel.stages_per_rank=12", f"batch.accumulation={number}", "nodes=2")
        for number in (2, 16)
    )
    moved = [time.exposed_s + time.hidden_s for time in (few, many)]
    assert moved[0] == pytest.approx(moved[1])
    assert many.exposed_s <= few.exposed_s and "idle" not in few.parts


def test_rehearsed_time_of_the_first_rank_scales_all_parts() -> None:
    spec = build("engine=pipeline", "parallel.pipeline=4", "batch.accumulation=8")
    once, twice = (predict_step_time(spec, MACHINE, rehearsed_s=seconds) for seconds in (0.5, 1.0))
    assert [twice.parts[name] / once.parts[name] for name in ("forward", "backward", "optimizer")] == [2] * 3
    assert twice.step_s == pytest.approx(2 * once.step_s, rel=0.05)
    # the parts are those of the busiest rank, which may not be the first
    assert sum(once.parts[name] for name in ("forward", "backward", "optimizer")) >= 0.5


@pytest.mark.parametrize("fields", [{"nodes": 4, "parallel.pipeline": 8}, {"parallel.pipeline": 2}], ids=str)
def test_pipeline_has_predicted_memory_and_time(fields: dict[str, Any]) -> None:
    spec = build("engine=pipeline", "batch.accumulation=16", *(f"{name}={value}" for name, value in fields.items()))
    assert predict_memory(spec).peak > 0 and predict_step_time(spec, MACHINE).step_s > 0


@pytest.mark.parametrize(("schedule", "size"), [
    ("gpipe", PipelineSize(4, 1, 61)), ("1f1b", PipelineSize(3, 1, 50)), ("interleaved", PipelineSize(4, 2, 48)),
    ("breadth_first", PipelineSize(4, 3, 64)),
])  # fmt: skip
@pytest.mark.parametrize("slow", [1.0, 1.4])
def test_shortened_simulation_of_a_long_schedule_has_the_time_of_the_complete_simulation(
    schedule: ScheduleName, size: PipelineSize, slow: float
) -> None:
    """For a long schedule, the prediction simulates only some micro-batches. Its step time is compared with a
    simulation of every pass. The last stage takes `slow` times as long as the others."""
    forward_s = [FORWARD_S] * (size.stages - 1) + [slow * FORWARD_S]
    backward_s = [2 * seconds for seconds in forward_s]
    ends_s = costs.simulate_ends(schedule, size, forward_s, backward_s, lambda source, target: 0.1)
    whole = simulate_schedule(build_computation(schedule, size), size, forward_s, backward_s, 0.1)
    assert max(ends_s) == pytest.approx(whole.total_s, rel=0.003)


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("interleaved", 2)])
def test_memory_moments_of_a_long_schedule_are_those_of_three_groups(schedule: ScheduleName, stages: int) -> None:
    few, many = (
        [set(list_moments(order, size, rank)) for rank, order in enumerate(build_schedule(schedule, size))]
        for size in (PipelineSize(4, stages, 4 * groups) for groups in (costs.FILLED, 9))
    )
    assert few == many
