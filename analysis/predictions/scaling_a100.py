"""T5-3B on 1 to 20 nodes of A100, as NVIDIA published it, beside what is predicted from its first row alone.

A step of n nodes is A(n) · c + F(n): micro-steps, and what follows the last of them. The run divides every layer
between two devices, so 4 n replicas share the 2,160 samples and A(n) = 20 / n; each device holds half of the
parameters. F(n) is the reduction of their gradients, the gathering of their weights and the optimizer's traffic. The
published configuration of the model (NeMo-Framework-Launcher, launcher_scripts/conf/training/t5/3b.yaml; its batch is
another) has distributed_fused_adam with overlap_grad_sync off, so nothing of it is overlapped, and bucket_cap_mb 200.
That buckets follow one another is assumed: apex has done so, and later versions launch all of them as one group. c
comes from the row of one node, so what tensor parallelism moves inside a node lies in c.
"""

from typing import NamedTuple

from analysis.claims.published import read
from analysis.predictions import PredictionComparison, PredictionPoint
from analysis.predictions.shapes import read_shape
from bench.machine import CollectiveKind, Machine
from bench.predict.step_time.compute import ADAMW_PASSES, UPDATE_PASSES
from bench.predict.step_time.network import MIB, RankSpan, compute_collective_s
from bench.predict.workload import get_network
from bench.spec import FULL, RunSpec
from bench.stacks import count_parameters

POINTS = 5.0
"""Bound of every efficiency's error, in points; set before the model was written."""
SAMPLES, MICRO, TENSOR_PARALLEL, DEVICES = 2160, 27, 2, 8
"""Samples per step, samples per micro-batch, devices that share a layer, devices per node: as published."""
REPLICAS = DEVICES // TENSOR_PARALLEL
"""Per node."""
HALF = 2
"""Bytes of a weight in bf16."""
BUCKET = 200 * MIB
"""Bytes of gradients that one collective reduces: bucket_cap_mb. They are in fp32, the type of the optimizer's states:
no grad_sync_dtype is given (apex, contrib/optimizers/distributed_fused_adam.py). Weights are gathered in the model's
type, since megatron_amp_O2 is on (NeMo, setup_optimization of megatron_base_model.py)."""
BETWEEN_NODES = 8 * 25e9 / TENSOR_PARALLEL
"""Bytes/s of a node's links that one of its two data-parallel groups has: 8 cards of 200 Gbit/s, the usual build of
such a node (assumed: the page does not say), shared by both."""
TEXT = (
    "NVIDIA's table of T5-3B pre-training (`results/published/t5_3b_scaling_a100.csv`) on nodes of 8 A100, strong "
    "scaling: efficiency is T(1) / (n T(n)). Only the row of one node is used: it gives the time of a micro-step, all "
    "else is arithmetic on published sizes and links. Tensor parallelism of 2 halves what a device reduces and gathers "
    "and makes 4 replicas of a node; its own all-reduces stay inside a node and lie in the micro-step. The links "
    "between nodes are assumed. 6·N·tokens knows no communication, so by it every efficiency is 100 %.\n\n"
    "History: a first comparison took gradients in bf16 and one collective for all of them, and was up to 15.9 points "
    "too high, by about 0.1 s of every step on any number of nodes. Then the model's published configuration (its "
    "batch is another) and the code of its optimizer were read once more: buckets of 200 MiB and, by default, "
    "gradients in fp32. Buckets are taken to follow one another, and to reach what was measured between nodes of "
    "B200, about half of the links (`results/published/collectives.csv`). Which version of the optimizer ran is not "
    "known, and later ones launch all buckets at once: by that 20 nodes would be about 12 points too high, and 10 "
    "nodes 6. No number was taken from the rows that are predicted, but they are why it was read again."
)


class PublishedScalingRow(NamedTuple):
    """A row of the published table."""

    nodes: int
    step_s: float


def compare() -> PredictionComparison:
    """Return the efficiency at every node count but the first, which it is relative to."""
    one, *rows = (
        PublishedScalingRow(int(row["nodes"]), float(row["s_per_step"])) for row in read("t5_3b_scaling_a100").rows
    )
    points = tuple(_build_efficiency_point(row, one, build_machine()) for row in rows)
    return PredictionComparison(
        "scaling_a100", "T5-3B on 1 to 20 nodes of 8 A100: efficiency", TEXT, points, "%", "points", each=POINTS,
        rival="6·N·tokens",
    )  # fmt: skip


def predict_step_s(nodes: int, one: PublishedScalingRow, machine: Machine) -> float:
    """Return the seconds of a step on `nodes`, from the row of one node."""
    return count_micro_steps(nodes) * _compute_micro_step_s(one, machine) + predict_update_s(nodes, machine)


def _compute_micro_step_s(one: PublishedScalingRow, machine: Machine) -> float:
    return (one.step_s - predict_update_s(one.nodes, machine)) / count_micro_steps(one.nodes)


def count_micro_steps(nodes: int) -> float:
    """Return the micro-steps of a step."""
    return SAMPLES / (MICRO * REPLICAS * nodes)


def predict_update_s(nodes: int, machine: Machine) -> float:
    """Return the seconds after the micro-steps of a step, by what is moved and read."""
    device_parameters, ranks = _count_parameters() / TENSOR_PARALLEL, REPLICAS * nodes

    def moved(kind: CollectiveKind, payload_bytes: float) -> float:
        return compute_collective_s(kind, payload_bytes, RankSpan(nodes, ranks), machine)

    assert machine.memory_bytes_per_s is not None
    width = FULL * (ADAMW_PASSES["fused"] + UPDATE_PASSES) + 2 * (HALF + FULL)
    updating = width * device_parameters / ranks / machine.memory_bytes_per_s
    buckets = FULL * device_parameters / BUCKET
    bucket_s = moved("reduce_scatter", BUCKET) + moved("all_gather", BUCKET * HALF / FULL)
    return buckets * bucket_s + moved("all_reduce", FULL) + updating


def _build_efficiency_point(row: PublishedScalingRow, one: PublishedScalingRow, machine: Machine) -> PredictionPoint:
    predicted_step_s = predict_step_s(row.nodes, one, machine)
    predicted, truth = (100 * one.step_s / (row.nodes * seconds) for seconds in (predicted_step_s, row.step_s))
    error = predicted - truth
    right = abs(error) <= POINTS
    reason = "" if right else f"a step takes {row.step_s - predicted_step_s:.2f} s longer than predicted"
    return PredictionPoint(
        f"{row.nodes} nodes", predicted, truth, error, "ok" if right else "exception", reason, rival=100.0,
        rival_error=100 - truth,
    )  # fmt: skip


def _count_parameters() -> int:
    """Parameters of the published shape; its learned positions are 0.04 % more."""
    spec = RunSpec.model_validate({
        "model": {"name": "nemo_t5_3b", "shape": read_shape("nemo_t5_3b")}, "engine": {"name": "ddp", "backend": "ddp"},
        "data": {"name": "synthetic", "source": "synthetic"}, "batch": {"micro": MICRO},
    })  # fmt: skip
    return count_parameters(get_network(spec))


def build_machine() -> Machine:
    """Return a node of the table as one of its two data-parallel groups sees it."""
    (row,) = (row for row in read("machines").rows if row["accelerator"] == "A100-SXM-80")
    return Machine(
        name="a100_80", memory_bytes_per_s=1e12 * float(row["memory_tb_s"]),
        intra_node_bytes_per_s=1e9 * float(row["intra_node_gb_s_one_way"]), inter_node_bytes_per_s=BETWEEN_NODES,
    )  # fmt: skip
