"""Energy of all devices for 10^6 tokens of all kinds, padding included; what the hosts used is not in it."""

from analysis.observed import compute_energy_j, get_tokens, get_window
from bench.record import RunRecord

LABEL, UNIT, BETTER = "energy of the devices for a million tokens", "J/10^6 tokens", "less"


def value(record: RunRecord) -> float | None:
    energy, timed, counted = compute_energy_j(record), get_window(record), get_tokens(record)
    if energy is None or timed is None or counted is None:
        return None
    return energy / (len(timed.step_s) * counted.all) * 1e6
