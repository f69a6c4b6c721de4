import json
from pathlib import Path
from typing import Any

import jsonschema

import bench
from bench.core import store
from bench.core.files import read_regular
from bench.core.record import RunRecord
from bench.core.record_checks import migrate

SCHEMA = Path(bench.__file__).parent / "core" / "record.schema.json"
RECORDED = list(store.find_records([Path(__file__).parents[1] / "data" / "runs.zip"]))


def test_published_schema_equals_the_schema_of_records() -> None:
    assert json.loads(SCHEMA.read_text()) == RunRecord.model_json_schema(), "renew it with `make schema`"


def test_recorded_runs_of_all_versions_match_the_schema_without_loss() -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    for path in RECORDED:
        plain = migrate(json.loads(read_regular(path)), path.with_name(store.STEPS))
        read = json.loads(store.to_json(store.read_record(path)))
        validator.validate(read)
        assert holds(read, plain), path


def holds(whole: Any, part: Any) -> bool:
    """Return True if the JSON value `whole` contains all values of `part`. `whole` may have additional fields, which
    the format of an older record lacks."""
    if isinstance(part, dict):
        return all(key in whole and holds(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(holds, whole, part))
    return bool(whole == part)


def test_recorded_runs_include_every_engine_and_failures() -> None:
    records = [store.read_record(path) for path in RECORDED]
    assert {record.spec.engine.name for record in records} >= {"ddp", "zero0", "zero1", "zero2", "zero3", "fsdp"}
    assert {"ok", "invalid", "error"} <= {record.outcome.kind for record in records}
