from typing import Any

import pytest
from pydantic import ValidationError

from bench.config import compose
from bench.core.errors import UserError
from bench.core.study import Budget, Study, expand_study, list_control_pairs, order_runs


def test_axes_span_all_combinations_with_the_last_axis_varying_fastest() -> None:
    study = Study(name="s", base={"model": "tiny"}, axes={"engine": ["ddp", "zero1"], "batch.micro": [2, 4]})
    assert expand_study(study, []) == [
        (("model", "tiny"), ("engine", "ddp"), ("batch.micro", 2)),
        (("model", "tiny"), ("engine", "ddp"), ("batch.micro", 4)),
        (("model", "tiny"), ("engine", "zero1"), ("batch.micro", 2)),
        (("model", "tiny"), ("engine", "zero1"), ("batch.micro", 4)),
    ]


def test_override_fixes_an_axis_and_a_list_adds_one() -> None:
    study = Study(name="s", base={"seed": 1}, axes={"engine": ["ddp", "zero1"]})
    points = expand_study(study, [("engine", ["zero3"]), ("seed", [5, 6])])
    assert points == [(("engine", "zero3"), ("seed", 5)), (("engine", "zero3"), ("seed", 6))]


def test_axis_value_may_be_a_group_of_overrides() -> None:
    study = Study(name="s", axes={"engine": ["ddp", {"engine": "zero1", "engine.reduce_bucket_size": 10}]})
    assert expand_study(study, []) == [(("engine", "ddp"),), (("engine", "zero1"), ("engine.reduce_bucket_size", 10))]


def test_repeats_are_interleaved_in_different_orders() -> None:
    study = Study(name="s", repeats=3)
    requested = order_runs([0] * 10, study)
    assert [repeat for repeat, _ in requested] == [0] * 10 + [1] * 10 + [2] * 10
    orders = [[point for repeat, point in requested if repeat == r] for r in range(3)]
    assert all(sorted(o) == list(range(10)) for o in orders)
    assert len({tuple(o) for o in orders}) == 3
    assert requested == order_runs([0] * 10, study), "the same seed, the same order"


def test_priority_points_run_first_and_the_others_in_random_order() -> None:
    study = Study(name="s", repeats=2)
    turns = [point % 3 for point in range(30)]
    requested = order_runs(turns, study)
    assert [turns[point] for _, point in requested] == 2 * (10 * [0] + 10 * [1] + 10 * [2])
    assert sorted(requested) == [(repeat, point) for repeat in range(2) for point in range(30)]
    begun = [point for repeat, point in requested if repeat == 0 and turns[point] == 0]
    assert begun != sorted(begun)


def test_point_has_the_priority_of_the_first_matching_rule() -> None:
    rules = ("engine == 'zero3' and batch.micro == 2", "engine.stage != null and engine.stage >= 2")
    axes = {"engine": ["ddp", "zero2", "zero3"], "batch.micro": [2, 4]}
    found = compose.compose_points(Study(name="s", axes=axes, first=rules), []).points
    turns = {(p.composed.spec.engine.name, p.composed.spec.batch.micro): p.turn for p in found}
    assert turns == {
        ("ddp", 2): 2, ("ddp", 4): 2, ("zero2", 2): 1, ("zero2", 4): 1, ("zero3", 2): 0, ("zero3", 4): 1,
    }  # fmt: skip


def test_control_point_uses_the_base_and_single_value_overrides() -> None:
    study = Study(
        name="s", base={"machine": "a100_80", "engine": "zero2"}, control={"engine": "zero1"}, axes={"nodes": [1, 2]}
    )
    assert dict(list_control_pairs(study, []) or ()) == {"machine": "a100_80", "engine": "zero1"}
    pinned = list_control_pairs(study, [("machine", ["h200"]), ("batch.micro", [2, 4])])
    assert dict(pinned or ()) == {"machine": "h200", "engine": "zero1"}


def test_control_point_is_optional() -> None:
    assert list_control_pairs(Study(name="s", base={"model": "tiny"}), []) is None


def test_budget_is_a_positive_number_of_node_hours_and_attempts() -> None:
    assert Study(name="s").budget == Budget(node_hours=None, attempts=3)
    for refused in ({"node_hours": 0}, {"node_hours": -1}, {"attempts": 0}, {"hours": 3}):
        with pytest.raises(ValidationError):
            Budget.model_validate(refused)


def test_smoke_study_is_five_engines_on_two_processes_with_three_repeats() -> None:
    study = compose.read_study("smoke")
    points = [compose.compose_request(pairs).spec for pairs in expand_study(study, [])]
    assert (len(points), study.repeats) == (5, 3)
    assert {p.engine.name for p in points} == {"ddp", "zero0", "zero1", "zero2", "zero3"}
    assert {(p.world_size, p.batch.micro) for p in points} == {(2, 4)}
    assert {p.data.name for p in points} == {"text"}


@pytest.mark.parametrize("fields", [{"axes": {key: list(range(1000)) for key in "abc"}}, {"repeats": 10**9}])
def test_too_many_runs_are_refused_before_they_are_listed(fields: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"study=s: its axes and repeats make 1,000,000,000 runs; the maximum is 100,000"
    ):
        expand_study(Study(name="s", **fields), [])


@pytest.mark.parametrize("axes", [{"engine": []}, {"engine": [{3: 4}]}])
def test_axis_without_values_or_with_a_non_text_key_is_refused(axes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="engine"):
        Study(name="s", axes=axes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "s", "axis": {"engine": ["ddp"]}}, "study.axis: no such key; did you mean axes?"),
        ({"nam": "s"}, "study.nam: no such key; did you mean name?"),
        ({"axes": {"engine": ["ddp"]}}, "study.name: is required and missing"),
        ({"name": "s", "repeats": 0}, "study.repeats=0: "),
    ],
)
def test_invalid_fields_of_a_study_are_errors_for_users(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        Study(**fields)
    assert str(raised.value).startswith(message)
    with pytest.raises(ValidationError):
        Study.model_validate(fields)
