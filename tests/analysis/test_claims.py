"""Tests of the findings about claims from published papers, for synthetic sets of runs whose correct findings are
known."""

from typing import Any

import pytest
from records import failed, results, run, spec, steps

from analysis.claims import ClaimFinding
from analysis.claims.findings import as_table, find_findings
from analysis.table import list_rows
from bench.core.files import read_engine_preset
from bench.core.record import NodeLoad, RunRecord
from bench.core.spec import EngineSpec

Runs = RunRecord | list[RunRecord]


def at(engine: str, nodes: int, seconds: float, jitter: float = 0.01, repeats: int = 3, **more: Any) -> list[RunRecord]:
    """Return repeats of a configuration with one rank per node. From one repeat to the next, the step time increases by
    `jitter` seconds. The mean step time of all repeats is `seconds`."""
    around = {name: more.pop(name) for name in ("machine", "attempt", "torch", "evidence") if name in more}
    of = spec(engine, ranks=1, nodes=nodes, **more)
    times = [seconds + jitter * (repeat - (repeats - 1) / 2) for repeat in range(repeats)]
    return [run(of, repeat=n, steps=steps((time,) * 30), **around) for n, time in enumerate(times)]


def found(*records: Runs) -> list[ClaimFinding]:
    return find_findings(results(*(one for some in records for one in (some if isinstance(some, list) else [some]))))


def count_effects(*records: Runs) -> dict[str, tuple[str, dict[str, int]]]:
    """Return the verdict on each claim, and how often each effect (such as `faster`) was found. All runs have one
    machine and one model."""
    of_set = found(*records)
    assert [finding.claim.id for finding in of_set] == ["C1", "C2", "C3"]
    return {finding.claim.id: (finding.verdict, dict(finding.counts)) for finding in of_set}


def pairs(claim: str, *records: Runs) -> list[tuple[str, str, str]]:
    (finding,) = [finding for finding in found(*records) if finding.claim.id == claim]
    return [(*comparison.differ, comparison.effect) for comparison in finding.comparisons]


# -- each claim


def test_first_claim_agrees_if_one_step_is_slower_on_more_nodes() -> None:
    records = [at("zero1", 1, 1.0), at("zero1", 2, 0.6), at("zero1", 4, 0.8)]
    assert count_effects(*records)["C1"] == ("reproduced", {"faster": 2, "slower": 1})
    assert pairs("C1", *records) == [
        ("1 node", "2 nodes", "faster"), ("1 node", "4 nodes", "faster"), ("2 nodes", "4 nodes", "slower"),
    ]  # fmt: skip


def test_first_claim_disagrees_if_steps_are_always_faster_on_more_nodes() -> None:
    records = [at(engine, nodes, 1.0 / nodes) for engine in ("ddp", "zero3") for nodes in (1, 2, 4)]
    assert count_effects(*records)["C1"] == ("contradicted", {"faster": 6})


def test_first_claim_is_open_if_a_difference_is_not_detectable() -> None:
    records = [at("zero1", 1, 1.0), at("zero1", 2, 0.6, 0.05), at("zero1", 4, 0.65, 0.05)]
    assert count_effects(*records)["C1"] == ("cannot be told", {"faster": 2, "no detectable difference": 1})


def test_each_pair_of_stages_is_compared_at_every_node_count() -> None:
    seconds = {"zero0": 1.0, "zero1": 1.1, "zero2": 1.1, "zero3": 1.5}
    records = [at(engine, nodes, s * nodes) for engine, s in seconds.items() for nodes in (1, 2)]
    assert count_effects(*records)["C2"] == ("reproduced", {"slower": 10, "equal within 3 %": 2})
    assert count_effects(*records)["C3"] == ("reproduced", {"slower": 2})
    assert pairs("C3", *records) == [("zero2", "zero3", "slower")] * 2


def test_second_and_third_claims_disagree_if_higher_stages_are_faster() -> None:
    records = [at(f"zero{stage}", 2, 1.0 - 0.2 * stage) for stage in range(4)]
    assert count_effects(*records)["C2"] == ("contradicted", {"faster": 6})
    assert count_effects(*records)["C3"] == ("contradicted", {"faster": 1})


def test_third_claim_must_hold_at_every_node_count() -> None:
    ahead = [at("zero2", 2, 1.0), at("zero3", 2, 2.0)]
    assert count_effects(*ahead)["C3"] == ("reproduced", {"slower": 1})
    even = count_effects(*ahead, at("zero2", 4, 1.0), at("zero3", 4, 1.005))
    assert even["C3"] == ("cannot be told", {"slower": 1, "equal within 3 %": 1})
    behind = count_effects(*ahead, at("zero2", 4, 2.0), at("zero3", 4, 1.0))
    assert behind["C3"] == ("contradicted", {"slower": 1, "faster": 1})


# -- unknown effects


def test_claims_without_comparisons_are_open() -> None:
    records = [at("ddp", 1, 1.0), at("ddp", 2, 2.0)]
    assert count_effects(*records)["C2"] == count_effects(*records)["C3"] == ("cannot be told", {})


def test_effect_of_a_failed_run_is_out_of_memory_or_unknown() -> None:
    out_of_memory = failed("oom", spec("zero1", ranks=1, nodes=4))
    lost_early = failed("node_failure", spec("zero1", ranks=1, nodes=8), torch=None)
    of = count_effects(at("zero1", 1, 1.0), out_of_memory, lost_early)["C1"]
    assert of == ("cannot be told", {"second out of memory": 1, "unknown": 2})


def test_two_repeats_give_a_ratio_without_a_verdict() -> None:
    records = [at("zero1", 1, 1.0), at("zero1", 2, 3.0, repeats=2)]
    assert count_effects(*records)["C1"] == ("cannot be told", {"too few repeats to tell": 1})
    ((one,),) = [finding.comparisons for finding in found(*records) if finding.claim.id == "C1"]
    assert one.tested is not None
    assert one.tested.ratio == pytest.approx(3.0, rel=1e-3)
    assert one.tested.interval is not None


def test_failure_with_a_successful_retry_does_not_count() -> None:
    early = failed("node_failure", spec("zero1", ranks=1, nodes=2), torch=None)
    again = at("zero1", 2, 0.5, attempt=1)
    assert count_effects(early, at("zero1", 1, 1.0), again)["C1"] == ("contradicted", {"faster": 1})


# -- comparable configurations


def test_runs_of_different_machines_are_not_compared() -> None:
    quick, slow = ({"machine": {"name": name}} for name in ("quick_link", "slow_link"))
    records = [at("zero1", 1, 1.0, **quick), at("zero1", 2, 0.5, **quick)]
    records += [at("zero1", 1, 1.0, attempt=1, **slow), at("zero1", 2, 3.0, attempt=1, **slow)]
    first = [finding for finding in found(*records) if finding.claim.id == "C1"]
    assert [(finding.machine, finding.verdict) for finding in first] == [
        ("quick_link", "contradicted"), ("slow_link", "reproduced"),
    ]  # fmt: skip
    ratios = [one.tested.ratio for finding in first for one in finding.comparisons if one.tested]
    assert ratios == pytest.approx([0.5, 3.0], rel=1e-3)


@pytest.mark.parametrize(
    "other",
    [
        {"torch": "2.12.0"},
        {"evidence": "rehearsed"},
        {"seed": 1},
        {"precision": "bf16"},
        {"batch": {"micro": 1}},
        {"measure": {"width": 0.5}},
        {"model": {"name": "tiny", "parameters": 401}},
        {"machine": {"name": "other"}},
    ],
    ids=str,
)
def test_configurations_that_differ_in_another_field_are_not_compared(other: dict[str, Any]) -> None:
    assert found(at("zero1", 1, 1.0), at("zero1", 2, 0.5, **other)) == []
    assert found(at("zero2", 2, 1.0), at("zero3", 2, 0.5, **other)) == []


PRESET_3 = read_engine_preset("zero3")


@pytest.mark.parametrize(
    ("two", "three", "label"),
    [
        (read_engine_preset("zero2"), PRESET_3, "zero3"),
        ({"offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": {"device": "cpu"}}, "zero3"),
        ({}, {"offload_optimizer": {"device": "cpu"}}, None),  # both engines have the option
        ({"reduce_bucket_size": 1}, {"reduce_bucket_size": 2}, None),
        ({}, {"offload_param": {"device": "cpu"}}, None),  # only stage 3 has the option, and its preset leaves it unset
        ({}, {"stage3_prefetch_bucket_size": 1}, "zero3 (stage3_prefetch_bucket_size=1)"),
    ],
    ids=str,
)
def test_stages_are_compared_with_equal_shared_options_and_label_own_options(
    two: dict[str, Any], three: dict[str, Any], label: str | None
) -> None:
    def side(name: str, seconds: float, options: dict[str, Any]) -> list[RunRecord]:
        engine = EngineSpec(name=name, backend="deepspeed", options=dict(options))
        return [
            run(one.spec.model_copy(update={"engine": engine}), repeat=one.circumstance.repeat)
            for one in at(name, 2, seconds)
        ]

    of_set = found(side("zero2", 1.0, two), side("zero3", 2.0, three))
    assert [one.differ[1] for finding in of_set if finding.claim.id == "C3" for one in finding.comparisons] == (
        [label] if label else []
    )


def test_node_counts_are_compared_at_equal_work_per_device_or_per_step() -> None:
    def after(samples: int) -> list[tuple[str, str, str]]:
        first = at("zero1", 1, 1.0, batch={"micro": 2, "global": 8})
        return pairs("C1", first, at("zero1", 2, 0.5, batch={"micro": 2, "global": samples}))

    assert after(8) == after(16) == [("1 node", "2 nodes", "faster")]
    with pytest.raises(ValueError, match="not enough values"):
        after(12)


def test_runs_on_one_node_have_no_findings() -> None:
    assert found(*(run(spec(f"zero{stage}", ranks=ranks)) for stage in range(4) for ranks in (1, 2))) == []
    assert found() == []


def test_model_measured_on_one_node_has_no_findings() -> None:
    other = {"model": {"name": "other"}}
    of_set = found(at("zero1", 1, 1.0), at("zero1", 2, 2.0), at("zero2", 1, 1.0, **other), at("zero3", 1, 2.0, **other))
    assert {finding.model for finding in of_set} == {"tiny"}


# -- layouts


def layout(
    name: str, nodes: int, seconds: float, moved: int = 1, idle: float = 0.1, **parallel: int
) -> list[RunRecord]:
    """Return three repeats at micro-batch 1 and global batch 8. `moved` is the payload of the all-gathers of a step in
    bytes. `idle` is the share of the step time in which a rank is idle."""
    known = {"ddp": "ddp", "fsdp": "fsdp", "lga": "pipeline", "modular": "pipeline", "pipeline": "pipeline"}
    of = spec(
        {"name": name, "backend": known.get(name, "deepspeed")}, micro=1, ranks=1, nodes=nodes, parallel=parallel,
        batch={"micro": 1, "global": 8},
    )  # fmt: skip
    seen = {
        "collectives": {"all_gather": {"calls": 1, "payload_bytes": moved}, "recv": {"calls": 1, "payload_bytes": 7}},
        "outside_collectives_s": (0.01,) * of.world_size,
    }
    return [
        run(
            of, repeat=n, steps=steps((seconds * (1 + n / 100),) * 30), idle_s=(idle * seconds,) * of.world_size, **seen
        )
        for n in range(3)
    ]


def verdicts(*records: Runs) -> dict[str, tuple[str, list[tuple[str, str, str]]]]:
    """Return the verdict of every claim for which configurations could be compared, with the effect of each compared
    pair."""
    return {
        finding.claim.id: (finding.verdict, [(*one.differ, one.effect) for one in finding.comparisons])
        for finding in found(*records)
        if finding.comparisons
    }


def test_layered_accumulation_is_compared_with_sharded_accumulation() -> None:
    found_verdicts = verdicts(
        layout("zero3", 2, 4.0, moved=80), layout("fsdp", 2, 5.0, moved=84), layout("lga", 2, 1.0, moved=10)
    )
    assert found_verdicts["L1"] == ("reproduced", [("zero3", "lga", "less"), ("fsdp", "lga", "less")])
    assert found_verdicts["L2"] == ("reproduced", [("zero3", "lga", "faster"), ("fsdp", "lga", "faster")])
    slower = verdicts(layout("zero3", 2, 1.0, moved=80), layout("lga", 2, 1.5, moved=10))
    assert slower["L1"][0] == "reproduced" and slower["L2"][0] == "contradicted"


def test_busy_run_counts_for_bytes_but_not_for_time() -> None:
    """Background load changes step times, but not the bytes that a step sends. So a busy run counts for a claim about
    bytes, and not for a claim about time."""
    quiet, busy = layout("zero3", 2, 4.0, moved=80), layout("lga", 2, 1.0, moved=10)
    load = (NodeLoad(node=0, others_share=0.3),)
    first = busy[0].observations
    assert first
    busy[0] = busy[0].model_copy(update={"observations": first.model_copy(update={"load": load})})
    found_verdicts = verdicts(quiet, busy)
    assert found_verdicts["L1"] == ("reproduced", [("zero3", "lga", "less")])
    assert found_verdicts["L2"] == ("cannot be told", [("zero3", "lga", "too few repeats to tell")])


def test_modular_pipeline_is_compared_by_idle_time_with_a_plain_pipeline() -> None:
    plain, modular = layout("pipeline", 2, 1.0, idle=0.3, pipeline=2), layout("modular", 2, 9.0, idle=0.1, pipeline=2)
    more = layout("pipeline", 4, 1.0, idle=0.3, pipeline=4)
    assert verdicts(plain, modular, more)["L3"] == (
        "reproduced", [("pipeline 2", "modular, pipeline 2", "less")],
    )  # fmt: skip


def test_pipelines_of_different_degree_are_compared_by_idle_time() -> None:
    two, four = layout("pipeline", 2, 1.0, idle=0.1, pipeline=2), layout("pipeline", 4, 0.6, idle=0.3, pipeline=4)
    fewer = layout("pipeline", 4, 0.6, idle=0.2, pipeline=2)  # data parallelism over two copies of the model
    assert verdicts(two, four, fewer)["F2"] == ("reproduced", [("pipeline 2", "pipeline 4", "more")])


def test_tensor_parallelism_across_nodes_is_compared_with_lower_degrees_and_ddp() -> None:
    records = [layout("ddp", 4, 1.0), layout("pipeline", 4, 2.0, tensor=2), layout("pipeline", 4, 3.0, tensor=4)]
    assert verdicts(*records)["F1"] == (
        "reproduced",
        [("ddp", "tensor 2", "slower"), ("ddp", "tensor 4", "slower"), ("tensor 2", "tensor 4", "slower")],
    )


# -- the table


def test_table_of_claims_has_both_sides_of_every_comparison() -> None:
    first, second = at("zero2", 2, 1.0, 0.02), at("zero3", 2, 2.0, 0.04)
    rows = list_rows(as_table(found(first, second)))
    assert [row["claim"] for row in rows] == ["C2", "C3"]
    row = rows[1]
    assert (row["before"], row["after"], row["effect"]) == ("zero2", "zero3", "slower")
    assert row["ratio"] == pytest.approx(2.0)
    assert row["ratio_low"] < 2 < row["ratio_high"]
    assert row["ratio_kind"] == "between repeats"
    assert [row[f"before_{name}"] for name in ("config_id", "n", "step_s", "step_s_low", "step_s_high")] == [
        first[0].config_id, 3, 1.0, 0.98, 1.02,
    ]  # fmt: skip
    assert [row[f"after_{name}"] for name in ("config_id", "n", "step_s", "step_s_low", "step_s_high")] == [
        second[0].config_id, 3, 2.0, 1.96, 2.04,
    ]  # fmt: skip
    assert row["before_interval_kind"] == "range of repeats"
