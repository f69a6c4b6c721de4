"""What tokens cost. Prices are the user's, in a currency of their own; none is built in."""

import math

import pandas as pd

from bench.core.errors import UserError

_HOUR_S = 3600


def compute_cost_per_million_tokens(price_per_device_hour: float, devices: int, tokens_per_s: float) -> float:
    """Return what 10^6 tokens cost, in the price's currency."""
    return price_per_device_hour * devices / _HOUR_S / tokens_per_s * 1e6


def add_prices(table: pd.DataFrame, price_per_device_hour: float) -> pd.DataFrame:
    """Return a run table, or a summary, whose `cost_per_million_tokens` is of this price, whatever a record's own is;
    missing where the throughput is. Raises UserError for a price that is not positive."""
    if not (math.isfinite(price_per_device_hour) and price_per_device_hour > 0):
        raise UserError(
            f"price {price_per_device_hour:g}", "not positive", "give what a device costs per hour, e.g. 2.5"
        )
    rates = zip(table["world_size"], table["tokens_per_s"], strict=True)
    costs = [compute_cost_per_million_tokens(price_per_device_hour, devices, rate) for devices, rate in rates]
    return table.assign(cost_per_million_tokens=pd.Series(costs, index=table.index, dtype="float64"))
