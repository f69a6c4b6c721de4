from bench import config
from bench.study import Study, expand, order


def test_axes_span_every_combination_the_last_varying_fastest() -> None:
    study = Study(name="s", base={"model": "tiny"}, axes={"engine": ["ddp", "zero1"], "batch.micro": [2, 4]})
    assert expand(study, []) == [
        (("model", "tiny"), ("engine", "ddp"), ("batch.micro", 2)),
        (("model", "tiny"), ("engine", "ddp"), ("batch.micro", 4)),
        (("model", "tiny"), ("engine", "zero1"), ("batch.micro", 2)),
        (("model", "tiny"), ("engine", "zero1"), ("batch.micro", 4)),
    ]


def test_an_override_pins_an_axis_and_a_list_makes_one() -> None:
    study = Study(name="s", base={"seed": 1}, axes={"engine": ["ddp", "zero1"]})
    points = expand(study, [("engine", ["zero3"]), ("seed", [5, 6])])
    assert points == [(("engine", "zero3"), ("seed", 5)), (("engine", "zero3"), ("seed", 6))]


def test_a_value_may_be_several_overrides_that_go_together() -> None:
    study = Study(name="s", axes={"engine": ["ddp", {"engine": "zero1", "engine.reduce_bucket_size": 10}]})
    assert expand(study, []) == [(("engine", "ddp"),), (("engine", "zero1"), ("engine.reduce_bucket_size", 10))]


def test_repeats_are_interleaved_and_each_in_an_order_of_its_own() -> None:
    study = Study(name="s", repeats=3)
    todo = order(10, study)
    assert [repeat for repeat, _ in todo] == [0] * 10 + [1] * 10 + [2] * 10
    orders = [[point for repeat, point in todo if repeat == r] for r in range(3)]
    assert all(sorted(o) == list(range(10)) for o in orders)
    assert len({tuple(o) for o in orders}) == 3
    assert todo == order(10, study), "the same seed, the same order"


def test_the_smoke_study_is_two_by_two_by_every_engine() -> None:
    points = [config.request(pairs).spec for pairs in expand(config.study("smoke"), [])]
    assert len(points) == 20
    assert {p.engine.name for p in points} == {"ddp", "zero0", "zero1", "zero2", "zero3"}
    assert {p.world_size for p in points} == {1, 2}
    assert {p.data.name for p in points} == {"text"}
