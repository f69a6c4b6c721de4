"""Runs of others' software as published tables have them: a spec, the machine, and what of the software is known.

They are predicted as any run is (bench.predict.step_time): by engine `pipeline`, which divides the states as theirs
does, with its schedule played through.
"""

from typing import Any, NamedTuple

from analysis.claims.sources import read_published
from bench.core.machine import Machine
from bench.core.spec import RunSpec
from bench.predict.step_time import StepTime, predict_step_time
from bench.predict.step_time.rates import CEILING_OF_PEAK
from bench.predict.workload import FUSED, USUAL, Software

SIZES = ("d_model", "d_kv", "d_ff", "encoder_layers", "decoder_layers", "heads", "vocab")


def read_shape(name: str) -> dict[str, Any]:
    """Return the shape of a model of `results/published/t5_shapes.csv`."""
    row = _find_row(name)
    gated = row["gated_ffn"] == "true"
    return {
        **{size: int(row[size]) for size in SIZES},
        "gated": gated,
        "activation": "gelu_new" if gated else "relu",  # v1.1 and mT5; the first T5
        "separate_head": row["separate_head"] == "true",
    }


def read_parameter_count(name: str) -> int:
    """Return the published count of a model's parameters."""
    return int(_find_row(name)["parameters"])


def _find_row(name: str) -> dict[str, str]:
    (row,) = (row for row in read_published("t5_shapes").rows if row["model"] == name)
    return row


VOCABULARY, FRONTIER_VOCABULARY = 50257, 50688
"""Tokens of GPT on A100, by the source, and on Frontier: 50,257 padded to a multiple of 512, for all layouts alike."""
DEVICES = 8
"""Per node, of T5-3B and of Frontier."""
T5_SAMPLES, T5_MICRO, T5_TENSOR = 2160, 27, 2
"""Samples of a step and of a micro-batch, devices that share a layer: as published."""
MT5_SAMPLES, MT5_MICRO, MT5_VOCABULARY = 1920, 24, 250112
"""The same of mT5-3B, and its vocabulary, whose padding is assumed."""
VTRAIN = FUSED._replace(
    name="vtrain", started_unfused=True, last_again=False, start_s=30e-6, pace=1.0, interval=(0.82, 1.22)
)
"""VIA-Research/vTrain, predictor.py, computes nothing again on the last stage, where backward follows at once. Its
kernels are those of Megatron, each started by a module in Python; host and interval were chosen on its traces."""
MULTIPROCESSORS = {"A100-SXM-80": 108, "MI250X-GCD": 110}
"""By NVIDIA's white paper of A100; the compute units of one die, by AMD's data sheet."""
BETWEEN_NODES = {"A100-SXM-80": 8 * 25e9, "MI250X-GCD": 4 * 25e9}
"""Bytes/s of a node's links, one way: 8 cards of 200 Gbit/s are the usual build of such a node (assumed: the page of
T5-3B does not say), 4 are Frontier's."""


FP16_SUSTAINED = {"MI250X-GCD": 92.0}
"""Sustained TFLOP/s where fp16 differs from bf16: the same 0.60 of a best product of 0.8 of the peak."""


class PublishedRun(NamedTuple):
    """A run that was published."""

    what: str
    spec: RunSpec
    machine: Machine
    software: Software

    def predict(self) -> StepTime:
        """Return the time of a step as it is predicted."""
        return predict_step_time(self.spec, self.machine, software=self.software)


_NO_COUNTS = ("model", "precision", "percent_of_peak", "step_s")


def build_gpt_run(row: dict[str, str], machine: Machine) -> PublishedRun:
    """Return a run of GPT on one node of A100."""
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
    return PublishedRun(what, spec, machine, VTRAIN)


def build_t5_run(nodes: int, machine: Machine) -> PublishedRun:
    """Return T5-3B on so many nodes of A100."""
    return _build_nemo_run("nemo_t5_3b", read_shape("nemo_t5_3b"), nodes, machine, T5_SAMPLES, T5_MICRO)


def build_mt5_run(nodes: int, machine: Machine) -> PublishedRun:
    """Return mT5-3B on so many nodes of A100."""
    shape = read_shape("nemo_t5_3b") | {"vocab": MT5_VOCABULARY}
    return _build_nemo_run("nemo_mt5_3b", shape, nodes, machine, MT5_SAMPLES, MT5_MICRO)


def _build_nemo_run(
    name: str, shape: dict[str, Any], nodes: int, machine: Machine, samples: int, micro: int
) -> PublishedRun:
    model = {"name": name, "shape": shape, "attention": "eager", "dropout": 0.1}
    copies = nodes * DEVICES // T5_TENSOR
    spec = _build_spec(
        model, nodes=nodes, devices_per_node=DEVICES, micro=micro, accumulation=samples // micro // copies,
        tensor=T5_TENSOR, pipeline=1, precision="bf16", checkpointing=False,
    )  # fmt: skip
    return PublishedRun(f"{nodes} nodes", spec, machine, FUSED)


def build_frontier_run(
    row: dict[str, str], machine: Machine, nodes: int | None = None, samples: int | None = None
) -> PublishedRun:
    """Return a run of GPT on Frontier, or its layout on other `nodes` with other `samples` in a step."""
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
    """Return a node of a published accelerator from published numbers alone."""
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
    """Return the same node at the rate of its best product, as traces of single kernels see it."""
    return build_machine(accelerator).model_copy(update={"sustained_tflops": {}})


def count_megatron_flops(row: dict[str, str]) -> float:
    """Return the FLOPs of a step as Megatron counts them, recomputation included (arXiv 2104.04473, section 5.1)."""
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
