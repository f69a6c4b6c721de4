"""Two choices side by side: whether one is faster for sure, and which part of the step makes the difference.

All points of a question share the machine, so they share the doubt about its rates and about how well communication
hides behind compute: one is called faster if it is so at both ends of both doubts, the same for both points. What one
engine computes in equal portions (micro-batch and checkpointing) cancels then. Where engine or portions differ, each
may still be off by what a rehearsal leaves in doubt, and an engine with work on the host, which no rate knows, by more.
"""

import itertools

from bench import engines
from bench.predict.advice.choices import Choice
from bench.predict.step_time.compute import CALIBRATED, REHEARSED

SHOWN = 0.01
"""Share of the better one's step below which a part of it explains nothing."""


def compute_price(choice: Choice, step_s: float, *, per_device: bool) -> float:
    """Return seconds per token, or device-seconds per token."""
    return step_s * (choice.spec.world_size if per_device else 1) / choice.time.tokens


def is_surely_faster(a: Choice, b: Choice, *, per_device: bool, weight: float = 1.0) -> bool:
    """Whether `a` takes less time per token (and device) than `b`, whatever the doubt, if a token of `b` counts for
    `weight` of `a`'s."""
    if "measured" in (a.estimate.evidence, b.estimate.evidence) or a.rates != b.rates:
        high, low = a.estimate.high_s, b.estimate.low_s
        return compute_price(a, high, per_device=per_device) < weight * compute_price(b, low, per_device=per_device)
    most, least = _find_own_doubt(a, b)[1], _find_own_doubt(b, a)[0]
    return all(
        compute_price(a, a.step_s(rate * most, overlapping=overlapping), per_device=per_device)
        < weight * compute_price(b, b.step_s(rate * least, overlapping=overlapping), per_device=per_device)
        for rate, overlapping in itertools.product(a.rates, (True, False))
    )


def compute_worst_price(choice: Choice, *, per_device: bool) -> float:
    """Return what `choice` takes per token (and device) if what is in doubt of it alone turns out badly."""
    if choice.estimate.evidence != "predicted":
        return compute_price(choice, choice.estimate.high_s, per_device=per_device)
    own = CALIBRATED[1] if _has_host_work(choice) else REHEARSED[1]
    return compute_price(choice, choice.step_s(own), per_device=per_device)


def _find_own_doubt(choice: Choice, other: Choice) -> tuple[float, float]:
    """Return how much longer `choice` may compute than predicted without `other` doing so as well, least and most.

    CALIBRATED is what was seen of all engines, its high end of the one that works on the host, ZeRO's stage 3; the
    others were within a rehearsal's doubt of each other.
    """
    if _list_portions(choice) == _list_portions(other):
        return 1.0, 1.0
    alone = _has_host_work(choice) and not _has_host_work(other)
    return REHEARSED[0], CALIBRATED[1] if alone else REHEARSED[1]


def _list_portions(choice: Choice) -> tuple[object, ...]:
    spec = choice.spec
    return spec.engine, spec.parallel, spec.batch.micro, spec.activation_checkpointing


def _has_host_work(choice: Choice) -> bool:
    return engines.facts(choice.spec).works_on_host


def compute_extra_share(a: Choice, b: Choice, *, per_device: bool) -> float:
    """Return how much more `b` takes per token (and device) than `a`, as a share."""
    return _compute_likely_price(b, per_device) / _compute_likely_price(a, per_device) - 1


def explain_difference(a: Choice, b: Choice, *, per_device: bool) -> dict[str, float]:
    """Return the parts in which `b` takes longer per token (and device), largest first, as shares of `a`'s step."""
    whole = _compute_likely_price(a, per_device)
    ours, theirs = (
        {name: compute_price(c, c.scale * seconds, per_device=per_device) for name, seconds in c.time.parts.items()}
        for c in (a, b)
    )
    more = {name: (seconds - ours.get(name, 0.0)) / whole for name, seconds in theirs.items()}
    return dict(sorted(((k, v) for k, v in more.items() if v >= SHOWN), key=lambda part: -part[1]))


def _compute_likely_price(choice: Choice, per_device: bool) -> float:
    return compute_price(choice, choice.estimate.step_s, per_device=per_device)
