"""Older records as today's: each step from schema version n to n + 1 is a function on plain JSON.

It may look at every rank's own steps beside the record, for they hold what it leaves out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.core.files import read_regular
from bench.core.record import SCHEMA_VERSION
from bench.core.spec import AdaptiveMeasure
from bench.core.step_times import compute_step_s, list_block_lengths

Plain = dict[str, Any]


def migrate(plain: Plain, series: Path) -> Plain:
    """Return a record of an older version as one of today's. `series` is the file of every rank's own steps, which may
    not be there. AttributeError, KeyError, TypeError or ValueError for a record that its own version
    does not allow."""
    for version in range(plain["schema_version"], SCHEMA_VERSION):
        plain = MIGRATIONS[version](plain, series) | {"schema_version": version + 1}
    return plain


def _migrate_from_1(plain: Plain, series: Path) -> Plain:
    """Correct the step times, which were the greatest of the ranks' own, and drop `before_collectives_s`.

    That was the time before a step's first collective, written before there was one outside of all collectives. It
    says the same of a slow rank, but for stage 3, where weights are gathered before anything is computed.
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
    """Return the steps with the differences of the slowest rank's completions. Where the ranks' own series is gone the
    times stay as they were: a little long, the more the more ranks there are; `window_s` was always right."""
    steps = steps | {"slowest_rank_s": steps["step_s"]}
    if spec.get("nodes", 1) * spec.get("devices_per_node", 1) == 1:
        return steps | {"fastest_rank_s": steps["step_s"]}
    own_s = _read_own_steps(path)
    if own_s is None or len(own_s) != len(steps["step_s"]) or not 0 <= steps["cut"] <= len(own_s):
        return steps
    blocks = list_block_lengths(len(own_s), steps["cut"], AdaptiveMeasure.model_validate(spec.get("measure", {})))
    return steps | {"step_s": compute_step_s(own_s, blocks), "fastest_rank_s": own_s.min(axis=1).tolist()}


def _read_own_steps(path: Path) -> Any:
    """Return every rank's own seconds of each step, shape (steps, ranks); None where they cannot be read."""
    import pyarrow as pa  # most records are of today's version, and reading them needs none
    import pyarrow.parquet as pq

    try:
        content = pa.BufferReader(read_regular(path))
        table = pq.read_table(content, columns=["step", "rank", "step_s"])
    except (OSError, pa.ArrowException):
        return None
    if not pa.types.is_floating(table.schema.field("step_s").type):
        return None
    table = table.sort_by([("step", "ascending"), ("rank", "ascending")])
    ranks = len(table.column("rank").unique())
    seconds = table.column("step_s").to_numpy()
    return seconds.reshape(-1, ranks) if ranks and len(seconds) % ranks == 0 else None


def _migrate_from_2(plain: Plain, series: Path) -> Plain:
    """Write out the protocol, whose defaults are others today."""
    if "spec" not in plain:
        return plain
    protocol = AdaptiveMeasure().model_dump(mode="json") | plain["spec"].get("measure", {})
    return plain | {"spec": plain["spec"] | {"measure": protocol}}


MIGRATIONS: dict[int, Callable[[Plain, Path], Plain]] = {1: _migrate_from_1, 2: _migrate_from_2}
