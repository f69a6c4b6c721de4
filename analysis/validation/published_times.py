"""Published traces of GPT and steps of T5-3B compared with predictions from a machine's published numbers alone.

A seeded random draw holds out a third of the traces of GPT: no constant of the predictions was fitted to these traces.

The scaling efficiency of T5-3B is predicted from one row of its published table alone, the row of one node. A step on n
nodes takes A(n) · c + F(n) seconds. A(n) is the number of micro-steps, c is the time of a micro-step, and F(n) is the
time of the update after the last micro-step. The row of one node gives c, so c includes the transfers of tensor
parallelism inside a node.

A(n) is 20 / n. A step has 2,160 samples, which are 80 micro-batches of 27 samples. Two devices share every layer, so a
node of 8 devices has 4 replicas of the model. The 4 n replicas share the 80 micro-batches. Each device holds half of
the parameters.

F(n) is the time to reduce gradients, gather weights, and read and write the optimizer's states. Except for the batch,
the published configuration is launcher_scripts/conf/training/t5/3b.yaml of NeMo-Framework-Launcher. Its optimizer is
distributed_fused_adam with two settings. bucket_cap_mb is 200. overlap_grad_sync is off, so no communication overlaps
with computation. Buckets are assumed to be reduced one after another, as in the first versions of apex; later versions
launch all buckets as one group.
"""

import random
import statistics
from collections.abc import Sequence
from typing import Any

from analysis.claims.sources import read_published
from analysis.validation import PredictionComparison, PredictionPoint, build_comparison
from analysis.validation.published_runs import (
    DEVICES,
    T5_MICRO,
    T5_SAMPLES,
    T5_TENSOR,
    PublishedStep,
    build_burst_machine,
    build_gpt_run,
    build_machine,
    compare_published,
    read_nemo_runs,
    read_shape,
)
from bench.core.machine import Calibration, CollectiveKind, Machine
from bench.core.network import count_parameters
from bench.core.spec import FULL, RunSpec
from bench.predict.step_time.compute import ADAMW_PASSES, MODULE_OF_KERNEL, UPDATE_PASSES
from bench.predict.step_time.network import MIB, RankSpan, compute_collective_s
from bench.predict.workload import get_network

SEED, SET_ASIDE = 20260, 3
"""SEED is the seed of the random draw of held-out traces. One of every SET_ASIDE traces is held out."""
HOST_S = (10e-6, 35e-6)
"""Plausible range of the host's seconds to start one operation of a Python module (bench.predict.workload.USUAL)."""
INSIDE = (
    "{share:.0f} % of the {points} steps lie in their predicted interval. Its ends are a factor of {width:.2f} apart, "
    "and the mean interval score is {score:.0f} %."
)


def compare_steps() -> list[PredictionComparison]:
    """Return four comparisons of published step times with predictions. The first is for the held-out traces of GPT.
    The second is for the same traces with another host time. The third is for the other traces of GPT, which were not
    held out. The fourth is for the steps of T5-3B.

    The host time is the host's seconds to start one operation. In the first and the third comparison, the host time was
    fitted to the traces that were not held out. In the second comparison, the host time is the middle of the range
    HOST_S, which does not come from the source of the traces.
    """
    steps, host_s = predict_gpt_steps(), statistics.fmean(HOST_S)
    aside = draw_set_aside(len(steps))
    left_out = [step for place, step in enumerate(predict_gpt_steps(host_s)) if place in aside]
    return [
        _compare("gpt_times_aside", [step for place, step in enumerate(steps) if place in aside]),
        _compare("gpt_times_left_out", left_out, host_us=1e6 * host_s),
        _compare("gpt_times", [step for place, step in enumerate(steps) if place not in aside]),
        _compare("t5_times", [run.predict_step() for run in read_nemo_runs("t5_3b")]),
    ]


def draw_set_aside(rows: int) -> set[int]:
    """Return the indices of the held-out rows. No constant of the predictions may be chosen on these rows."""
    places = list(range(rows))
    random.Random(SEED).shuffle(places)
    return set(places[: rows // SET_ASIDE])


def predict_gpt_steps(host_s: float | None = None) -> list[PublishedStep]:
    """Return every trace of GPT with its prediction. `host_s` replaces the host's seconds to start one operation."""
    machine = build_burst_machine("A100-SXM-80")
    if host_s is not None:
        machine = machine.model_copy(update={"calibration": Calibration(kernel_s=host_s / MODULE_OF_KERNEL)})
    return [build_gpt_run(row, machine).predict_step() for row in read_published("gpt_single_node_a100").rows]


def _compare(name: str, steps: Sequence[PublishedStep], **values: Any) -> PredictionComparison:
    inside = INSIDE.format(
        points=len(steps), share=100 * statistics.fmean(step.inside for step in steps),
        width=statistics.geometric_mean(step.high_s / step.low_s for step in steps),
        score=100 * statistics.fmean(step.score for step in steps),
    )  # fmt: skip
    return compare_published(name, steps, inside=inside, **values)


# -- efficiency of T5-3B

REPLICAS = DEVICES // T5_TENSOR
"""Copies of T5-3B per node."""
HALF = 2
"""Bytes of a weight in bf16."""
BUCKET = 200 * MIB
"""Bytes of gradients that one collective reduces, from bucket_cap_mb.

Gradients are reduced in fp32, the type of the optimizer's states, since the configuration gives no grad_sync_dtype
(apex, contrib/optimizers/distributed_fused_adam.py). Weights are gathered in the model's type, since megatron_amp_O2 is
on (NeMo, setup_optimization of megatron_base_model.py).
"""
BETWEEN_NODES = 8 * 25e9 / T5_TENSOR
"""Bytes/s of a node's network links that one of its two data-parallel groups can use. The groups share the links
equally. The node is assumed to have 8 network cards of 200 Gbit/s, as is usual, since the published page gives no
number."""


def compare_efficiency() -> PredictionComparison:
    """Return the comparison of scaling efficiency, relative to one node, for every larger number of nodes."""
    rows = read_published("t5_3b_scaling_a100").rows
    steps_s = {int(row["nodes"]): float(row["s_per_step"]) for row in rows}
    machine, one_node_s, points = build_replica_machine(), steps_s.pop(1), []
    for nodes, step_s in steps_s.items():
        predicted_s = predict_step_s(nodes, one_node_s, machine)
        predicted, truth = (100 * one_node_s / (nodes * seconds) for seconds in (predicted_s, step_s))
        reason = f"a step takes {step_s - predicted_s:.2f} s longer than predicted"
        points.append(PredictionPoint(f"{nodes} nodes", predicted, truth, reason=reason, rival=100.0))
    return build_comparison("scaling_a100", points)


def predict_step_s(nodes: int, one_node_s: float, machine: Machine) -> float:
    """Return the predicted step time on `nodes` nodes in seconds. `one_node_s` is the published step time on one
    node."""
    micro_step_s = (one_node_s - predict_update_s(1, machine)) / count_micro_steps(1)
    return count_micro_steps(nodes) * micro_step_s + predict_update_s(nodes, machine)


def count_micro_steps(nodes: int) -> float:
    """Return the number of micro-steps in one optimizer step of the published T5-3B runs on `nodes` nodes."""
    return T5_SAMPLES / (T5_MICRO * REPLICAS * nodes)


def predict_update_s(nodes: int, machine: Machine) -> float:
    """Return the seconds of a step after its last micro-step: collectives, and the optimizer's memory traffic."""
    spec = RunSpec.model_validate({
        "model": {"name": "nemo_t5_3b", "shape": read_shape("nemo_t5_3b")}, "engine": {"name": "ddp", "backend": "ddp"},
        "data": {"name": "synthetic", "source": "synthetic"}, "batch": {"micro": T5_MICRO},
    })  # fmt: skip
    # the shape lacks learned positions, which would add 0.04 %
    device_parameters, ranks = count_parameters(get_network(spec)) / T5_TENSOR, REPLICAS * nodes

    def move(kind: CollectiveKind, payload_bytes: float) -> float:
        return compute_collective_s(kind, payload_bytes, RankSpan(nodes, ranks), machine)

    assert machine.memory_bytes_per_s is not None
    width = FULL * (ADAMW_PASSES["fused"] + UPDATE_PASSES) + 2 * (HALF + FULL)
    updating = width * device_parameters / ranks / machine.memory_bytes_per_s
    bucket_s = move("reduce_scatter", BUCKET) + move("all_gather", BUCKET * HALF / FULL)
    return FULL * device_parameters / BUCKET * bucket_s + move("all_reduce", FULL) + updating


def build_replica_machine() -> Machine:
    """Return a machine with A100. Each node has two data-parallel groups that share its network. The network bandwidth
    of the returned machine is the share of one group."""
    return build_machine("A100-SXM-80").model_copy(update={"inter_node_bytes_per_s": BETWEEN_NODES})
