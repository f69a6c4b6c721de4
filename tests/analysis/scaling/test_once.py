"""Results that several tables and figures share are computed once per set of runs, and freed together with the set."""

import gc
import weakref

from clusters import asked, measured
from records import results

from analysis.scaling.best import best
from analysis.scaling.curves import build_curves


def test_it_is_worked_out_once_for_each_set() -> None:
    one, other = (results(*measured(asked(1), 1.0), *measured(asked(2), seconds)) for seconds in (1.1, 1.2))
    assert build_curves(one) is build_curves(one)
    assert build_curves(one) != build_curves(other)


def test_it_keeps_no_results_alive() -> None:
    found = results(*measured(asked(1), 1.0))
    best(found)
    alive = weakref.ref(found)
    del found
    gc.collect()
    assert alive() is None
