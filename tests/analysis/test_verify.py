import math
from typing import Any

import pytest
from records import LOSSES, failed, observed, run, spec, steps

from analysis.table import plain, run_table
from analysis.verify import STEPS, TOLERANCE
from bench.record import RunRecord
from bench.spec import Precision


def losses(apart: float, step: int = 3) -> dict[str, Any]:
    """Steps whose loss at `step` is `apart` off, relative."""
    series = list(steps().loss)
    series[step] = LOSSES[step] * (1 + apart) if math.isfinite(apart) else None
    return {"steps": steps(loss=tuple(series))}


def judged(record: RunRecord, *others: RunRecord) -> tuple[str, bool]:
    first = plain(run_table([record, *others]))[0]
    return first["outcome"], "unverified" in first["flags"].split()


def test_the_same_losses_verify() -> None:
    assert judged(run(), run(spec("ddp"))) == ("ok", False)


def test_the_reference_is_neither_flagged_nor_compared() -> None:
    assert judged(run(spec("ddp"))) == ("ok", False)
    assert "unverified" not in run_table([run(spec("ddp"))])["flags"][0]


@pytest.mark.parametrize("precision", TOLERANCE)
def test_the_tolerance_is_that_of_the_precision(precision: Precision) -> None:
    allowed = TOLERANCE[precision]
    reference = run(spec("ddp", precision=precision))
    assert judged(run(spec(precision=precision), **losses(0.9 * allowed)), reference) == ("ok", False)
    assert judged(run(spec(precision=precision), **losses(-1.1 * allowed)), reference) == ("invalid", False)


def test_a_mismatch_is_invalid_names_reference_step_and_difference_and_shows_no_speed() -> None:
    reference = run(spec("ddp"))
    told = plain(run_table([run(**losses(0.5)), reference]))[0]
    assert told["outcome"] == "invalid"
    assert told["tokens_per_s"] is None
    assert told["step_s"] is None
    for part in (reference.config_id, "step 3", "9.0 instead of 6.0", "0.5 apart", "1e-05 allowed in fp32"):
        assert part in told["reason"]


def test_a_loss_that_is_not_finite_is_no_match() -> None:
    assert judged(run(**losses(math.nan)), run(spec("ddp"))) == ("invalid", False)


def test_only_the_first_steps_count() -> None:
    assert judged(run(**losses(0.5, step=4)), run(spec("ddp"))) == ("invalid", False)
    later = steps(loss=(*steps().loss[:STEPS], *(99.0,) * 30))
    assert judged(run(steps=later), run(spec("ddp"))) == ("ok", False)


@pytest.mark.parametrize(
    "reference",
    [
        spec("ddp", micro=4),
        spec("ddp", ranks=1),
        spec("ddp", seed=1),
        spec("ddp", precision="bf16"),
        spec("ddp", activation_checkpointing=True),
        spec("ddp", optimizer={"lr": 1e-3}),
        spec("ddp", sequence={"encoder": 9, "decoder": 2}),
        spec("zero0"),
    ],
)
def test_another_question_is_no_reference(reference: Any) -> None:
    assert judged(run(), run(reference)) == ("ok", True)


@pytest.mark.parametrize(
    "kernels",
    [
        {"model": {"attention": "eager"}},
        {"model": {"loss_chunk_tokens": 64}},
        {"optimizer": {"implementation": "fused"}},
    ],
)
def test_other_kernels_train_the_same_model(kernels: Any) -> None:
    assert judged(run(), run(spec("ddp", **kernels))) == ("ok", False)


def test_the_protocol_and_where_a_shape_comes_from_may_differ() -> None:
    reference = spec("ddp", measure={"max_steps": 40}, model={"source": "elsewhere"})
    assert judged(run(), run(reference)) == ("ok", False)


@pytest.mark.parametrize(
    "reference",
    [
        run(spec("ddp"), torch="2.12.0"),
        run(spec("ddp"), torch=None),
        run(spec("ddp"), drill="sleep"),
        run(spec("ddp"), evidence="rehearsed"),
        run(spec("ddp"), steps=steps((0.1,) * 3, cut=1)),
        failed("oom", spec("ddp")),
    ],
)
def test_a_run_that_cannot_be_believed_is_no_reference(reference: RunRecord) -> None:
    assert judged(run(), reference) == ("ok", True)


def test_dropout_draws_other_numbers_in_every_engine() -> None:
    model = {"dropout": 0.1}
    assert judged(run(spec(model=model), **losses(0.5)), run(spec("ddp", model=model))) == ("ok", True)


def test_other_skipped_updates_cannot_be_compared_and_the_same_can() -> None:
    fp16 = {"precision": "fp16"}
    skipping, wrong = {"steps": steps(skipped=(0,))}, steps(skipped=(0,), loss=(99.0,) * 35)
    assert judged(run(spec(**fp16), **losses(0.5)), run(spec("ddp", **fp16), **skipping)) == ("ok", True)
    assert judged(run(spec(**fp16), **skipping), run(spec("ddp", **fp16), **skipping)) == ("ok", False)
    assert judged(run(spec(**fp16), steps=wrong), run(spec("ddp", **fp16), **skipping)) == ("invalid", False)


def test_a_failure_stays_what_it_is() -> None:
    assert judged(failed("oom"), run(spec("ddp"))) == ("oom", False)


def test_records_are_not_changed() -> None:
    record = run(**losses(0.5))
    run_table([record, run(spec("ddp"))])
    assert record.outcome.kind == "ok"
    assert observed(record.spec).parameters == 402
