"""Studies: one question each, as axes that span an ordered list of points, or as a search over them."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, get_args

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from bench.core.errors import UserError, suggest_nearest
from bench.core.quantities import OBJECTIVES, QUANTITIES
from bench.core.spec import Frozen, Name, Positive

SamplerName = Literal["gp", "tpe", "grid", "random", "cma_es", "nsga2", "qmc"]
SAMPLERS: tuple[str, ...] = get_args(SamplerName)
MOST_LISTED = 5_000
"""Values of a space, or of one range, that are all considered. A larger one is drawn from."""


class Dimension(Frozen):
    """One field of a point that varies: over `values`, or from `from` to `to`; whole numbers where both are."""

    values: tuple[Any, ...] | None = Field(
        None, description="a value that is a mapping stands for several fields that go together"
    )
    from_: float | None = Field(None, alias="from")
    to: float | None = None
    step: float | None = Field(None, gt=0)
    log: bool = Field(False, description="equal ratios are equally likely, and a grid begins with each value's double")
    when: dict[str, tuple[Any, ...]] = Field(
        {}, description="set only where fields that stand before it have one of these values"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, plain: Any) -> Any:
        return {"values": plain} if isinstance(plain, list | tuple) else plain

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.values is None) == (self.from_ is None and self.to is None):
            raise ValueError("neither values nor a range; write a list, or {from: 1, to: 8}")
        if self.values is not None:
            if not self.values:
                raise ValueError("has no values; give one, or leave it out")
            if self.log or self.step is not None:
                raise ValueError("log and step belong to a range; write {from: 1, to: 8}, or leave them out")
        elif self.from_ is None or self.to is None or self.from_ > self.to:
            raise ValueError(f"from {self.from_} to {self.to} holds nothing; give from and to, the smaller first")
        elif self.log and (self.from_ <= 0 or self.step is not None):
            raise ValueError("a range by ratios begins above 0 and has no step; leave out log or step")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "array"}, handler(core)]}

    @property
    def whole(self) -> bool:
        """Whether a range is of whole numbers."""
        return all(number is None or number.is_integer() for number in (self.from_, self.to, self.step))

    @property
    def count(self) -> int | None:
        """Number of values; None for a range of fractions without a step."""
        if self.values is not None:
            return len(self.values)
        assert self.from_ is not None and self.to is not None
        if self.whole:
            return int(self.to - self.from_) // int(self.step or 1) + 1
        if self.step is None:
            return 1 if self.from_ == self.to else None
        return int((self.to - self.from_) / self.step + 1e-9) + 1

    def find_value(self, index: int) -> Any:
        """Return the value with this number, counted from 0 in their order."""
        if self.values is not None:
            return self.values[index]
        assert self.from_ is not None
        value = self.from_ + index * (self.step or 1)
        return int(value) if self.whole else value

    def list_values(self) -> tuple[Any, ...] | None:
        """Return all values; None where there are more than MOST_LISTED. A range by ratios begins with its powers of
        two times its first value, so that a grid that ends early has seen all of the range."""
        if self.count is None or self.count > MOST_LISTED:
            return None
        listed = tuple(map(self.find_value, range(self.count)))
        if not (self.log and self.whole):
            return listed
        doubled = (listed[0] << exponent for exponent in range(listed[-1].bit_length()))
        return tuple(dict.fromkeys([*(value for value in doubled if value <= listed[-1]), *listed]))

    def compute_share(self, value: Any) -> float:
        """Return how likely a value is to be drawn, relative to the other values of the dimension."""
        if not (self.log and self.whole):
            return 1.0
        return math.log((value + 0.5) / (value - 0.5))


class Bound(Frozen):
    """What a measured quantity must keep to."""

    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _holds_something(self) -> Self:
        if self.at_least is None and self.at_most is None:
            raise ValueError("bounds nothing; give at_least or at_most")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(
                f"nothing is at least {self.at_least:g} and at most {self.at_most:g}; exchange them, or leave one out"
            )
        return self

    def holds(self, value: float | None) -> bool:
        """Whether a value keeps to it; one that nobody knows does not."""
        if value is None or (self.at_least is not None and value < self.at_least):
            return False
        return self.at_most is None or value <= self.at_most

    def compute_distance(self, value: float) -> float:
        """Return how far a value is beyond it; not above 0 where it keeps to it."""
        below = -math.inf if self.at_least is None else self.at_least - value
        above = -math.inf if self.at_most is None else value - self.at_most
        return max(below, above)

    def __str__(self) -> str:
        words = (("least", self.at_least), ("most", self.at_most))
        return " and ".join(f"at {word} {value:.4g}" for word, value in words if value is not None)


class RungSection(Frozen):
    """Where trainings may stop, for the best of them to go on: behind a `factor`-th of their tokens, a `factor`-th of
    those, and so on, but never behind fewer than `least`."""

    least: Positive = Field(description="tokens")
    factor: int = Field(3, ge=2, description="one of so many goes on, to so many times the tokens")
    brackets: Positive = Field(1, description="rungs at which trainings begin; with 1 all begin at the lowest")


class SearchSection(Frozen):
    """What a search looks for, where, and when it ends."""

    space: dict[str, Dimension]
    objective: str
    constraints: dict[str, Bound] = Field(
        {}, description="by measured quantity; rules over fields stand in the study's `exclude`"
    )
    sampler: SamplerName = "gp"
    trials: Positive = Field(50, description="at the most")
    node_hours: float | None = Field(None, gt=0, description="of all trials together; None: no limit")
    gain: float = Field(0.01, ge=0, description="the search ends once 20 trials in a row gain less together, relative")
    parallel: Positive = Field(4, description="trials that a queue has at a time")
    seed: int = Field(0, ge=0)
    rungs: RungSection | None = Field(None, description="None: every training goes to its end at once")

    @model_validator(mode="before")
    @classmethod
    def _asks_for_something(cls, plain: Any) -> Any:
        if isinstance(plain, Mapping):
            if plain.get("objective") is None:
                raise ValueError(f"a search without an objective; give one of {', '.join(OBJECTIVES)}")
            if not plain.get("space"):
                raise ValueError("its space is empty; give a field and its values, such as batch.micro: [1, 2, 4]")
        return plain

    @field_validator("objective")
    @classmethod
    def _known_objective(cls, name: str) -> str:
        if name not in OBJECTIVES:
            raise ValueError(f"nothing that can be sought; {suggest_nearest(name, OBJECTIVES)}")
        return name

    @field_validator("sampler", mode="before")
    @classmethod
    def _known_sampler(cls, name: Any) -> Any:
        if name == "prior":  # the former default, of searches that were begun with it
            return "gp"
        if name not in SAMPLERS:
            raise ValueError(f"no such sampler; {suggest_nearest(str(name), SAMPLERS)}")
        return name

    @model_validator(mode="after")
    def _rungs_of_trainings(self) -> Self:
        if self.rungs and self.objective != "validation_loss":
            raise ValueError("rungs are of trainings; seek validation_loss, or leave rungs out")
        given = {name for one in self.space.values() for value in one.values or () if isinstance(value, Mapping)
                 for name in value}  # fmt: skip
        for name in ("learning.tokens", "learning.stop_after"):
            if self.rungs and name in {*self.space, *given}:
                raise ValueError(f"rungs say how long a training is; leave {name} out of the space")
        return self

    @field_validator("constraints")
    @classmethod
    def _known_quantities(cls, constraints: dict[str, Bound]) -> dict[str, Bound]:
        for name in constraints:
            if name not in QUANTITIES:
                raise ValueError(f"{name} is not measured; {suggest_nearest(name, QUANTITIES)}")
        return constraints

    @field_validator("space")
    @classmethod
    def _conditions_on_earlier(cls, space: dict[str, Dimension]) -> dict[str, Dimension]:
        seen: set[str] = set()
        for key, dimension in space.items():
            for other in dimension.when:
                if other not in seen:
                    raise ValueError(f"{key} depends on {other}, which does not stand before it; give that first")
            seen.add(key)
            seen.update(name for value in dimension.values or () if isinstance(value, Mapping) for name in value)
        return space


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
