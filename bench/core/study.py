"""Studies. A study answers one question. Its points (configurations) are all combinations of the values on its axes, or
are chosen by a search."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, get_args

from pydantic import Field, GetJsonSchemaHandler, ValidationError, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from bench.core import field_errors
from bench.core.errors import UserError, suggest_nearest
from bench.core.formatting import format_number
from bench.core.quantities import OBJECTIVES, QUANTITIES
from bench.core.spec import Frozen, Name, Positive

SamplerName = Literal["gp", "tpe", "grid", "random", "cma_es", "nsga2", "qmc"]
SAMPLERS: tuple[str, ...] = get_args(SamplerName)
MOST_LISTED = 5_000
"""Maximum number of values of a search space, or of a range, that are listed in full. Of a larger space or range, only
a sample is listed."""


class Dimension(Frozen):
    """A dimension of a search space: a field that varies over `values`, or over the range from `from` to `to`. The
    range contains only integers if both ends (and `step`, if given) are integers."""

    values: tuple[Any, ...] | None = Field(
        None, description="values to try; a value that is a mapping sets several fields together"
    )
    from_: float | None = Field(None, alias="from", description="lowest value of a range")
    to: float | None = Field(None, description="highest value of a range")
    step: float | None = Field(None, gt=0, description="distance between values of a range")
    log: bool = Field(
        False,
        description="True: values are sampled uniformly in their logarithm. A grid search tries `from`, 2 × `from`, "
        "4 × `from` and so on first",
    )
    when: dict[str, tuple[Any, ...]] = Field(
        {},
        description="conditions by earlier field of the space: this field is set only if the earlier field has one of "
        "the listed values",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, plain: Any) -> Any:
        return {"values": plain} if isinstance(plain, list | tuple) else plain

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.values is None) == (self.from_ is None and self.to is None):
            raise ValueError("needs either values or a range; write a list, or {from: 1, to: 8}")
        if self.values is not None:
            if not self.values:
                raise ValueError("has no values; add a value, or remove the field")
            if self.log or self.step is not None:
                raise ValueError("log and step need a range; write {from: 1, to: 8}, or remove log and step")
        elif self.from_ is None or self.to is None or self.from_ > self.to:
            rule = f"the range from {self.from_} to {self.to} is empty"
            raise ValueError(f"{rule}; set from and to, with from the smaller")
        elif self.log and (self.from_ <= 0 or self.step is not None):
            raise ValueError("a range with log must begin above 0 and have no step; remove log or step")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "array"}, handler(core)]}

    @property
    def whole(self) -> bool:
        """True if the range contains only integers."""
        return all(number is None or number.is_integer() for number in (self.from_, self.to, self.step))

    @property
    def count(self) -> int | None:
        """Number of values; None for a continuous range."""
        if self.values is not None:
            return len(self.values)
        assert self.from_ is not None and self.to is not None
        if self.whole:
            return int(self.to - self.from_) // int(self.step or 1) + 1
        if self.step is None:
            return 1 if self.from_ == self.to else None
        # The addition of 1e-9 is needed because 0.3 / 0.1 is slightly below 3 in floating point.
        return int((self.to - self.from_) / self.step + 1e-9) + 1

    def list_fields(self) -> list[str]:
        """Return the field names (keys) of all values that are mappings. Return an empty list if no value is a
        mapping."""
        return [name for value in self.values or () if isinstance(value, Mapping) for name in value]

    def find_value(self, index: int) -> Any:
        """Return the value at `index`, counted from 0."""
        if self.values is not None:
            return self.values[index]
        assert self.from_ is not None
        value = self.from_ + index * (self.step or 1)
        return int(value) if self.whole else value

    def list_values(self) -> tuple[Any, ...] | None:
        """Return all values; None for a continuous range, or for more than MOST_LISTED values. An integer range with
        `log` has a special order: first `from`, 2 × `from`, 4 × `from` and so on, then all other values. A grid search
        in this order has tried values from the whole range even if it ends early."""
        if self.count is None or self.count > MOST_LISTED:
            return None
        listed = tuple(map(self.find_value, range(self.count)))
        if not (self.log and self.whole):
            return listed
        # List the doublings first, then the remaining values in order.
        doubled = (listed[0] << exponent for exponent in range(listed[-1].bit_length()))
        return tuple(dict.fromkeys([*(value for value in doubled if value <= listed[-1]), *listed]))

    def compute_share(self, value: Any) -> float:
        """Return the sampling weight of a value, relative to the other values. Weights are equal, except for an integer
        range with `log`. There, the weight is log((value + 0.5) / (value - 0.5)), so that the logarithm is sampled
        uniformly."""
        return math.log((value + 0.5) / (value - 0.5)) if self.log and self.whole else 1.0


class Bound(Frozen):
    """A lower bound, an upper bound or both for a measured quantity."""

    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _holds_something(self) -> Self:
        if self.at_least is None and self.at_most is None:
            raise ValueError("has no bound; set at_least or at_most")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            rule = f"at_least={self.at_least:g} is above at_most={self.at_most:g}"
            raise ValueError(f"{rule}; exchange them, or remove one")
        return self

    def holds(self, value: float | None) -> bool:
        """Return True if a value is within the bounds. Return False for an unknown value (None)."""
        return value is not None and self.compute_distance(value) <= 0

    def compute_distance(self, value: float) -> float:
        """Return the difference between a value and the bound that it violates, in the unit of the value. Return 0 or a
        negative number for a value within the bounds."""
        below = -math.inf if self.at_least is None else self.at_least - value
        above = -math.inf if self.at_most is None else value - self.at_most
        return max(below, above)

    def __str__(self) -> str:
        words = (("least", self.at_least), ("most", self.at_most))
        return " and ".join(f"at {word} {format_number(value, 4)}" for word, value in words if value is not None)


class RungSection(Frozen):
    """Rungs of successive halving: numbers of tokens at which all trainings stop, and from which only the best
    trainings continue.

    The rungs are the tokens of a whole training divided by powers of `factor`, down to `least`.
    """

    least: Positive = Field(description="number of tokens of the lowest rung")
    factor: int = Field(
        3, ge=2, description="at each rung, 1 of `factor` trainings continues, up to `factor` times the tokens"
    )
    brackets: Positive = Field(
        1,
        description="number of brackets (Hyperband). Trainings of bracket 1 first stop at the lowest rung, those of "
        "bracket 2 at the second rung, and so on",
    )


class SearchSection(Frozen):
    """The search of a study: its space of configurations, objective, constraints, sampler, and rules for its end."""

    space: dict[str, Dimension] = Field(description="fields that vary, each with its values or range")
    objective: str = Field(description="quantity to optimise, such as samples_per_s or peak_bytes")
    constraints: dict[str, Bound] = Field(
        {}, description="bounds of measured quantities by name, with at_least, at_most or both"
    )
    sampler: SamplerName = Field("gp", description="Optuna sampler that proposes the next trials")
    trials: Positive = Field(50, description="maximum number of trials, which are tried configurations")
    node_hours: float | None = Field(
        None, gt=0, description="maximum node-hours of all trials together; None: no limit"
    )
    gain: float = Field(
        0.01,
        ge=0,
        description="the search ends when 20 trials in a row improve the best result by less than this share",
    )
    parallel: Positive = Field(4, description="maximum number of trials that wait or run at a time")
    seed: int = Field(0, ge=0, description="random seed of the sampler")
    rungs: RungSection | None = Field(
        None, description="successive halving of trainings; None: every training runs to its end"
    )

    @model_validator(mode="before")
    @classmethod
    def _asks_for_something(cls, plain: Any) -> Any:
        if isinstance(plain, Mapping):
            if plain.keys() - {field.alias or name for name, field in cls.model_fields.items()}:
                return plain  # an unknown key is refused next; it may be a misspelling of a required key
            if plain.get("objective") is None:
                raise ValueError(f"the search has no objective; set objective to one of {', '.join(OBJECTIVES)}")
            if not plain.get("space"):
                remedy = "add a field with its values, such as batch.micro: [1, 2, 4]"
                raise ValueError(f"the search has an empty space; {remedy}")
        return plain

    @field_validator("objective")
    @classmethod
    def _known_objective(cls, name: str) -> str:
        if name not in OBJECTIVES:
            raise ValueError(f"is not an objective; {suggest_nearest(name, OBJECTIVES)}")
        return name

    @field_validator("sampler", mode="before")
    @classmethod
    def _known_sampler(cls, name: Any) -> Any:
        if name == "prior":  # a former default, which files of older searches contain
            return "gp"
        if name not in SAMPLERS:
            raise ValueError(f"no such sampler; {suggest_nearest(str(name), SAMPLERS)}")
        return name

    @model_validator(mode="after")
    def _rungs_of_trainings(self) -> Self:
        if self.rungs and self.objective != "validation_loss":
            raise ValueError("rungs need a training; set objective: validation_loss, or remove rungs")
        given = {*self.space, *(name for one in self.space.values() for name in one.list_fields())}
        for name in ("learning.tokens", "learning.stop_after"):
            if self.rungs and name in given:
                raise ValueError(f"rungs set the length of a training; remove {name} from the space")
        return self

    @field_validator("constraints")
    @classmethod
    def _known_quantities(cls, constraints: dict[str, Bound]) -> dict[str, Bound]:
        for name in constraints:
            if name not in QUANTITIES:
                raise ValueError(f"{name} is not a measured quantity; {suggest_nearest(name, QUANTITIES)}")
        return constraints

    @field_validator("space")
    @classmethod
    def _conditions_on_earlier(cls, space: dict[str, Dimension]) -> dict[str, Dimension]:
        seen: set[str] = set()
        for key, dimension in space.items():
            for other in dimension.when:
                if other not in seen:
                    raise ValueError(f"{key} depends on {other}, which must come before it; move {other} up")
            seen.update([key, *dimension.list_fields()])
        return space


MOST_RUNS = 100_000

Pair = tuple[str, Any]
"""An override as a pair. It is either a config group and the name of a file in it, or a dotted key and its value."""
Overrides = Sequence[tuple[str, list[Any]]]
"""Overrides on the command line besides `study=`: each key with its list of values."""


class Budget(Frozen):
    """Limits after which a study ends."""

    node_hours: float | None = Field(None, gt=0, description="maximum node-hours of all runs together; None: no limit")
    attempts: Positive = Field(
        3,
        description="maximum attempts at one repeat; only failures that may be transient are tried again",
    )


class Study(Frozen):
    """A study, as defined by a file of conf/study.

    A point is one configuration, which is measured in `repeats` runs. All points share the settings in `base`. `axes`
    maps each varying key to its values. A value that is a mapping sets several overrides at once.
    """

    name: Name = Field(description="name of the study, which is also the name of its results folder")
    question: str = Field("", description="question that the study answers, for its report")
    base: dict[str, Any] = Field({}, description="settings of all points (configurations), as KEY: VALUE")
    axes: dict[str, list[Any]] = Field(
        {},
        description="keys that vary, each with its list of values; the points are all combinations. A value that is a "
        "mapping sets several keys",
    )
    exclude: tuple[str, ...] = Field(
        (), description="conditions; points that fulfil one are not measured, such as engine == 'ddp' and nodes > 2"
    )
    first: tuple[str, ...] = Field(
        (),
        description="conditions as in `exclude`; points that fulfil the first condition are measured first, and so on",
    )
    control: dict[str, Any] = Field(
        {},
        description="overrides of `base` for the control point: a reference configuration, which is measured first and "
        "last to reveal drift of the machine; empty: no control point",
    )
    repeats: Positive = Field(1, description="runs of each point")
    seed: int = Field(0, ge=0, description="seed of the random order of runs")
    budget: Budget = Budget()
    search: SearchSection | None = Field(
        None, description="space and rules of `zeroscale search`; None: the points follow from the axes"
    )

    def __init__(self, **fields: Any) -> None:
        """Raise UserError for an unknown, missing or invalid field."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise field_errors.build_error(error, type(self), "study") from error

    # With this attribute, `model_validate` does not call `__init__`, and raises the errors of pydantic.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @field_validator("axes")
    @classmethod
    def _words(cls, axes: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in axes.items():
            if not values:
                raise ValueError(f"{key} has no values; add a value, or remove the key")
            if any(isinstance(value, dict) and not all(isinstance(name, str) for name in value) for value in values):
                raise ValueError(f"a value of {key} has a key that is not text; write {{engine: zero1, seed: 1}}")
        return axes


def expand_study(study: Study, overrides: Overrides) -> list[tuple[Pair, ...]]:
    """Return every point (configuration) of a study as overrides. The points are in the order of the axes, of which the
    last varies fastest.

    `overrides` replace keys of the study. A list of several values becomes an axis; a single value fixes the key. Raise
    UserError for more than MOST_RUNS runs.
    """
    axes = {key: list(values) for key, values in study.axes.items()}
    for key, values in overrides:
        axes[key] = [{key: value} for value in values]  # wrapped, so that a mapping remains the value of `key`
    number = math.prod(map(len, axes.values())) * study.repeats
    if number > MOST_RUNS:
        rule = f"its axes and repeats make {number:,} runs; the maximum is {MOST_RUNS:,}"
        raise UserError(f"study={study.name}", rule, "remove values or lower repeats")
    base = [(key, value) for key, value in study.base.items() if key not in axes]
    choices = [
        [tuple(value.items()) if isinstance(value, dict) else ((key, value),) for value in values]
        for key, values in axes.items()
    ]
    return [(*base, *itertools.chain(*combination)) for combination in itertools.product(*choices)]


def list_control_pairs(study: Study, overrides: Overrides) -> tuple[Pair, ...] | None:
    """Return the control point of a study as overrides; None if the study has no control point. The control point is a
    reference configuration. It is measured at the start and at the end of a sequence of points, to reveal drift of the
    machine.

    The settings of the control point are `study.base`, then `overrides`, then `study.control`; later settings replace
    earlier settings. An override with several values is an axis, so it is ignored here.
    """
    if not study.control:
        return None
    pinned = {key: values[0] for key, values in overrides if len(values) == 1}
    return tuple((study.base | pinned | study.control).items())


def order_runs(turns: Sequence[int], study: Study) -> list[tuple[int, int]]:
    """Return pairs (repeat, index of the point) in the order in which they run. Every repeat contains all points, in a
    random order of its own that follows from the study's seed.

    The order is random because otherwise a drift of the machine's speed could look like an effect of an axis. `turns`
    has a number for each point. Within a repeat, points with a lower number run earlier, so that these points are
    measured even if the sweep ends early.
    """
    generator, points = random.Random(study.seed), len(turns)
    # `sorted` is stable, so points with equal turns stay in random order.
    repeats = [sorted(generator.sample(range(points), points), key=turns.__getitem__) for _ in range(study.repeats)]
    return [(repeat, point) for repeat, ordered in enumerate(repeats) for point in ordered]
