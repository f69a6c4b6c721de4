"""Tests of the values that the class `Results` holds in addition to the run table: recorded steps and specs of the
runs."""

import json
from pathlib import Path

import pytest
from records import LOSSES, MIB, failed, results, run, save, spec, steps

from analysis.questions import describe_protocol, describe_series, describe_variants, tell_apart
from analysis.results import read
from analysis.table import list_rows
from bench.core.spec import RunSpec, config_id


def test_runs_of_a_summary_row_are_its_timed_steps_by_allocation() -> None:
    slurm = {"slurm": {"SLURM_JOB_ID": "7"}}
    shared = [run(repeat=i, steps=steps((s,) * 6, cut=2), environment=slurm) for i, s in enumerate((0.1, 0.3))]
    found = results(*shared, run(repeat=2, steps=steps((0.2,) * 6)), failed("oom", repeat=3))
    (row,) = list_rows(found.summary)
    assert found.runs(row) == {"7": [0.1] * 6 + [0.3] * 6, "run2": [0.2] * 6}


def test_summary_row_of_failures_has_no_runs() -> None:
    found = results(failed("oom"))
    assert [found.runs(row) for row in list_rows(found.summary)] == [{}]


def test_results_map_ids_to_specs() -> None:
    of = spec(micro=8)
    assert results(run(of)).specs == {config_id(of): of}


def test_record_read_from_its_file_has_the_judged_outcome(tmp_path: Path) -> None:
    strange = run(spec("zero2"), steps=steps(loss=(99.0,) * 35))
    found = read([save(tmp_path, run(spec("ddp")), strange)])
    assert found.record(0) == run(spec("ddp"))
    outcome = found.record(1).outcome
    assert (outcome.kind, outcome.reason) == ("invalid", found.table["reason"][1])
    assert outcome.evidence == {
        "reference": config_id(spec("ddp")), "tolerance": 1e-5, "step": 0, "loss": 99.0, "expected": LOSSES[0],
    }  # fmt: skip
    assert found.record(1).observations == strange.observations


def test_traces_have_the_row_order_of_the_table() -> None:
    of = spec(ranks=1)
    found = results(run(of, steps=steps((0.1, 0.2), cut=1), outside_collectives_s=(0.3,)), failed("oom", torch=None))
    ran, failure = (found.traces.iloc[place] for place in (0, 1))
    assert (ran["step_s"], ran["cut"], ran["own_s"]) == ((9.9, 0.1, 0.2), 1, (0.3,))
    assert (ran["rank_peak_bytes"], ran["file"]) == ((10 * MIB,), "run0/record.json")
    assert RunSpec.model_validate_json(ran["spec"]) == of
    assert json.loads(ran["environment"])["environment_id"] == "env1-2.13.0"
    assert (failure["step_s"], failure["environment"]) == ((), None)


def test_row_indices_of_a_summary_row_are_in_the_order_of_its_runs() -> None:
    found = results(run(repeat=1), failed("node_failure"), run(attempt=1))
    assert [found.behind(row) for row in list_rows(found.summary)] == [[2, 0]]


@pytest.mark.parametrize(
    ("change", "described"),
    [
        ({"seed": 3}, ("seed=0", "seed=3")),
        ({"measure": {"min_steps": 40}}, ("", "")),
        ({"micro": 4}, ("", "")),
        ({"micro": 4, "measure": {"min_steps": 40}}, ("", "")),
    ],
)
def test_variant_contains_only_fields_without_a_column(change: dict[str, object], described: tuple[str, str]) -> None:
    one, other = spec(), spec(**change)  # type: ignore[arg-type]
    assert tuple(describe_variants({"a": one, "b": other}).values()) == described


def name_rows(*specs: RunSpec) -> list[str]:
    """Return the names that a table gives to rows with these specs. The specs differ only in their measurement
    protocol, so all names would be equal without protocol fields."""
    known = {str(place): one for place, one in enumerate(specs)}
    base = {"engine": "ddp", "accumulation": 1, "activation_checkpointing": False, "variant": "seed=0"}
    rows = [base | {"config_id": config_id} for config_id in known]
    return [describe_series(row) for row in tell_apart(rows, known, describe_series)]


def test_rows_with_equal_names_get_the_fewest_protocol_fields_that_distinguish_them() -> None:
    one, other = (spec(measure={"min_steps": steps, "max_s": 10.0 * steps}) for steps in (30, 40))
    assert name_rows(one, other) == ["ddp (seed=0, min_steps=30)", "ddp (seed=0, min_steps=40)"]
    assert name_rows(one) == name_rows(one, one)[:1] == ["ddp (seed=0)"]
    assert name_rows(one, other, spec(measure={"min_steps": 40, "max_s": 300.0}))[1:] == [
        "ddp (seed=0, min_steps=40, max_s=400.0)",
        "ddp (seed=0, min_steps=40, max_s=300.0)",
    ]


def test_different_data_sets_do_not_appear_in_variants() -> None:
    one = spec()
    other = one.model_copy(update={"data": one.data.model_copy(update={"name": "other", "source": "text"})})
    assert set(describe_variants({"a": one, "b": other}).values()) == {""}


def test_description_of_protocols_has_only_fields_that_differ() -> None:
    assert describe_protocol([spec(), spec()]) == ""
    assert describe_protocol([spec(), spec(measure={"min_steps": 40})]) == "min_steps 30, 40"


def test_option_missing_in_one_spec_is_described_as_default() -> None:
    bare = spec()
    engine = bare.engine.model_dump() | {"options": {"reduce_bucket_size": 1000}}
    described = describe_variants(
        {"a": bare, "b": bare.model_copy(update={"engine": bare.engine.model_validate(engine)})}
    )
    assert described == {"a": "reduce_bucket_size=default", "b": "reduce_bucket_size=1000"}
