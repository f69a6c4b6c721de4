"""What is worked out once for a set of results, although several figures and tables ask for it."""

import functools
import weakref
from collections.abc import Callable
from typing import TypeVar

from analysis.results import Results

Result = TypeVar("Result")


def read_once(work: Callable[[Results], Result]) -> Callable[[Results], Result]:
    """Keep what `work` returns for as long as its results live; it must not hold them. They are told apart by what they
    are and not by what they contain."""
    known: dict[int, Result] = {}

    @functools.wraps(work)
    def read_or_compute(results: Results) -> Result:
        name = id(results)
        if name not in known:
            known[name] = work(results)
            weakref.finalize(results, known.pop, name, None)
        return known[name]

    return read_or_compute
