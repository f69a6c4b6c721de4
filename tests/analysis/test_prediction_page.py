"""The page of `zeroscale predict`: bars that add up to what is predicted, exact values, no request."""

import re
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from analysis.answer_pages.bars import StackedBar, choose_looks, draw_bars
from analysis.answer_pages.prediction_page import build_memory_bars, build_time_bars
from bench import api
from bench.cli import main

ONE = "model=mt5_xl engine=zero2 nodes=2 devices_per_node=8 machine=a100_80"
SEVERAL = "model=mt5_xl engine=ddp,zero3 devices_per_node=8 machine=a100_40"
GB = (1e9, "GB")


def parts(axes: Axes, place: int) -> list[tuple[float, float]]:
    """Return where the parts of a bar begin and end, in the axis' unit."""
    drawn = [patch for patch in axes.patches if str(patch.get_gid()).startswith(f"part-{place}-")]
    return [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in drawn]


def line(axes: Axes, name: str) -> list[float]:
    """Return the horizontal ends of a line."""
    return [float(x) for drawn in axes.lines if drawn.get_gid() == name for x in drawn.get_xdata()]


def test_a_bar_is_its_parts_one_after_the_other_with_its_range_and_its_limit() -> None:
    bar = StackedBar("a", {"x": 2e9, "y": 3e9}, 5e9, 7e9, 6e9, words="may fit")
    axes = draw_bars([bar], choose_looks(["y", "x", "z"]), GB, "the device").axes[0]
    assert parts(axes, 0) == [(0, 3), (3, 5)], "in the order of the looks"
    assert (line(axes, "range-0"), line(axes, "limit-0")) == ([5, 7], [6, 6])
    assert axes.get_xlim()[1] > 7
    assert {text.get_text() for text in axes.texts} == {"a", "5–7 GB, may fit", "the device, 6 GB"}


def test_parts_are_told_apart_beyond_the_number_of_colours() -> None:
    looks = choose_looks(map(str, range(14)))
    assert len({(look.colour, look.hatched) for look in looks}) == 14


def test_memory_of_one_point_is_drawn_by_phase_and_then_for_the_device() -> None:
    (one,) = found = api.predict(overrides=ONE)
    bars = build_memory_bars(found, [""])
    assert one.memory
    *phases, device = bars
    assert [(bar.label, sum(bar.parts.values())) for bar in phases] == [(p.name, p.total) for p in one.memory.phases]
    assert sum(device.parts.values()) == device.low == one.memory.device[0]
    assert (device.high, device.words) == (one.memory.device[1], "fits")
    assert {bar.limit for bar in bars} == {one.point.composed.machine.memory_bytes}


def test_time_is_drawn_by_part_and_what_is_hidden_beside_it() -> None:
    (one,) = found = api.predict(overrides=ONE)
    step, hidden = build_time_bars(found, [""])
    assert one.time
    assert sum(step.parts.values()) == pytest.approx(one.time.step_s)
    assert step.low < sum(step.parts.values()) < step.high
    assert hidden.parts == {"hidden": one.time.hidden_s}


def test_of_several_points_each_has_a_bar_and_a_row(tmp_path: Path) -> None:
    found = api.predict(overrides=SEVERAL)
    bars = build_memory_bars(found, ["ddp", "zero3"])
    assert [(bar.label, bar.words) for bar in bars] == [("ddp", "does not fit"), ("zero3", "fits")]
    assert [bar.label for bar in build_time_bars(found, ["ddp", "zero3"])] == ["ddp", "zero3"]
    page = write(tmp_path, SEVERAL)
    assert "Does not fit: 1 point; fits: 1 point." in page
    assert re.findall(r"<code>([0-9a-f]{10})</code>", page) == [one.point.config_id for one in found]


def test_the_page_holds_the_answer_the_exact_values_and_nothing_that_is_fetched(tmp_path: Path) -> None:
    page = write(tmp_path, ONE)
    (one,) = api.predict(overrides=ONE)
    assert one.memory and one.time
    for amount in (*one.memory.device, one.memory.peak, one.memory.resident):
        assert f"{amount:,}" in page
    for seconds in one.time.parts.values():
        assert f"{seconds:.6g}" in page
    assert "Largest micro-batch: " in page and "No GPU run stands behind any of it yet." in page
    assert one.point.composed.machine.source.split(",")[0] in page
    assert page.count("<svg") == 2
    assert not re.search(r"<script|(src|href)=\"(?!#)", page)
    assert "zeroscale predict model=mt5_xl" in page


def test_what_cannot_be_predicted_is_said_where_its_bar_would_be(tmp_path: Path) -> None:
    words = f"{ONE} machine.memory_bytes_per_s=null machine.memory_bytes=null"
    page = write(tmp_path, words)
    (one,) = api.predict(overrides=words)
    assert one.time is None and one.fits is None
    assert page.count("<svg") == 1
    assert "No step time is predicted" in page


def test_a_page_replaces_a_page_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = write(tmp_path, ONE), write(tmp_path, ONE)
    assert first == again
    other = tmp_path / "config.yaml"
    other.write_text("kept")
    assert refuse(capsys, other) == f"zeroscale: --page {other}: not the name of a page; let it end in .html\n"
    assert other.read_text() == "kept"
    assert refuse(capsys, tmp_path / "config.yaml" / "p.html").endswith("choose another file\n")
    (tmp_path / "folder.html").mkdir()
    assert refuse(capsys, tmp_path / "folder.html").endswith("a folder; name a file in it\n")


def refuse(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    """Return the one line by which a path for the page is refused."""
    capsys.readouterr()
    assert main(["predict", *ONE.split(), "--page", str(path)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def write(folder: Path, words: str) -> str:
    """Call the verb; return its page."""
    path = folder / "pages" / "prediction.html"
    assert main(["predict", *words.split(), "--page", str(path)]) == 0
    return path.read_text()
