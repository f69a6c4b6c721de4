"""What stands beside the run table: the steps and the specs behind it."""

import pytest
from records import failed, results, run, spec, steps

from analysis.table import plain
from analysis.variants import variants
from bench.spec import config_id


def test_the_runs_behind_a_row_are_its_timed_steps_by_allocation() -> None:
    slurm = {"slurm": {"SLURM_JOB_ID": "7"}}
    shared = [run(repeat=i, steps=steps((s,) * 6, cut=2), environment=slurm) for i, s in enumerate((0.1, 0.3))]
    found = results(*shared, run(repeat=2, steps=steps((0.2,) * 6)), failed("oom", repeat=3))
    (row,) = plain(found.summary)
    assert found.runs(row) == {"7": [0.1] * 6 + [0.3] * 6, "run2": [0.2] * 6}


def test_a_row_without_a_number_has_no_runs() -> None:
    found = results(failed("oom"))
    assert [found.runs(row) for row in plain(found.summary)] == [{}]


def test_specs_are_found_by_their_id() -> None:
    of = spec(micro=8)
    assert results(run(of)).specs == {config_id(of): of}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 3}, ("seed=0", "seed=3")),
        ({"measure": {"min_steps": 40}}, ("measure.min_steps=30", "measure.min_steps=40")),
        ({"micro": 4}, ("", "")),
    ],
)
def test_a_variant_is_what_no_column_shows(change: dict[str, object], told: tuple[str, str]) -> None:
    one, other = spec(), spec(**change)  # type: ignore[arg-type]
    assert tuple(variants({"a": one, "b": other}).values()) == told


def test_an_option_that_one_leaves_out_is_its_default() -> None:
    bare = spec()
    engine = bare.engine.model_dump() | {"options": {"reduce_bucket_size": 1000}}
    told = variants({"a": bare, "b": bare.model_copy(update={"engine": bare.engine.model_validate(engine)})})
    assert told == {"a": "reduce_bucket_size=default", "b": "reduce_bucket_size=1000"}
