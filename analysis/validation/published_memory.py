"""Published memory compared with predictions. The published numbers are the table of model states in the ZeRO paper,
and users' reports on whether a run fitted a device.

The published numbers are also compared with DeepSpeed's memory estimators. The formulas here are those of DeepSpeed
0.19.8: estimate_zero2_model_states_mem_needs in runtime/zero/stage_1_and_2.py, and
estimate_zero3_model_states_mem_needs in stage3.py. A test compares the formulas with these functions. The estimators
assume the model states of 16-bit training, whatever the precision. DeepSpeed has no estimators for stages 0 and 1.
"""

import itertools
from collections.abc import Iterator, Sequence
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple

from analysis.claims.sources import read_published
from analysis.validation import PredictionComparison, PredictionPoint, Verdict, build_comparison, judge
from analysis.validation.published_runs import read_parameter_count, read_shape
from bench.core.engine_facts import Division
from bench.core.formatting import format_count
from bench.core.spec import RunSpec
from bench.engines import find_facts
from bench.predict.memory import predict_host_memory, predict_memory

HALF = 2
"""Bytes of a weight in 16 bits."""
DIVIDED = 18
"""Bytes per parameter that both estimators divide among GPUs: 2 for the gradient in 16 bits, 4 for the gradient in 32
bits, 4 for the master weight, and 8 for Adam's moments. The estimator of stage 2 adds the weights to these 18 bytes. At
stage 3, the 18 bytes already include the weights, according to DeepSpeed."""
LAYER = 4
"""Bytes per parameter of the largest layer at stage 3: 2 for its gathered weight and 2 for its gradient, in 16 bits."""
FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""FLOPs of forward and backward per parameter and token, by the rule of thumb of arXiv 2001.08361, section 2.1."""


def estimate_zero2(parameters: int, ranks: int, *, offload: bool) -> int:
    """Return bytes of model states per GPU, as DeepSpeed's function estimate_zero2_model_states_mem_needs computes
    them."""
    return HALF * parameters if offload else HALF * parameters + int(DIVIDED * parameters / ranks)


def estimate_zero3(parameters: int, largest_layer: int, ranks: int, *, offload: bool, offload_weights: bool) -> int:
    """Return bytes of model states per GPU, as DeepSpeed's function estimate_zero3_model_states_mem_needs computes
    them. `largest_layer` is a number of parameters."""
    if not offload:
        return LAYER * largest_layer + int(DIVIDED * parameters / ranks)
    return LAYER * largest_layer + (0 if offload_weights else int(HALF * parameters / ranks))


def find_stage(spec: RunSpec) -> int | None:
    """Return the ZeRO stage in the DeepSpeed config of a run; None if its engine has no DeepSpeed config."""
    facts = find_facts(spec)
    if facts is None or facts.deepspeed_config is None:
        return None
    return int(facts.deepspeed_config(spec)["zero_optimization"]["stage"])


def estimate_memory(spec: RunSpec, parameters: int) -> int | None:
    """Return the bytes per GPU that DeepSpeed's estimator gives for the run's stage; None if the stage has no
    estimator."""
    options, at = spec.engine.options, find_stage(spec)
    devices = [(options.get(name) or {}).get("device", "none") for name in ("offload_optimizer", "offload_param")]
    offload, offload_weights = (device != "none" for device in devices)
    if at == 2:
        return estimate_zero2(parameters, spec.data_parallel, offload=offload)
    if at == 3:
        layer = count_largest_layer(spec.model.shape)
        return estimate_zero3(parameters, layer, spec.data_parallel, offload=offload, offload_weights=offload_weights)
    return None


def count_largest_layer(shape: dict[str, Any]) -> int:
    """Return the number of parameters in a T5's largest weight matrix, such as the embedding. In a T5, each weight
    matrix is a module of its own."""
    widest: int = max(shape["vocab"], shape["d_ff"], shape["heads"] * shape["d_kv"])
    return int(shape["d_model"]) * widest


def estimate_flops(parameters: int, tokens: float) -> float:
    """Return the estimated FLOPs of forward and backward over `tokens` tokens: 6 · parameters · tokens."""
    return FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens


# -- ZeRO's table

STAGES = (1, 2, 3)
GB = 10**9


def compare_zero_table() -> PredictionComparison:
    """Return the comparison of predictions with every number in the table of the ZeRO paper."""
    points = []
    for row in read_published("zero_memory_table").rows:
        elements, ranks = round(float(row["parameters_b"]) * GB), int(row["data_parallel"])
        estimates = {
            2: estimate_zero2(elements, ranks, offload=False) / GB,
            3: estimate_zero3(elements, 0, ranks, offload=False, offload_weights=False) / GB,
        }
        for stage in STAGES:
            what = f"{row['parameters_b']}B parameters, stage {stage}, {format_count(ranks, 'device')}"
            weights, gradients, optimizer = (ranks if stage >= first else 1 for first in (3, 2, 1))
            states = Division(weights, gradients, optimizer).state_bytes(elements, "bf16")
            exact, printed = Decimal(states) / GB, row[f"stage{stage}_gb"]
            verdict, rival = judge(is_printed_form(printed, exact)), estimates.get(stage)
            points.append(PredictionPoint(what, float(exact), float(printed), verdict=verdict, rival=rival))
    return build_comparison("zero_table", points)


def is_printed_form(printed: str, exact: Decimal) -> bool:
    """Return True if the printed number equals `exact` after `exact` is rounded or truncated to the same number of
    digits."""
    return Decimal(printed) in {exact.quantize(Decimal(printed), how) for how in (ROUND_HALF_UP, ROUND_DOWN)}


# -- reports of runs that fitted a device, or did not

DEVICE_BYTES = {"RTX-3090 24GB": 25_430_000_000, "V100-16GB": 16_920_000_000, "A100-40GB": 42_500_000_000}
"""Device memory in bytes for each device of the reports, as its driver reports it. The values of V100 and A100 are also
in `conf/machine`. CUDA's out-of-memory messages on an RTX 3090 show 23.69 GiB."""
FITS = {True: "fits", False: "does not fit", None: "may fit"}
SHAPES = {"t5-3b": "t5_3b", "flan-t5-xl 3B": "t5_v1_1_xl", "flan-t5-xxl 11B": "t5_v1_1_xxl"}
"""Model name in a report, and the name of its shape in `results/published/t5_shapes.csv`."""
UP_TO_128 = tuple((tokens, tokens) for tokens in (16, 32, 48, 64, 72, 80, 88, 96, 112, 128))
"""Possible (encoder, decoder) lengths in tokens of a batch of sentences. A batch is padded to its longest sentence, so
its length is unknown. The command line in the report cuts sentences at 128 tokens (huggingface/transformers issue
8771)."""
FLAN = ((500, 129),)
HOST = (
    "predicted not to fit without checkpointing; with it one sample fits the device. The report does not say which it "
    "had. The host cannot fit, whose memory is not compared here: {each:.0f} bytes per parameter are {states:.0f} GB, "
    "and 8 processes that each load the weights first need {weights:.0f} GB. The usual node of 8 such cards (AWS "
    "p3.16xlarge) has 524 GB"
)


class FitReport(NamedTuple):
    """Configuration of one run, from a report in which a user states whether the run fitted its device. If the report
    does not state the (encoder, decoder) lengths in tokens, `lengths` lists all possible values. If it does not state
    whether activations were checkpointed, `checkpointing` lists both values."""

    memory_bytes: int
    precision: str
    devices: int
    micro: int
    lengths: Sequence[tuple[int, int]]
    options: dict[str, Any]
    checkpointing: Sequence[bool] = (False,)
    native: bool = False  # DeepSpeed's own optimizer, which offload needs
    excuse: str = ""  # reason why the prediction is wrong for possible values


def _build_zero3_options(width: int, **offload: Any) -> dict[str, Any]:
    """Return the options of ZeRO stage 3. Bucket sizes and the persistence threshold are the values that transformers
    inserts for "auto" in a DeepSpeed config. transformers computes them from the model's d_model, which is `width`.
    `offload` adds further options."""
    return {
        "stage": 3, "overlap_comm": True, "reduce_bucket_size": width**2,
        "stage3_prefetch_bucket_size": int(0.9 * width**2), "stage3_param_persistence_threshold": 10 * width,
        "stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9, **offload,
    }  # fmt: skip


_CPU = {"device": "cpu"}
_ZERO2 = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 200_000_000, "offload_optimizer": _CPU}
"""ZeRO stage 2 with the bucket sizes of the configuration file that the report's command line names."""
_BOTH = (True, False)
_T5_3B = FitReport(DEVICE_BYTES["RTX-3090 24GB"], "fp16", 1, 1, UP_TO_128, {"bucket_cap_mb": 25})
_T5_3B_OFFLOADED = _T5_3B._replace(micro=20, options=_ZERO2, native=True)
_XL = FitReport(DEVICE_BYTES["V100-16GB"], "fp32", 4, 1, FLAN, _build_zero3_options(2048), _BOTH)
_XXL = FitReport(DEVICE_BYTES["A100-40GB"], "bf16", 8, 8, FLAN, _build_zero3_options(4096), (True,))
_ALL_OFFLOADED = _build_zero3_options(4096, offload_optimizer=_CPU, offload_param=_CPU)
_XXL_OFFLOADED = FitReport(
    DEVICE_BYTES["V100-16GB"], "fp32", 8, 1, FLAN, _ALL_OFFLOADED, _BOTH, native=True, excuse=HOST
)
REPORTS = {
    ("t5-3b", "fp16 batch 1 no sharding no offload"): _T5_3B,
    ("t5-3b", "ZeRO-2 + CPU optimizer offload batch 20"): _T5_3B_OFFLOADED,
    ("t5-3b", "ZeRO-2 + CPU optimizer offload batch 30"): _T5_3B_OFFLOADED._replace(micro=30),
    ("flan-t5-xl 3B", "fp32 no offload"): _XL,
    ("flan-t5-xxl 11B", "ZeRO-3 bf16 batch 8 no offload"): _XXL,
    ("flan-t5-xxl 11B", "fp32 + offload"): _XXL_OFFLOADED,
}
"""Configurations of the reports, by model and configuration as the report prints them."""


def compare_fits() -> PredictionComparison:
    """Return the comparison of predictions with all published reports on whether a run fitted its device."""
    return build_comparison("fit_boundaries", map(_build_report_point, read_published("fit_boundaries").rows))


def list_specs(model: str, report: FitReport) -> Iterator[RunSpec]:
    """Yield a spec for every combination of lengths and checkpointing that is possible for a report."""
    backend = "deepspeed" if "stage" in report.options else "ddp"
    name = SHAPES[model]
    for (encoder, decoder), checkpointing in itertools.product(report.lengths, report.checkpointing):
        yield RunSpec.model_validate({
            "model": {"name": name, "shape": read_shape(name), "attention": "eager", "dropout": 0.1},
            "engine": {"name": backend, "backend": backend, "options": report.options},
            "data": {"name": "synthetic", "source": "synthetic"},
            "batch": {"micro": report.micro},
            "devices_per_node": report.devices,
            "sequence": {"encoder": encoder, "decoder": decoder},
            "precision": report.precision,
            "activation_checkpointing": checkpointing,
            "optimizer": {"implementation": "native" if report.native else "torch"},
        })  # fmt: skip


def _build_report_point(row: dict[str, str]) -> PredictionPoint:
    what = f"{row['model']}, {row['device']}, {row['configuration']}"
    truth = row["fits"] == "true"
    report = REPORTS.get((row["model"], row["configuration"]))
    if report is None:
        reason = "its configuration is not in REPORTS"
        return PredictionPoint(what, None, FITS[truth], verdict="not testable", reason=reason)
    candidates, parameters = list(list_specs(row["model"], report)), read_parameter_count(SHAPES[row["model"]])
    found = [predict_memory(spec, "cuda", report.memory_bytes).fits(report.memory_bytes) for spec in candidates]
    said = estimate_memory(candidates[0], parameters)
    rival = None if said is None else FITS[said <= report.memory_bytes]
    predicted = " or ".join(dict.fromkeys(FITS[fits] for fits in found))
    verdict, reason = _judge_report(parameters, report, candidates, found, truth)
    return PredictionPoint(what, predicted, FITS[truth], verdict=verdict, reason=reason, rival=rival)


def _judge_report(
    parameters: int, report: FitReport, candidates: Sequence[RunSpec], found: Sequence[bool | None], truth: bool
) -> tuple[Verdict, str]:
    """Return the verdict on the predictions for a report, and a reason. If all predictions are right, the verdict is
    `ok` and the reason is empty.

    A report may not state the sequence lengths, or whether activations were checkpointed. `candidates` holds one spec
    for each combination of possible lengths and checkpointing. `found` holds for each spec whether it is predicted to
    fit (None: uncertain). `truth` is True if the reported run fitted. `parameters` is the model's number of parameters.
    """
    if set(found) == {truth}:
        return "ok", ""
    if report.excuse:
        host = predict_host_memory(candidates[0])
        assert host is not None
        states = sum(low for name, (low, _) in host.terms.items() if name != "processes")
        numbers = {"each": states / parameters, "states": states / 1e9, "weights": 8 * 4 * parameters / 1e9}
        return "exception", report.excuse.format(**numbers)
    right = [spec.sequence["encoder"] for spec, fits in zip(candidates, found, strict=True) if fits is truth]
    if not right:
        return "exception", ""
    lengths = [spec.sequence["encoder"] for spec in candidates]
    span = f"{min(lengths)} to {max(lengths)}"
    return "not testable", f"right at {min(right)} to {max(right)} tokens of the possible {span}"
