"""Cost and energy per million tokens, padding included, and the time for which one attempt holds its devices.

Users state prices in a currency of their choice; no price is assumed. `analysis.costs` adds up the attempts (tries at a
run) of each configuration.
"""

import math
from typing import TYPE_CHECKING

from analysis.metrics import build_metric
from analysis.metrics.throughput import compute_tokens_per_s
from analysis.observed import compute_energy_j, get_tokens, get_window
from bench.core.errors import UserError
from bench.core.record import RunRecord

if TYPE_CHECKING:
    from pandas import DataFrame

_HOUR_S = 3600
_ROUNDING = 1e-6
"""Relative difference between two sums of the same step times that rounding may cause."""


def add_prices(table: "DataFrame", price_per_device_hour: float) -> "DataFrame":
    """Return a run table or summary whose column `cost_per_million_tokens` is computed with the given price per device
    and hour instead of the recorded price.

    Rows without a throughput have no cost. Raise UserError for a price that is not a positive finite number.
    """
    check_price(price_per_device_hour)
    # world_size is Int64, whose quotient would be a nullable pandas type instead of float64
    per_second = price_per_device_hour * table["world_size"].astype("float64") / _HOUR_S
    return table.assign(cost_per_million_tokens=per_second / table["tokens_per_s"] * 1e6)


def check_price(price: float | None) -> None:
    """Raise UserError if a price is given that is not a positive finite number."""
    _check_positive("--price", price, "give what a device costs per hour, e.g. 2.5")


def check_loss(loss: float | None) -> None:
    """Raise UserError if a loss is given that is not a positive finite number."""
    _check_positive("--loss", loss, "give a held-out loss, e.g. 2.5")


def _check_positive(option: str, value: float | None, remedy: str) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UserError(f"{option} {value:g}", "must be a positive finite number", remedy)


def compute_cost_per_million_tokens(record: RunRecord) -> float | None:
    """Return the cost of 10^6 tokens, padding included, in the user's currency. The cost is computed from the price per
    device and hour that the record states for the machine."""
    price, rate = record.circumstance.machine.price_per_device_hour, compute_tokens_per_s(record)
    if price is None or rate is None:
        return None
    return price * record.spec.world_size / _HOUR_S / rate * 1e6


def compute_attempt_s(record: RunRecord) -> float | None:
    """Return the seconds of an attempt (one try at a run) from the start of its processes to its last step, with its
    evaluations and checkpoints.

    None if the record has no times: the attempt was lost, or failed before its observations were written.
    """
    observed = record.observations
    if observed is None:
        return None
    earlier_s = _compute_earlier_s(record)
    evaluated = [one.seconds for one in observed.evaluations or () if not earlier_s or (one.trained_s or 0) > earlier_s]
    stored = [one.seconds for one in observed.checkpoints or ()]
    steps = observed.steps.step_s if observed.steps else ()
    return math.fsum((*observed.phases_s.values(), *steps, *evaluated, *stored)) or None


def compute_startup_s(record: RunRecord) -> float | None:
    """Return the seconds of an attempt (one try at a run) from the start of its processes to its first step; None if
    the record has no times."""
    observed = record.observations
    return math.fsum(observed.phases_s.values()) or None if observed else None


def compute_seconds_to_loss(record: RunRecord, loss: float, *, own: bool = False) -> float | None:
    """Return the seconds of a training until the end of its first evaluation with at most this loss; None if no
    evaluation reached the loss.

    The start-up, earlier evaluations and earlier checkpoints are included. If the training resumed from a checkpoint,
    the steps of earlier attempts are included as well. Exception: if `own` is true, steps and evaluations of earlier
    attempts are excluded. In this case, the result is None if an earlier attempt reached the loss.
    """
    observed = record.observations
    if observed is None or not observed.evaluations:
        return None
    reached = next((one for one in observed.evaluations if one.loss is not None and one.loss <= loss), None)
    if reached is None or reached.trained_s is None:
        return None
    earlier_s = _compute_earlier_s(record) if own else 0.0
    if earlier_s and reached.trained_s <= earlier_s:
        return None
    counted = [one for one in observed.evaluations if one.step <= reached.step]
    evaluated = [one.seconds for one in counted if not earlier_s or (one.trained_s or 0.0) > earlier_s]
    stored = [one.seconds for one in observed.checkpoints or () if one.step <= reached.step and one.kind != "model"]
    return math.fsum((*observed.phases_s.values(), reached.trained_s - earlier_s, *evaluated, *stored))


def is_resumed(record: RunRecord) -> bool:
    """Return True if a training resumed from a checkpoint. The training times that its evaluations state then include
    steps of earlier attempts."""
    return _compute_earlier_s(record) > 0


def _compute_earlier_s(record: RunRecord) -> float:
    """Return the total duration of the steps that earlier attempts made in a resumed training, in seconds. The result
    is 0 for a training that was not resumed.

    Each evaluation in a record states the training time before this evaluation, with the steps of earlier attempts. The
    list of steps in a record contains only the steps of the last attempt. The result is the difference.
    """
    observed = record.observations
    if observed is None or observed.steps is None or not observed.evaluations:
        return 0.0
    trained_s = observed.evaluations[-1].trained_s or 0.0
    earlier_s = trained_s - math.fsum(observed.steps.step_s)
    return earlier_s if earlier_s > _ROUNDING * trained_s else 0.0


def compute_energy_j_per_million_tokens(record: RunRecord) -> float | None:
    """Return the energy that all devices use for 10^6 tokens, padding included, in joules. Hosts are excluded."""
    energy, timed, counted = compute_energy_j(record), get_window(record), get_tokens(record)
    if energy is None or timed is None or counted is None:
        return None
    return energy / (len(timed.step_s) * counted.all) * 1e6


METRICS = (
    build_metric(
        compute_cost_per_million_tokens,
        "cost of a million tokens, padding included, in the currency of the price",
        "currency/10^6 tokens",
    ),
    build_metric(
        compute_energy_j_per_million_tokens,
        "energy that all devices use for a million tokens, hosts excluded",
        "J/10^6 tokens",
    ),
)
