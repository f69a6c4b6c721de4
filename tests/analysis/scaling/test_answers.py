"""The answers at a glance, by their data and by where they are drawn."""

import re

import pytest
from clusters import asked, measured, out_of_memory
from drawn import note
from records import results

from analysis.charts.answers import MOST_PANELS, AnswerChart, build_answer_chart
from analysis.figures import answers
from analysis.questions import describe_choice
from analysis.report.glance import render_glance
from analysis.scaling.best import best
from bench.record import RunRecord


def build(*records: RunRecord) -> AnswerChart:
    chart = build_answer_chart(best(results(*records)))
    assert chart is not None
    return chart


def one(engine: str, times: float | list[float], **more: int) -> list[RunRecord]:
    return measured(asked(1, engine=engine, **more), times)


RIVALS = [*one("ddp", [1.0, 1.01, 0.99]), *one("zero1", [1.25, 1.26, 1.24]), *one("zero3", [3.0, 3.01, 2.99])]


def test_every_engine_stands_as_far_out_as_it_takes_longer() -> None:
    (panel,) = build(*RIVALS).panels
    assert [mark.label.split(",")[0] for mark in panel.marks] == ["ddp", "zero1", "zero3"]
    assert [mark.extra for mark in panel.marks] == pytest.approx([0, 0.25, 2.0], rel=1e-3)
    first, second, _ = panel.marks
    assert first.ends is None and first.words.startswith("the fastest: ")
    assert second.ends is not None and second.ends[0] < 0.25 < second.ends[1]
    assert second.words.startswith("slower: +2")


def test_what_ran_fewer_than_three_times_is_indicative_and_has_no_interval() -> None:
    (panel,) = build(*one("ddp", [1.0, 1.0]), *one("zero1", [1.5, 1.5])).panels
    _, rival = panel.marks
    assert rival.indicative and rival.ends is None
    assert rival.words.replace("\u00a0", " ") == "indicative, fewer than 3 runs a side: +50 %"
    assert not any(mark.indicative for mark in build(*RIVALS).panels[0].marks)


def test_places_are_in_proportion_and_what_is_beyond_lies_at_the_edge() -> None:
    chart = build(*RIVALS)
    assert (chart.low, chart.high) == (pytest.approx(-0.02), 1.0), "three times as long is beyond the axis"
    (panel,) = render_glance(chart)
    first, second, third = panel.marks
    assert first.at == panel.zero == pytest.approx(100 * 0.02 / 1.02, abs=0.01)
    assert second.at == pytest.approx(100 * 0.27 / 1.02, abs=0.2)
    assert third.at == 100
    assert second.begins < second.at < second.begins + second.width


def test_of_an_engine_the_fastest_stands_for_all_and_of_one_engine_every_choice() -> None:
    two = build(*one("ddp", 1.0, micro=2), *one("ddp", 1.2, micro=4), *one("zero1", 1.5, micro=4)).panels[0]
    assert [mark.label for mark in two.marks] == ["ddp, micro 4", "zero1, micro 4"]
    alone = build(*one("ddp", 1.0, micro=2), *one("ddp", 1.2, micro=4)).panels[0]
    assert [mark.label for mark in alone.marks] == ["ddp, micro 4", "ddp, micro 2"]


def test_a_difference_of_protocol_names_no_mark() -> None:
    one, other = (asked(1, engine="ddp", measure={"min_steps": steps}) for steps in (30, 40))
    found = best(results(*measured(one, 1.0), *measured(other, 1.2), *measured(asked(1, engine="zero1"), 1.5)))
    assert "min_steps=40" in describe_choice(found[0].rivals[0].row), "in a table it tells the two apart"
    chart = build_answer_chart(found)
    assert chart and [mark.label for mark in chart.panels[0].marks] == ["ddp, micro 2", "zero1, micro 2"]


def test_without_rivals_there_is_nothing_to_see() -> None:
    found = results(*one("ddp", 1.0), *out_of_memory(asked(1, engine="zero1")))
    assert build_answer_chart(best(found)) is None
    assert not answers.applies(found)


def test_of_many_questions_those_with_the_most_rivals_are_seen_and_the_note_says_so() -> None:
    few = [
        record
        for ranks in range(1, 8)
        for engine in ("ddp", "zero1")
        for record in measured(asked(ranks, engine=engine), 1.0)
    ]
    chart = build(*few, *measured(asked(7, engine="zero2"), 1.5))
    assert len(chart.panels) == MOST_PANELS
    assert len(chart.panels[-1].marks) == 3
    assert chart.note.endswith("The 6 of 7 questions with the most rivals.")


def test_in_print_a_mark_stands_at_its_value_beside_its_words() -> None:
    figure = answers.figure(results(*RIVALS))
    (axes,) = figure.axes
    at = {line.get_ydata()[0]: line.get_xdata()[0] for line in axes.lines}
    assert at == {1: 0.0, 2: pytest.approx(0.25, rel=1e-3), 3: 1.0}
    figure.draw_without_rendering()
    words = [label.get_text() for label in axes.child_axes[0].get_yticklabels()]
    assert len(words) == 3 and re.match(r"slower: \+2\d", words[1])
    assert "The axis ends at +100 %." in note(figure)
