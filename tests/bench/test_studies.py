"""Tests of the studies in conf/study. Every point of a study must be valid, and its costs must be those that the
study's file states."""

import json
import re
from pathlib import Path

import pytest

from bench import api
from bench.config import compose
from bench.config.compose import Expansion
from bench.core import store
from bench.core.errors import UserError
from bench.core.spec import MeasureSpec, config_id
from bench.core.study import list_control_pairs
from bench.measure.loop import find_stop_reason

FILES = sorted(path.stem for path in (compose.find_conf_folder() / "study").glob("*.yaml"))
SEARCHES = [name for name in FILES if compose.read_study(name).search]
STUDIES = [name for name in FILES if name not in SEARCHES]
ON_A_CLUSTER = [
    "data_loading",
    "frontier_175b",
    "frontier_1t",
    "frontier_22b",
    "fsdp_beside_zero",
    "gpt2_3b_v100",
    "lga",
    "paper",
    "precision",
    "strong_scaling",
    "weak_scaling",
]
SMOKE_RECORDS = Path(__file__).parents[1] / "data/runs.zip/smoke"


def least_s(protocol: MeasureSpec) -> float:
    return protocol.gpu_warmup_s + protocol.window_s


def most_s(protocol: MeasureSpec) -> float:
    return protocol.gpu_warmup_s + protocol.max_s


def points_of(name: str) -> Expansion:
    return compose.compose_points(compose.read_study(name), [])


def costs(name: str) -> str:
    """Return the section "Cost" of the comment at the start of a study's file, as one line."""
    head = (
        (compose.find_conf_folder() / "study" / f"{name}.yaml")
        .read_text()
        .partition("# Cost:")[2]
        .partition("# Result:")[0]
    )
    return " ".join(head.replace("#", " ").split())


def stated(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern} not in {text}"
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize("name", STUDIES)
def test_every_point_composes_and_their_number_is_as_stated(name: str) -> None:
    assert len(points_of(name).points) == stated(r"^([\d,]+) points", costs(name))


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_has_the_stated_number_of_points(name: str) -> None:
    made = api.plan_search(name)
    assert len(made.pool.list_all()) == stated(r"^([\d,]+) points", costs(name))
    assert made.pool.section.trials == stated(r"at most ([\d,]+) of them", costs(name))


@pytest.mark.parametrize("name", STUDIES)
def test_every_exclude_rule_applies_and_no_points_are_equal(name: str) -> None:
    found = points_of(name)
    assert all(found.excluded.values())
    assert not found.merged


@pytest.mark.parametrize("name", STUDIES)
def test_control_point_composes_for_every_shape_of_allocation(name: str) -> None:
    study = compose.read_study(name)
    for shape in {
        (point.composed.spec.nodes, point.composed.spec.devices_per_node) for point in points_of(name).points
    }:
        pairs = list_control_pairs(study, [("nodes", [shape[0]]), ("devices_per_node", [shape[1]])])
        if pairs:
            composed = compose.compose_request(pairs)
            compose.check(composed, None)
            assert (composed.spec.nodes, composed.spec.devices_per_node) == shape


@pytest.mark.parametrize("name", ON_A_CLUSTER)
def test_cost_of_a_cluster_study_is_as_stated(name: str) -> None:
    study, specs, costs_text = (
        compose.read_study(name),
        [point.composed.spec for point in points_of(name).points],
        costs(name),
    )
    hours = sum(study.repeats * spec.nodes * (10 * 60 + 2 * spec.measure.max_s) for spec in specs) / 3600
    assert round(hours) == stated(r"at most ([\d,]+) node-hours", costs_text) == study.budget.node_hours
    assert max(spec.world_size for spec in specs) == stated(r"up to ([\d,]+) GPUs", costs_text)
    assert study.repeats == stated(r"× (\d+) repeats", costs_text)
    assert "points × repeats × nodes × (10 min of setup + 2 × measure.max_s)" in costs_text
    assert study.control
    least, most = (
        sum(study.repeats * spec.nodes * seconds(spec.measure) for spec in specs) for seconds in (least_s, most_s)
    )
    share = f"{least / 3600:.0f} to {most / 3600:.0f} node-hours of these are warm-up and window"
    assert share in costs_text


def test_paper_study_has_five_models_five_engines_and_four_node_counts() -> None:
    specs = [point.composed.spec for point in points_of("paper").points]
    assert {spec.model.name for spec in specs} == {"mt5_base", "mt5_large", "mt5_xl", "mt5_xxl", "t5_11b"}
    assert {spec.engine.name for spec in specs} == {"ddp", "zero0", "zero1", "zero2", "zero3"}
    assert {(spec.nodes, spec.devices_per_node) for spec in specs} == {(1, 8), (2, 8), (4, 8), (8, 8)}
    weak = [spec for spec in specs if spec.accumulation == 1]
    strong = [spec for spec in specs if spec not in weak]
    assert len(weak) == 5 * 5 * 4 * len({spec.batch.micro for spec in weak})
    assert {(spec.batch.micro, spec.global_batch) for spec in strong} == {(2, 256)}
    assert len(strong) == 5 * 5 * 4


def test_weak_scaling_fixes_the_micro_batch_and_strong_scaling_the_global_batch() -> None:
    weak = [point.composed.spec for point in points_of("weak_scaling").points]
    assert {(spec.batch.micro, spec.accumulation) for spec in weak} == {(4, 1)}
    strong = [point.composed.spec for point in points_of("strong_scaling").points]
    assert {spec.global_batch for spec in strong} == {256}
    assert (8, 8) not in {(spec.batch.micro, spec.nodes) for spec in strong}, "512 samples"


def test_fp16_at_stage_0_is_the_only_excluded_precision() -> None:
    found = {
        (point.composed.spec.engine.name, point.composed.spec.precision) for point in points_of("precision").points
    }
    engines, precisions = ("ddp", "zero0", "zero1", "zero2", "zero3"), ("bf16", "fp16", "fp32")
    assert {(engine, precision) for engine in engines for precision in precisions} - found == {("zero0", "fp16")}


def test_same_point_in_two_studies_has_the_same_config_id() -> None:
    def ids(name: str, max_nodes: int) -> set[str]:
        return {point.config_id for point in points_of(name).points if point.composed.spec.nodes <= max_nodes}

    assert ids("weak_scaling", 8) < ids("paper", 8)
    strong = {point.config_id for point in points_of("strong_scaling").points if point.composed.spec.batch.micro == 2}
    assert strong < ids("paper", 8)
    assert len(ids("weak_scaling", 8)) == 3 * 5 * 4


def test_recorded_smoke_runs_include_the_points_of_the_smoke_study() -> None:
    """The runs were recorded with an older measurement protocol: a fixed number of timed steps, and the mean of the
    loss over micro-batches. If these two settings are applied to the points of the current study, every point must be
    among the recorded runs."""
    recorded = [store.read_record(path) for path in store.find_records([SMOKE_RECORDS])]
    [protocol] = {record.spec.measure for record in recorded}
    before = {"measure": protocol, "loss_mean": "micro_batches"}
    asked = [point.composed.spec.model_copy(update=before) for point in points_of("smoke").points]
    assert {config_id(spec) for spec in asked} < {record.config_id for record in recorded}


def test_command_line_overrides_a_study() -> None:
    study = compose.read_study("testbed")
    slower = compose.compose_points(
        study, compose.parse_overrides(["machine=testbed_100mbit", "nodes=1", "launcher=local"])
    ).points
    assert {(point.composed.machine.name, point.composed.launcher) for point in slower} == {
        ("testbed_100mbit", "local")
    }
    assert len(slower) == 4


@pytest.mark.parametrize("name", ["a; rm -rf .", "$(reboot)", "a b", "-rf", "../runs", "two\nlines", ""])
def test_study_with_an_invalid_name_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(json.dumps({"name": name}))
    for asked_for in (str(file), name):
        with pytest.raises(UserError, match=r"^study") as caught:
            compose.read_study(asked_for)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: [", "while parsing a flow node"),
        ("name: s\naxis: {}", "study.axis: no such key; did you mean axes?"),
        ("name: s\nrepeats: 0", "study.repeats=0: must be an integer > 0; set study.repeats=1 or more"),
        ("name: s\nbudget: {node_hour: 3}", "study.budget.node_hour: no such key; did you mean budget.node_hours?"),
        (
            "name: s\nexclude: nodes > 1",
            "study.exclude=nodes > 1: must be a list of text; write a list, such as study.exclude=[nodes > 1]",
        ),
        ("", "must be a mapping, with lines such as `key: value`"),
        ("repeats: 1", "study.name: is required and missing; "),
    ],
)
def test_file_without_a_study_is_refused_in_one_line(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        compose.read_study(str(file))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_memory_study_has_windows_without_a_minimum_time() -> None:
    study = compose.read_study(str(SMOKE_RECORDS.parents[1] / "studies/peaks.yaml"))
    protocols = {point.composed.spec.measure for point in compose.compose_points(study, []).points}
    assert [find_stop_reason(3, 0.03, protocol) for protocol in protocols] == ["window"]
