import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from records import LOSSES, failed, observed, run, run_table, spec, steps

from analysis import verify
from analysis.table import list_rows
from analysis.verify import NORM_TOLERANCE, STEPS, TOLERANCE, TOLERANCE_8BIT, UNSUMMED_NORM_TOLERANCE
from bench.core import store
from bench.core.engine_facts import SUMMED_STEPS
from bench.core.record import RunRecord
from bench.core.spec import EngineSpec, Precision, RunSpec
from bench.engines import find_facts, trained
from bench.engines.precision import LossScale
from bench.engines.precision.update import Update
from bench.models.t5 import build as t5

SUMMED = {"summed_norms": SUMMED_STEPS}
MEASURED = Path(__file__).parents[2] / "results" / "measured"


def losses(apart: float, step: int = 3) -> dict[str, Any]:
    """Return recorded steps, for the argument `steps` of `run`, in which the loss of step number `step` is wrong. The
    relative error of this loss is `apart`. If `apart` is not finite, the loss is missing."""
    series = list(steps().loss)
    series[step] = LOSSES[step] * (1 + apart) if math.isfinite(apart) else None
    return {"steps": steps(loss=tuple(series))}


def norms(factor: float, step: int = 0, **more: Any) -> dict[str, Any]:
    """Return recorded steps, for the argument `steps` of `run`, in which the gradient norm of step number `step` is
    wrong. It is `factor` times the correct norm. If `factor` is not finite, the norm is missing."""
    series = list(steps().gradient_norm)
    series[step] = factor * (series[step] or 0.0) if math.isfinite(factor) else None
    return {"steps": steps(gradient_norm=tuple(series), **more)}


def judged(record: RunRecord, *others: RunRecord) -> tuple[str, bool]:
    first = list_rows(run_table([record, *others]))[0]
    return first["outcome"], "unverified" in first["flags"].split()


def test_equal_losses_verify_a_run() -> None:
    assert judged(run(), run(spec("ddp"))) == ("ok", False)


def test_reference_engine_is_not_flagged_unverified() -> None:
    assert judged(run(spec("ddp"))) == ("ok", False)
    assert "unverified" not in run_table([run(spec("ddp"))])["flags"][0]


def on_gpu(of: RunSpec, **more: Any) -> RunRecord:
    """Return the record of a run on a GPU, with kernels that add in an order that changes from run to run."""
    record = run(of, **more)
    assert record.environment
    versions = record.environment.classification.versions | {"cuda": "13.0"}
    known = record.environment.classification.model_copy(update={"versions": versions})
    return record.model_copy(update={"environment": record.environment.model_copy(update={"classification": known})})


@pytest.mark.parametrize(
    ("wrong", "outcome"),
    [
        (norms(1.01, step=0, **SUMMED), "invalid"),  # before any update, equal runs differ by rounding only
        (norms(1.02, step=1, **SUMMED), "ok"),
        (norms(1.10, step=1, **SUMMED), "invalid"),
        (norms(1.10, step=2, **SUMMED), "ok"),
        (norms(1.30, step=2, **SUMMED), "invalid"),
        (losses(0.03, step=2), "invalid"),
        (losses(0.03, step=4), "ok"),
        (losses(0.5, step=4), "invalid"),
    ],
)
def test_later_steps_of_a_gpu_run_in_16_bits_may_differ_more(wrong: dict[str, Any], outcome: str) -> None:
    half = spec(precision="bf16"), spec("ddp", precision="bf16")
    reference = on_gpu(half[1], steps=steps(**SUMMED))
    assert judged(on_gpu(half[0], **wrong), reference)[0] == outcome
    assert judged(run(half[0], **wrong), run(half[1], steps=steps(**SUMMED)))[0] == "invalid", "on a CPU"


def test_recorded_engines_on_a_gpu_agree_with_ddp_and_two_equal_runs_differ_from_each_other() -> None:
    """On one rank, stages 1 and 2 of ZeRO compute the same. The spread of their gradient norms is the reason for the
    wide tolerance after the second update."""
    found = [store.read_record(path) for path in store.find_records([MEASURED / "h200.zip/single_gpu"])]
    table = run_table([record for record in found if record.observations])
    assert set(table["outcome"]) == {"ok"}
    large = {r.spec.engine.name: r for r in found if r.spec.model.name == "mt5_large" and r.spec.batch.micro == 16}
    assert set(large) == {"ddp", "zero0", "zero1", "zero2", "zero3", "fsdp"}
    first, second = (large[name].observations for name in ("zero1", "zero2"))
    assert first and second and first.steps and second.steps
    assert first.steps.gradient_norm[0] == pytest.approx(second.steps.gradient_norm[0], rel=2e-4)
    assert first.steps.gradient_norm[2] != pytest.approx(second.steps.gradient_norm[2], rel=0.05)


def test_unknown_engine_is_verified_but_is_no_reference() -> None:
    foreign = spec().model_copy(update={"engine": EngineSpec(name="tomorrow", backend="tomorrow")})
    assert judged(run(foreign)) == ("ok", True)
    assert judged(run(), run(foreign)) == ("ok", True)
    assert judged(run(foreign), run(spec("ddp"))) == ("ok", False)


def test_engine_that_deviates_by_definition_is_unverified_and_never_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    """By definition, some engines have other losses than the reference ddp. Local SGD is an example. If an engine does
    not declare this deviation, a run with other losses is invalid."""
    wrong, reference = run(**losses(0.5)), run(spec("ddp"))
    assert judged(wrong, reference) == ("invalid", False)
    ddp = find_facts(reference.spec)
    assert ddp
    declared = dataclasses.replace(ddp, is_reference=False, deviates=True)
    monkeypatch.setattr(verify, "find_facts", lambda spec: ddp if spec.engine.name == "ddp" else declared)
    assert judged(run(**losses(0.5)), reference) == ("ok", True)


@pytest.mark.parametrize("precision", TOLERANCE)
def test_tolerance_of_losses_depends_on_the_precision(precision: Precision) -> None:
    allowed = TOLERANCE[precision]
    reference = run(spec("ddp", precision=precision))
    assert judged(run(spec(precision=precision), **losses(0.9 * allowed)), reference) == ("ok", False)
    assert judged(run(spec(precision=precision), **losses(-1.1 * allowed)), reference) == ("invalid", False)


def test_mismatch_is_invalid_with_reason_and_without_times() -> None:
    reference = run(spec("ddp"))
    row = list_rows(run_table([run(**losses(0.5)), reference]))[0]
    assert row["outcome"] == "invalid"
    assert row["tokens_per_s"] is None
    assert row["step_s"] is None
    for part in (
        reference.config_id,
        "step 3",
        "9.0 instead of 6.0",
        "relative difference 0.5",
        "allowed in fp32: 1e-05",
    ):
        assert part in row["reason"]


def test_loss_that_is_not_finite_is_invalid() -> None:
    assert judged(run(**losses(math.nan)), run(spec("ddp"))) == ("invalid", False)


def test_gradient_norm_of_another_scale_is_invalid_at_equal_losses() -> None:
    """A run that sums gradients over ranks has the same losses as a run that averages them, because clipping and AdamW
    divide by the size of the gradient. Only the norms show the error."""
    row = list_rows(run_table([run(**norms(8)), run(spec("ddp"))]))[0]
    assert (row["outcome"], row["tokens_per_s"]) == ("invalid", None)
    assert "gradient norm differs from that of ddp" in row["reason"]
    assert "16.0 instead of 2.0 at step 0, relative difference 7, allowed in fp32: 0.1" in row["reason"]


def test_gradient_norms_are_compared_before_losses() -> None:
    both = norms(8, loss=(99.0,) * 35)
    assert "gradient norm" in list_rows(run_table([run(**both), run(spec("ddp"))]))[0]["reason"]


def test_8_bit_moments_have_their_own_tolerance_in_fp32() -> None:
    eight = {"optimizer": {"name": "adamw_8bit"}}
    reference = run(spec("ddp", **eight))
    assert judged(run(spec(**eight), **losses(0.9 * TOLERANCE_8BIT)), reference) == ("ok", False)
    assert judged(run(spec(**eight), **losses(1.1 * TOLERANCE_8BIT)), reference) == ("invalid", False)
    assert judged(run(**losses(0.9 * TOLERANCE_8BIT)), run(spec("ddp"))) == ("invalid", False)


@pytest.mark.parametrize("precision", NORM_TOLERANCE)
@pytest.mark.parametrize("step", range(SUMMED_STEPS))
def test_tolerance_of_the_first_gradient_norms_depends_on_the_precision(precision: Precision, step: int) -> None:
    allowed, of = NORM_TOLERANCE[precision], spec(precision=precision)
    reference = run(spec("ddp", precision=precision), steps=steps(**SUMMED))
    assert judged(run(of, **norms(1 + 0.9 * allowed, step, **SUMMED)), reference) == ("ok", False)
    assert judged(run(of, **norms(1 - 1.1 * allowed, step, **SUMMED)), reference) == ("invalid", False)
    assert judged(run(of, **norms(2, SUMMED_STEPS, **SUMMED)), reference) == ("ok", False), "later ones drift"


def test_reason_for_a_mismatch_of_norms_has_step_and_tolerance() -> None:
    row = list_rows(run_table([run(**norms(1.01, 2, **SUMMED)), run(spec("ddp"), steps=steps(**SUMMED))]))[0]
    assert "2.02 instead of 2.0 at step 2, relative difference 0.01, allowed in fp32: 0.001" in row["reason"]


@pytest.mark.parametrize("mine", [{}, SUMMED])
def test_norms_not_summed_in_fp64_have_a_tolerance_of_ten_percent(mine: dict[str, int]) -> None:
    """In older runs, the squares of gradients were not summed in fp64 for the norm. If at least one of two compared
    runs is such an older run, the tolerance for norms is larger."""
    reference = run(spec("ddp"), steps=steps(**({} if mine else SUMMED)))
    assert judged(run(**norms(1 + 0.9 * UNSUMMED_NORM_TOLERANCE, **mine)), reference) == ("ok", False)
    assert judged(run(**norms(1 - 1.1 * UNSUMMED_NORM_TOLERANCE, **mine)), reference) == ("invalid", False)
    assert judged(run(**norms(8, step=1, **mine)), reference) == ("ok", False)


def test_recorded_runs_are_within_the_tolerances_of_fp64_sums() -> None:
    """The strict tolerances of norms summed in fp64 are applied to all runs in results/measured. No run is invalid, so
    the tolerances are not too strict."""
    found = [store.read_record(path) for path in store.find_records([MEASURED])]
    summed = [
        record.model_copy(update={"observations": record.observations.model_copy(
            update={"steps": record.observations.steps.model_copy(update=SUMMED)})})
        for record in found if record.outcome.kind == "ok" and record.observations and record.observations.steps
    ]  # fmt: skip
    outcomes = Counter(row["outcome"] for row in list_rows(run_table(summed)))
    assert outcomes["ok"] == len(summed) > 100


def test_gradients_of_norm_layers_counted_twice_are_invalid() -> None:
    """In a real model with gradient clipping, the gradients of the normalisation layers are doubled. The losses stay
    within their tolerance, so only gradient norms can show the error. A tolerance of 10 % for gradient norms would not
    detect it."""
    right, twice = (train(factor) for factor in (1, 2))
    reference = run(spec("ddp"), steps=steps(**right, **SUMMED))
    assert judged(run(steps=steps(**right, **SUMMED)), reference) == ("ok", False)
    assert judged(run(steps=steps(**twice)), reference) == ("ok", False)
    reason = list_rows(run_table([run(steps=steps(**twice, **SUMMED)), reference]))[0]["reason"]
    assert "gradient norm differs from that of ddp" in reason and "at step 0" in reason


def train(factor: float) -> dict[str, Any]:
    """Train a small T5 for 35 steps, and return its losses and gradient norms. The gradients of its normalisation
    layers are multiplied by `factor`."""
    of = RunSpec.model_validate({
        "model": {"name": "tiny", "shape": {"d_model": 32, "d_kv": 8, "d_ff": 64, "encoder_layers": 2,
                                            "decoder_layers": 2, "heads": 4, "vocab": 128, "gated": True,
                                            "activation": "gelu_new", "separate_head": True}},
        "engine": {"name": "ddp", "backend": "ddp"}, "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": 2}, "precision": "fp32", "sequence": {"encoder": 12, "decoder": 6},
    })  # fmt: skip
    module = t5.build(of)
    t5.initialise(module, of)
    for name, parameter in module.named_parameters():
        if "layer_norm" in name:
            parameter.register_hook(lambda gradient: factor * gradient)
    update, generator = Update(trained(module), "fp32", of.optimizer, LossScale()), torch.Generator().manual_seed(1)
    losses, found = [], []
    for _ in range(35):
        inputs, labels = (torch.randint(2, 128, (2, length), generator=generator) for length in (12, 6))
        loss = module(input_ids=inputs, labels=labels).loss
        loss.backward()
        update()
        module.zero_grad()
        assert update.norm is not None
        losses.append(float(loss.detach()))
        found.append(float(update.norm))
    return {"loss": tuple(losses), "gradient_norm": tuple(found)}


def test_gradient_norms_of_skipped_steps_are_not_compared() -> None:
    """In fp16, the first steps are skipped while the loss scale is searched. Norms are compared from the first step
    that updates weights."""
    fp16, first = spec("ddp", precision="fp16"), {"skipped": (0, 1)}
    reference = run(fp16, steps=steps(**first))
    assert judged(run(spec(precision="fp16"), **norms(8, step=2, **first)), reference) == ("invalid", False)
    assert judged(run(spec(precision="fp16"), **norms(math.nan, step=0, **first)), reference) == ("ok", False)


def test_losses_without_norms_can_refute_but_not_verify() -> None:
    unknown = {"gradient_norm": ()}
    reference = run(spec("ddp"))
    assert judged(run(steps=steps(**unknown)), reference) == ("ok", True)
    assert judged(run(), run(spec("ddp"), steps=steps(**unknown))) == ("ok", True)
    assert judged(run(steps=steps(loss=(99.0,) * 35, **unknown)), reference) == ("invalid", False)


def test_only_the_first_steps_are_verified() -> None:
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
def test_run_of_another_question_is_no_reference(reference: Any) -> None:
    assert judged(run(), run(reference)) == ("ok", True)


@pytest.mark.parametrize(
    "kernels",
    [
        {"model": {"attention": "eager"}},
        {"model": {"loss_chunk_tokens": 64}},
        {"optimizer": {"implementation": "fused"}},
    ],
)
def test_run_with_other_kernels_is_a_reference(kernels: Any) -> None:
    assert judged(run(), run(spec("ddp", **kernels))) == ("ok", False)


def test_reference_may_differ_in_protocol_and_source_of_the_shape() -> None:
    reference = spec("ddp", measure={"min_steps": 40}, model={"source": "elsewhere"})
    assert judged(run(), run(reference)) == ("ok", False)


def test_reference_of_version_1_with_max_steps_verifies_nothing() -> None:
    assert judged(run(), run(spec("ddp", measure={"max_steps": 40}))) == ("ok", True)


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
def test_unusable_runs_are_no_reference(reference: RunRecord) -> None:
    assert judged(run(), reference) == ("ok", True)


def test_runs_with_dropout_are_not_verified() -> None:
    model = {"dropout": 0.1}
    assert judged(run(spec(model=model), **losses(0.5)), run(spec("ddp", model=model))) == ("ok", True)


def test_losses_are_compared_only_at_equal_skipped_updates() -> None:
    fp16 = {"precision": "fp16"}
    skipping, wrong = {"steps": steps(skipped=(0,))}, steps(skipped=(0,), loss=(99.0,) * 35)
    assert judged(run(spec(**fp16), **losses(0.5)), run(spec("ddp", **fp16), **skipping)) == ("ok", True)
    assert judged(run(spec(**fp16), **skipping), run(spec("ddp", **fp16), **skipping)) == ("ok", False)
    assert judged(run(spec(**fp16), steps=wrong), run(spec("ddp", **fp16), **skipping)) == ("invalid", False)


def test_failure_keeps_its_outcome() -> None:
    assert judged(failed("oom"), run(spec("ddp"))) == ("oom", False)


def test_verification_does_not_change_records() -> None:
    record = run(**losses(0.5))
    run_table([record, run(spec("ddp"))])
    assert record.outcome.kind == "ok"
    assert observed(record.spec).parameters == 402
