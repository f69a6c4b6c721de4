"""What does not vary from run to run: counts and bytes. On a CPU memory varies by some bytes, its peak by buckets."""

from collections.abc import Sequence
from typing import NamedTuple

from analysis.observed import compute_step_flops, find_worst_rank_value
from bench.record import Collective, RunRecord

PEAK = "peak_allocated_bytes"
_MEMORY = ("resident_bytes", PEAK)
_COUNTS = ("calls", "payload_bytes")
FIXED = ("parameters", "model_flops", "hardware_flops", *_MEMORY)
"""Quantities of every run, beside those of each kind of collective."""
# What the harness and gloo keep on a CPU: repeats of 40 configurations differed by up to 4 KiB. Their peaks did so by
# 3.7 %, and are not exact there; those of the initialisation, at stage 3, by 192 KiB, and are not looked at.
_SLACK_BYTES = 64 * 1024


class QuantityChange(NamedTuple):
    """A quantity that no run of B has in common with any run of A, from the lowest to the highest of their values."""

    name: str
    a: tuple[int, int]
    b: tuple[int, int]
    exact: bool = True  # no run should differ from another of the same code

    @property
    def growth(self) -> float:
        """The least ratio of a value of B to one of A; infinite from nothing to something."""
        return self.b[0] / self.a[1] if self.a[1] else float("inf")


def find_changes(ours: Sequence[RunRecord], theirs: Sequence[RunRecord]) -> tuple[QuantityChange, ...]:
    """Return the quantities that all runs of both sides know and whose values do not overlap."""
    kinds = sorted({kind for record in (*ours, *theirs) for kind in _get_collectives(record)})
    a, b = ([list_quantities(record, kinds) for record in side] for side in (ours, theirs))
    known = [name for name in a[0] if all(name in one for one in (*a, *b))] if a and b else []
    on_host = any(map(_is_on_host, (*ours, *theirs)))
    found = [
        QuantityChange(name, _find_range(name, a), _find_range(name, b), not (on_host and name == PEAK))
        for name in known
    ]
    return tuple(
        change for change in found if _is_apart(change, _SLACK_BYTES if on_host and change.name in _MEMORY else 0)
    )


def is_quantity(name: str) -> bool:
    """Whether a quantity may have this name; no list holds all kinds of collectives."""
    return name in FIXED or any(name.endswith(f"_{count}") for count in _COUNTS)


def list_quantities(record: RunRecord, kinds: Sequence[str]) -> dict[str, int]:
    """Return what a run that ended well counted, whatever is known of it: FLOPs of a step over all ranks, calls and
    payload bytes per step of each of the `kinds` of collectives, of the rank that moves most, and memory of the rank
    that holds most."""
    observed = record.observations
    if observed is None:
        return {}
    found = {"parameters": observed.parameters, **_list_flops(record)}
    for kind in kinds if observed.collectives is not None else ():
        found |= {f"{kind}_{count}": getattr(_get_collectives(record).get(kind), count, 0) for count in _COUNTS}
    memory = {name: find_worst_rank_value(record, name) for name in _MEMORY}
    return found | {name: value for name, value in memory.items() if value is not None}


def _is_apart(change: QuantityChange, slack: int) -> bool:
    return change.a[1] + slack < change.b[0] or change.b[1] + slack < change.a[0]


def _find_range(name: str, side: Sequence[dict[str, int]]) -> tuple[int, int]:
    values = [one[name] for one in side]
    return min(values), max(values)


def _is_on_host(record: RunRecord) -> bool:
    """Whether tensors live in the host's memory, beside those of the harness, which keeps a few numbers of every step,
    and of gloo, whose threads let go of a bucket when they come to it: that moves the peak."""
    link = record.observations.link if record.observations else None
    return link is not None and link.backend == "gloo"


def _get_collectives(record: RunRecord) -> dict[str, Collective]:
    return (record.observations.collectives if record.observations else None) or {}


def _list_flops(record: RunRecord) -> dict[str, int]:
    found = {
        "model_flops": compute_step_flops(record, "model"),
        "hardware_flops": compute_step_flops(record, "hardware"),
    }
    return {name: flops for name, flops in found.items() if flops is not None}
