"""Tests that records which zeroscale did not write are reported and excluded, and that all other records are still
read."""

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from records import failed, plain, run, save, spec

from analysis import formats, reading, results
from analysis.compare import ComparisonSetup, compare
from analysis.compare.output import to_text
from analysis.figures import step_series
from analysis.report.findings import compute_findings
from bench.cli import main
from bench.core import store
from bench.core.files import read_regular
from bench.core.record import RunRecord
from bench.sweep.snapshot import read_snapshot

RECORDED = Path(__file__).parents[1] / "data" / "runs.zip"
GOOD = (run(spec("ddp")), run(), failed("oom", spec(micro=4)))
Plain = dict[str, Any]


def written(value: Any) -> str:
    """Return JSON text of a value. Placeholders in `value` are replaced by NaN, infinity or a deeply nested list, which
    a JSON encoder would not write."""
    text = json.dumps(value, indent=1)
    for word, meant in (("@inf", "1e999"), ("@nan", "NaN"), ("@deep", "[" * 100_000)):
        text = text.replace(f'"{word}"', meant)
    return text


def changed(path: str, value: Any, of: RunRecord | None = None) -> str:
    """Return the JSON of a record with one value replaced. `path` names the replaced field, such as
    `observations.steps.cut`."""
    whole = plain(of or run())
    *way, last = path.split(".")
    inside = whole
    for key in way:
        inside = inside[key]
    inside[last] = value
    return written(whole)


FOREIGN = {
    "deeply nested": "[" * 100_000,
    "deeply nested within": changed("observations.data", "@deep"),
    "infinite": changed("spec.optimizer.lr", "@inf"),
    "infinite wait": changed("observations.steps.data_wait_s", ["@inf"] * 35),
    "infinite tokens": changed("observations.tokens.decoder", "@inf"),
    "infinite size": changed("spec.model.shape.d_ff", "@inf"),
    "no number": changed("observations.steps.step_s", [0.1] * 34 + ["@nan"]),
    "ok without observations": changed("observations", None),
    "ok without steps": changed("observations.steps", None),
    "empty window": changed("observations.steps.step_s", []),
    "cut beyond the steps": changed("observations.steps.cut", 35),
    "cut before the steps": changed("observations.steps.cut", -3),
    "steps without a loss": changed("observations.steps.loss", [1.0]),
    "negative steps": changed("observations.steps.step_s", [-0.1] * 35),
    "steps of no time": changed("observations.steps.step_s", [0.0] * 35),
    "more tokens than there are": changed("observations.tokens.decoder", 1e308),
    "negative tokens": changed("observations.tokens.encoder", -1),
    "endless energy": changed("observations.energy_j", [1e308, 1e308]),
    "endless parameters": changed("observations.parameters", 2**62),
    "endless layer": changed("spec.model.shape.d_ff", 2**62),
    "endless batch": changed("spec.batch", {"micro": 2**62}),
    "commit that is a number": changed("environment.git", {"commit": 5}),
    **{f"schema version {version!r}": changed("schema_version", version) for version in (0, -7, True, "1", 1.5, None)},
    "rehearsal without seconds": changed("evidence", "rehearsed", run(steps=None)),
}


def put(folder: Path, content: str) -> Path:
    path = folder / store.RECORD
    path.parent.mkdir(parents=True)
    path.write_text(content)
    return path


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_invalid_record_is_reported_and_excluded(tmp_path: Path, content: str) -> None:
    save(tmp_path, *GOOD)
    path = put(tmp_path / "foreign", content)
    found = results.read([tmp_path])
    assert [skipped.path for skipped in found.skipped] == [path]
    assert len(found.table) == len(GOOD)
    assert "\n" not in str(found.skipped[0])
    assert len(reading.find_rows([tmp_path]).read_records()) == len(GOOD)


def test_special_files_named_as_a_record_are_reported_and_excluded(tmp_path: Path) -> None:
    """The special files are a link to itself, a pipe, a device, a folder, and a link to a record that is already
    read."""
    good = next(save(tmp_path, *GOOD).rglob(store.RECORD))
    for name in ("loop", "pipe", "device", "folder", "twice"):
        (tmp_path / name).mkdir()
    (tmp_path / "loop" / store.RECORD).symlink_to(store.RECORD)
    os.mkfifo(tmp_path / "pipe" / store.RECORD)
    (tmp_path / "device" / store.RECORD).symlink_to("/dev/zero")
    (tmp_path / "folder" / store.RECORD).mkdir()
    (tmp_path / "twice" / store.RECORD).symlink_to(good)
    found = results.read([tmp_path])
    assert [skipped.path.parent.name for skipped in found.skipped] == ["device", "folder", "loop", "pipe", "twice"]
    assert len(found.table) == len(GOOD)


def test_symbolic_link_given_as_a_path_is_read(tmp_path: Path) -> None:
    record = next(save(tmp_path / "runs", run()).rglob(store.RECORD))
    (tmp_path / "one.json").symlink_to(record)
    assert len(results.read([tmp_path / "one.json"]).table) == 1


def test_folder_with_a_name_that_is_not_utf_8_is_reported_and_excluded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, *GOOD)
    bad = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    save(bad, run())
    found = results.read([tmp_path])
    assert [(skipped.path, skipped.why) for skipped in found.skipped] == [(bad, "name is not UTF-8")]
    assert len(found.table) == len(GOOD)
    results.warn(found)
    assert main(["table", str(bad)]) == 2
    assert "name is not UTF-8" in capfd.readouterr().err


def find_rehearsal() -> Path:
    found = store.find_records([RECORDED])
    return next(path for path in found if store.read_record(path).evidence == "rehearsed")


def test_rehearsals_are_not_comparable() -> None:
    path = find_rehearsal()
    found = results.read([path])
    compared = compare(found, found, ComparisonSetup(("a", "b"), (), None, False))
    assert "not comparable" in to_text(compared)


# -- any record, changed anywhere

VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.5, 1e-320, 1e308, -1e308,
    "@inf", "@nan", "@deep", "", "x", "5", "nan", "=1+1", "../../x", "\x1b[31m", "a\nb", "a\rb", "\u2028", "<b>",
    "日本", "x" * 5000, [], {}, [[]], [None], ["x"], [0], [1e308], {"a": 1}, {"": {}},
)  # fmt: skip


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested JSON: the keys and indices that lead to the value. In a list, only the
    first and the last element are visited."""
    if way:
        yield way
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    last = len(value) - 1 if isinstance(value, list) else 0
    for key, inner in inside:
        if isinstance(value, dict) or key in (0, last):
            yield from places(inner, (*way, key))


def mutants(count: int, seed: int) -> Iterator[str]:
    """Yield the JSON of `count` records in which one random value is changed or deleted."""
    rng = random.Random(seed)
    measured = run(spec(nodes=2), environment={"hosts": ("a", "b"), "git": {"commit": "abc", "dirty": False}})
    old = json.loads(read_regular(next(store.find_records([RECORDED / "smoke"]))))
    wholes = [(whole, list(places(whole))) for whole in (plain(measured), plain(failed("oom")), old)]
    for _ in range(count):
        whole, ways = rng.choice(wholes)
        *way, last = rng.choice(ways)
        mutant = copy.deepcopy(whole)
        inside: Any = mutant
        for key in way:
            inside = inside[key]
        if rng.random() < 0.1:
            del inside[last]
        else:
            inside[last] = rng.choice(VALUES)
        yield written(mutant)


def read_and_render(folder: Path) -> results.Results:
    """Read a results folder, and render its table in all formats."""
    found = results.read([folder])
    for write in (formats.to_csv, formats.to_json, formats.to_markdown):
        write(found.table)
    assert len(found.summary) and compute_findings(found)
    return found


@pytest.mark.parametrize(
    "use",
    [read_and_render, lambda folder: read_snapshot(folder / "smoke") and results.read([folder])],
    ids=["table", "status"],
)
def test_record_with_one_changed_value_does_not_affect_other_records(
    tmp_path: Path, use: Callable[[Path], results.Results]
) -> None:
    for seed in range(2):
        folder = save(tmp_path / str(seed), *GOOD)
        for number, content in enumerate(mutants(200, seed)):
            put(folder / "smoke" / f"{number:010}" / "0.0", content)
        found = use(folder)
        assert len(found.table) + len(found.skipped) + found.copies == len(GOOD) + 200
        assert {record.config_id for record in GOOD} <= {*found.table["config_id"]}


def test_every_readable_record_survives_a_round_trip(tmp_path: Path) -> None:
    """A record that passes validation can be written and read again. No value becomes null on the way."""
    for number, content in enumerate(mutants(300, 2)):
        path = put(tmp_path / str(number), content)
        try:
            record = store.read_record(path)
        except store.Unreadable:
            continue
        store.write_json(path, record)
        assert store.read_record(path).spec == record.spec


def test_rehearsal_among_runs_has_no_step_series(tmp_path: Path) -> None:
    path = find_rehearsal()
    save(tmp_path, *GOOD)
    put(tmp_path / "rehearsed", read_regular(path).decode())
    found = results.read([tmp_path])
    places, _ = step_series._select_runs(found)
    assert places and found.table["step_s"].iloc[places].notna().all()
