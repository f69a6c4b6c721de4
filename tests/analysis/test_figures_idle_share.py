"""Tests of the measured and predicted idle share (bubble) of a pipeline. Values are compared with values computed by
hand. Other tests check the drawn figure."""

from typing import Any

import pytest
from drawn import draw, legend, note, places, shows, titles
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from records import failed, results, run, spec

from analysis.drawing import choose_looks
from analysis.drawing.curves import ChartCurve, build_panels
from analysis.figures import idle_share
from analysis.report.texts import format_hover
from bench.core.record import RunRecord
from bench.core.spec import RunSpec
from bench.predict.step_time.pipeline import predict_idle_share

WIDTH = 256
"""Width of the model. A block has 12 · 256 · 256 weights, and the head has only 2 · 256. So the work of a stage with
the head exceeds that of a stage with the same number of blocks and no head by only 0.1 %."""
ENGINES = {"1f1b": "pipeline", "gpipe": "pipeline", "interleaved": "interleaved", "breadth_first": "modular"}


def piped(micro_batches: int, schedule: str = "1f1b", ranks: int = 2, stages: int = 1, **more: Any) -> RunSpec:
    """Return the spec of a small GPT on a pipeline with equal stages and without data parallelism. `stages` is the
    number of stages per rank."""
    shape = {"width": WIDTH, "layers": 8, "heads": 4, "inner": 4 * WIDTH, "vocab": 2, "positions": 8}
    return spec(
        {"name": ENGINES[schedule], "backend": "pipeline", "options": {"schedule": schedule}},
        ranks=ranks,
        model={"name": "small", "family": "gpt", "shape": shape},
        objective="causal_lm",
        sequence={"tokens": 4},
        batch={"micro": 2, "accumulation": micro_batches},
        parallel={"pipeline": ranks, "stages_per_rank": stages},
        **more,
    )


def ran(of: RunSpec, *idle_s: float) -> RunRecord:
    """Return a run with steps of 0.1 s. `idle_s` has the idle seconds of each rank per step (by default 0.02)."""
    return run(of, idle_s=idle_s or (0.02,) * of.world_size)


def curves(*records: RunRecord) -> dict[tuple[str, bool], ChartCurve]:
    """Return the curves of the figure's only panel, as a dict. A key is the label of the curve, and a bool that is True
    for a predicted curve."""
    (panel,) = build_panels(idle_share.group_rows(results(*records)), idle_share.QUANTITY)
    return {(curve.label, curve.predicted): curve for curve in panel.curves}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("breadth_first", 2)])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 12)])
def test_idle_share_of_equal_stages_matches_the_closed_form(
    ranks: int, micro_batches: int, schedule: str, stages: int, checkpointed: bool
) -> None:
    """With P ranks, v stages per rank and m micro-batches, the idle share is (P - 1) / (v m + P - 1). It does not
    depend on the cost of a backward pass (arXiv 2104.04473, section 2.2)."""
    of = piped(micro_batches, schedule, ranks, stages, activation_checkpointing=checkpointed)
    assert predict_idle_share(of) == pytest.approx((ranks - 1) / (stages * micro_batches + ranks - 1), abs=2e-3)


def test_idle_share_of_breadth_first_with_fewer_micro_batches_than_ranks() -> None:
    """With P ranks, v stages per rank and m micro-batches, idle time divided by computing time is ((P - 1) + (v - 1) (P
    - m)) / (v m) = (3 + 2) / 4."""
    assert predict_idle_share(piped(2, "breadth_first", 4, 2)) == pytest.approx(5 / 9, abs=2e-3)


def test_engine_without_a_pipeline_has_no_idle_share() -> None:
    assert predict_idle_share(spec("ddp")) is None


def test_each_engine_has_a_measured_and_a_predicted_curve() -> None:
    drawn = curves(ran(piped(2), 0.04, 0.02), ran(piped(8), 0.02, 0.01), ran(piped(4, "interleaved", stages=2)))
    assert drawn.keys() == {
        (name, is_predicted) for name in ("pipeline", "interleaved") for is_predicted in (False, True)
    }
    measured, predicted = drawn["pipeline", False], drawn["pipeline", True]
    assert [(point.place, point.value) for point in measured.points] == [(0, pytest.approx(0.3)), (2, 0.15)]
    assert [point.value for point in predicted.points] == pytest.approx([1 / 3, 1 / 9], abs=2e-3)
    assert len(measured.segments) == 2, "4 micro-batches were not run, so no line leads to them"


def test_pipelines_of_each_degree_have_a_panel_and_other_runs_none() -> None:
    found = results(ran(piped(4)), ran(piped(4, ranks=4)), run(), failed("oom", piped(8)))
    assert shows(idle_share, found)
    drawn = draw(idle_share, found)
    assert titles(drawn) == [
        "small · 2 ranks · micro 2 · pipeline degree 2",
        "small · 4 ranks · micro 2 · pipeline degree 4",
    ]
    assert not shows(idle_share, results(run(), failed("oom", piped(8)))), "the time that ranks waited is unknown"


def test_repeats_are_drawn_as_one_point_at_their_median() -> None:
    shares = (0.01, 0.02, 0.05)
    repeats = [run(piped(4), idle_s=(share,) * 2, repeat=number) for number, share in enumerate(shares)]
    assert [point.value for point in curves(*repeats)["pipeline", False].points] == pytest.approx([0.2])


def test_prediction_is_hollow_and_dashed_in_the_colour_of_its_engine() -> None:
    drawn = draw(idle_share, results(ran(piped(2), 0.03, 0.03), ran(piped(4), 0.02, 0.02)))
    (axes,) = drawn.axes
    assert (places(axes), axes.get_ylabel()) == (["2", "4"], "idle fraction of a step")
    marked: dict[str, list[Line2D]] = {"none": [], "full": []}
    for line in axes.lines:
        if line.get_marker() == "o" or line.get_marker() == "s":
            marked["none" if line.get_markerfacecolor() == "none" else "full"].append(line)
    assert [list(line.get_ydata()) for line in marked["full"]] == [pytest.approx([0.3, 0.2])]
    assert [list(line.get_ydata()) for line in marked["none"]] == [pytest.approx([1 / 3, 1 / 5], abs=2e-3)]
    assert {to_hex(line.get_color()).upper() for lines in marked.values() for line in lines} == {
        choose_looks(["pipeline"])["pipeline"].colour
    }
    assert [line.is_dashed() for line in axes.lines if line.get_marker() == "None" and len(line.get_xdata()) == 2]
    assert legend(drawn) == ["pipeline"], "measured and predicted curves share one label"
    assert "Hollow, dashed: prediction by a simulation of the engine's schedule" in note(drawn)


def test_hover_text_has_the_measured_and_the_predicted_share() -> None:
    [group] = idle_share.group_rows(results(ran(piped(2)), ran(piped(4))))
    assert format_hover(group.rows[0]).splitlines()[2] == "idle 20 % of a step; predicted: 33 %"
