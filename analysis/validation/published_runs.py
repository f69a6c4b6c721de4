"""Published runs of programs other than zeroscale. Each run has a spec, a machine and a class of software. A class of
software groups programs whose kernels are optimized to the same degree (`bench.predict.workload.Software`).

The step times of these runs are predicted like those of any run (`bench.predict.step_time`). The spec of a published
run has the engine `pipeline`, because this engine divides model states in the same way as these programs. The
prediction simulates the engine's pipeline schedule.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from analysis.claims.sources import read_published
from analysis.validation import (
    OUTSIDE,
    PredictionComparison,
    PredictionPoint,
    build_comparison,
    compute_error_percent,
    judge,
)
from bench.core.machine import Machine
from bench.core.spec import RunSpec
from bench.predict.step_time import StepTime, predict_step_time
from bench.predict.step_time.compute import CEILING_OF_PEAK
from bench.predict.workload import FUSED, USUAL, Software

MISSED = 0.1
"""Share of published step times that are expected to lie outside of their predicted intervals."""
SIZES = ("d_model", "d_kv", "d_ff", "encoder_layers", "decoder_layers", "heads", "vocab")


def read_shape(name: str) -> dict[str, Any]:
    """Return the shape of a model from `results/published/t5_shapes.csv`."""
    row = _find_row(name)
    gated = row["gated_ffn"] == "true"
    return {
        **{size: int(row[size]) for size in SIZES},
        "gated": gated,
        "activation": "gelu_new" if gated else "relu",  # T5 v1.1 and mT5 are gated; the first T5 is not
        "separate_head": row["separate_head"] == "true",
    }


def read_parameter_count(name: str) -> int:
    """Return the number of parameters of a model, as published."""
    return int(_find_row(name)["parameters"])


def _find_row(name: str) -> dict[str, str]:
    (row,) = (row for row in read_published("t5_shapes").rows if row["model"] == name)
    return row


VOCABULARY, FRONTIER_VOCABULARY = 50257, 50688
"""Vocabulary sizes of GPT. VOCABULARY is that of the runs on A100, as the source states it. FRONTIER_VOCABULARY is that
of the runs on Frontier, padded from 50,257 to a multiple of 512 in all layouts."""
DEVICES = 8
"""Devices per node in the runs of T5-3B and in those on Frontier."""
T5_SAMPLES, T5_MICRO, T5_TENSOR = 2160, 27, 2
"""Published layout of T5-3B: samples per step, samples per micro-batch, and tensor-parallel devices."""
MT5_SAMPLES, MT5_MICRO, MT5_VOCABULARY = 1920, 24, 250112
"""Samples per step and per micro-batch of mT5-3B, as published, and its vocabulary size. The source does not give the
padding of the vocabulary, so it is assumed."""
VTRAIN = FUSED._replace(
    name="vtrain", started_unfused=True, last_again=False, start_s=30e-6, pace=1.0, interval=(0.82, 1.22)
)
"""Class of software of the simulator vTrain (VIA-Research/vTrain, predictor.py).

vTrain recomputes no activations on the last pipeline stage, where backward follows forward immediately. Its kernels are
those of Megatron, and a Python module starts each of them. The constants `start_s` (host time to start an operation)
and `interval` were chosen to fit its traces.
"""
MULTIPROCESSORS = {"A100-SXM-80": 108, "MI250X-GCD": 110}
"""Number of multiprocessors: of A100 from NVIDIA's white paper, and of one MI250X die (compute units) from AMD's data
sheet."""
BETWEEN_NODES = {"A100-SXM-80": 8 * 25e9, "MI250X-GCD": 4 * 25e9}
"""Bytes/s of all network links of a node together, in one direction. A node with A100 is assumed to have 8 network
cards of 200 Gbit/s, as is usual, since the published page on T5-3B gives no number. A node of Frontier has 4 such
cards."""
FP16_SUSTAINED = {"MI250X-GCD": 92.0}
"""Sustained TFLOP/s in fp16, for devices where it differs from that in bf16. As in bf16, the sustained rate is 0.60 of
the rate of the best matrix product, which is taken as 0.8 of the peak."""


class PublishedRun(NamedTuple):
    """A training run of a program other than zeroscale. Its numbers come from a published table. `step_s` is NaN if its
    step time is not published."""

    what: str
    spec: RunSpec
    machine: Machine
    software: Software
    step_s: float = math.nan
    source: str = ""

    def predict(self) -> StepTime:
        """Return the predicted step time of this run."""
        return predict_step_time(self.spec, self.machine, software=self.software)

    def predict_step(self, software: Software | None = None) -> "PublishedStep":
        """Return the published step together with its prediction. `software`, if given, replaces the run's class of
        software, which states how much the kernels are optimized."""
        found = predict_step_time(self.spec, self.machine, software=software or self.software)
        return PublishedStep(self, found.step_s, found.low_s, found.high_s)


class PublishedStep(NamedTuple):
    """A published step time and its prediction with an interval, in seconds."""

    run: PublishedRun
    predicted_s: float
    low_s: float
    high_s: float

    @property
    def inside(self) -> bool:
        """True if the published step time lies in the predicted interval."""
        return self.low_s <= self.run.step_s <= self.high_s

    @property
    def error(self) -> float:
        """Signed error of the prediction, in percent of the published step time."""
        return compute_error_percent(self.predicted_s, self.run.step_s)

    @property
    def score(self) -> float:
        """Interval score divided by the published step time (doi 10.1198/016214506000001437): the width of the
        predicted interval plus a penalty if the step time lies outside. A lower score is better."""
        beyond = max(0.0, self.low_s - self.run.step_s, self.run.step_s - self.high_s)
        return (self.high_s - self.low_s + 2 / MISSED * beyond) / self.run.step_s


def compare_published(name: str, steps: Sequence[PublishedStep], **values: Any) -> PredictionComparison:
    """Return the comparison of published step times with predictions, with a point for each of `steps`. A point is `ok`
    if the published step time lies in the predicted interval. `values` replace the placeholders in the description of
    the comparison `name` in `comparisons.yaml`."""
    points = (
        PredictionPoint(one.run.what, one.predicted_s, one.run.step_s, verdict=judge(one.inside), reason=OUTSIDE)
        for one in steps
    )
    return build_comparison(name, points, **values)


_NO_COUNTS = ("model", "precision", "percent_of_peak", "step_s")


def build_gpt_run(row: dict[str, str], machine: Machine) -> PublishedRun:
    """Return a published run of GPT on one node of A100, with its step time."""
    given = {name: int(value) for name, value in row.items() if name != "step_s"}
    width, tensor, pipeline, data = (given[name] for name in ("hidden", "tensor", "pipeline", "data"))
    micro, layers = given["micro_batch"], given["layers"]
    micro_batches = given["global_batch"] // micro // data
    vocabulary = -(-VOCABULARY // tensor) * tensor
    spec = _build_spec(
        _build_gpt(width, layers, given["heads"], vocabulary, given["sequence"], attention="eager"),
        nodes=1, devices_per_node=given["gpus"], micro=micro, accumulation=micro_batches, tensor=tensor,
        pipeline=pipeline, precision="fp16", tokens=given["sequence"],
    )  # fmt: skip
    what = (
        f"width {width}, {layers} layers, tensor {tensor}, pipeline {pipeline}, data {data}, "
        f"micro-batch {micro} × {micro_batches}"
    )
    return PublishedRun(what, spec, machine, VTRAIN, float(row["step_s"]))


def read_nemo_runs(name: Literal["t5_3b", "mt5_3b"]) -> list[PublishedRun]:
    """Return the runs of T5-3B or mT5-3B in NVIDIA's table, on nodes of A100, with their step times."""
    samples, micro, shape = T5_SAMPLES, T5_MICRO, read_shape("nemo_t5_3b")
    if name == "mt5_3b":
        samples, micro, shape = MT5_SAMPLES, MT5_MICRO, shape | {"vocab": MT5_VOCABULARY}
    machine, runs = build_machine("A100-SXM-80"), []
    for row in read_published(f"{name}_scaling_a100").rows:
        nodes = int(row["nodes"])
        spec = _build_spec(
            {"name": f"nemo_{name}", "shape": shape, "attention": "eager", "dropout": 0.1},
            nodes=nodes, devices_per_node=DEVICES, micro=micro,
            accumulation=samples // micro // (nodes * DEVICES // T5_TENSOR),
            tensor=T5_TENSOR, pipeline=1, precision="bf16", checkpointing=False,
        )  # fmt: skip
        step_s = float(row["s_per_step"])
        runs.append(PublishedRun(f"{nodes} nodes", spec, machine, FUSED, step_s, f"NVIDIA NeMo {name}"))
    return runs


def build_frontier_run(
    row: dict[str, str], machine: Machine, nodes: int | None = None, samples: int | None = None
) -> PublishedRun:
    """Return a published run of GPT on Frontier. `nodes` and `samples` replace the published numbers of nodes and of
    samples per step; the layout stays."""
    given = {name: int(row[name]) for name in row if name not in _NO_COUNTS}
    nodes, samples = nodes or given["nodes"], samples or given["global_batch"]
    tensor, pipeline, tokens = given["tensor"], given["pipeline"], given["sequence"]
    copies = nodes * DEVICES // (tensor * pipeline)
    micro = given["micro_batch"]
    spec = _build_spec(
        _build_gpt(given["hidden"], given["layers"], given["heads"], FRONTIER_VOCABULARY, tokens, attention="sdpa"),
        nodes=nodes, devices_per_node=DEVICES, micro=micro, accumulation=samples // micro // copies, tensor=tensor,
        pipeline=pipeline, precision=row["precision"], tokens=tokens,
    )  # fmt: skip
    what = f"{row['model']}, {nodes} nodes, tensor {tensor}, pipeline {pipeline}, data {copies}, {samples} samples"
    return PublishedRun(what, spec, machine, USUAL)


def build_machine(accelerator: str) -> Machine:
    """Return a machine with this accelerator, built from published numbers alone (`results/published/machines.csv`)."""
    (row,) = (row for row in read_published("machines").rows if row["accelerator"] == accelerator)
    peak, sustained = float(row["peak_bf16_tflops"]), float(row["sustained_tflops"])
    return Machine(
        name=accelerator, peak_tflops={"fp16": peak, "bf16": peak},
        memory_bytes_per_s=1e12 * float(row["memory_tb_s"]),
        intra_node_bytes_per_s=1e9 * float(row["intra_node_gb_s_one_way"]),
        inter_node_bytes_per_s=BETWEEN_NODES[accelerator],
        matmul_ceiling_tflops={"bf16": float(row["matmul_ceiling_tflops"]), "fp16": CEILING_OF_PEAK["fp16"] * peak},
        sustained_tflops={"bf16": sustained, "fp16": FP16_SUSTAINED.get(accelerator, sustained)},
        multiprocessors=MULTIPROCESSORS[accelerator],
    )  # fmt: skip


def build_burst_machine(accelerator: str) -> Machine:
    """Return the machine of `build_machine`, but with the FLOP rate of the best matrix product in place of the
    sustained rate. Use it for published traces of single kernels."""
    return build_machine(accelerator).model_copy(update={"sustained_tflops": {}})


def count_megatron_flops(row: dict[str, str]) -> float:
    """Return the FLOPs of a step as Megatron counts them, including recomputation (arXiv 2104.04473, section 5.1)."""
    samples, tokens, layers, width = (int(row[name]) for name in ("global_batch", "sequence", "layers", "hidden"))
    blocks = 96 * samples * tokens * layers * width**2
    return blocks * (1 + tokens / (6 * width) + FRONTIER_VOCABULARY / (16 * layers * width))


def _build_gpt(width: int, layers: int, heads: int, vocab: int, tokens: int, *, attention: str) -> dict[str, Any]:
    shape = {"width": width, "layers": layers, "heads": heads, "inner": 4 * width, "vocab": vocab, "positions": tokens}
    return {"name": "gpt", "family": "gpt", "shape": shape, "attention": attention, "dropout": 0.1}


def _build_spec(
    model: dict[str, Any], *, nodes: int, devices_per_node: int, micro: int, accumulation: int, tensor: int,
    pipeline: int, precision: str, tokens: int | None = None, checkpointing: bool = True,
) -> RunSpec:  # fmt: skip
    learning = {"objective": "causal_lm", "sequence": {"tokens": tokens}} if tokens else {}
    return RunSpec.model_validate({
        "model": model, **learning, "nodes": nodes, "devices_per_node": devices_per_node, "precision": precision,
        "engine": {"name": "pipeline", "backend": "pipeline", "options": {"schedule": "1f1b", "cut": "blocks"}},
        "parallel": {"tensor": tensor, "pipeline": pipeline}, "activation_checkpointing": checkpointing,
        "batch": {"micro": micro, "accumulation": accumulation}, "optimizer": {"implementation": "fused"},
        "data": {"name": "synthetic", "source": "synthetic"},
    })  # fmt: skip
