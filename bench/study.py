"""A study: one question, as axes that span an ordered list of points."""

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

from pydantic import Field, field_validator

from bench.errors import UserError
from bench.search_section import SearchSection
from bench.spec import Frozen, Name, Positive

MOST_RUNS = 100_000

Pair = tuple[str, Any]
"""One override: a group and its file's name, or a dotted key and its value."""
Overrides = Sequence[tuple[str, list[Any]]]
"""What stands beside `study=` on the command line: keys, each with its values."""


class Budget(Frozen):
    """What a study may cost before it ends by itself."""

    node_hours: float | None = Field(None, gt=0, description="of all runs together; None: no limit")
    attempts: Positive = Field(3, description="of one repeat, before a failure that may pass counts as its answer")


class Study(Frozen):
    """A file of conf/study. `base` holds what every point shares, `axes` the values of what varies; a value that is a
    mapping stands for several overrides that go together."""

    name: Name
    question: str = ""
    base: dict[str, Any] = {}
    axes: dict[str, list[Any]] = {}
    exclude: tuple[str, ...] = Field(
        (), description="rules of bench.config.exclude_rules: a point for which one of them holds is left out"
    )
    first: tuple[str, ...] = Field(
        (), description="rules of the same kind: points for which the first holds run first, and so on"
    )
    control: dict[str, Any] = Field(
        {}, description="the control point, on top of `base`, nodes left to its caller; empty: there is none"
    )
    repeats: Positive = 1
    seed: int = Field(0, ge=0, description="of the order")
    budget: Budget = Budget()
    search: SearchSection | None = Field(None, description="of `zeroscale search`; None: the axes are all there is")

    @field_validator("axes")
    @classmethod
    def _words(cls, axes: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in axes.items():
            if not values:
                raise ValueError(f"{key} has no values; give one, or leave it out")
            if any(isinstance(value, dict) and not all(isinstance(name, str) for name in value) for value in values):
                raise ValueError(f"a key of {key} is no word; write overrides: {{engine: zero1, seed: 1}}")
        return axes


def expand_study(study: Study, overrides: Overrides) -> list[tuple[Pair, ...]]:
    """Return every point of a study as overrides, in the order of its axes, the last varying fastest.

    `overrides` win over the study: a list becomes an axis, and a single value pins one. UserError for more than can be
    planned.
    """
    axes = {key: list(values) for key, values in study.axes.items()}
    for key, values in overrides:
        axes[key] = [{key: value} for value in values]  # a mapping is then the key's own value, as of a single run
    _check_number(study, axes)
    base = [(key, value) for key, value in study.base.items() if key not in axes]
    choices = [[_list_pairs(key, value) for value in values] for key, values in axes.items()]
    return [(*base, *itertools.chain(*combination)) for combination in itertools.product(*choices)]


def _check_number(study: Study, axes: dict[str, list[Any]]) -> None:
    number = math.prod(map(len, axes.values())) * study.repeats
    if number > MOST_RUNS:
        rule = f"its axes and repeats make {number:,} runs, and at most {MOST_RUNS:,} are planned"
        raise UserError(f"study={study.name}", rule, "give fewer values or repeats")


def _list_pairs(key: str, value: Any) -> tuple[Pair, ...]:
    return tuple(value.items()) if isinstance(value, dict) else ((key, value),)


def list_control_pairs(study: Study, overrides: Overrides) -> tuple[Pair, ...] | None:
    """Return the control point as overrides: whoever runs a sequence of points puts it first and last, so that a drift
    of the machine shows. Overrides of one value win over the base, as for every point, but not over what makes it
    the control point; None if there is none.
    """
    if not study.control:
        return None
    pinned = {key: values[0] for key, values in overrides if len(values) == 1}
    return tuple((study.base | pinned | study.control).items())


def order_runs(turns: Sequence[int], study: Study) -> list[tuple[int, int]]:
    """Return (repeat, point) in the order to run: repeats interleaved, each in a seeded-random order of its own, so
    that a drift of the machine is not taken for an effect of an axis. `turns` has a number for every point, and those
    of a lower one run before others: what a sweep that is cut short must not lack."""
    generator, points = random.Random(study.seed), len(turns)
    repeats = [sorted(generator.sample(range(points), points), key=turns.__getitem__) for _ in range(study.repeats)]
    return [(repeat, point) for repeat, ordered in enumerate(repeats) for point in ordered]
