import numpy as np
import pytest
from simulated import ar1

from analysis.stats.steady import steady_cut


def test_a_warm_up_is_cut_and_nothing_else() -> None:
    assert steady_cut([0.5] * 20 + [0.1] * 80) == 20
    assert steady_cut([0.5] * 17 + [0.1] * 83) == 15, "batches of five, told by their medians"
    assert steady_cut([0.1] * 100) == 0


def test_a_slow_step_is_no_warm_up() -> None:
    assert steady_cut([0.1] * 11 + [3.0] + [0.1] * 88) == 0


def test_what_never_settles_has_no_steady_half() -> None:
    assert steady_cut(np.linspace(0.2, 0.1, 100)) is None


def test_steady_noise_is_rarely_called_unsteady() -> None:
    cuts = [steady_cut(steps) for steps in 1 + 0.05 * ar1(0.5)(np.random.default_rng(2), 500, 100)]
    assert sum(cut is None for cut in cuts) < 25
    assert np.median([cut for cut in cuts if cut is not None]) == 0


@pytest.mark.parametrize("n", [0, 1, 49])
def test_too_short_to_tell(n: int) -> None:
    assert steady_cut([0.1] * n) is None


def test_an_exponential_warm_up_is_cut_where_the_noise_hides_it() -> None:
    # 0.5 exp(-t / 10) falls below the noise of 0.01 at t = 39
    noise = 0.01 * ar1(0.3)(np.random.default_rng(1), 50, 200)
    cuts = [steady_cut(steps) for steps in 0.1 + 0.5 * np.exp(-np.arange(200) / 10) + noise]
    known = [cut for cut in cuts if cut is not None]
    assert len(known) >= 45
    assert min(known) >= 30
    assert np.median(known) == pytest.approx(39, abs=5)
