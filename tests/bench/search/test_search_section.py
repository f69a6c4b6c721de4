"""Tests of the section `search` of a study's file. Each of its error messages has one line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import api
from bench.core.errors import UserError
from bench.core.study import Bound, Dimension

BASE = {"machine": "cpu", "model": "tiny", "data": "synthetic", "precision": "fp32", "devices_per_node": 1}


def plan(folder: Path, search: dict[str, Any], *overrides: str, **study: Any) -> Any:
    file = folder / "mine.yaml"
    file.write_text(json.dumps({"name": "mine", "base": BASE, "search": search, **study}))
    return api.plan_search(str(file), overrides)


def ask(**changed: Any) -> dict[str, Any]:
    return {"objective": "samples_per_s", "space": {"batch.micro": [1, 2, 4], "engine": ["ddp", "zero1"]}, **changed}


def rungs(space: Mapping[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    of = {"least": 100} | changed
    return {"objective": "validation_loss", "space": space or {"optimizer.lr": [1e-3, 1e-2]}, "rungs": of}


@pytest.mark.parametrize(
    ("search", "message"),
    (
        ({"space": {"batch.micro": [1]}}, "the search has no objective; set objective to one of samples_per_s"),
        (ask(objective="samples_per_sec"), "is not an objective; did you mean samples_per_s?"),
        (ask(space={}), "the search has an empty space; add a field with its values"),
        ({"objective": "step_s", "spce": {"seed": [1, 2]}}, "search.spce: no such key; did you mean search.space?"),
        ({"objctive": "step_s", "space": {"seed": [1, 2]}}, "search.objctive: no such key; did you mean search.obj"),
        (ask(space={"batch.micro": []}), "has no values; add a value, or remove the field"),
        (ask(space={"batch.micro": {"from": 4, "to": 1}}), "is empty; set from and to, with from the smaller"),
        (ask(space={"batch.micros": [1]}), "search.space.batch.micros: no such config key; did you mean batch.micro?"),
        (ask(space={"machine": ["cpu"]}), "search.space.machine: a search has one machine and one launcher"),
        (ask(space={"engine": ["ddp", "zero9"]}, trials=1), None),
        (ask(space={"engine": ["zero9"]}), "no point of the space can run.*zero9"),
        (ask(sampler="tpi"), "no such sampler; did you mean tpe?"),
        (ask(constraints={"peak_bytes": {"at_least": 2e9, "at_most": 1e9}}), "at_least=2e.09 is above at_most=1e.09"),
        (ask(constraints={"peak": {"at_most": 1}}), "peak is not a measured quantity; did you mean peak_bytes?"),
        (
            ask(space={"batch.micro": {"values": [1], "when": {"engine": ["ddp"]}}}),
            "must come before it; move engine up",
        ),
        (ask(constraints={"peak_bytes": {}}), "has no bound; set at_least or at_most"),
        (ask(objective=None), "the search has no objective; set objective to one of samples_per_s"),
        (ask(objective="loss"), "is not an objective"),
        (ask(trials=0), "search.trials=0: must be an integer > 0; "),
        (ask(trials=-3), "search.trials=-3: must be an integer > 0; "),
        (ask(node_hours=0), "search.node_hours=0: must be a number > 0 or null; "),
        (ask(node_hours=-1), "search.node_hours=-1: must be a number > 0 or null; "),
        (ask(gain=-0.01), "search.gain=-0.01: must be a number ≥ 0; "),
        (ask(parallel=0), "search.parallel=0: must be an integer > 0; "),
        (ask(seed=-1), "search.seed=-1: must be an integer ≥ 0; "),
        (ask(trial=3), "search.trial: no such key; did you mean search.trials?"),
        (ask(rungs={"least": 100}), "rungs need a training; set objective: validation_loss, or remove rungs"),
        (rungs(least=0), "search.rungs.least=0: must be an integer > 0; "),
        (rungs(factor=1), "search.rungs.factor=1: must be an integer ≥ 2; "),
        (rungs({"learning.tokens": [1_000]}), "remove learning.tokens from the space"),
        (rungs({"optimizer.lr": [{"optimizer.lr": 1, "learning.stop_after": 9}]}), "remove learning.stop_after from"),
    ),
)
def test_invalid_search_section_is_refused_in_one_line(
    tmp_path: Path, search: dict[str, Any], message: str | None
) -> None:
    if message is None:
        assert len(plan(tmp_path, search).pool.list_all()) == 1, (
            "of a space of which a part cannot run, the rest is tried"
        )
        return
    with pytest.raises(UserError, match=message) as refused:
        plan(tmp_path, search)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("bound", "held", "broken"),
    (
        ({"at_most": 0}, (0, -1.0), (0.1, None)),
        ({"at_least": 0}, (0, 3.0), (-0.1, None)),
        ({"at_least": 1, "at_most": 2}, (1, 1.5, 2), (0.9, 2.1, None)),
    ),
)
def test_bound_holds_for_values_within_its_limits(bound: Any, held: tuple[Any, ...], broken: tuple[Any, ...]) -> None:
    made = Bound.model_validate(bound)
    assert all(made.holds(value) for value in held) and not any(made.holds(value) for value in broken)


def test_search_without_runnable_points_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no point of the space can run"):
        plan(tmp_path, ask(), exclude=["batch.micro > 0"])


ON_CLUSTER = {"machine": "h100", "launcher": "slurm", "launcher.exclusive": True, "model": "mt5_xxl"}


@pytest.mark.parametrize(
    ("base", "constraints", "told"),
    [
        ({}, {"peak_bytes": {"at_most": 1000}}, r"^search.constraints.peak_bytes: must be at most 1,000, but each of "
         r"the 2 points is predicted to need more, at least [\d,]{10}; relax the constraint, or change the space$"),
        (ON_CLUSTER, {}, r"^search.space: each of its 2 points is "
         r"predicted to need far more memory than a device of h100 has; change the space or the machine$"),
    ],
)  # fmt: skip
def test_search_with_all_points_predicted_beyond_memory_or_constraints_is_refused(
    tmp_path: Path, base: dict[str, Any], constraints: dict[str, Any], told: str
) -> None:
    asked = ask(space={"batch.micro": [1, 2]}, constraints=constraints)
    own = {"machine": "cpu", "model": "tiny", "engine": "ddp", "devices_per_node": 1} | base
    with pytest.raises(UserError, match=told):
        plan(tmp_path, asked, base=own)
    asked = ask(space={"batch.micro": [1, 2]}, constraints={"peak_bytes": {"at_most": 1e9}})
    local = {key: value for key, value in own.items() if not key.startswith("launcher")}
    assert plan(tmp_path, asked, base=local | {"machine": "cpu", "model": "tiny"})


def test_study_without_a_search_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no search section"):
        api.plan_search("smoke")


def test_planning_a_search_as_a_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has a search section but no axes; use `zeroscale search`"):
        api.plan("search_smoke")


@pytest.mark.parametrize("verb", [api.plan_search, api.plan])
def test_axes_next_to_a_search_are_refused(tmp_path: Path, verb: Any) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"name": "mine", "base": BASE, "search": ask(), "axes": {"nodes": [1, 2]}}))
    with pytest.raises(UserError, match=r"study=mine: has axes \(nodes\) and a search.*move the axes into"):
        verb(str(file))


def test_field_set_on_the_command_line_is_not_searched(tmp_path: Path) -> None:
    made = plan(tmp_path, ask(), "batch.micro=2", "search.sampler=grid")
    assert made.pool.section.sampler == "grid"
    assert [one.point.spec["batch"]["micro"] for one in made.pool.list_all()] == [2, 2]


def test_validation_loss_as_objective_needs_a_training_with_an_end(tmp_path: Path) -> None:
    asked = ask(objective="validation_loss", space={"optimizer.lr": [1e-3, 1e-2]})
    with pytest.raises(
        UserError, match=r"validation_loss: needs trainings of a fixed number of tokens; .*learning\.tokens"
    ):
        plan(tmp_path, asked)
    made = plan(tmp_path, asked, "model=gpt2_tiny", "data=text", "learning.tokens=100000")
    assert [one.predicted for one in made.pool.list_all()] == [None, None]


def test_invalid_and_duplicate_points_are_no_candidates(tmp_path: Path) -> None:
    space = {"batch.global": [2, 3], "batch.micro": [1, 2], "engine": ["ddp"]}
    made = plan(tmp_path, ask(space=space))
    assert len(made.pool.list_all()) == 3 and len(made.pool.explain_left_out()) == 1, "3 is not a multiple of 2"


@pytest.mark.parametrize(
    ("dimension", "values"),
    (
        ([1, "a", None], (1, "a", None)),
        ({"from": 1, "to": 4}, (1, 2, 3, 4)),
        ({"from": 2, "to": 9, "step": 3}, (2, 5, 8)),
        ({"from": 0.5, "to": 1, "step": 0.25}, (0.5, 0.75, 1.0)),
        ({"from": 1e-4, "to": 1e-2, "log": True}, None),
        ({"from": 0, "to": 10**12}, None),
        ({"from": 0, "to": 1, "step": 1e-12}, None),
        ({"from": 3, "to": 15, "log": True}, (3, 6, 12, 4, 5, 7, 8, 9, 10, 11, 13, 14, 15)),
    ),
)
def test_values_of_a_dimension(dimension: Any, values: Any) -> None:
    assert Dimension.model_validate(dimension).list_values() == values


@pytest.mark.parametrize("given", ["base", "command line"])
def test_stop_after_next_to_rungs_is_refused(tmp_path: Path, given: str) -> None:
    base = BASE | {"data": "text", "learning.tokens": 100_000} | ({"learning.stop_after": 9} if given == "base" else {})
    overrides = ["learning.stop_after=9"] if given == "command line" else []
    with pytest.raises(UserError, match=r"stop_after: a search with rungs sets this key itself"):
        plan(tmp_path, rungs(), *overrides, base=base)


def test_rungs_that_end_at_the_same_step_are_refused(tmp_path: Path) -> None:
    base = BASE | {"data": "text", "learning.tokens": 4096, "batch.micro": 4, "sequence.encoder": 128}
    with pytest.raises(UserError, match=r"search\.rungs\.least=10: rungs at .* end at the same step"):
        plan(tmp_path, rungs(least=10), base=base)
