"""Tests of timelines of a pipeline, with one lane per rank. They are made from a record: the measured passes, and the
passes simulated from the schedule."""

import pytest
from drawn import draw, shows
from records import failed, results, run
from test_figures_idle_share import piped

from analysis.drawing.lanes import compute_busy, compute_idle
from analysis.figures import pass_lanes
from analysis.figures.pass_lanes import build_pair
from bench.core.record import RunRecord, TimedPass
from bench.core.record_checks import find_broken_rule

GPIPE = (
    (("forward", 0, 0, 0.0, 0.01), ("forward", 0, 1, 0.01, 0.02), ("backward", 0, 0, 0.06, 0.08),
     ("backward", 0, 1, 0.09, 0.11)),
    (("forward", 1, 0, 0.02, 0.03), ("forward", 1, 1, 0.03, 0.04), ("backward", 1, 0, 0.04, 0.06),
     ("backward", 1, 1, 0.07, 0.09)),
)  # fmt: skip
"""Recorded passes (kind, stage, micro-batch, begin and end in seconds) of two ranks with two micro-batches. Each rank
computes for 0.06 s of 0.11 s, and spends the rest on transfers and waiting."""


def timed(**more: int) -> RunRecord:
    passes = tuple(tuple(TimedPass(*one) for one in here) for here in GPIPE)
    return run(piped(2, "gpipe"), idle_s=(0.02, 0.02), passes=passes, **more)


def test_measured_lanes_equal_the_recorded_passes() -> None:
    pair = build_pair(timed())
    assert pair
    assert [[(span.kind, span.begin_s, span.end_s) for span in lane.spans] for lane in pair.measured] == [
        [(kind, begin_s, end_s) for kind, _, _, begin_s, end_s in here] for here in GPIPE
    ]
    assert compute_idle(pair.measured) == pytest.approx(1 - 0.12 / 0.22)


def test_expected_lanes_have_the_same_compute_time_and_the_idle_share_of_the_schedule() -> None:
    pair = build_pair(timed())
    assert pair
    assert compute_busy(pair.expected) == pytest.approx(0.12)
    assert compute_idle(pair.expected) == pytest.approx(1 / 3, abs=2e-3)
    (first, *_), (_, *_, last) = (lane.spans for lane in pair.expected)
    assert (first.begin_s, first.end_s) == (0, pytest.approx(0.01, rel=0.01)), (
        "forward passes take a third of the time of all passes"
    )
    assert last.end_s == pytest.approx(0.07, rel=0.01)


def test_figure_has_measured_lanes_above_expected_lanes_with_equal_x_axes() -> None:
    above, below = draw(pass_lanes, results(timed(), run(), failed("oom"))).axes
    titles = [axes.get_title(loc="left") for axes in (above, below)]
    assert titles[0].startswith("measured, 45 % idle · small")
    assert titles[1].startswith("simulated, 33 % idle · small")
    assert above.get_xlim() == below.get_xlim() == (0, pytest.approx(0.11))
    for axes in (above, below):
        assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
        boxes = [len(drawn.get_path().vertices) // 5 for drawn in axes.patches]
        assert boxes == [2] * 4, "forwards and backwards of both"


def test_one_repeat_is_drawn_and_runs_without_recorded_passes_are_not() -> None:
    assert len(draw(pass_lanes, results(timed(), timed(repeat=1))).axes) == 2
    assert not shows(pass_lanes, results(run(), run(piped(4), idle_s=(0.01, 0.01)), failed("oom", piped(2))))


def test_record_with_negative_times_of_passes_is_invalid() -> None:
    record = timed()
    assert find_broken_rule(record) is None
    assert record.observations
    odd = record.observations.model_copy(update={"passes": ((TimedPass("forward", 0, 0, -1.0, 1.0),),)})
    assert "observations.passes" in str(find_broken_rule(record.model_copy(update={"observations": odd})))
