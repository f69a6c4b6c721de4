"""What 10^6 tokens cost, padding included: of the price that the user gave for a device and hour, none without one."""

from analysis.metrics import tokens_per_s
from analysis.prices import compute_cost_per_million_tokens
from bench.record import RunRecord

LABEL, UNIT, BETTER = "cost of a million tokens, in the price's currency", "currency/10^6 tokens", "less"


def value(record: RunRecord) -> float | None:
    price, rate = record.circumstance.machine.price_per_device_hour, tokens_per_s.value(record)
    return (
        None if price is None or rate is None else compute_cost_per_million_tokens(price, record.spec.world_size, rate)
    )
