"""What a million tokens, padding included, take in money and energy."""

from analysis import prices
from analysis.metrics import Metric
from analysis.metrics.throughput import compute_tokens_per_s
from analysis.observed import compute_energy_j, get_tokens, get_window
from bench.core.record import RunRecord


def compute_cost_per_million_tokens(record: RunRecord) -> float | None:
    """What 10^6 tokens cost, padding included, of the price that the user gave for a device and hour."""
    price, rate = record.circumstance.machine.price_per_device_hour, compute_tokens_per_s(record)
    if price is None or rate is None:
        return None
    return prices.compute_cost_per_million_tokens(price, record.spec.world_size, rate)


def compute_energy_j_per_million_tokens(record: RunRecord) -> float | None:
    """Energy of all devices for 10^6 tokens of all kinds, padding included; what the hosts used is not in it."""
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
