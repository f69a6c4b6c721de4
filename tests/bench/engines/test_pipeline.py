"""Tests that a pipeline trains the same model as one process. Real ranks over gloo run both model families, every
schedule, and one or several copies of the model."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from pipeline_runs import (
    Ranks,
    average_losses,
    cut_own,
    list_different_initial_weights,
    list_unequal_shared_weights,
    run_jobs,
    train_alone,
)
from pipeline_specs import MICRO, parts_of, spec

from bench import engines, models
from bench.core.engine_facts import list_stages, place
from bench.core.network import pad_elements
from bench.core.spec import RunSpec
from bench.engines.distributed.schedule import add_gathers, build_schedule
from bench.engines.pipeline.options import size_of
from bench.predict.memory.stages import TensorSlices
from bench.predict.step_time.pipeline import list_exchanges
from bench.predict.workload import build_workload

pytestmark = [pytest.mark.thorough, pytest.mark.processes, pytest.mark.timeout(600)]

BF16 = {"precision": "bf16"}
ZERO3 = {"sharding": "zero3"}
AGAIN = {"activation_checkpointing": True}
# `make parity` runs more combinations.
JOBS = {
    "t5 1f1b": spec("t5", "1f1b", 2),
    "t5 gpipe, tied": spec("tied", "gpipe", 2),
    "t5 breadth-first, masked": spec("masked", "breadth_first", 2, 4),
    "umt5 1f1b": spec("umt5", "1f1b", 2),
    "t5 layered, two copies": spec("t5", "breadth_first", 1, 8, data=2),
    "t5 1f1b bf16": spec("t5", "1f1b", 2, **BF16),
    "gpt 1f1b": spec("gpt", "1f1b", 2),
    "gpt interleaved": spec("gpt", "interleaved", 2, 3),
    "gpt breadth-first, documents": spec("documents", "breadth_first", 2, 2),
    "llama gpipe": spec("llama", "gpipe", 2),
    "t5 interleaved, tied, three copies": spec("tied", "interleaved", 2, 2, data=3),
    "t5 on four ranks": spec("t5", "interleaved", 4, 2),
    "t5 bf16, two copies": spec("t5", "1f1b", 2, data=2, **BF16),
    "gpt breadth-first, two copies": spec("gpt", "breadth_first", 2, 2, data=2),
    "t5 sliced": spec("t5", "1f1b", 1, tensor=2),
    "t5 sliced, by tokens": spec("t5", "1f1b", 1, tensor=2, by_tokens=True),
    "t5 sliced, masked, by tokens": spec("masked", "1f1b", 1, tensor=2, by_tokens=True),
    "t5 sliced, written out": spec("eager", "1f1b", 1, tensor=2, by_tokens=True),
    "gpt sliced": spec("gpt", "1f1b", 1, tensor=2),
    "gpt sliced, documents": spec("documents", "1f1b", 1, tensor=2, by_tokens=True),
    "llama sliced, by tokens": spec("llama", "1f1b", 1, tensor=2, by_tokens=True),
    "tied t5 sliced in a pipeline": spec("tied", "interleaved", 2, 2, tensor=2),
    "gpt sliced by tokens in a pipeline": spec("gpt", "1f1b", 2, tensor=2, by_tokens=True),
    "gpt sliced bf16 in a pipeline": spec("gpt", "1f1b", 2, tensor=2, by_tokens=True, **BF16),
    "t5 layered, divided": spec("t5", "breadth_first", 1, 8, data=2, **ZERO3),
    "tied t5 layered, divided": spec("tied", "breadth_first", 1, 8, data=2, **ZERO3),
    "gpt interleaved, divided": spec("gpt", "interleaved", 2, 3, data=2, **ZERO3),
    "t5 layered, sliced, divided": spec("t5", "breadth_first", 1, 8, data=2, tensor=2, by_tokens=True, **ZERO3),
    "t5 1f1b, checkpointed": spec("t5", "1f1b", 2, **AGAIN),
    "umt5 layered, divided, checkpointed": spec("umt5", "breadth_first", 1, 4, data=2, **ZERO3, **AGAIN),
    "gpt sliced, checkpointed": spec("gpt", "1f1b", 2, tensor=2, by_tokens=True, **AGAIN),
    "t5 on eight ranks": spec("tied", "1f1b", 2, data=2, tensor=2, by_tokens=True),
}
FP32 = [label for label in JOBS if "bf16" not in label]
Seen = dict[str, Ranks]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Observations of all trainings, such as losses and weights. The keys are the labels of the jobs, and each value is
    a list with one dict per rank."""
    return run_jobs(JOBS, tmp_path_factory.mktemp("ranks"))


@functools.cache
def alone(label: str) -> dict[str, Any]:
    """Train the job with this label in one process, as the reference for its ranks, and return its observations."""
    return train_alone(JOBS[label])


@pytest.mark.parametrize("label", JOBS)
def test_initial_weights_of_pipeline_ranks_equal_those_of_the_whole_model(seen: Seen, label: str) -> None:
    assert not list_different_initial_weights(seen[label], alone(label)["begun"])


@pytest.mark.parametrize("label", FP32)
def test_losses_norms_and_weights_of_a_pipeline_equal_those_of_one_process(seen: Seen, label: str) -> None:
    ranks, whole = seen[label], alone(label)
    near = 1e-6 if JOBS[label].parallel.tensor == 1 else 1e-5  # sums over slices are rounded in another order
    assert average_losses(ranks) == pytest.approx(whole["losses"], rel=near)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(whole["norms"], rel=near)
        for name, weight in rank["weights"].items():
            difference = (weight - cut_own(rank, name, whole["weights"][name])).abs().max()
            assert difference <= near * whole["weights"][name].abs().max(), name


@pytest.mark.parametrize("label", [label for label in JOBS if label not in FP32])
def test_pipeline_in_bf16_trains_like_one_process_except_for_rounding(seen: Seen, label: str) -> None:
    ranks, whole = seen[label], alone(label)
    assert average_losses(ranks) == pytest.approx(whole["losses"], rel=1e-2)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(whole["norms"], rel=2e-2)
        assert all(weight.dtype == torch.bfloat16 for weight in rank["weights"].values())


@pytest.mark.parametrize("label", JOBS)
def test_parameters_shared_by_several_ranks_stay_bitwise_equal(seen: Seen, label: str) -> None:
    assert not list_unequal_shared_weights(seen[label])


@pytest.mark.parametrize("label", JOBS)
def test_only_ranks_of_the_last_stage_have_a_loss_and_all_ranks_have_idle_time(seen: Seen, label: str) -> None:
    job, ranks = JOBS[label], seen[label]
    with_loss = tuple(rank for rank, found in enumerate(ranks) if found["losses"][0] is not None)
    assert with_loss == engines.facts(job).loss_ranks
    idle = [found["idle_s"] for found in ranks]
    assert all((seconds > 0) == (job.parallel.pipeline > 1) for rank in idle for seconds in rank)


def list_holders(job: RunSpec, name: str) -> tuple[int, ...]:
    """Return the positions in the pipeline whose ranks hold copies of the same parameter, such as a tied embedding. If
    only one position holds the parameter, return an empty tuple."""
    stages = models.load_builder(job.model.family).find_shared(job, parts_of(job)).get(name, ())
    places = sorted({stage % job.parallel.pipeline for stage in stages})
    return tuple(places) if len(places) > 1 else ()


@pytest.mark.parametrize("label", JOBS)
def test_bytes_sent_between_stages_equal_the_closed_form(seen: Seen, label: str) -> None:
    job, width = JOBS[label], 2 if JOBS[label].precision == "bf16" else 4
    shares = job.parallel.tensor if job.parallel.sequence else 1
    per_pass = [MICRO * length * 32 * width // shares for length in job.sequence.values()]
    pipeline, stages, data = job.parallel.pipeline, job.parallel.stages_per_rank, job.data_parallel
    for rank, found in enumerate(seen[label]):
        ends = place(job, rank).pipeline in (0, pipeline - 1)
        passes = 0 if pipeline == 1 else job.accumulation * (2 * stages - 1 if ends else 2 * stages)
        wanted = (passes * len(per_pass), passes * sum(per_pass)) if passes else (0, 0)
        assert found["traffic"].get("send", (0, 0)) == found["traffic"].get("recv", (0, 0)) == wanted
        elements = Counter[tuple[int, ...]]()  # shared parameters are in flat tensors of their own
        for name, weight in found["weights"].items():
            elements[list_holders(job, name)] += weight.numel()
        padded = [-(-size // data) * data * width for size in elements.values()]
        once = (len(padded), sum(padded)) if data > 1 else (0, 0)
        if not job.parallel.sequence and job.engine.options["sharding"] == "zero1":
            assert found["traffic"].get("reduce_scatter", (0, 0)) == found["traffic"].get("all_gather", (0, 0)) == once


DIVIDED = [label for label, job in JOBS.items() if job.engine.options["sharding"] == "zero3"]
UNSLICED = [label for label in DIVIDED if JOBS[label].parallel.tensor == 1]
SLICED = [label for label, job in JOBS.items() if job.parallel.tensor == job.world_size and label not in DIVIDED]


@pytest.mark.parametrize("label", UNSLICED)
def test_zero3_pipeline_gathers_stages_for_forward_and_backward_and_reduces_once(seen: Seen, label: str) -> None:
    """The weights of a stage are gathered for its forward passes and again for its backward passes. Its gradients are
    reduced once. There are two exceptions. If the backward of a stage directly follows its forward, its weights stay
    gathered in between. Parameters that several stages share are never partitioned."""
    job, ranks = JOBS[label], seen[label]
    family = models.load_divided_builder(job.model.family)
    shared, parts = family.find_shared(job, parts_of(job)), parts_of(job)
    for rank, found in enumerate(ranks):
        sizes = {}
        for stage in list_stages(job, rank):
            module = family.build_part(job, parts[stage], torch.device("meta"))
            elements = sum(weight.numel() for name, weight in module.named_parameters() if name not in shared)
            sizes[stage] = pad_elements(elements, job.data_parallel)
        whole = sum(weight.numel() for name, weight in found["weights"].items() if name in shared)
        once = pad_elements(whole, job.data_parallel)
        order = build_schedule(job.engine.options["schedule"], size_of(job))[place(job, rank).pipeline]
        actions = [action for action in add_gathers(order) if sizes.get(action.stage)]
        width = 2 if job.precision == "bf16" else 4
        for kind, collective in (("gather", "all_gather"), ("reduce", "reduce_scatter")):
            at = [sizes[action.stage] for action in actions if action.kind == kind]
            assert found["traffic"][collective] == (len(at) + bool(once), width * (sum(at) + once)), kind


@pytest.mark.parametrize("label", SLICED)
def test_tensor_parallel_exchanges_equal_the_closed_form(seen: Seen, label: str) -> None:
    """In forward, tensor-parallel ranks sum the outputs of each sub-layer, of the embedding and of the head. In
    backward, the ranks sum the gradients of the inputs of these layers. Cross-attention also sums the gradient of the
    encoder states. With sequence parallelism, a reduce-scatter and an all-gather replace each sum."""
    job, width = JOBS[label], 2 if JOBS[label].precision == "bf16" else 4
    shape, lengths = job.model.shape, list(job.sequence.values())
    if job.model.family == "t5":
        encoder, decoder = shape["encoder_layers"], shape["decoder_layers"]
        calls = 4 * encoder + 7 * decoder + 3
        tokens = lengths[0] * (4 * encoder + decoder + 1) + lengths[1] * (6 * decoder + 2)
    else:
        calls, tokens = 4 * shape["layers"] + 2, lengths[0] * (4 * shape["layers"] + 2)
    micros, payload = job.accumulation, MICRO * tokens * 32 * width
    of_loss = 3 * 4 * MICRO * lengths[-1]
    for found in seen[label]:
        traffic = found["traffic"]
        whole = sum(weight.numel() for name, weight in found["weights"].items() if name not in found["slices"])
        if job.parallel.sequence:
            assert traffic["all_reduce"] == (2 * micros + 2, micros * of_loss + width * whole + 4)
            data = job.data_parallel > 1  # ZeRO's two exchanges
            elements = sum(weight.numel() for weight in found["weights"].values())
            padded = -(-elements // job.data_parallel) * job.data_parallel * width
            both = (micros * calls + data, micros * payload + data * padded)
            assert traffic["reduce_scatter"] == traffic["all_gather"] == both
        else:
            assert traffic["all_reduce"] == (micros * (calls + 2) + 1, micros * (payload + of_loss) + 4)


@pytest.mark.parametrize("label", JOBS)
def test_collectives_of_a_pipeline_equal_the_prediction(seen: Seen, label: str) -> None:
    job = JOBS[label]
    network, predict_costs = models.get_network(job.model), engines.facts(job).pipeline
    assert predict_costs
    costs, load = predict_costs(job, network, "cpu", False), build_workload(job, "cpu")
    slices = TensorSlices(job.parallel.tensor, job.parallel.sequence)
    for rank, found in enumerate(seen[label]):
        here, expected = costs.places[place(job, rank).pipeline], Counter[tuple[str, str]]()
        inside = [one for stage in here.stages for one in list_exchanges(network, load, costs.parts[stage], slices)]
        for times, transfers in ((1, here.step.transfers), (job.accumulation, inside)):
            for one in transfers:
                expected[one.kind, "calls"] += times * one.calls
                expected[one.kind, "bytes"] += times * one.payload_bytes
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            assert found["traffic"].get(kind, (0, 0)) == (expected[kind, "calls"], expected[kind, "bytes"]), kind
