import pytest
from drawn import draw, legend, note, places, titles
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from records import MIB, failed, memory, results, run, spec

from analysis.drawing import choose_looks
from analysis.figures import memory_by_stage
from bench.core.spec import EngineSpec, RunSpec
from bench.predict.memory import predict_memory as predicted

WEIGHTS, GRADIENTS, OPTIMIZER = 4 * 402, 4 * 402, 8 * 402
"""Bytes of weights, gradients and AdamW states for the 402 parameters of the model in fp32."""

DIVIDED = {"reduce_bucket_size": 100, "overlap_comm": False}
PARTITIONED = {
    "stage3_prefetch_bucket_size": 100, "stage3_param_persistence_threshold": 10, "stage3_max_live_parameters": 1000,
    "stage3_max_reuse_distance": 1000,
}  # fmt: skip


def staged(stage: int, micro: int = 2, **more) -> RunSpec:
    of = spec(f"zero{stage}", micro, **more)
    options = {"stage": stage, **(DIVIDED if stage else {}), **(PARTITIONED if stage == 3 else {})}
    return of.model_copy(update={"engine": of.engine.model_copy(update={"options": options})})


def replicated(micro: int = 2) -> RunSpec:
    of = spec("ddp", micro)
    options = {"bucket_cap_mb": 1, "gradient_as_bucket_view": True, "static_graph": False}
    return of.model_copy(update={"engine": of.engine.model_copy(update={"options": options})})


ORDER = {"peak": 4, "predicted": 3, "resting": 2}


def marks(axes: Axes, kind: str) -> dict[str, float]:
    """Return the drawn values of one kind (peak, predicted or resting) by the tick label below them."""
    found = [line for line in axes.lines if line.get_zorder() == ORDER[kind] and line.get_linestyle() == "None"]
    pairs = [pair for line in found for pair in zip(line.get_xdata(), line.get_ydata(), strict=True)]
    return {places(axes)[int(x)]: y for x, y in pairs}


def bars(axes: Axes) -> dict[str, float]:
    return {places(axes)[round(bar.get_x() + bar.get_width() / 2)]: bar.get_height() for bar in axes.patches}


def stages() -> Figure:
    """Return the figure for ddp and ZeRO stages 0 to 3 on 2 ranks at micro-batch 2, where stage 3 is out of memory. At
    micro-batch 4 only ddp was run."""
    small = {"memory": memory(2, peak=5 * 1024)}
    return draw(
        memory_by_stage,
        results(
            run(replicated(), **small),
            *(run(staged(stage), **small) for stage in (0, 1, 2)),
            failed("oom", staged(3)),
            run(replicated(4), **small),
        ),
    )


def test_bars_equal_the_zero_formula_at_every_stage() -> None:
    (axes,) = stages().axes
    unit = MIB
    whole = WEIGHTS + GRADIENTS + OPTIMIZER
    assert bars(axes) == pytest.approx(
        {
            "ddp": whole / unit,
            "zero0": whole / unit,
            "zero1": (WEIGHTS + GRADIENTS + OPTIMIZER / 2) / unit,
            "zero2": (WEIGHTS + (GRADIENTS + OPTIMIZER) / 2) / unit,
            "zero3": 400 * 16 / 2 / unit,  # the model is never built; its published number of parameters is used
        }
    )


def test_measured_and_predicted_peaks_have_separate_marks() -> None:
    (axes,) = stages().axes
    assert marks(axes, "peak") == pytest.approx(dict.fromkeys(("ddp", "zero0", "zero1", "zero2"), 1 + 5 / 1024))
    expected = {f"zero{stage}": predicted(staged(stage), "cpu").peak / MIB for stage in range(4)}
    expected["ddp"] = predicted(replicated(), "cpu").peak / MIB
    assert marks(axes, "predicted") == pytest.approx(expected)


def test_memory_between_steps_is_marked_below_the_peak() -> None:
    (axes,) = draw(memory_by_stage, results(run(memory=memory(2, resident_bytes=6 * MIB)))).axes
    assert (marks(axes, "resting"), marks(axes, "peak")) == ({"zero1": 6}, {"zero1": 11})


def test_run_out_of_memory_is_labelled_and_keeps_its_prediction() -> None:
    (axes,) = stages().axes
    (text,) = axes.texts
    assert (text.get_text(), places(axes)[round(text.get_position()[0])]) == ("OOM", "zero3")
    assert axes.get_ylim()[0] < text.get_position()[1] < 0


def test_panel_shows_the_micro_batch_with_the_most_numbers() -> None:
    assert titles(stages()) == ["tiny · 2 ranks · micro 2"]
    twice = draw(memory_by_stage, results(run(spec("ddp", 2)), run(spec("ddp", 4))))
    assert titles(twice) == ["tiny · 2 ranks · micro 4"], "of equally frequent micro-batches, the largest is shown"


def test_configuration_with_the_most_memory_is_drawn_for_each_engine() -> None:
    twins = [
        run(spec(optimizer={"eps": eps}), memory=memory(2, peak=peak * MIB)) for eps, peak in ((1e-6, 8), (1e-7, 5))
    ]
    (axes,) = draw(memory_by_stage, results(*twins)).axes
    assert marks(axes, "peak") == {"zero1": 9}, "the second rank holds 1 MiB more"


def test_legend_distinguishes_measured_rehearsed_and_predicted_values() -> None:
    drawn = stages()
    assert legend(drawn) == [
        "measured: peak allocated memory", "measured: memory between steps", "predicted: peak allocated memory",
        "predicted: model states (ZeRO paper, Table 1)",
    ]  # fmt: skip
    assert "formulas that are not fitted to measurements" in note(drawn)
    rehearsed = draw(memory_by_stage, results(run(evidence="rehearsed")))
    assert legend(rehearsed)[0] == "rehearsed: peak allocated memory"


def test_model_of_an_unknown_family_is_drawn_without_a_prediction() -> None:
    (axes,) = draw(memory_by_stage, results(run(staged(1, model={"family": "unheard"})))).axes
    assert (len(marks(axes, "peak")), len(marks(axes, "predicted")), len(bars(axes))) == (1, 0, 1)


def test_unknown_engine_is_drawn_without_a_prediction() -> None:
    foreign = spec("tomorrow").model_copy(update={"engine": EngineSpec(name="tomorrow", backend="tomorrow")})
    (axes,) = draw(memory_by_stage, results(run(foreign))).axes
    assert (len(marks(axes, "peak")), len(marks(axes, "predicted")), len(bars(axes))) == (1, 0, 0)


def test_run_with_a_caching_allocator_is_predicted_for_cuda() -> None:
    cached = memory(2, peak_reserved_bytes=20 * MIB)
    of = staged(1, precision="bf16")
    (axes,) = draw(memory_by_stage, results(run(of, memory=cached))).axes
    assert marks(axes, "predicted") == pytest.approx({"zero1": predicted(of, "cuda").peak / MIB})
    assert predicted(of, "cuda").peak != predicted(of, "cpu").peak


def test_engines_have_the_colours_and_markers_of_the_other_figures() -> None:
    (axes,) = stages().axes
    looks = choose_looks(["ddp", "zero0", "zero1", "zero2", "zero3"])
    peaks = [line for line in axes.lines if line.get_zorder() == ORDER["peak"]]
    assert {(line.get_marker(), line.get_color()) for line in peaks} == {
        (look.marker, look.colour) for engine, look in looks.items() if engine != "zero3"
    }
