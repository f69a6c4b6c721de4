"""Goodput: the share of a training job's time that makes progress, with random failures.

Failures are assumed to have a constant rate (exponential times between them). Each failure ends the job, and all work
since the last checkpoint is repeated. The formulas are those of J. W. Young (Communications of the ACM 17, 1974) and
J. T. Daly (Future Generation Computer Systems 22, 2006). All times are seconds.
"""

import functools
import math
from typing import NamedTuple

from bench.core.spec import WIDTH, Precision

_DAY_S = 86_400.0


class PublishedFailures(NamedTuple):
    """Published failures that ended training on a job or cluster, and the device-days in which they occurred."""

    failures: float
    device_days: float
    source: str

    @property
    def device_mtbf_s(self) -> float:
        """Mean time between the failures of one device with its share of host, network and storage."""
        return self.device_days / self.failures * _DAY_S


LLAMA_3 = PublishedFailures(
    419, 16_384 * 54, "Llama 3 405B, arXiv 2407.21783: 419 unexpected interruptions in 54 days on 16,384 H100"
)
"""884,736 / 419 = 2,112 device-days: one failure in 3.09 h for all devices."""
OPT_175B = PublishedFailures(
    35 + 70, 992 * 60, "OPT-175B, arXiv 2205.01068: 35 manual and about 70 automatic restarts in 2 months on 992 A100"
)
"""59,520 / 105 = 567 device-days: one failure in 13.7 h for all devices."""
RSC_1 = PublishedFailures(6.50, 1000 * 8, "RSC-1, arXiv 2410.21680: 6.50 failures in 1,000 days of a node of 8 A100")
"""8,000 / 6.50 = 1,231 device-days; the source has 1.8 h for a job of 16,384 devices."""
RSC_2 = PublishedFailures(2.34, 1000 * 8, "RSC-2, arXiv 2410.21680: 2.34 failures in 1,000 days of a node of 8 A100")
"""8,000 / 2.34 = 3,419 device-days."""
PUBLISHED = (LLAMA_3, OPT_175B, RSC_1, RSC_2)
PUBLISHED_RANGE = "OPT-175B to RSC-2"
"""The source with the most frequent failures, and the source with the least frequent."""

RESTART_S = 600.0
"""Default time from a failure to the first step of the restarted job. Chosen: detection, scheduling, the start of the
processes and the read of the checkpoint take minutes; no publication has a number for all of it."""
_LEAST_SHARE = 1e-3
"""A lower goodput counts as 0: the model does not describe such jobs."""


class FailureTerms(NamedTuple):
    """Terms of the goodput for jobs of any size; times are above 0."""

    write_s: float  # that training stops for one checkpoint
    restart_s: float = RESTART_S
    device_mtbf_s: float | None = None  # mean time between failures of one device; None: as published


class Reliability(NamedTuple):
    """Terms of the goodput for a job of given size."""

    mtbf_s: float  # mean time between failures of the whole job
    write_s: float  # that training stops for one checkpoint
    restart_s: float  # from a failure to the first step after it


class Goodput(NamedTuple):
    """Expected goodput of a job that writes checkpoints at the best interval."""

    share: float  # of the job's time, spent on steps that are not repeated
    low: float
    high: float
    interval_s: float  # computing time between two checkpoints
    mtbf_s: float  # of the whole job
    source: str  # of the failure rate


def compute_young_interval(mtbf_s: float, write_s: float) -> float:
    """Return the best time between checkpoints to first order, √(2δM) (Young 1974)."""
    return math.sqrt(2 * write_s * mtbf_s)


def compute_daly_interval(mtbf_s: float, write_s: float) -> float:
    """Return the best time between checkpoints to higher order (Daly 2006, equation 37): for δ < 2M
    √(2δM)·[1 + ⅓√(δ/2M) + ⅑·δ/2M] − δ, else M."""
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    part = write_s / (2 * mtbf_s)
    return compute_young_interval(mtbf_s, write_s) * (1 + math.sqrt(part) / 3 + part / 9) - write_s


def compute_goodput(reliability: Reliability, interval_s: float) -> float:
    """Return the share of time that makes progress with a checkpoint after every `interval_s` of computing.

    Daly's complete model: an interval τ and its checkpoint δ take M·e^(R/M)·(e^((τ+δ)/M) − 1) on average, including
    failures during writes and restarts. The share is τ over that time.
    """
    mtbf_s, write_s, restart_s = reliability
    try:
        taken_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + write_s) / mtbf_s)
    except OverflowError:  # failures are so frequent that hardly any interval ends
        return 0.0
    return interval_s / taken_s


@functools.cache
def predict_goodput(devices: int, terms: FailureTerms) -> Goodput:
    """Return the goodput of a job on `devices`, each of whose failures ends the job.

    Without a given failure rate it uses Llama 3's, with the range of all rates in `PUBLISHED`.
    """
    own = terms.device_mtbf_s
    rates = [own] if own else [one.device_mtbf_s for one in (LLAMA_3, *PUBLISHED)]
    jobs = [Reliability(rate / devices, terms.write_s, terms.restart_s) for rate in rates]
    intervals_s = [max(1.0, compute_daly_interval(job.mtbf_s, job.write_s)) for job in jobs]  # writes may take no time
    shares = [compute_goodput(job, interval_s) for job, interval_s in zip(jobs, intervals_s, strict=True)]
    shares = [share if share >= _LEAST_SHARE else 0.0 for share in shares]
    source = "your node_mtbf" if own else f"{LLAMA_3.source}; range: {PUBLISHED_RANGE}"
    return Goodput(shares[0], min(shares), max(shares), intervals_s[0], jobs[0].mtbf_s, source)


def compute_checkpoint_bytes(parameters: int, precision: Precision) -> int:
    """Return the bytes of weights and AdamW's state in a checkpoint: weights in the run's precision, master weights if
    that is below fp32, and two fp32 moments."""
    master = 0 if precision == "fp32" else WIDTH["fp32"]
    return parameters * (WIDTH[precision] + master + 2 * WIDTH["fp32"])
