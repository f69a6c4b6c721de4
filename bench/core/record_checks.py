"""Migrations of records from older schema versions, and rules that every record must satisfy.

Each migration converts plain JSON from schema version n to n + 1. It may read each rank's own step times from the file
`steps.parquet` next to the record.

The types in `RunRecord` check most rules. This module adds rules between fields, and limits of measured numbers. Sums,
products and squares of numbers within these limits are finite. Code that reads a checked record therefore needs no
checks of its own.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core.files import read_regular
from bench.core.record import SCHEMA_VERSION, Observations, RunRecord, Steps
from bench.core.spec import AdaptiveMeasure
from bench.core.steps import compute_step_s, list_block_lengths

Plain = dict[str, Any]

# ---------------------------------------- migrations


def migrate(plain: Plain, series: Path) -> Plain:
    """Convert a record of an older schema version to the current version.

    `series` is the path of the file with each rank's own step times, which may be missing (only the migration from
    version 1 reads it). Raise AttributeError, KeyError, TypeError or ValueError for a record that is invalid in its own
    version.
    """
    for version in range(plain["schema_version"], SCHEMA_VERSION):
        plain = MIGRATIONS[version](plain, series) | {"schema_version": version + 1}
    return plain


def _migrate_from_1(plain: Plain, series: Path) -> Plain:
    """Convert a record of schema version 1: correct its step times, and replace its field `before_collectives_s`.

    In version 1, a step time was the maximum of the ranks' own times. The step times are computed again from the own
    times of all ranks in the file `series`.

    `before_collectives_s` was the time of a step before its first collective. Its values are moved to the field
    `outside_collectives_s`, because both times show which rank is slow. For ZeRO stage 3 the values are dropped: this
    stage gathers weights before any computation, so the time before the first collective shows nothing.
    """
    observed = plain.get("observations")
    if observed is None:
        return plain
    observed = dict(observed)
    before = observed.pop("before_collectives_s", [])
    if not observed.get("outside_collectives_s") and plain["spec"]["engine"]["options"].get("stage") != 3:
        observed["outside_collectives_s"] = before
    if observed.get("steps"):
        observed["steps"] = _correct_steps(observed["steps"], plain["spec"], series)
    return plain | {"observations": observed}


def _correct_steps(steps: Plain, spec: Plain, path: Path) -> Plain:
    """Return the steps with corrected times: differences between the slowest rank's completions of successive steps.

    If `path`, the file with the ranks' own times, is lost, the step times are not changed. The step times are then
    slightly too long, and the error grows with the number of ranks. `window_s` needs no correction.
    """
    steps = steps | {"slowest_rank_s": steps["step_s"]}
    if spec.get("nodes", 1) * spec.get("devices_per_node", 1) == 1:
        return steps | {"fastest_rank_s": steps["step_s"]}
    own_s = _read_own_steps(path)
    if own_s is None or len(own_s) != len(steps["step_s"]) or not 0 <= steps["cut"] <= len(own_s):
        return steps
    blocks = list_block_lengths(len(own_s), steps["cut"], AdaptiveMeasure.model_validate(spec.get("measure", {})))
    return steps | {"step_s": compute_step_s(own_s, blocks), "fastest_rank_s": own_s.min(axis=1).tolist()}


def _read_own_steps(path: Path) -> Any:
    """Return each rank's own time for each step in seconds, shape (steps, ranks); None if the file is unreadable."""
    import pyarrow as pa  # imported here: it is slow, and records of the current version do not need it
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(read_regular(path)), columns=["step", "rank", "step_s"])
    except (OSError, pa.ArrowException):
        return None
    if not pa.types.is_floating(table.schema.field("step_s").type):
        return None
    table = table.sort_by([("step", "ascending"), ("rank", "ascending")])
    ranks = len(table.column("rank").unique())
    seconds = table.column("step_s").to_numpy()
    return seconds.reshape(-1, ranks) if ranks and len(seconds) % ranks == 0 else None


def _migrate_from_2(plain: Plain, series: Path) -> Plain:
    """Convert a record of schema version 2: write all values of its measurement protocol into its spec. Values that the
    spec lacks are set to the defaults of version 2, because later versions have other defaults. `series` is not used.
    """
    if "spec" not in plain:
        return plain
    protocol = AdaptiveMeasure().model_dump(mode="json") | plain["spec"].get("measure", {})
    return plain | {"spec": plain["spec"] | {"measure": protocol}}


MIGRATIONS: dict[int, Callable[[Plain, Path], Plain]] = {1: _migrate_from_1, 2: _migrate_from_2}

# ---------------------------------------- rules

_LEAST_S, _MOST_S = 1e-9, 1e9  # bounds of a step time in seconds
_MOST = 2**53  # limit of counts and tokens: integers up to this are exact as floats
_MOST_SIZE = 2**31  # limit of one size of a model

_Rules = Iterable[tuple[bool, str]]
"""Rules as pairs: True if the rule is broken, and the message for that case, which begins with the name of the
field."""


def find_broken_rule(record: RunRecord) -> str | None:
    """Return the message of the first rule that a record breaks; None if it breaks no rule."""
    for rules in (_list_size_rules, _list_outcome_rules, _list_observation_rules, _list_plain_rules):
        if message := next((message for broken, message in rules(record) if broken), None):
            return message
    return None


def _list_size_rules(record: RunRecord) -> _Rules:
    spec, observed = record.spec, record.observations
    version = record.schema_version
    yield version != SCHEMA_VERSION, f"schema_version: the record contains {version} and a second value"
    samples = spec.global_batch * max(spec.sequence.values(), default=0)
    yield samples > _MOST, f"spec: more than {_MOST} samples or tokens per step"
    parameters = max(spec.model.parameters or 0, observed.parameters if observed else 0)
    yield parameters > _MOST, f"parameters: more than {_MOST}"
    tokens = [one.step * spec.tokens_per_step for one in (observed.evaluations if observed else None) or ()]
    yield _is_outside(tokens, 0, _MOST), f"observations.evaluations: a step after more than {_MOST} tokens"
    sizes = [size for size in spec.model.shape.values() if isinstance(size, int | float)]
    yield any(abs(size) > _MOST_SIZE for size in sizes), f"spec.model.shape: a size above {_MOST_SIZE}"


def _list_outcome_rules(record: RunRecord) -> _Rules:
    """Yield rules for the observations of a run with the outcome `ok`. A measured run must have a measurement window. A
    rehearsal (one rank run alone) must have measured compute times. Exception: a rehearsal with `shapes_only` must have
    measured memory instead."""
    if record.outcome.kind != "ok":
        return
    observed = record.observations
    if observed is None:
        yield True, "observations: missing, but the outcome is ok"
    elif record.evidence == "rehearsed" and record.circumstance.shapes_only:
        yield not observed.memory, "observations.memory: missing, but the rehearsal has the outcome ok"
    elif record.evidence == "rehearsed":
        lacks_times = not (observed.compute_s or observed.steps)
        yield lacks_times, "observations.compute_s: missing, but the rehearsal has the outcome ok"
    else:
        steps = observed.steps
        lacks_window = steps is None or steps.cut >= len(steps.step_s) or steps.window_s <= 0
        yield lacks_window, "observations.steps: no measurement window, but the outcome is ok"


def _list_observation_rules(record: RunRecord) -> _Rules:
    observed = record.observations
    if observed is None:
        return
    if observed.steps:
        yield from ((broken, f"observations.steps.{message}") for broken, message in _list_step_rules(observed.steps))
    tokens = tuple(observed.tokens.root.values()) if observed.tokens else ()
    yield _is_outside(tokens, 0, _MOST), "observations.tokens: a count out of range"
    for seconds, field in _list_seconds(observed):
        yield _is_outside(seconds, 0, _MOST_S), f"observations{field}: a time out of range"
    energies = [energy for energy in observed.energy_j if energy is not None]
    yield _is_outside(energies, -_MOST, _MOST), "observations.energy_j: an energy out of range"


def _list_seconds(observed: Observations) -> Iterable[tuple[Sequence[float], str]]:
    yield (*observed.compute_s, *observed.outside_collectives_s), ": compute_s or outside_collectives_s"
    yield [idle for idle in observed.idle_s or () if idle is not None], ".idle_s"
    yield [s for rank in observed.passes or () for one in rank for s in (one.begin_s, one.end_s)], ".passes"


def _list_step_rules(steps: Steps) -> _Rules:
    count = len(steps.step_s)
    yield _is_outside(steps.step_s, _LEAST_S, _MOST_S), "step_s: a time out of range"
    waits = steps.data_wait_s
    yield (
        _is_outside(waits, 0, _MOST_S) or len(waits) != count,
        "data_wait_s: a time out of range, or not one time per step",
    )
    has_window = 0 <= steps.cut <= count and (steps.window_s == 0 or _LEAST_S <= steps.window_s <= _MOST_S)
    yield not has_window, "cut: the window does not lie within the steps"
    yield (
        len(steps.loss) != count or len(steps.gradient_norm) not in (0, count),
        "loss: not one loss and one gradient_norm per step",
    )
    yield _is_outside(steps.skipped, 0, count - 1), "skipped: an index that no step has"


def _list_plain_rules(record: RunRecord) -> _Rules:
    """Yield rules for fields whose types permit any JSON value, such as engine options. Numbers in these fields must be
    finite, because other code computes with the numbers. The commit of the code must be text."""
    spec, environment = record.spec, record.environment
    commit = (environment.git or {}).get("commit") if environment else None
    yield not isinstance(commit, str | None), "environment.git.commit: must be text"
    for name, part in (("model.shape", spec.model.shape), ("engine", spec.engine.options), ("data", spec.data.options)):
        yield not _is_finite(part), f"spec.{name}: contains a number that is not finite"


def _is_outside(values: Sequence[float], low: float, high: float) -> bool:
    # `not (low <= …)` instead of `low > …`, so that NaN counts as outside.
    return bool(values) and not (low <= min(values) and max(values) <= high)


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, list | tuple) else True
