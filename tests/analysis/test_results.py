"""Values that results hold in addition to the run table: steps and specs of the runs."""

import json
from pathlib import Path

import pytest
from records import LOSSES, MIB, failed, results, run, save, spec, steps

from analysis.questions import describe_protocol, describe_series, describe_variants, tell_apart
from analysis.results import read
from analysis.table import list_rows
from bench.core.spec import RunSpec, config_id


def test_the_runs_behind_a_row_are_its_timed_steps_by_allocation() -> None:
    slurm = {"slurm": {"SLURM_JOB_ID": "7"}}
    shared = [run(repeat=i, steps=steps((s,) * 6, cut=2), environment=slurm) for i, s in enumerate((0.1, 0.3))]
    found = results(*shared, run(repeat=2, steps=steps((0.2,) * 6)), failed("oom", repeat=3))
    (row,) = list_rows(found.summary)
    assert found.runs(row) == {"7": [0.1] * 6 + [0.3] * 6, "run2": [0.2] * 6}


def test_a_row_without_a_number_has_no_runs() -> None:
    found = results(failed("oom"))
    assert [found.runs(row) for row in list_rows(found.summary)] == [{}]


def test_specs_are_found_by_their_id() -> None:
    of = spec(micro=8)
    assert results(run(of)).specs == {config_id(of): of}


def test_a_whole_record_is_read_from_its_file_and_ends_as_it_was_judged(tmp_path: Path) -> None:
    strange = run(spec("zero2"), steps=steps(loss=(99.0,) * 35))
    found = read([save(tmp_path, run(spec("ddp")), strange)])
    assert found.record(0) == run(spec("ddp"))
    outcome = found.record(1).outcome
    assert (outcome.kind, outcome.reason) == ("invalid", found.table["reason"][1])
    assert outcome.evidence == {
        "reference": config_id(spec("ddp")), "tolerance": 1e-5, "step": 0, "loss": 99.0, "expected": LOSSES[0],
    }  # fmt: skip
    assert found.record(1).observations == strange.observations


def test_traces_stand_in_the_rows_of_the_table() -> None:
    of = spec(ranks=1)
    found = results(run(of, steps=steps((0.1, 0.2), cut=1), outside_collectives_s=(0.3,)), failed("oom", torch=None))
    ran, failure = (found.traces.iloc[place] for place in (0, 1))
    assert (ran["step_s"], ran["cut"], ran["own_s"]) == ((9.9, 0.1, 0.2), 1, (0.3,))
    assert (ran["rank_peak_bytes"], ran["file"]) == ((10 * MIB,), "run0/record.json")
    assert RunSpec.model_validate_json(ran["spec"]) == of
    assert json.loads(ran["environment"])["environment_id"] == "env1-2.13.0"
    assert (failure["step_s"], failure["environment"]) == ((), None)


def test_the_places_behind_a_row_are_in_the_order_of_the_runs() -> None:
    found = results(run(repeat=1), failed("node_failure"), run(attempt=1))
    assert [found.behind(row) for row in list_rows(found.summary)] == [[2, 0]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 3}, ("seed=0", "seed=3")),
        ({"measure": {"min_steps": 40}}, ("", "")),
        ({"micro": 4}, ("", "")),
        ({"micro": 4, "measure": {"min_steps": 40}}, ("", "")),
    ],
)
def test_a_variant_is_what_no_column_shows(change: dict[str, object], told: tuple[str, str]) -> None:
    one, other = spec(), spec(**change)  # type: ignore[arg-type]
    assert tuple(describe_variants({"a": one, "b": other}).values()) == told


def name_rows(*specs: RunSpec) -> list[str]:
    """Return the names of rows for these specs. Without their protocol, all rows would have the same name."""
    known = {str(place): one for place, one in enumerate(specs)}
    base = {"engine": "ddp", "accumulation": 1, "activation_checkpointing": False, "variant": "seed=0"}
    rows = [base | {"config_id": config_id} for config_id in known]
    return [describe_series(row) for row in tell_apart(rows, known, describe_series)]


def test_rows_of_one_name_are_told_apart_by_their_protocol_by_one_field_where_it_is_enough() -> None:
    one, other = (spec(measure={"min_steps": steps, "max_s": 10.0 * steps}) for steps in (30, 40))
    assert name_rows(one, other) == ["ddp (seed=0, min_steps=30)", "ddp (seed=0, min_steps=40)"]
    assert name_rows(one) == name_rows(one, one)[:1] == ["ddp (seed=0)"]
    assert name_rows(one, other, spec(measure={"min_steps": 40, "max_s": 300.0}))[1:] == [
        "ddp (seed=0, min_steps=40, max_s=400.0)",
        "ddp (seed=0, min_steps=40, max_s=300.0)",
    ]


def test_what_another_data_set_brings_with_it_names_nothing() -> None:
    one = spec()
    other = one.model_copy(update={"data": one.data.model_copy(update={"name": "other", "source": "text"})})
    assert set(describe_variants({"a": one, "b": other}).values()) == {""}


def test_a_protocol_that_differs_is_described_once() -> None:
    assert describe_protocol([spec(), spec()]) == ""
    assert describe_protocol([spec(), spec(measure={"min_steps": 40})]) == "min_steps 30, 40"


def test_an_option_that_one_leaves_out_is_its_default() -> None:
    bare = spec()
    engine = bare.engine.model_dump() | {"options": {"reduce_bucket_size": 1000}}
    told = describe_variants({"a": bare, "b": bare.model_copy(update={"engine": bare.engine.model_validate(engine)})})
    assert told == {"a": "reduce_bucket_size=default", "b": "reduce_bucket_size=1000"}
