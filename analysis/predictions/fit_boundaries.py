"""Published reports of what fitted a device and what did not, beside what is predicted of them."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from analysis.claims.published import read
from analysis.predictions import PredictionComparison, PredictionPoint, Verdict, estimators, shapes
from bench.predict.memory import predict_memory
from bench.spec import RunSpec

DEVICE_BYTES = {"RTX-3090 24GB": 25_430_000_000, "V100-16GB": 16_920_000_000, "A100-40GB": 42_500_000_000}
"""By a report's device, as its driver reports them: of the last two `conf/machine` says the same; CUDA's out-of-memory
messages on an RTX 3090 say 23.69 GiB."""
FITS = {True: "fits", False: "does not fit", None: "may fit"}
SHAPES = {"t5-3b": "t5_3b", "flan-t5-xl 3B": "t5_v1_1_xl", "flan-t5-xxl 11B": "t5_v1_1_xxl"}
"""A report's model: our name of its shape in `results/published/t5_shapes.csv`."""
UP_TO_128 = tuple((tokens, tokens) for tokens in (16, 32, 48, 64, 72, 80, 88, 96, 112, 128))
"""Encoder and decoder lengths of a batch of sentences: padded to its longest, and the reporter's full command line
(huggingface/transformers issue 8771) cuts them at 128 tokens."""
FLAN = ((500, 129),)
TEXT = (
    "Six reports (`results/published/fit_boundaries.csv`): would the device have held the run? What a report does not "
    "state is varied: lengths up to the 128 tokens at which its command line cuts sentences, and checkpointing with "
    "and without. A report is not testable where the answer changes within that range. Device memory is what "
    "drivers report: 25.4, 16.9 and 42.5 GB. Activations are those of eager attention with dropout 0.1, as "
    "transformers had it then. DeepSpeed's estimators see model states only."
)
HOST_BYTES_PER_PARAMETER = 20
"""Of fp32 training with everything offloaded: weight, gradient, master weight and two moments, 4 each."""
HOST = (
    "without checkpointing predicted not to fit, with it one sample fits the device; which of the two the report had, "
    "it does not say. What cannot fit is the host, whose memory is not in question here: 20 bytes per parameter are "
    "{states:.0f} GB, and 8 processes that each load the weights first hold {weights:.0f} GB; the usual node of 8 such "
    "cards (AWS p3.16xlarge) has 524 GB"
)


class FitReport(NamedTuple):
    """What a report says in our terms; `lengths` and `checkpointing` are what it may have meant."""

    memory_bytes: int
    precision: str
    devices: int
    micro: int
    lengths: Sequence[tuple[int, int]]
    options: dict[str, Any]
    checkpointing: Sequence[bool] = (False,)
    native: bool = False  # DeepSpeed's own optimizer, which offload takes
    excuse: str = ""  # of a prediction that is wrong within the range


def _build_zero3_options(width: int, **offload: Any) -> dict[str, Any]:
    """Stage 3 with what transformers puts for "auto", from d_model."""
    return {
        "stage": 3, "overlap_comm": True, "reduce_bucket_size": width**2,
        "stage3_prefetch_bucket_size": int(0.9 * width**2), "stage3_param_persistence_threshold": 10 * width,
        "stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9, **offload,
    }  # fmt: skip


_CPU = {"device": "cpu"}
_ZERO2 = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 200_000_000, "offload_optimizer": _CPU}
"""The sizes of the configuration file that the report's command line names."""
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
"""By model and configuration, as they are printed."""


def compare() -> PredictionComparison:
    """Return every report."""
    points = tuple(_build_report_point(row) for row in read("fit_boundaries").rows)
    return PredictionComparison(
        "fit_boundaries", "What fits and what does not", TEXT, points, bound="all right, or the exception explained",
        rival="DeepSpeed's estimator", excused=True,
    )  # fmt: skip


def list_specs(model: str, report: FitReport) -> Iterator[RunSpec]:
    """Yield every run that a report may have meant."""
    backend = "deepspeed" if "stage" in report.options else "ddp"
    name = SHAPES[model]
    for (encoder, decoder), checkpointing in itertools.product(report.lengths, report.checkpointing):
        yield RunSpec.model_validate({
            "model": {"name": name, "shape": shapes.read_shape(name), "attention": "eager", "dropout": 0.1},
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
        return PredictionPoint(
            what, None, FITS[truth], verdict="not testable", reason="its words are in nobody's settings yet"
        )
    candidates, parameters = list(list_specs(row["model"], report)), shapes.read_parameter_count(SHAPES[row["model"]])
    found = [predict_memory(spec, "cuda", report.memory_bytes).fits(report.memory_bytes) for spec in candidates]
    said = estimators.estimate_memory(candidates[0], parameters)
    point = PredictionPoint(
        what, " or ".join(dict.fromkeys(FITS[fits] for fits in found)), FITS[truth],
        rival=None if said is None else FITS[said <= report.memory_bytes],
    )  # fmt: skip
    if set(found) == {truth}:
        return point
    verdict, reason = _explain_mismatch(parameters, report, candidates, found, truth)
    return point._replace(verdict=verdict, reason=reason)


def _explain_mismatch(
    parameters: int, report: FitReport, candidates: Sequence[RunSpec], found: Sequence[bool | None], truth: bool
) -> tuple[Verdict, str]:
    """Return the verdict on a prediction that is not right throughout the range that a report leaves open, and why."""
    if report.excuse:
        numbers = {"states": HOST_BYTES_PER_PARAMETER * parameters / 1e9, "weights": 8 * 4 * parameters / 1e9}
        return "exception", report.excuse.format(**numbers)
    right = [spec.sequence["encoder"] for spec, fits in zip(candidates, found, strict=True) if fits is truth]
    if not right:
        return "exception", ""
    return (
        "not testable",
        f"right at {min(right)} to {max(right)} tokens of the {_format_length_range(candidates)} that it may have been",
    )


def _format_length_range(candidates: Sequence[RunSpec]) -> str:
    lengths = [spec.sequence["encoder"] for spec in candidates]
    return f"{min(lengths)} to {max(lengths)}"
