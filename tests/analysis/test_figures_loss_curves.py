"""Figure of losses on held-out data, compared with values computed by hand."""

import numpy as np
import pytest
from drawn import draw, legend, shows
from records import failed, results, run, trained

from analysis.figures import loss_curves
from bench.core.record import NodeLoad


def test_figure_is_omitted_without_trainings() -> None:
    assert not shows(loss_curves, results(run()))
    assert shows(loss_curves, results(run(), trained(4.0, 0.1)))


def test_each_training_has_curves_over_tokens_and_over_time_best_first() -> None:
    drawn = draw(loss_curves, results(trained(4.5, 0.1), trained(4.0, 0.2), run()))
    left, right = drawn.axes
    assert [np.asarray(line.get_ydata()).tolist() for line in left.lines] == [[6.0, 4.0], [6.0, 4.5]]
    assert np.asarray(left.lines[0].get_xdata()).tolist() == pytest.approx([0.0, 200e-6])
    assert np.asarray(right.lines[0].get_xdata()).tolist() == [0.0, 10.0]
    assert legend(drawn) == ["zero1 (lr=0.2)", "zero1 (lr=0.1)"]


def test_seeds_of_one_configuration_share_colour_and_legend_entry() -> None:
    drawn = draw(loss_curves, results(trained(4.5, 0.1), trained(4.4, 0.1, seed=1), trained(4.0, 0.2)))
    best, *seeds = drawn.axes[0].lines
    assert len({line.get_color() for line in seeds}) == 1
    assert best.get_color() != seeds[0].get_color()
    assert len(legend(drawn)) == 2


def test_all_runs_of_the_best_configurations_are_drawn_and_the_note_counts_the_others() -> None:
    """There are 13 learning rates with two seeds each. The configuration with the highest mean loss, 17.5, is not
    drawn, although one of its seeds has the lowest loss of all. Two more trainings have no loss at their end, and are
    not drawn either."""
    records = [trained(3.0 + rate, rate, seed=seed) for rate in range(1, 13) for seed in range(2)]
    records += [trained(1.0, 13.0), trained(34.0, 13.0, seed=1)]
    diverged = [failed("invalid", trained(9.0, 20.0).spec), failed("oom", trained(9.0, 21.0).spec)]
    shown = loss_curves.picture(results(*records, *diverged))
    drawn = draw(loss_curves, results(*records, *diverged))
    assert [len(axes.lines) for axes in drawn.axes] == [24, 24]
    assert [key.label for key in shown.keys] == [f"zero1 (lr={rate}.0)" for rate in range(1, 13)]
    assert "1 of 13 configurations are omitted: those with the highest final loss." in shown.note
    assert shown.note.endswith("Omitted, because they have no final loss: 1 invalid, 1 oom.")


def test_runs_on_a_busy_machine_are_not_drawn_against_time() -> None:
    load = NodeLoad(node=0, others_share=0.3)
    some = results(trained(4.5, 0.1), trained(4.0, 0.2, load=(load,)))
    assert [len(axes.lines) for axes in draw(loss_curves, some).axes] == [2, 1]
    assert "Not drawn against time: 1 of 2 runs; their times are excluded" in loss_curves.picture(some).note
    (tokens,) = draw(loss_curves, results(trained(4.0, 0.2, load=(load,)))).axes
    assert tokens.get_title(loc="left") == "against tokens"
