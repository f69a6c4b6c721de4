"""Figure of losses on held-out data, compared with values computed by hand."""

import numpy as np
import pytest
from drawn import draw, legend, shows
from records import results, run, spec

from analysis.figures import loss_curves
from bench.core.record import Evaluation, RunRecord


def trained(last: float, lr: float, seed: int = 0) -> RunRecord:
    """Return a training of 5 steps, each with 40 tokens and 2 s. Its last evaluation has the loss `last`, and `lr` is
    its learning rate."""
    of = spec(learning={"tokens": 200}, optimizer={"lr": lr}, seed=seed)
    assert of.tokens_per_step == 40
    evaluations = [
        Evaluation(step=step, loss=loss, target_tokens=50, seconds=0.1, trained_s=2.0 * step)
        for step, loss in ((0, 6.0), (5, last))
    ]
    return run(of, evaluations=tuple(evaluations))


def test_figure_is_omitted_without_trainings() -> None:
    assert not shows(loss_curves, results(run()))
    assert shows(loss_curves, results(run(), trained(4.0, 0.1)))


def test_each_training_has_curves_over_tokens_and_over_time_best_first() -> None:
    drawn = draw(loss_curves, results(trained(4.5, 0.1), trained(4.0, 0.2), run()))
    left, right = drawn.axes
    assert [np.asarray(line.get_ydata()).tolist() for line in left.lines] == [[6.0, 4.0], [6.0, 4.5]]
    assert np.asarray(left.lines[0].get_xdata()).tolist() == pytest.approx([0.0, 200e-6])
    assert np.asarray(right.lines[0].get_xdata()).tolist() == [0.0, 10.0]
    assert legend(drawn) == ["zero1 · lr=0.2", "zero1 · lr=0.1"]


def test_seeds_of_one_configuration_share_colour_and_legend_entry() -> None:
    drawn = draw(loss_curves, results(trained(4.5, 0.1), trained(4.4, 0.1, seed=1), trained(4.0, 0.2)))
    best, *seeds = drawn.axes[0].lines
    assert len({line.get_color() for line in seeds}) == 1
    assert best.get_color() != seeds[0].get_color()
    assert len(legend(drawn)) == 2
