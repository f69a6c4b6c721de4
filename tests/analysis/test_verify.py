import math
from typing import Any

import pytest
from records import LOSSES, failed, observed, run, run_table, spec, steps

from analysis.table import list_rows
from analysis.verify import NORM_TOLERANCE, STEPS, TOLERANCE
from bench.record import RunRecord
from bench.spec import EngineSpec, Precision


def losses(apart: float, step: int = 3) -> dict[str, Any]:
    """Steps whose loss at `step` is `apart` off, relative."""
    series = list(steps().loss)
    series[step] = LOSSES[step] * (1 + apart) if math.isfinite(apart) else None
    return {"steps": steps(loss=tuple(series))}


def norms(factor: float, step: int = 0, **more: Any) -> dict[str, Any]:
    """Steps whose gradient norm at `step` is `factor` times what it should be."""
    series = list(steps().gradient_norm)
    series[step] = factor * (series[step] or 0.0) if math.isfinite(factor) else None
    return {"steps": steps(gradient_norm=tuple(series), **more)}


def judged(record: RunRecord, *others: RunRecord) -> tuple[str, bool]:
    first = list_rows(run_table([record, *others]))[0]
    return first["outcome"], "unverified" in first["flags"].split()


def test_the_same_losses_verify() -> None:
    assert judged(run(), run(spec("ddp"))) == ("ok", False)


def test_the_reference_is_neither_flagged_nor_compared() -> None:
    assert judged(run(spec("ddp"))) == ("ok", False)
    assert "unverified" not in run_table([run(spec("ddp"))])["flags"][0]


def test_an_engine_that_is_not_known_here_is_compared_and_is_no_reference() -> None:
    foreign = spec().model_copy(update={"engine": EngineSpec(name="tomorrow", backend="tomorrow")})
    assert judged(run(foreign)) == ("ok", True)
    assert judged(run(), run(foreign)) == ("ok", True)
    assert judged(run(foreign), run(spec("ddp"))) == ("ok", False)


@pytest.mark.parametrize("precision", TOLERANCE)
def test_the_tolerance_is_that_of_the_precision(precision: Precision) -> None:
    allowed = TOLERANCE[precision]
    reference = run(spec("ddp", precision=precision))
    assert judged(run(spec(precision=precision), **losses(0.9 * allowed)), reference) == ("ok", False)
    assert judged(run(spec(precision=precision), **losses(-1.1 * allowed)), reference) == ("invalid", False)


def test_a_mismatch_is_invalid_names_reference_step_and_difference_and_shows_no_speed() -> None:
    reference = run(spec("ddp"))
    told = list_rows(run_table([run(**losses(0.5)), reference]))[0]
    assert told["outcome"] == "invalid"
    assert told["tokens_per_s"] is None
    assert told["step_s"] is None
    for part in (reference.config_id, "step 3", "9.0 instead of 6.0", "0.5 apart", "1e-05 allowed in fp32"):
        assert part in told["reason"]


def test_a_loss_that_is_not_finite_is_no_match() -> None:
    assert judged(run(**losses(math.nan)), run(spec("ddp"))) == ("invalid", False)


def test_a_gradient_of_another_scale_is_invalid_though_the_losses_agree() -> None:
    """Clipping and AdamW divide by the gradient's own size: a sum over ranks trains as their mean does."""
    told = list_rows(run_table([run(**norms(8)), run(spec("ddp"))]))[0]
    assert (told["outcome"], told["tokens_per_s"]) == ("invalid", None)
    assert "gradient norm is not that of ddp" in told["reason"]
    assert "16.0 instead of 2.0 at step 0, 7 apart, 0.1 allowed" in told["reason"]


def test_norms_are_compared_before_losses() -> None:
    both = norms(8, loss=(99.0,) * 35)
    assert "gradient norm" in list_rows(run_table([run(**both), run(spec("ddp"))]))[0]["reason"]


def test_a_norm_may_be_off_by_a_tenth() -> None:
    reference = run(spec("ddp"))
    assert judged(run(**norms(1 + 0.9 * NORM_TOLERANCE)), reference) == ("ok", False)
    assert judged(run(**norms(1 - 1.1 * NORM_TOLERANCE)), reference) == ("invalid", False)


def test_norms_are_compared_where_weights_are_equal_alone() -> None:
    """In the first step, or in fp16 in the first whose update was not skipped; later ones drift with the weights."""
    assert judged(run(**norms(8, step=1)), run(spec("ddp"))) == ("ok", False)
    fp16, first = spec("ddp", precision="fp16"), {"skipped": (0, 1)}
    reference = run(fp16, steps=steps(**first))
    assert judged(run(spec(precision="fp16"), **norms(8, step=2, **first)), reference) == ("invalid", False)
    assert judged(run(spec(precision="fp16"), **norms(math.nan, step=0, **first)), reference) == ("ok", False)


def test_losses_alone_do_not_verify_and_do_refute() -> None:
    unknown = {"gradient_norm": ()}
    reference = run(spec("ddp"))
    assert judged(run(steps=steps(**unknown)), reference) == ("ok", True)
    assert judged(run(), run(spec("ddp"), steps=steps(**unknown))) == ("ok", True)
    assert judged(run(steps=steps(loss=(99.0,) * 35, **unknown)), reference) == ("invalid", False)


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
