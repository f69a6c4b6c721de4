"""Tests of the archive that `zeroscale pack` writes. It must give the same numbers as the original records, and contain
no names of users, hosts or files."""

import json
import re
import types
import zipfile
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pandas as pd
import pytest
from pydantic import BaseModel
from records import failed, run, save, spec

import analysis
from analysis.cli.pack import KEPT, pack_records
from bench.cli import main
from bench.core.record import RunRecord
from bench.core.spec import RunSpec, config_id

RECORDED = Path(__file__).parents[1] / "data" / "runs.zip"


def unpacked(paths: list[Path], folder: Path) -> Path:
    out = folder / "packed.zip"
    assert main(["pack", *map(str, paths), "--out", str(out)]) == 0
    with zipfile.ZipFile(out) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


# -- numbers

NAMES = {"study", "device", "allocation", "slowest_host", "slowest_link_node", "reason"}
"""Columns of the run table that contain names, or texts that may contain names."""


@pytest.mark.parametrize("study", ["smoke", "testbed", "failures", "memory"])
def test_packed_records_have_the_numbers_of_the_originals(study: str, tmp_path: Path) -> None:
    before = analysis.open_study(RECORDED / study)
    after = analysis.open_study(unpacked([RECORDED / study], tmp_path))
    for name in ("table", "summary", "best", "scaling"):
        one, other = getattr(before, name), getattr(after, name)
        pd.testing.assert_frame_equal(
            one.drop(columns=NAMES, errors="ignore"), other.drop(columns=NAMES, errors="ignore")
        )
        for column in NAMES & {*one.columns} - {"reason"}:  # each name has the same pseudonym everywhere
            pairs = set(zip(one[column].fillna(""), other[column].fillna(""), strict=True))
            assert len(pairs) == one[column].fillna("").nunique() == other[column].fillna("").nunique(), column


def test_report_of_the_archive_has_the_figures_of_the_original(tmp_path: Path) -> None:
    inside = unpacked([RECORDED / "smoke"], tmp_path)
    assert main(["report", str(inside), "--out", str(tmp_path / "report")]) == 0
    assert main(["report", str(RECORDED / "smoke"), "--out", str(tmp_path / "original")]) == 0
    pages = [(tmp_path / name / "report.html").read_text() for name in ("report", "original")]
    figures = [re.findall(r'<h3 id="figure-(\w+)"', page) for page in pages]
    assert figures[0] == figures[1] != []


def test_archive_contains_one_record_per_run_and_nothing_else(tmp_path: Path) -> None:
    later = run(machine={"name": "h100"}, started_at="2026-11-25T09:00:00+00:00")
    runs = [run(), run(repeat=1), later, run(spec(micro=4))]
    found = unpacked([save(tmp_path / "runs" / str(n), one) for n, one in enumerate(runs)], tmp_path)
    names = sorted(path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file())
    first, other = config_id(spec()), config_id(spec(micro=4))
    assert names == sorted(
        f"{name}/record.json" for name in (f"{first}-0.0", f"{first}-1.0", f"{first}-0.0_2", f"{other}-0.0")
    )


def test_equal_records_give_equal_bytes() -> None:
    assert pack_records([run(), failed("oom")]) == pack_records([run(), failed("oom")])


def test_points_that_differ_in_a_removed_text_keep_different_ids() -> None:
    specs = [spec(data={"name": "text", "source": "text", "options": {"files": [file]}}) for file in ("/a", "/b")]
    packed = [RunRecord.model_validate_json(content) for content in pack_records(map(run, specs)).values()]
    assert len({one.config_id for one in packed}) == 2
    assert [one.config_id for one in packed] == [config_id(one.spec) for one in packed]


def test_pseudonyms_of_two_archives_differ() -> None:
    packed = [pack_records([run(study="mine", started_at=f"2026-11-24T09:00:0{second}+00:00")]) for second in (0, 1)]
    one, other = (b"".join(files.values()).decode() for files in packed)
    assert set(re.findall(r"study1-\w+", one)).isdisjoint(re.findall(r"study1-\w+", other))


# -- names

PLANTED = (
    "frontnode17.hpc.example.edu", "frontnode17", "jdoe", "Jane Doe", "jane.doe@example.edu", "/scratch/jdoe/corpora",
    "../../jdoe", "hf_" + "aB3" * 11, "registry.example.edu/zebra-team/tiger:1", "12345:jdoe(1001)", "NVIDIA jdoe",
    "2.13.0+jdoe", "2026-11-24T09:00:00 jdoe", "GPU-0a1b2c3d-0000-1111-2222-333344445555", "10.11.12.13",
    "sk-" + "a1" * 12, "deadbeefcafe4711", "cpu\njdoe",
)  # fmt: skip
VALID = spec().model_dump(mode="json", by_alias=True)


def fill(kind: Any, text: str) -> Any:
    """Return a valid JSON value for a type annotation `kind`. Every string field has the value `text`."""
    if kind is RunSpec:
        return fill_spec(text)
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if "root" in kind.model_fields:
            return {"encoder": 8.0, "encoder_padding": 1.0}
        return {field.alias or name: fill(field.annotation, text) for name, field in kind.model_fields.items()}
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return [fill(one, text) for one in kind.__annotations__.values()]
    if origin is Annotated:
        return fill(arguments[0], text)
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType):
        return fill(next(one for one in arguments if one is not type(None)), text)
    if origin is tuple:
        return [fill(arguments[0], text)] * 2 if arguments[-1] is Ellipsis else [fill(one, text) for one in arguments]
    if origin is dict:
        key = text if arguments[0] is str else fill(arguments[0], text)
        return {key: fill(arguments[1], text)}
    plain = {int: 1, float: 1.0, bool: True, str: text, date: "2026-11-26"}
    return plain[kind] if kind is not Any else {text: text, "list": [text], "number": 1}


def fill_spec(text: str) -> dict[str, Any]:
    """Return the JSON of a spec in which every field that accepts any string has the value `text`. Fields that accept
    only identifiers get an identifier made from `text`."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")
    options = {"anything": text, text: [text], "stage": 1}
    return {
        **VALID,
        "model": {**VALID["model"], "name": name, "family": name, "source": text, "shape": {**options, "heads": 2}},
        "engine": {"name": name, "backend": name, "options": options},
        "data": {**VALID["data"], "name": name, "source": name, "options": options},
        "objective": name,
        "sequence": {name: 8},
    }


def list_texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from list_texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from list_texts(inner)
    elif isinstance(value, str):
        yield value


def planted(text: str) -> RunRecord:
    """Return a record in which every field that accepts any string has the value `text`. Fields that accept only
    identifiers get an identifier made from `text`."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")
    plain = fill(RunRecord, text)
    plain |= {"schema_version": 3}
    plain["circumstance"]["machine"] = fill(RunRecord.model_fields["circumstance"].annotation, name)["machine"]
    plain["circumstance"]["machine"] |= {"source": text, "note": text, "device_names": [text], "calibration": None}
    plain["circumstance"]["machine"] |= {"peak_tflops": {"bf16": 1.0}}
    plain["circumstance"]["machine"]["rented"] = []  # `Machine.on` removes offers from records
    plain["circumstance"]["limits"] = {}
    plain["observations"]["steps"] |= {"cut": 0, "skipped": [0], "summed_norms": 1}
    return RunRecord.model_validate(plain)


@pytest.mark.parametrize("text", PLANTED)
def test_text_planted_in_every_field_is_absent_from_the_archive(text: str) -> None:
    record = planted(text)
    whole = json.dumps(record.model_dump(mode="json", by_alias=True))
    times = sum(text in one or one in re.sub(r"[^A-Za-z0-9]+", "-", text) for one in list_texts(json.loads(whole)))
    assert times > 60, "otherwise the record would test nothing"
    (content,) = pack_records([record]).values()
    remaining = [one for one in list_texts(json.loads(content)) if _holds(one, text)]
    assert remaining == []
    packed = RunRecord.model_validate_json(content)
    assert packed.observations and record.observations
    assert packed.observations.steps == record.observations.steps
    assert packed.outcome.kind == record.outcome.kind


def _holds(found: str, text: str) -> bool:
    """Return True if the text `found`, which comes from the archive, contains the private text `text`. A single word of
    `text` also counts, if the word could be a name."""
    parts = [part for part in re.split(r"[^A-Za-z0-9]+", text.lower()) if len(part) > 3 and not part.isdigit()]
    known = {"nvidia", "hf", "sk", "2026"}
    return text in found or any(part in found.lower() for part in parts if part not in known)


def test_all_texts_of_a_packed_record_have_an_allowed_form() -> None:
    """Every string in a packed record is one of zeroscale's own words, or a version, a time, a hash or a pseudonym."""
    (content,) = pack_records([planted("jdoe")]).values()
    forms = r"[a-z_]+\d+-[0-9a-f]{6}|[0-9a-f]{10}|[a-z_0-9]+|removed by zeroscale pack|\{host\}|(host\d+-\w{6},?)+|"
    assert [text for text in list_texts(json.loads(content)) if not re.fullmatch(forms, text)] == []


def test_rules_of_pack_refer_to_existing_fields() -> None:
    for path in KEPT:
        kind: Any = RunRecord
        for part in path.split("."):
            inner = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]
            if not inner:  # a mapping with free keys
                break
            assert part in inner[0].model_fields, path
            kind = inner[0].model_fields[part].annotation


def test_packed_run_keeps_the_flag_foreign_hosts(tmp_path: Path) -> None:
    job = {"job_id": "7", "cluster": "zinc", "nodelist": "gpu[1-2]"}
    of = spec(nodes=2, ranks=1)
    record = run(of, environment={"hosts": ("gpu1.example.edu", "gpu3.example.edu"), "job": job})
    folder = unpacked([save(tmp_path / "runs", record)], tmp_path)
    (row,) = analysis.open_study(folder).table.to_dict("records")
    assert "foreign_hosts" in row["flags"]
    assert re.fullmatch(r"job1-[0-9a-f]{6}", row["allocation"])


def test_invalid_record_is_excluded_from_the_archive_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The record has a sequence length for tokens of the kind `jdoe`. Its training objective has no tokens of this
    kind, so the record is invalid."""
    odd = run().model_copy(update={"spec": spec().model_copy(update={"sequence": {"jdoe": 8}})})
    assert len(pack_records([odd, run(repeat=1)])) == 1
    assert "is not in the archive" in caplog.text and "jdoe" not in caplog.text
