"""Goodput: the share of a training job's time that makes progress despite random failures.

Failures are assumed to have a constant rate (exponential times between them). Each failure ends the job, and all work
since the last checkpoint is repeated. The formulas are those of J. W. Young (Communications of the ACM 17, 1974) and J.
T. Daly (Future Generation Computer Systems 22, 2006). All times are seconds.
"""

import functools
import math
from typing import NamedTuple

from bench.core.spec import WIDTH, Precision

_DAY_S = 86_400.0


class PublishedFailures(NamedTuple):
    """Published number of failures of training jobs, and the number of device-days in which these failures were
    counted. The numbers are from a single job or a whole cluster."""

    failures: float
    device_days: float
    source: str

    @property
    def device_mtbf_s(self) -> float:
        """Mean time between failures of one device, in seconds. Failures of hosts, network and storage count as
        failures of devices, and are divided equally among all devices."""
        return self.device_days / self.failures * _DAY_S


LLAMA_3 = PublishedFailures(
    419, 16_384 * 54, "Llama 3 405B, arXiv 2407.21783: 419 unexpected interruptions in 54 days on 16,384 H100"
)
"""Computed by hand: 884,736 device-days / 419 failures = 2,112 device-days per failure, or one failure in 3.09 h of the
job."""
OPT_175B = PublishedFailures(
    35 + 70, 992 * 60, "OPT-175B, arXiv 2205.01068: 35 manual and about 70 automatic restarts in 2 months on 992 A100"
)
"""Computed by hand: 59,520 device-days / 105 failures = 567 device-days per failure, or one failure in 13.7 h of the
job."""
RSC_1 = PublishedFailures(6.50, 1000 * 8, "RSC-1, arXiv 2410.21680: 6.50 failures in 1,000 days of a node of 8 A100")
"""Computed by hand: 8,000 device-days / 6.50 failures = 1,231 device-days per failure. This agrees with the source,
which states a failure every 1.8 h for a job of 16,384 devices."""
RSC_2 = PublishedFailures(2.34, 1000 * 8, "RSC-2, arXiv 2410.21680: 2.34 failures in 1,000 days of a node of 8 A100")
"""Computed by hand: 8,000 device-days / 2.34 failures = 3,419 device-days per failure."""
PUBLISHED = (LLAMA_3, OPT_175B, RSC_1, RSC_2)
PUBLISHED_RANGE = "OPT-175B to RSC-2"
"""Range of the published failure rates: the sources with the most frequent and with the least frequent failures."""

RESTART_S = 600.0
"""Default seconds from a failure to the first step of the restarted job. This is an assumption: detection, scheduling,
process start and reading of the checkpoint take minutes. No publication states the sum."""
_LEAST_SHARE = 1e-3
"""Goodput below this share is returned as 0, because the model does not hold for such jobs."""


class FailureTerms(NamedTuple):
    """Inputs of the goodput model that do not depend on the size of the job. Times are in seconds and above 0."""

    write_s: float  # seconds for which a checkpoint stops training
    restart_s: float = RESTART_S
    device_mtbf_s: float | None = None  # mean time between failures of one device; None: published rates


class Reliability(NamedTuple):
    """Inputs of the goodput model for a job of a given size, in seconds."""

    mtbf_s: float  # mean time between failures of the whole job
    write_s: float  # seconds for which a checkpoint stops training
    restart_s: float  # seconds from a failure to the first step after it


class Goodput(NamedTuple):
    """Expected goodput (share of the time that is not lost to failures) of a job that writes checkpoints at the optimal
    interval. Its uncertainty range goes from `low` to `high`."""

    share: float  # share of the job's time spent on steps that are not repeated
    low: float
    high: float
    interval_s: float  # computing time between two checkpoints
    mtbf_s: float  # mean time between failures of the whole job
    source: str  # source of the failure rate


def compute_young_interval(mtbf_s: float, write_s: float) -> float:
    """Return the optimal number of seconds between checkpoints in first-order approximation, √(2δM) (Young 1974). δ is
    `write_s` (the seconds of a checkpoint), M is `mtbf_s` (the mean time between failures)."""
    return math.sqrt(2 * write_s * mtbf_s)


def compute_daly_interval(mtbf_s: float, write_s: float) -> float:
    """Return the optimal number of seconds between checkpoints in higher-order approximation (Daly 2006, equation 37).

    δ is `write_s` (the seconds of a checkpoint) and M is `mtbf_s` (the mean time between failures). For δ < 2M the
    result is √(2δM)·[1 + ⅓√(δ/2M) + ⅑·δ/2M] − δ, otherwise M.
    """
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    part = write_s / (2 * mtbf_s)
    return compute_young_interval(mtbf_s, write_s) * (1 + math.sqrt(part) / 3 + part / 9) - write_s


def compute_goodput(reliability: Reliability, interval_s: float) -> float:
    """Return the goodput, from 0 to 1, of a job that writes a checkpoint after every `interval_s` of computing.

    This is Daly's complete model. An interval τ and its checkpoint δ take M·e^(R/M)·(e^((τ+δ)/M) − 1) seconds on
    average, including failures during writes and restarts. M is the mean time between failures and R the restart time.
    The goodput is τ divided by that time.
    """
    mtbf_s, write_s, restart_s = reliability
    try:
        taken_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + write_s) / mtbf_s)
    except OverflowError:  # failures are so frequent that hardly any interval ends
        return 0.0
    return interval_s / taken_s


@functools.cache
def predict_goodput(devices: int, terms: FailureTerms) -> Goodput:
    """Return the goodput of a job on `devices` devices; a failure of any device ends the job.

    If `terms` has no failure rate, the published rate of Llama 3 is used. In this case, the uncertainty range goes from
    the lowest to the highest goodput that any rate in `PUBLISHED` gives.
    """
    own = terms.device_mtbf_s
    rates = [own] if own else [one.device_mtbf_s for one in (LLAMA_3, *PUBLISHED)]
    jobs = [Reliability(rate / devices, terms.write_s, terms.restart_s) for rate in rates]
    # at least 1 s, since write_s may be 0
    intervals_s = [max(1.0, compute_daly_interval(job.mtbf_s, job.write_s)) for job in jobs]
    shares = [compute_goodput(job, interval_s) for job, interval_s in zip(jobs, intervals_s, strict=True)]
    shares = [share if share >= _LEAST_SHARE else 0.0 for share in shares]
    source = "your node_mtbf" if own else f"{LLAMA_3.source}; range: {PUBLISHED_RANGE}"
    return Goodput(shares[0], min(shares), max(shares), intervals_s[0], jobs[0].mtbf_s, source)


def compute_checkpoint_bytes(parameters: int, precision: Precision) -> int:
    """Return the bytes of a checkpoint: weights in the run's precision, two fp32 moments of AdamW, and fp32 master
    weights if the precision is below fp32."""
    master = 0 if precision == "fp32" else WIDTH["fp32"]
    return parameters * (WIDTH[precision] + master + 2 * WIDTH["fp32"])
