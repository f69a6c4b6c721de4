"""Does an engine train the same model? Its first gradient norms and its losses beside those of the reference engine,
ddp, at the same seed.

Norms come first: clipping and AdamW divide the gradient by its own size, so that losses stay the same whatever factor
it is wrong by, a sum over ranks instead of their mean, say. They are compared in the first updates of the weights:
before the first of them the weights are equal, and a little later still nearly so.

The reference is torch's own code and nothing stands behind it to compare with: a ddp run is neither verified nor
flagged. Any other run is compared with a ddp run that differs in nothing but the engine and the measurement protocol,
of the same environment class. Repeats use the same seed, so any one of them will do.

What a record is judged by is a `Case`; a set is judged in columns of them, all at once.
"""

import hashlib
import json
import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from analysis.observed import remember_latest
from bench.core.engine_facts import SUMMED_STEPS
from bench.core.point_fields import select
from bench.core.record import Outcome, RunRecord, Steps
from bench.core.spec import RunSpec
from bench.engines import REFERENCE, find_facts

STEPS = 5
"""First steps that are compared, warm-up included; later the rounding that engines differ in has grown by itself."""

TOLERANCE = {
    # Sums in another order over 24 significant bits. Seen: below 2e-7, in all stages of DeepSpeed 0.19.8 on two ranks.
    "fp32": 1e-5,
    # A loss is itself a number of 8 significant bits, spaced by 2^-7 of it at worst, and some stages sum gradients in
    # bf16, others in fp32: two and a half spacings. Seen: one. It shows gross errors, not small ones.
    "bf16": 2e-2,
    # As bf16, with 11 significant bits, spaced by 2^-10. Not yet seen: DeepSpeed has no fp16 on a CPU.
    "fp16": 2.5e-3,
}
"""Largest difference of a loss, relative to the reference's."""

NORM_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-3, "fp16": 5e-3}
"""Largest difference of the norm of one of the first SUMMED_STEPS updates, relative to the reference's, where both runs
summed squares in fp64. Seen in recorded runs: at most 9e-7 in fp32 and 1.6e-3 in bf16, in all stages of DeepSpeed
0.19.8 and FSDP2. It shows a gradient of a norm's scale that is counted twice, which changes no loss within its
tolerance."""

UNSUMMED_NORM_TOLERANCE = 0.1
"""The same of the first update alone, where the squares of one of the runs were summed otherwise. On a CPU torch 2.13
sums the squares of one large tensor in fp32 without care: the norm of 2^27 elements (mT5's head) is 1.4 % too small,
that of 2^29 9.6 %. It shows a wrong factor only."""


class VerificationCase(NamedTuple):
    """What a record is judged by."""

    ok: bool
    reference: bool  # a run of the reference engine
    question: str | None  # what runs must share for their losses to be equal, hashed; None where losses mean nothing
    norms: tuple[float, ...]  # of the gradient, in the first SUMMED_STEPS updates; NaN where one is unknown
    summed: bool  # in fp64
    losses: tuple[float, ...]  # of the first steps, NaN for one that was not finite; empty without a question
    updates: int  # bit i for step i: a scaled loss may overflow, and skip its update, elsewhere in another engine
    precision: str


class VerificationCases(NamedTuple):
    """The cases of a set of records, a column each."""

    ok: NDArray[np.bool_]
    reference: NDArray[np.bool_]
    question: NDArray[np.int64]  # a number for each, -1 for none
    norms: NDArray[np.float64]  # by case and update
    summed: NDArray[np.bool_]
    norm_tolerance: NDArray[np.float64]
    losses: NDArray[np.float64]  # by case and step
    updates: NDArray[np.int64]
    tolerance: NDArray[np.float64]


class Mismatch(NamedTuple):
    """The first number of a run that is not its reference's; None is one that was not finite."""

    place: int
    reference: int  # the place of the run beside it
    step: int
    quantity: Literal["gradient norm", "loss"]
    found: float | None
    expected: float | None
    tolerance: float


class Judgement(NamedTuple):
    """What became of the cases of a set, by their places."""

    unverified: NDArray[np.bool_]
    mismatches: tuple[Mismatch, ...]


def judge(cases: VerificationCases) -> Judgement:
    """Compare the first gradient norms and the losses of every ok run with those of the first reference that answers
    the same question. A run whose first norm, or whose reference's, is unknown is not verified by losses alone."""
    first = np.full(cases.question.max(initial=-1) + 2, -1)  # the last place is for those without a question
    references = np.flatnonzero(cases.reference & (cases.question >= 0))[::-1]
    first[cases.question[references]] = references  # of several, the last one written is the first
    reference_places = first[cases.question]
    judged = cases.ok & ~cases.reference
    unverified = judged & ((reference_places < 0) | (cases.updates != cases.updates[reference_places]))
    places = np.flatnonzero(judged & ~unverified)
    found, expected = (np.hstack([cases.norms[at], cases.losses[at]]) for at in (places, reference_places[places]))
    summed = cases.summed[places] & cases.summed[reference_places[places]]
    allowed = np.column_stack(
        [np.where(summed, cases.norm_tolerance[places], UNSUMMED_NORM_TOLERANCE)]
        + [np.where(summed, cases.norm_tolerance[places], math.inf)] * (SUMMED_STEPS - 1)
        + [cases.tolerance[places]] * cases.losses.shape[1]
    )
    near = np.abs(found - expected) <= allowed * np.abs(expected)  # false where one is NaN
    missing = np.isnan(found[:, :SUMMED_STEPS]) | np.isnan(expected[:, :SUMMED_STEPS])
    near[:, :SUMMED_STEPS] |= missing
    unknown = missing[:, 0]
    agrees = near.all(axis=1)
    unverified[places[unknown & agrees]] = True
    mismatches = []
    for row in np.flatnonzero(~agrees):
        column, place = int(np.argmin(near[row])), int(places[row])
        is_norm = column < SUMMED_STEPS
        mismatches.append(
            Mismatch(
                place=place,
                reference=int(reference_places[place]),
                step=_list_updates(int(cases.updates[place]))[column] if is_norm else column - SUMMED_STEPS,
                quantity="gradient norm" if is_norm else "loss",
                found=_drop_nonfinite(found[row, column]),
                expected=_drop_nonfinite(expected[row, column]),
                tolerance=float(allowed[row, column]),
            )
        )
    return Judgement(unverified, tuple(mismatches))


@remember_latest
def is_reference(spec: RunSpec) -> bool:
    """Whether a run is one of the reference engine; one whose engine is not known here is none."""
    facts = find_facts(spec)
    return facts is not None and facts.is_reference


def build_case(record: RunRecord) -> VerificationCase:
    """Return what a record is judged by."""
    ok, reference = record.outcome.kind == "ok", is_reference(record.spec)
    steps, precision = _get_comparable_steps(record), record.spec.precision
    if steps is None:
        return VerificationCase(ok, reference, None, (math.nan,) * SUMMED_STEPS, False, (), 0, precision)
    losses = tuple(math.nan if loss is None else loss for loss in steps.loss[:STEPS])
    updates = sum(1 << step for step in range(STEPS) if step not in steps.skipped)
    norms = [steps.gradient_norm[step] for step in _list_updates(updates)[:SUMMED_STEPS] if steps.gradient_norm]
    known = [math.nan if norm is None else norm for norm in norms]
    return VerificationCase(
        ok=ok,
        reference=reference,
        question=_hash_question(record),
        norms=(*known, *(math.nan,) * (SUMMED_STEPS - len(known))),
        summed=steps.summed_norms >= SUMMED_STEPS,
        losses=losses,
        updates=updates,
        precision=precision,
    )


def build_invalid_outcome(mismatch: Mismatch, reference: str, precision: str) -> Outcome:
    """Return the outcome of a run with a mismatch; `reference` is the config_id of the run beside it."""
    found, expected, quantity = mismatch.found, mismatch.expected, mismatch.quantity
    reason = (
        f"{quantity} is not that of {REFERENCE} ({reference}): {found} instead of {expected} at step {mismatch.step}, "
        f"{_format_difference(found, expected)}, {mismatch.tolerance:g} allowed in {precision}"
    )
    evidence = {"reference": reference, "tolerance": mismatch.tolerance, "step": mismatch.step}
    return Outcome(
        kind="invalid", reason=reason, evidence={**evidence, quantity.replace(" ", "_"): found, "expected": expected}
    )


def _list_updates(updates: int) -> list[int]:
    """Return the first steps that changed the weights: before the first of them they are those that the run began
    with."""
    return [step for step in range(STEPS) if updates >> step & 1]


def _format_difference(found: float | None, expected: float | None) -> str:
    if found is None or expected is None:
        return "not finite"
    return f"{abs(found - expected) / abs(expected) if expected else math.inf:.2g} apart"


def _drop_nonfinite(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _get_comparable_steps(record: RunRecord) -> Steps | None:
    """Return the steps of a run whose losses mean something and have nothing random in them: a drill breaks them, a
    rehearsal has none, and dropout draws other numbers in every engine."""
    observed = record.observations
    if record.outcome.kind != "ok" or record.evidence != "measured" or record.environment is None:
        return None
    if (
        observed is None
        or observed.drill is not None
        or observed.steps is None
        or len(observed.steps.loss) < STEPS
        or record.spec.model.dropout
    ):
        return None
    return observed.steps


def _hash_question(record: RunRecord) -> str:
    """Return what two runs must share for their losses to be equal: all but engine, layout, protocol and kernels."""
    assert record.environment is not None and record.observations is not None  # _comparable
    spec = _select_deciding_losses(record.spec)
    parts = (json.dumps(record.environment.environment_id), spec, json.dumps(record.observations.data, sort_keys=True))
    return hashlib.sha256(f"[{', '.join(parts)}]".encode()).hexdigest()[:16]  # another corpus has other losses


@remember_latest
def _select_deciding_losses(spec: RunSpec) -> str:
    """Return of a spec what decides the losses of a seed, as JSON."""
    return json.dumps(select(json.loads(spec.model_dump_json(by_alias=True)), "losses"), sort_keys=True)
