"""Tests of the JSON schemas with which editors check config files. All config files of the project must be valid, and
mistakes must be found."""

from typing import Any

import jsonschema
import pytest

from bench.config.reference import GROUPS, Schema, build_schemas
from bench.core.files import find_conf_folder, read_yaml
from bench.core.study import Study

FILES = sorted(path for group in GROUPS for path in (find_conf_folder() / group).glob("*.yaml"))


@pytest.fixture(scope="module")
def schemas() -> dict[str, Schema]:
    return build_schemas()


def problems(schemas: dict[str, Schema], group: str, content: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(schemas[group]).iter_errors(content)]


def test_every_config_group_has_a_schema(schemas: dict[str, Schema]) -> None:
    assert set(schemas) == set(GROUPS)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_shipped_file_matches_its_schema(schemas: dict[str, Schema]) -> None:
    assert len(FILES) > 70
    found = {path.name: problems(schemas, path.parent.name, read_yaml(path, path.name)) for path in FILES}
    assert {name: messages for name, messages in found.items() if messages} == {}


@pytest.mark.parametrize(
    ("group", "content"),
    [
        ("machine", {"memory_byte": 1}),
        ("machine", {"memory_bytes": "85 GB"}),
        ("machine", {"peak_tflops": {"bf17": 1}}),
        ("launcher", {"network": {"interfaces": "ib0"}}),
        ("launcher", {"mode": "pack"}),
        ("study", {"bas": {}}),
        ("study", {"base": {"batch.mikro": 4}}),
        ("study", {"base": {"batch.micro": 0}}),
        ("study", {"axes": {"batch.micro": 4}}),
        ("study", {"axes": {"batch.micro": ["many"]}}),
        ("study", {"axes": {"engine": [{"engine": "zero1", "engine.bucket": 1}]}}),
        ("model", {"shape": {"layer": 3}}),
    ],
)
def test_schema_finds_a_mistake(group: str, content: Any, schemas: dict[str, Schema]) -> None:
    assert problems(schemas, group, content)


def test_axis_without_a_field_name_must_have_mappings(schemas: dict[str, Schema]) -> None:
    assert problems(schemas, "study", {"axes": {"variant": [{"engine": "zero1", "seed": 1}]}}) == []
    assert problems(schemas, "study", {"axes": {"variant": ["zero1"]}})


def test_every_key_has_a_description(schemas: dict[str, Schema]) -> None:
    assert schemas["machine"]["properties"]["power_w"]["description"] == "power limit of a device in watts"
    assert schemas["launcher"]["properties"]["account"]["description"] == "account that is charged for the jobs"
    assert schemas["study"]["$defs"]["batch.micro"]["description"] == "samples per device and forward pass"
    assert set(Study.model_fields) == set(schemas["study"]["properties"])
