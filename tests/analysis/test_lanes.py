"""Tests of the timelines of a pipeline, with one lane per rank. Times are compared with hand calculations. Other tests
check the drawing."""

import re
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from analysis.drawing.lanes import (
    BACKWARD,
    FORWARD,
    KEYS,
    TRANSFER,
    Lane,
    LaneSpan,
    build_lanes,
    compute_idle,
    draw_lanes,
)
from bench import api, engines, models
from bench.cli import main
from bench.config import compose
from bench.predict.step_time import predict_passes
from bench.sweep.prediction import Prediction

PIPELINE = (
    "model=gpt_22b engine=pipeline machine=a100_80 devices_per_node=8 parallel.pipeline=2 parallel.tensor=2 "
    "batch.micro=1 batch.accumulation=4"
)


def simulate(*, hop_s: float) -> list[Lane]:
    """Simulate GPipe with two micro-batches, and return one lane per rank. A forward pass takes 1 s, a backward pass 2
    s, and a transfer between stages `hop_s`."""
    words = [*PIPELINE.split(), "engine.schedule=gpipe", "batch.accumulation=2"]
    spec = compose.compose_request(compose.parse_single(words)).spec
    pipeline_facts, network = engines.facts(spec).pipeline, models.build_network(spec.model)
    assert pipeline_facts and network
    costs = pipeline_facts(spec, network, "cuda", False)
    return build_lanes(costs.list_passes([1.0, 1.0], [2.0, 2.0], lambda source, target: hop_s), 4)


COLOURS = {key.label: to_hex(key.style["facecolor"]) for key in KEYS}


def boxes(axes: Axes, kind: str, row: int) -> list[tuple[float, float]]:
    """Return begin and end of the spans of one kind (such as forward) that are drawn in a row."""
    found = []
    for drawn in axes.patches:
        corners = drawn.get_path().vertices.reshape(-1, 5, 2)  # the path of a box is closed
        if to_hex(drawn.get_facecolor()) == COLOURS[kind] and round(corners[0, :, 1].mean()) == row:
            found += [(box[:, 0].min(), box[:, 0].max()) for box in corners]
    return found


def ranks_per_place(one: Prediction) -> int:
    spec = one.point.composed.spec
    return spec.world_size // spec.parallel.pipeline


def test_gpipe_lanes_of_two_stages_computed_by_hand() -> None:
    first, second = simulate(hop_s=0.0)
    assert (first.label, second.label) == ("ranks 0–3", "ranks 4–7")
    assert first.spans == ((FORWARD, 0, 1), (FORWARD, 1, 2), (BACKWARD, 5, 7), (BACKWARD, 7, 9))
    assert second.spans == ((FORWARD, 1, 2), (FORWARD, 2, 3), (BACKWARD, 3, 5), (BACKWARD, 5, 7))
    assert compute_idle([first, second]) == pytest.approx(1 / 3), "(P - 1) / (m + P - 1)"


def test_lanes_show_transfers_only_while_a_rank_waits_for_them() -> None:
    first, second = simulate(hop_s=0.5)
    assert second.spans[:3] == ((TRANSFER, 1, 1.5), (FORWARD, 1.5, 2.5), (FORWARD, 2.5, 3.5))
    assert first.spans[2:4] == ((TRANSFER, 5.5, 6), (BACKWARD, 6, 8)), "the other rank's pass before it is no transfer"
    assert sum(span.kind == TRANSFER for span in (*first.spans, *second.spans)) == 2, (
        "the other transfers arrive while it computes"
    )


def test_predicted_lanes_have_every_pass_and_end_within_the_step_time() -> None:
    (one,) = api.predict(overrides=PIPELINE)
    assert one.time
    lanes = build_lanes(one.list_passes(), ranks_per_place(one))
    counts = [[sum(span.kind == kind for span in lane.spans) for kind in (FORWARD, BACKWARD)] for lane in lanes]
    assert counts == [[4, 4], [4, 4]]
    names = ("forward", "backward", "recomputation", "idle")
    least_s = sum(one.time.parts.get(name, 0.0) for name in names)
    assert least_s < max(lane.spans[-1].end_s for lane in lanes) < one.time.step_s, (
        "exchanges between tensor-parallel ranks are part of passes"
    )


def test_runs_without_a_pipeline_or_with_too_many_passes_have_no_lanes() -> None:
    (plain,) = api.predict(overrides="model=mt5_xl engine=zero2 devices_per_node=8 machine=a100_80")
    assert build_lanes(plain.list_passes(), 1) == []
    (one,) = api.predict(overrides=PIPELINE)
    composed = one.point.composed
    assert len(predict_passes(composed.spec, composed.machine, "cuda", most=16)) == 16
    assert not predict_passes(composed.spec, composed.machine, "cuda", most=15)


def test_lane_is_drawn_as_a_row_of_boxes_in_the_unit_of_the_axis() -> None:
    axes = Figure().subplots()
    lanes = [Lane("rank 0", (LaneSpan(FORWARD, 0, 0.002),)), Lane("rank 1", (LaneSpan(TRANSFER, 0.002, 0.003),))]
    draw_lanes(axes, lanes, 1e-3)
    assert boxes(axes, FORWARD, 0) == [pytest.approx((0, 2))]
    assert boxes(axes, TRANSFER, 1) == [pytest.approx((2, 3))]
    assert not boxes(axes, FORWARD, 1)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    low, high = axes.get_ylim()
    assert low > high, "rank 0 is above"


def test_page_of_one_pipeline_shows_its_lanes_and_idle_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["predict", *PIPELINE.split(), "--page", str(page)]) == 0
    text = page.read_text()
    section = text[text.index('id="figure-lanes"') : text.index('id="values"')]
    assert section.count('data-series="forward"') == 2
    (share,) = re.findall(r"a rank is idle for ([0-9.]+) % of this time", text)
    (one,) = api.predict(overrides=PIPELINE)
    assert float(share) == pytest.approx(
        100 * compute_idle(build_lanes(one.list_passes(), ranks_per_place(one))), rel=0.01
    )
