"""Tests of the report's figure of answers: its values, and its drawing. For each question (configurations that do the
same work on equal hardware), the figure shows the fastest configuration and how much longer other engines take."""

import itertools
import re

import pytest
from clusters import asked, measured, out_of_memory
from drawn import draw, note, shows, titles
from matplotlib.text import Text
from records import results

from analysis.drawing import draw_panel
from analysis.drawing.svg import PANEL_IN
from analysis.figures import answers
from analysis.figures.answers import MOST_MARKS, MOST_PANELS, AnswerPanel, build_panels, find_limits
from analysis.questions import describe_choice
from analysis.scaling.best import best
from bench.core.record import RunRecord


def build(*records: RunRecord) -> list[AnswerPanel]:
    panels, _ = build_panels(best(results(*records)))
    return panels


def one(engine: str, times: float | list[float], **more: int) -> list[RunRecord]:
    return measured(asked(1, engine=engine, **more), times)


RIVALS = [*one("ddp", [1.0, 1.01, 0.99]), *one("zero1", [1.25, 1.26, 1.24]), *one("zero3", [3.0, 3.01, 2.99])]


def test_marks_show_extra_time_relative_to_the_fastest() -> None:
    (panel,) = build(*RIVALS)
    assert [mark.label.split(",")[0] for mark in panel.marks] == ["ddp", "zero1", "zero3"]
    assert [mark.extra for mark in panel.marks] == pytest.approx([0, 0.25, 2.0], rel=1e-3)
    first, second, _ = panel.marks
    assert first.ends is None and first.words.startswith("fastest: ")
    assert second.ends is not None and second.ends[0] < 0.25 < second.ends[1]
    assert second.words.startswith("slower: +2")


def test_fewer_than_three_runs_are_indicative_without_an_interval() -> None:
    (panel,) = build(*one("ddp", [1.0, 1.0]), *one("zero1", [1.5, 1.5]))
    _, rival = panel.marks
    assert rival.ends is None
    assert rival.words.replace("\u00a0", " ") == "+50 %, indicative"
    assert not any("indicative" in mark.words for mark in build(*RIVALS)[0].marks)


def test_busy_runs_have_a_row_without_a_mark() -> None:
    busy = measured(asked(1, engine="zero2"), 0.5, load=({"node": 0, "others_share": 0.3},))
    (panel,) = build(*RIVALS, *busy)
    assert [(mark.engine, mark.extra, mark.words) for mark in panel.marks][-1] == (
        "zero2", None, "busy machine: times excluded",
    )  # fmt: skip
    (axes,) = draw(answers, results(*RIVALS, *busy)).axes
    assert len(axes.lines) == 3
    assert "zero2 [busy short]" in [text.get_text() for text in axes.texts]


def test_axis_ends_before_an_outlying_mark() -> None:
    (panel,) = build(*RIVALS)
    assert find_limits(panel.marks)[1] == pytest.approx(1.08 * 0.25, rel=0.2), "three times as long is beyond the axis"
    assert find_limits(panel.marks[:2]) == find_limits(panel.marks)


@pytest.mark.parametrize(
    ("extras", "end"),
    [
        ([0.13], 0.13), ([0.02, 0.45, 1.3, 1.7], 1.7), ([0.01, 0.01, 0.02, 0.5, 0.6], 0.6),
        ([0.45, 0.57, 1.3, 9.0], 1.3), ([0.1, 0.2, 0.3, 5.0, 9.0], 0.3), ([], 0.05), ([0.001], 0.05),
    ],
)  # fmt: skip
def test_the_axis_reaches_to_the_data_but_not_to_values_far_beyond_the_others(extras: list[float], end: float) -> None:
    (panel,) = build(*RIVALS)
    fastest, rival, _ = panel.marks
    marks = [fastest, *(rival._replace(extra=extra, ends=None) for extra in extras)]
    assert find_limits(marks)[1] == pytest.approx(end, rel=0.1)


def test_each_engine_has_its_fastest_mark_and_a_single_engine_has_all() -> None:
    two = build(*one("ddp", 1.0, micro=2), *one("ddp", 1.2, micro=4), *one("zero1", 1.5, micro=4))[0]
    assert [mark.label for mark in two.marks] == ["ddp, micro 4", "zero1, micro 4"]
    alone = build(*one("ddp", 1.0, micro=2), *one("ddp", 1.2, micro=4))[0]
    assert [mark.label for mark in alone.marks] == ["ddp, micro 4", "ddp, micro 2"]


def test_note_states_whether_a_mark_is_an_engine_or_a_configuration() -> None:
    two_engines = RIVALS[:6]
    alone = [record for micro in (2, 4) for record in measured(asked(2, engine="ddp", micro=micro), 1.0)]
    notes = [note(draw(answers, results(*records))) for records in (two_engines, alone, two_engines + alone)]
    assert notes[0].startswith("Each mark is the fastest configuration of an engine. The")
    assert notes[1].startswith("All configurations of a panel have the same engine, and each mark is one of them. The")
    assert "; in a panel with a single engine, each mark is a configuration. The" in notes[2]


def test_title_counts_the_engines_or_configurations_that_are_not_shown() -> None:
    engines = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp", "pipeline", "lga")
    (panel,) = build(*(record for engine in engines for record in one(engine, 1.0)))
    assert (len(panel.marks), panel.title.split(" · ")[-1]) == (MOST_MARKS, "6 of 8 engines shown")
    (panel,) = build(*(record for micro in range(1, 8) for record in one("ddp", 1.0, micro=micro)))
    assert (len(panel.marks), panel.title.split(" · ")[-1]) == (MOST_MARKS, "6 of 7 configurations shown")
    assert not any("shown" in one.title for one in build(*RIVALS))


def test_labels_of_marks_omit_the_protocol() -> None:
    one, other = (asked(1, engine="ddp", measure={"min_steps": steps}) for steps in (30, 40))
    found = best(results(*measured(one, 1.0), *measured(other, 1.2), *measured(asked(1, engine="zero1"), 1.5)))
    assert "min_steps=40" in describe_choice(found[0].rivals[0].row), "in a table the protocol distinguishes the two"
    (panel,), _ = build_panels(found)
    assert [mark.label for mark in panel.marks] == ["ddp", "zero1"]
    assert panel.title.endswith(" · micro 2")


def test_figure_is_empty_without_rivals() -> None:
    found = results(*one("ddp", 1.0), *out_of_memory(asked(1, engine="zero1")))
    assert not shows(answers, found)


def test_figure_shows_the_questions_with_the_most_rivals_and_notes_it() -> None:
    few = [
        record
        for ranks in range(1, 8)
        for engine in ("ddp", "zero1")
        for record in measured(asked(ranks, engine=engine), 1.0)
    ]
    figure = draw(answers, results(*few, *measured(asked(7, engine="zero2"), 1.5)))
    assert len(titles(figure)) == MOST_PANELS
    assert len(figure.axes[-1].lines) == 3, "a mark each"
    assert note(figure).endswith("Shown: the 6 questions with the most configurations, of 7 with several.")


def test_marks_are_drawn_at_their_values_and_arrows_for_values_beyond_the_axis() -> None:
    (axes,) = draw(answers, results(*RIVALS)).axes
    at = {line.get_ydata()[0]: (line.get_xdata()[0], line.get_marker()) for line in axes.lines}
    assert at[0] == (0.0, "o") and at[1] == (pytest.approx(0.25, rel=1e-3), "s") and at[2] == (axes.get_xlim()[1], ">")
    words = [text.get_text() for text in axes.texts]
    assert words[0] == "ddp [short]" and re.match(r"slower: \+2\d", words[3])
    assert [label.get_text() for label in axes.get_xticklabels()][1:3] == ["0%", "5%"]


def test_texts_next_to_the_rows_are_whole_and_within_the_figure() -> None:
    """If the edge of the figure cuts off a text, a number may be wrong: "-10 to +2" in place of "-10 to +27 %"."""
    noisy = [*one("ddp", [1.0, 1.1, 0.9]), *one("zero1", [1.0, 1.2, 0.95])]
    (panel,) = build(*noisy)
    figure = draw(answers, results(*noisy))
    figure.draw_without_rendering()
    drawn = {text.get_text(): text.get_window_extent() for text in figure.axes[0].texts}
    words = [mark.words.replace("\u00a0", " ") for mark in panel.marks]
    assert words[1].startswith("no detectable difference: ") and words[1].endswith(" %")
    assert set(words) < set(drawn)
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in drawn.values())


def test_long_labels_are_cut_rather_than_the_numbers_next_to_them() -> None:
    named = [
        {"engine": "ddp", "optimizer": {"eps": eps, "weight_decay": 0.0123456789, "lr": 0.000123456789}}
        for eps in (1e-6, 1.23456789e-8)
    ]
    noisy = [
        record
        for of, times in zip(named, ([1.0, 1.1, 0.9], [1.0, 1.2, 0.95]), strict=True)
        for record in measured(asked(1, **of), times)
    ]
    figure = draw(answers, results(*noisy))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_on_a_phone_label_and_numbers_have_a_line_each() -> None:
    noisy = [
        *measured(asked(1, engine="ddp", optimizer={"lr": 0.003}), [1.0, 1.1, 0.9]),
        *measured(asked(1, engine="ddp", optimizer={"lr": 0.01}), [1.0, 1.2, 0.95]),
    ]
    (panel,) = answers.picture(results(*noisy)).panels
    assert panel.narrow
    drawing = draw_panel(panel, PANEL_IN, panel.narrow)
    drawing.draw_without_rendering()
    texts = drawing.axes[0].texts
    assert {text.get_text() for text in texts} >= {"ddp (lr=0.003)", "ddp (lr=0.01)"}
    assert all(drawing.bbox.x0 <= box.x0 and box.x1 <= drawing.bbox.x1 for box in map(Text.get_window_extent, texts))
    heights = sorted(text.get_window_extent().y0 for text in texts)
    assert min(high - low for low, high in itertools.pairwise(heights)) >= 6.5, "lines do not overlap"
