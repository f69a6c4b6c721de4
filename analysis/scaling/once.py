"""What is worked out once for a set of results, although several figures and tables ask for it."""

import functools
import weakref
from collections.abc import Callable
from typing import TypeVar

from analysis.results import Results

Told = TypeVar("Told")


def once(work: Callable[[Results], Told]) -> Callable[[Results], Told]:
    """Keep what `work` returns for as long as its results live; it must not hold them. They are told apart by what they
    are and not by what they contain."""
    known: dict[int, Told] = {}

    @functools.wraps(work)
    def told(results: Results) -> Told:
        name = id(results)
        if name not in known:
            known[name] = work(results)
            weakref.finalize(results, known.pop, name, None)
        return known[name]

    return told
