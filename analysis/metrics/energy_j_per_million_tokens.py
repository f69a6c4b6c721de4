"""Energy of all devices for 10^6 tokens of all kinds, padding included; what the hosts used is not in it."""

from analysis.observed import energy_j, tokens, window
from bench.record import RunRecord

LABEL, UNIT, BETTER = "energy of the devices for a million tokens", "J/10^6 tokens", "less"


def value(record: RunRecord) -> float | None:
    energy, timed, counted = energy_j(record), window(record), tokens(record)
    if energy is None or timed is None or counted is None:
        return None
    return energy / (len(timed.step_s) * counted.all) * 1e6
