"""Does an engine train the same model? Its losses beside those of the reference engine, ddp, at the same seed.

The reference is torch's own code and nothing stands behind it to compare with: a ddp run is neither verified nor
flagged. Any other run is compared with a ddp run that differs in nothing but the engine and the measurement protocol,
of the same environment class. Repeats use the same seed, so any one of them will do.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from bench.record import Outcome, RunRecord, Steps

REFERENCE = "ddp"
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


class Verdict(NamedTuple):
    """`record` as it came, or with the outcome `invalid` where its losses are not the reference's."""

    record: RunRecord
    unverified: bool


class _Mismatch(NamedTuple):
    step: int
    loss: float | None
    reference: float | None


def verify(records: Sequence[RunRecord]) -> list[Verdict]:
    """Compare every ok run with its reference among `records`; return a verdict for each, in their order."""
    references: dict[str, RunRecord] = {}
    for record in records:
        if _comparable(record) and record.spec.engine.backend == REFERENCE:
            references.setdefault(_question(record), record)
    return [_verdict(record, references) for record in records]


def _verdict(record: RunRecord, references: dict[str, RunRecord]) -> Verdict:
    if record.outcome.kind != "ok" or record.spec.engine.backend == REFERENCE:
        return Verdict(record, unverified=False)
    reference = references.get(_question(record)) if _comparable(record) else None
    if reference is None or _updates(record) != _updates(reference):
        return Verdict(record, unverified=True)
    mismatch = _first_mismatch(record, reference)
    if mismatch is None:
        return Verdict(record, unverified=False)
    return Verdict(_invalid(record, reference, mismatch), unverified=False)


def _steps(record: RunRecord) -> Steps | None:
    return record.observations.steps if record.observations else None


def _comparable(record: RunRecord) -> bool:
    """Whether losses mean something and nothing random is in them: a drill breaks them, a rehearsal has none, and
    dropout draws other numbers in every engine."""
    observed, steps = record.observations, _steps(record)
    sound = record.outcome.kind == "ok" and record.evidence == "measured" and record.environment is not None
    return (
        sound
        and steps is not None
        and len(steps.loss) >= STEPS
        and record.spec.model.dropout == 0
        and observed is not None
        and observed.drill is None
    )


def _question(record: RunRecord) -> str:
    """What two runs must share for their losses to be equal: everything but engine and protocol."""
    spec = record.spec.model_dump(mode="json", exclude={"engine", "measure"})
    spec["model"].pop("source")
    data = record.observations.data if record.observations else {}  # another corpus has other losses
    return json.dumps([record.environment.environment_id if record.environment else None, spec, data], sort_keys=True)


def _updates(record: RunRecord) -> tuple[bool, ...]:
    """Which of the compared steps updated the weights: scaled losses may overflow at other steps in another engine."""
    steps = _steps(record)
    return tuple(step not in steps.skipped for step in range(STEPS)) if steps else ()


def _first_mismatch(record: RunRecord, reference: RunRecord) -> _Mismatch | None:
    ours, theirs = _steps(record), _steps(reference)
    assert ours is not None and theirs is not None  # _comparable
    allowed = TOLERANCE[record.spec.precision]
    for step, (loss, expected) in enumerate(zip(ours.loss[:STEPS], theirs.loss[:STEPS], strict=True)):
        if loss is None or expected is None or abs(loss - expected) > allowed * abs(expected):
            return _Mismatch(step, loss, expected)
    return None


def _invalid(record: RunRecord, reference: RunRecord, mismatch: _Mismatch) -> RunRecord:
    precision = record.spec.precision
    apart = "not finite"
    if mismatch.loss is not None and mismatch.reference is not None:
        apart = f"{abs(mismatch.loss - mismatch.reference) / abs(mismatch.reference):.2g} apart"
    reason = (
        f"loss is not that of {REFERENCE} ({reference.config_id}): {mismatch.loss} instead of {mismatch.reference} at "
        f"step {mismatch.step}, {apart}, {TOLERANCE[precision]:g} allowed in {precision}"
    )
    evidence = {"reference": reference.config_id, "tolerance": TOLERANCE[precision], **mismatch._asdict()}
    return record.model_copy(update={"outcome": Outcome(kind="invalid", reason=reason, evidence=evidence)})
