"""Cost and energy of tokens, padding included.

Users state prices in a currency of their own; none is built in.
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
    """Return a run table, or a summary, with `cost_per_million_tokens` at this price instead of that of the records.

    The cost is missing where the throughput is. Raises UserError for a price that is not positive.
    """
    if not (math.isfinite(price_per_device_hour) and price_per_device_hour > 0):
        raise UserError(
            f"price {price_per_device_hour:g}", "not positive", "give what a device costs per hour, e.g. 2.5"
        )
    # world_size is Int64, and its quotient would have pandas' own type for missing values
    per_second = price_per_device_hour * table["world_size"].astype("float64") / _HOUR_S
    return table.assign(cost_per_million_tokens=per_second / table["tokens_per_s"] * 1e6)


def compute_cost_per_million_tokens(record: RunRecord) -> float | None:
    """Return the cost of 10^6 tokens at the price that the user gave for a device and hour, in its currency."""
    price, rate = record.circumstance.machine.price_per_device_hour, compute_tokens_per_s(record)
    if price is None or rate is None:
        return None
    return price * record.spec.world_size / _HOUR_S / rate * 1e6


def compute_energy_j_per_million_tokens(record: RunRecord) -> float | None:
    """Return the energy of all devices for 10^6 tokens of all kinds, in joules; it excludes the hosts."""
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
