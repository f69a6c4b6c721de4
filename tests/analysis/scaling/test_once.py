"""Tests of cached results, such as scaling curves. Several tables and figures need the same results. A cached result
is computed only once per set of runs, and is freed together with the set."""

import gc
import weakref

from clusters import asked, measured
from records import results

from analysis.scaling.best import best
from analysis.scaling.curves import build_curves


def test_curves_are_computed_once_per_set_of_runs() -> None:
    one, other = (results(*measured(asked(1), 1.0), *measured(asked(2), seconds)) for seconds in (1.1, 1.2))
    assert build_curves(one) is build_curves(one)
    assert build_curves(one) != build_curves(other)


def test_cached_results_are_freed_with_their_set() -> None:
    found = results(*measured(asked(1), 1.0))
    best(found)
    alive = weakref.ref(found)
    del found
    gc.collect()
    assert alive() is None
