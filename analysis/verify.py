"""Verification: whether an engine trains the same model as the reference engine, ddp, with the same seed.

The first gradient norms are compared, then the losses. The losses alone are not enough: clipping and AdamW divide the
gradient by its own size, so a gradient with a wrong scale gives the same losses. An example of such an error is to sum
gradients over ranks in place of averaging them. Norms are compared in the first updates, where the weights of both runs
are equal or nearly equal.

The reference engine is torch's own code, and its runs are neither verified nor flagged. If an engine deviates from it
by definition (`EngineFacts.deviates`), its runs are never compared and are flagged `unverified`. Any other run is
compared with a ddp run of the same environment class (device and software versions). Their specs may differ only in
fields that do not affect the losses, such as engine, layout and measurement protocol. All repeats use the same seed, so
any repeat can be compared.

The data for comparing one record is its `VerificationCase`. All cases of a set of records are stored in arrays and
verified in one vectorised computation.
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
"""Number of first steps whose losses are compared, warm-up included. Rounding differences between engines grow in later
steps."""

TOLERANCE = {
    # Engines sum in different orders, with 24 significant bits. Observed: below 2e-7 for all stages of DeepSpeed 0.19.8
    # on two ranks.
    "fp32": 1e-5,
    # A loss has 8 significant bits, so adjacent values differ by at most 2^-7. Some stages sum gradients in bf16 and
    # others in fp32. The tolerance is two and a half such spacings; one was observed. Only gross errors exceed it.
    "bf16": 2e-2,
    # As for bf16, but with 11 significant bits and a spacing of 2^-10. Not measured: DeepSpeed has no fp16 on a CPU.
    "fp16": 2.5e-3,
}
"""Largest allowed difference of a loss, relative to the loss of the reference run, by precision."""

TOLERANCE_8BIT = 1e-3
"""Largest allowed relative difference of a loss in fp32 with 8-bit AdamW.

8-bit AdamW quantises Adam's moments in blocks of 256. Engines that partition the optimizer's state form other blocks
than DDP, and also quantise small tensors. The difference of the loss grows with the learning rate: 2e-4 was observed at
a learning rate of 1e-2, and 5e-6 at 1e-4. Stage 0 updates whole tensors, and its losses differ by less than 2e-7.
"""

NORM_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-3, "fp16": 5e-3}
"""Largest allowed relative difference of the gradient norm in the first SUMMED_STEPS updates, by precision. It applies
if both runs summed squares in fp64.

The norms of recorded runs differ by at most 9e-7 in fp32 and 1.6e-3 in bf16, for all stages of DeepSpeed 0.19.8 and
FSDP2. The tolerance is small enough to detect an error that counts the gradients of a norm layer's scale twice. Such an
error keeps all losses within their tolerance.
"""

UNSUMMED_NORM_TOLERANCE = 0.1
"""Largest allowed relative difference of the first gradient norm. It applies if either run did not sum squares in fp64;
later norms are then not compared.

On a CPU, torch 2.13 sums the squares of a large tensor one after the other in fp32. The norm of 2^27 elements (mT5's
head) is then 1.4 % too small, and the norm of 2^29 elements 9.6 %. So this tolerance detects only gradients with a
wrong factor.
"""

UNSTEADY_NORM_TOLERANCE = (NORM_TOLERANCE["bf16"], 0.05, 0.25)
UNSTEADY_STEPS, UNSTEADY_LOSS_TOLERANCE = 3, 0.1
"""Largest allowed relative differences for runs on a GPU in 16 bits: of the first gradient norms, and of the losses
after the first three, which have the usual tolerance.

Some kernels of a GPU add in an order that changes from run to run. AdamW's first updates have nearly the same size for
each weight, and their sign may follow from rounding. So the difference of two equal runs grows with each update. For
mt5_large on an H200 (results/measured/h200.zip), the gradient norms of six engines differ by 1e-4 before the first
update, and by 0.5 to 1.4 % after it. After the second update, the norms of stages 1 and 2 on one rank differ by 7 %,
although both stages compute the same. Losses differ by at most 1.4 % until the fourth step, and by 2.1 % in the fifth.
So on a GPU in 16 bits only gross errors of the updates are detected. For example, a learning rate that is a hundredth
of the right one is not.
"""

Quantity = Literal["gradient norm", "loss"]


class VerificationCase(NamedTuple):
    """The data of one record that are needed to compare its losses and gradient norms with those of the reference
    engine."""

    reference: bool  # True for a run of the reference engine
    question: str | None = None  # hash of everything that determines the losses; None if they are not comparable
    norms: tuple[float, ...] = (math.nan,) * SUMMED_STEPS  # gradient norms of the first updates; NaN if unknown
    summed: bool = False  # True if the squares in the norms were summed in fp64
    unsteady: bool = False  # True for a run on a GPU in 16 bits, whose rounding differs from that of an equal run
    losses: tuple[float, ...] = ()  # of the first steps, NaN if not finite; empty without a question
    tolerance: float = 0.0  # largest allowed relative difference of a loss
    updates: int = 0  # bit i is 1 if step i updated the weights; with loss scaling, engines may skip different steps


class VerificationCases(NamedTuple):
    """The data of `VerificationCase` for a set of records, with one array per field and one entry per record."""

    ok: NDArray[np.bool_]
    reference: NDArray[np.bool_]
    question: NDArray[np.int64]  # number of each distinct question; -1 for none
    norms: NDArray[np.float64]  # (cases, updates)
    summed: NDArray[np.bool_]
    unsteady: NDArray[np.bool_]
    norm_tolerance: NDArray[np.float64]
    losses: NDArray[np.float64]  # (cases, steps)
    updates: NDArray[np.int64]
    tolerance: NDArray[np.float64]


class Mismatch(NamedTuple):
    """First gradient norm or loss that differs between a run and its reference run. The run has the value `found`, and
    the reference run has the value `expected`. A value that is not finite is None."""

    place: int  # index of the run
    reference: int  # index of the reference run
    step: int
    quantity: Quantity
    found: float | None
    expected: float | None
    tolerance: float


def judge(cases: VerificationCases) -> tuple[NDArray[np.bool_], list[Mismatch]]:
    """Compare the first gradient norms and losses of every run that ended ok with those of the reference run. The
    reference run is the first run of the reference engine with the same `question`, which is a hash of all settings
    that determine the losses. Return the unverified runs as a mask of shape (cases,), and the mismatches.

    A run is unverified if it has no reference run, if the two runs skipped different updates, or if the first norm of
    either run is unknown. Losses alone do not verify a run.
    """
    first = np.full(cases.question.max(initial=-1) + 2, -1)  # the last entry, index -1, is for cases without a question
    references = np.flatnonzero(cases.reference & (cases.question >= 0))[::-1]
    # assigned in reverse order, so that the first reference run of a question wins
    first[cases.question[references]] = references
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
    unsteady = cases.unsteady[places]
    allowed[unsteady, :SUMMED_STEPS] = np.maximum(allowed[unsteady, :SUMMED_STEPS], UNSTEADY_NORM_TOLERANCE)
    allowed[unsteady, SUMMED_STEPS + UNSTEADY_STEPS :] = UNSTEADY_LOSS_TOLERANCE
    near = np.abs(found - expected) <= allowed * np.abs(expected)  # False if either is NaN
    missing = np.isnan(found[:, :SUMMED_STEPS]) | np.isnan(expected[:, :SUMMED_STEPS])
    near[:, :SUMMED_STEPS] |= missing
    unknown = missing[:, 0]
    agrees = near.all(axis=1)
    unverified[places[unknown & agrees]] = True
    mismatches = []
    for row in np.flatnonzero(~agrees):
        column, place = int(np.argmin(near[row])), int(places[row])
        is_norm = column < SUMMED_STEPS
        step = _list_updates(int(cases.updates[place]))[column] if is_norm else column - SUMMED_STEPS
        seen, wanted = (_drop_nonfinite(values[row, column]) for values in (found, expected))
        reference, tolerance = int(reference_places[place]), float(allowed[row, column])
        quantity: Quantity = "gradient norm" if is_norm else "loss"
        mismatches.append(Mismatch(place, reference, step, quantity, seen, wanted, tolerance))
    return unverified, mismatches


@remember_latest
def is_reference(spec: RunSpec) -> bool:
    """Return True if the engine of a spec is the reference engine (ddp); False for an engine that is not installed."""
    facts = find_facts(spec)
    return facts is not None and facts.is_reference


@remember_latest
def _deviates(spec: RunSpec) -> bool:
    """Return True if the engine of a spec deviates from the reference engine by definition, as its facts declare."""
    facts = find_facts(spec)
    return facts is not None and facts.deviates


def build_case(record: RunRecord) -> VerificationCase:
    """Return the data of a record that are needed to compare its losses and gradient norms with those of the reference
    engine."""
    reference, steps = is_reference(record.spec), _get_comparable_steps(record)
    if steps is None or _deviates(record.spec):
        return VerificationCase(reference)
    updates = sum(1 << step for step in range(STEPS) if step not in steps.skipped)
    norms = [steps.gradient_norm[step] for step in _list_updates(updates)[:SUMMED_STEPS] if steps.gradient_norm]
    norms += [None] * (SUMMED_STEPS - len(norms))
    return VerificationCase(
        reference=reference,
        question=_hash_question(record),
        norms=tuple(math.nan if norm is None else norm for norm in norms),
        summed=steps.summed_norms >= SUMMED_STEPS,
        unsteady=record.spec.precision != "fp32" and _ran_on_gpu(record),
        losses=tuple(math.nan if loss is None else loss for loss in steps.loss[:STEPS]),
        tolerance=find_tolerance(record.spec),
        updates=updates,
    )


def _ran_on_gpu(record: RunRecord) -> bool:
    versions = record.environment.classification.versions if record.environment else {}
    return bool(versions.get("cuda") or versions.get("hip"))


def find_tolerance(spec: RunSpec) -> float:
    """Return the largest allowed relative difference of a loss from that of the reference run."""
    quantised = spec.optimizer.name == "adamw_8bit"
    return max(TOLERANCE[spec.precision], TOLERANCE_8BIT * quantised)


def build_invalid_outcome(mismatch: Mismatch, reference: str, precision: str) -> Outcome:
    """Return the outcome `invalid` for a run with a mismatch. `reference` is the config_id of the reference run."""
    found, expected, quantity = mismatch.found, mismatch.expected, mismatch.quantity
    if found is None or expected is None:
        difference = "not finite"
    else:
        difference = f"relative difference {abs(found - expected) / abs(expected) if expected else math.inf:.2g}"
    reason = (
        f"{quantity} differs from that of {REFERENCE} ({reference}): {found} instead of {expected} at step "
        f"{mismatch.step}, {difference}, allowed in {precision}: {mismatch.tolerance:g}"
    )
    evidence = {"reference": reference, "tolerance": mismatch.tolerance, "step": mismatch.step}
    return Outcome(
        kind="invalid", reason=reason, evidence={**evidence, quantity.replace(" ", "_"): found, "expected": expected}
    )


def _list_updates(updates: int) -> list[int]:
    """Return the indices of the first steps that updated the weights, from the bits of `VerificationCase.updates`."""
    return [step for step in range(STEPS) if updates >> step & 1]


def _drop_nonfinite(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _get_comparable_steps(record: RunRecord) -> Steps | None:
    """Return the steps of a run if its losses are deterministic; otherwise None.

    In three cases the losses cannot be compared. A drill injects a fault, which changes the losses. A rehearsal, which
    runs one rank alone, has no losses. With dropout, every engine draws other random numbers.
    """
    observed = record.observations
    if record.outcome.kind != "ok" or record.evidence != "measured" or record.environment is None or observed is None:
        return None
    if observed.drill is not None or observed.steps is None or record.spec.model.dropout:
        return None
    return observed.steps if len(observed.steps.loss) >= STEPS else None


def _hash_question(record: RunRecord) -> str:
    """Return a hash of everything that should determine the losses. Engine, layout, measurement protocol and kernels
    are not part of it."""
    assert record.environment is not None and record.observations is not None  # checked by _get_comparable_steps
    spec, data = _select_deciding_losses(record.spec), json.dumps(record.observations.data, sort_keys=True)
    parts = (json.dumps(record.environment.environment_id), spec, data)  # `data` identifies the corpus
    return hashlib.sha256(f"[{', '.join(parts)}]".encode()).hexdigest()[:16]


@remember_latest
def _select_deciding_losses(spec: RunSpec) -> str:
    """Return the fields of a spec that determine the losses, as JSON text."""
    return json.dumps(select(json.loads(spec.model_dump_json(by_alias=True)), "losses"), sort_keys=True)
