"""Tests of migrations. A record that an older version of zeroscale wrote must be read as a record of the current
version."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.core import store
from bench.core.files import list_members, read_regular
from bench.core.record import SCHEMA_VERSION, RunRecord, Steps

RECORDED = Path(__file__).parents[1] / "data" / "runs.zip"
OLD = RECORDED / "smoke"

OWN_S = [[1.0, 1.2], [1.2, 1.0], [1.1, 1.1], [1.0, 1.4], [1.4, 1.0], [1.0, 1.0]]
"""Step times in seconds of two ranks, with shape (6 steps, 2 ranks). In each of the first two steps, another rank is
the slower one."""


@pytest.fixture
def old() -> dict[str, Any]:
    """Record of format version 1. The run has two ranks and six steps, in three blocks of two steps. The first block is
    the warm-up."""
    plains = (json.loads(read_regular(path)) for path in store.find_records([OLD]))
    plain: dict[str, Any] = next(plain for plain in plains if plain["spec"]["nodes"] == 1)
    plain["spec"] |= {"nodes": 1, "devices_per_node": 2, "batch": {"micro": 2}}
    plain["spec"]["measure"] = plain["spec"].get("measure", {}) | {"block_steps": 2}
    series = {"step_s": [max(own) for own in OWN_S], "data_wait_s": [0.0] * 6, "loss": [1.0] * 6}
    plain["observations"]["steps"] = {"cut": 2, "steady": True, "stopped": "steps", "window_s": 5.0, **series}
    return plain


def read(folder: Path, plain: dict[str, Any], own_s: list[list[float]] | None = None) -> RunRecord:
    (folder / store.RECORD).write_text(json.dumps(plain))
    if own_s is not None:
        ranks = len(own_s[0])
        columns = {
            "step": [step for step in range(len(own_s)) for _ in range(ranks)],
            "rank": list(range(ranks)) * len(own_s),
            "step_s": [seconds for own in own_s for seconds in own],
        }
        pq.write_table(pa.table(columns), folder / store.STEPS)
    return store.read_record(folder / store.RECORD)


def steps(record: RunRecord) -> Steps:
    assert record.observations and record.observations.steps
    return record.observations.steps


def test_version_1_record_reads_as_the_current_version(tmp_path: Path, old: dict[str, Any]) -> None:
    assert old["schema_version"] == 1
    record = read(tmp_path, old)
    assert record.schema_version == SCHEMA_VERSION
    assert record.observations and record.observations.trainable_parameters is None


def test_step_times_of_version_1_are_corrected_from_the_series_of_all_ranks(
    tmp_path: Path, old: dict[str, Any]
) -> None:
    """The expected step times are computed by hand. Each block starts at 0 s.

    Each pair below is one step: the times in seconds at which the two ranks complete it. A block has two steps, and so
    two pairs. First block: (1.0, 1.2), (2.2, 2.2). Second block: (1.1, 1.1), (2.1, 2.5). Third block: (1.4, 1.0), (2.4,
    2.0).
    """
    corrected = steps(read(tmp_path, old, OWN_S))
    assert corrected.step_s == pytest.approx((1.2, 1.0, 1.1, 1.4, 1.4, 1.0))
    assert corrected.slowest_rank_s == (1.2, 1.2, 1.1, 1.4, 1.4, 1.0)
    assert corrected.fastest_rank_s == (1.0, 1.0, 1.1, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("own_s", [None, OWN_S[:5]], ids=["no series", "series of another run"])
def test_step_times_stay_unchanged_without_the_series_of_the_ranks(
    tmp_path: Path, old: dict[str, Any], own_s: list[list[float]] | None
) -> None:
    kept = steps(read(tmp_path, old, own_s))
    assert kept.step_s == kept.slowest_rank_s == tuple(max(own) for own in OWN_S)
    assert kept.fastest_rank_s is None


def test_corrupt_series_leaves_the_record_readable(tmp_path: Path, old: dict[str, Any]) -> None:
    (tmp_path / store.STEPS).write_bytes(b"PAR1 and then nothing")
    assert steps(read(tmp_path, old)).fastest_rank_s is None


def test_step_times_of_a_single_rank_are_not_corrected(tmp_path: Path, old: dict[str, Any]) -> None:
    old["spec"]["devices_per_node"] = 1
    kept = steps(read(tmp_path, old))
    assert kept.step_s == kept.slowest_rank_s == kept.fastest_rank_s


SERIES = [RECORDED / name for name in list_members(RECORDED) if name.endswith(store.STEPS)]


@pytest.mark.parametrize("path", SERIES, ids=lambda path: "/".join(path.parts[-3:-1]))
def test_steps_of_recorded_windows_add_up_to_the_window(path: Path) -> None:
    found = steps(store.read_record(path.with_name(store.RECORD)))
    if found.cut and found.stopped != "invalid":
        assert sum(found.step_s[found.cut :]) == pytest.approx(found.window_s, rel=1e-9)


@pytest.mark.parametrize(("stage", "outside"), [(1, (0.01, 0.02)), (3, ())])
def test_time_outside_collectives_is_migrated_for_all_stages_but_3(
    tmp_path: Path, old: dict[str, Any], stage: int, outside: tuple[float, ...]
) -> None:
    old["spec"]["engine"] = {"name": f"zero{stage}", "backend": "deepspeed", "options": {"stage": stage}}
    old["observations"] |= {"outside_collectives_s": [], "before_collectives_s": [0.01, 0.02]}
    record = read(tmp_path, old)
    assert record.observations and record.observations.outside_collectives_s == outside
