"""Cost and energy per million tokens, padding included.

Users state prices in a currency of their choice; there are no built-in prices.
"""

import math
from typing import TYPE_CHECKING

from analysis.metrics import Metric
from analysis.metrics.throughput import compute_tokens_per_s
from analysis.observed import compute_energy_j, get_tokens, get_window
from bench.core.errors import UserError
from bench.core.record import RunRecord

if TYPE_CHECKING:
    from pandas import DataFrame

_HOUR_S = 3600


def add_prices(table: "DataFrame", price_per_device_hour: float) -> "DataFrame":
    """Return a run table or summary with `cost_per_million_tokens` at the given price per device and hour, in place of
    the recorded price.

    The cost is missing if the throughput is. Raises UserError for a price that is not positive.
    """
    if not (math.isfinite(price_per_device_hour) and price_per_device_hour > 0):
        raise UserError(
            f"price {price_per_device_hour:g}", "not positive", "give what a device costs per hour, e.g. 2.5"
        )
    # world_size is Int64, whose quotient would be a nullable pandas type instead of float64
    per_second = price_per_device_hour * table["world_size"].astype("float64") / _HOUR_S
    return table.assign(cost_per_million_tokens=per_second / table["tokens_per_s"] * 1e6)


def compute_cost_per_million_tokens(record: RunRecord) -> float | None:
    """Return the cost of 10^6 tokens, padding included. The price per device and hour is recorded with the
    machine, in the user's currency."""
    price, rate = record.circumstance.machine.price_per_device_hour, compute_tokens_per_s(record)
    if price is None or rate is None:
        return None
    return price * record.spec.world_size / _HOUR_S / rate * 1e6


def compute_energy_j_per_million_tokens(record: RunRecord) -> float | None:
    """Return the energy that all devices use for 10^6 tokens, padding included, in joules. Hosts are excluded."""
    energy, timed, counted = compute_energy_j(record), get_window(record), get_tokens(record)
    if energy is None or timed is None or counted is None:
        return None
    return energy / (len(timed.step_s) * counted.all) * 1e6


METRICS = (
    Metric(
        "cost_per_million_tokens",
        "cost of a million tokens, in the price's currency",
        "currency/10^6 tokens",
        "less",
        compute_cost_per_million_tokens,
    ),
    Metric(
        "energy_j_per_million_tokens",
        "energy of the devices for a million tokens",
        "J/10^6 tokens",
        "less",
        compute_energy_j_per_million_tokens,
    ),
)
