"""Tests of the comparison of two sets of runs, A and B: which configurations of A and B form pairs, and the verdict on
each pair."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from comparing import against, only, timed
from records import MIB, failed, memory, run, spec

from analysis.compare.fields import FieldDifference, name_across
from analysis.stats.compare import TOO_FEW
from bench.core.errors import UserError
from bench.core.record import Collective, RunRecord


@pytest.mark.parametrize(
    ("other", "named", "across"),
    [
        ({"of": spec(measure={"min_steps": 12})}, "measure.min_steps 30 → 12", "measure"),
        ({"torch": "2.14.0"}, "versions.torch 2.13.0 → 2.14.0", "versions.torch"),
        ({"machine": {"name": "other"}}, "machine cpu → other", "machine"),
        ({"evidence": "rehearsed"}, "evidence measured → rehearsed", "evidence"),
    ],
)
def test_different_protocols_versions_and_machines_are_compared_only_with_across(
    tmp_path: Path, other: dict[str, Any], named: str, across: str
) -> None:
    refused = only(against(tmp_path, [run()], [run(**other)]))
    assert (refused.status, refused.why, refused.comparison) == ("not comparable", named, None)
    named_option = across if across != "measure" else "measure.min_steps"
    assert name_across(refused.differ) == named_option
    assert only(against(tmp_path, [run()], [run(**other)], across)).comparison is not None


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        (["device", "machine"], "machine"),
        (["versions.torch", "versions.cuda", "machine"], "versions,machine"),
        (["measure.min_s", "measure.max_s"], "measure"),
        (["machine", "versions.torch", "machine"], "machine,versions.torch"),
    ],
)
def test_suggested_across_option_covers_all_differences(fields: list[str], option: str) -> None:
    assert name_across([FieldDifference(field, "a", "b") for field in fields]) == option


def test_reason_names_the_differences_not_covered_by_across(tmp_path: Path) -> None:
    ours, theirs = run(), run(torch="2.14.0", machine={"name": "other"})
    assert only(against(tmp_path, [ours], [theirs], "machine")).why == "versions.torch 2.13.0 → 2.14.0"


def test_equal_environments_are_paired_before_different_ones(tmp_path: Path) -> None:
    compared = against(tmp_path, [run(torch="2.13.0")], [run(torch="2.14.0", repeat=1), run(torch="2.13.0")])
    assert [line.status for _, line in compared.lines] == ["too few repeats to tell", "only in B"]


def test_configurations_missing_from_one_side_are_listed(tmp_path: Path) -> None:
    compared = against(tmp_path, [run(spec(micro=2))], [run(spec(micro=4))])
    assert [(name, line.status) for name, line in compared.lines] == [
        ("tiny · 2 ranks · zero1 · micro 2", "only in A"),
        ("tiny · 2 ranks · zero1 · micro 4", "only in B"),
    ]
    assert compared.note == "batch.micro 2 → 4"


def test_across_compares_two_engines_of_one_set(tmp_path: Path) -> None:
    both = [run(spec("zero1")), run(spec("zero2"))]
    [(name, line)] = against(tmp_path, both, both, "engine=zero1:zero2").lines
    assert name == "tiny · 2 ranks · zero1 → zero2 · micro 2"
    assert line.comparison


@pytest.mark.parametrize(
    ("across", "message"),
    [
        ("engine", "--across engine: A has the same point with engine=zero1 and with engine=zero2; choose a value for "
                   "A and for B, e.g. --across engine=zero1:zero2"),
        ("engine=zero1:zero3", "--across engine=zero1:zero3: B has no configuration with engine=zero3; choose from "
                               "zero1, zero2"),
        ("contain", "--across contain: no such field; did you mean container?"),
        ("engin", "--across engin: no such field; did you mean engine?"),
        ("versions.troch", "--across versions.troch: no such field; did you mean versions.torch?"),
        ("engine=ddp", "--across engine=ddp: must have the form FIELD=A:B; write the values of the field in A and in "
                       "B, e.g. engine=this:that"),
    ],
)  # fmt: skip
def test_invalid_across_is_refused_in_one_line(tmp_path: Path, across: str, message: str) -> None:
    both = [run(spec("zero1")), run(spec("zero2"))]
    with pytest.raises(UserError) as error:
        against(tmp_path, both, both, across)
    assert str(error.value) == message.replace("choose from zero1, zero2", error.value.remedy)


def test_failure_with_unknown_environment_is_compared_with_any_environment(tmp_path: Path) -> None:
    line = only(against(tmp_path, [run()], [failed("error", torch=None)]))
    assert (line.status, line.why) == ("failed in B", "error: why")


def test_names_of_configurations_contain_the_fields_that_differ(tmp_path: Path) -> None:
    both = [run(spec(precision="fp32")), run(spec(precision="bf16")), run(spec("ddp"))]
    assert [name for name, _ in against(tmp_path, both, both).lines] == [
        "tiny · 2 ranks · zero1 · micro 2 · precision=bf16",
        "tiny · 2 ranks · ddp · micro 2",
        "tiny · 2 ranks · zero1 · micro 2 · precision=fp32",
    ]


# verdicts


def test_slower_pair_has_a_ratio_and_its_t_interval(tmp_path: Path) -> None:
    line = only(against(tmp_path, timed(0.100), timed(0.110)))
    assert (line.status, line.runs) == ("slower", (5, 5))
    assert line.comparison and line.comparison.interval
    assert line.comparison.ratio == pytest.approx(1.1)
    # Logarithms have a standard deviation of 0.0079 on each side. Student's quantile for 8 degrees of freedom is 2.306,
    # so the margin is 2.306 × 0.0079 × √(2/5).
    assert line.comparison.interval[:2] == pytest.approx((1.1 * 0.98854, 1.1 * 1.01160), rel=1e-4)


def test_pair_is_faster_if_b_has_shorter_steps(tmp_path: Path) -> None:
    assert only(against(tmp_path, timed(0.110), timed(0.100))).status == "faster"


def test_set_compared_with_itself_has_no_difference(tmp_path: Path) -> None:
    line = only(against(tmp_path, timed(0.100), timed(0.100)))
    assert (line.status, line.changes) == ("equal within 3 %", ())


def test_shared_allocations_are_compared_pairwise(tmp_path: Path) -> None:
    nodes, noisy = (1.0, 1.3, 0.8, 1.1), (1.0, 1.302, 0.799, 1.1)
    ours, theirs = timed(0.100, nodes, (1, 2, 3, 4)), timed(0.105, noisy, (1, 2, 3, 4))
    assert only(against(tmp_path, ours, theirs)).status == "slower"
    elsewhere = timed(0.105, noisy, (5, 6, 7, 8))
    assert only(against(tmp_path, ours, elsewhere)).status == "no detectable difference"


def test_allocations_without_both_sides_are_excluded(tmp_path: Path) -> None:
    """A has runs in four allocations, and B in three of them. Only the three shared allocations are compared."""
    ours = timed(0.100, (1.0, 1.3, 0.8, 9.0), (1, 2, 3, 4))
    theirs = timed(0.105, (1.0, 1.302, 0.799), (1, 2, 3))
    line = only(against(tmp_path, ours, theirs))
    assert (line.status, line.runs) == ("slower", (3, 3))
    assert line.comparison == only(against(tmp_path, ours[:3], theirs)).comparison


def test_paired_runs_of_one_job_are_compared_by_round(tmp_path: Path) -> None:
    drift, noisy = (1.0, 1.3, 0.8, 1.1), (1.0, 1.302, 0.799, 1.1)
    ours, theirs = timed(0.100, drift, (1,) * 4), timed(0.105, noisy, (1,) * 4)
    line = only(against(tmp_path, ours, theirs, paired=True))
    assert (line.status, line.runs) == ("slower", (4, 4))
    assert only(against(tmp_path, ours, theirs)).runs == (1, 1), "runs of one job count once"


@pytest.mark.parametrize(("first", "status"), [(5, "not comparable"), (3, TOO_FEW)])
def test_paired_comparison_uses_only_common_repeats(tmp_path: Path, first: int, status: str) -> None:
    """A has repeats 0 to 4; B is slower, and has five repeats from `first` on: none or two in common."""
    theirs = [one.model_copy(update={"circumstance": one.circumstance.model_copy(update={"repeat": first + number})})
              for number, one in enumerate(timed(0.2))]  # fmt: skip
    assert only(against(tmp_path, timed(0.1), theirs, paired=True)).status == status


def test_paired_runs_that_did_not_alternate_are_reported(tmp_path: Path) -> None:
    def start(records: list[RunRecord], minutes: Sequence[int]) -> list[RunRecord]:
        at = [f"2026-11-24T09:{minute:02}:00+00:00" for minute in minutes]
        return [
            one.model_copy(update={"circumstance": one.circumstance.model_copy(update={"started_at": when})})
            for one, when in zip(records, at, strict=True)
        ]

    ours, theirs = timed(0.1, (1.0,) * 3), timed(0.1, (1.1,) * 3)
    for a, b, alternated in (((0, 3, 4), (1, 2, 5), True), ((0, 1, 2), (3, 4, 5), False)):
        sides = start(ours, a), start(theirs, b)
        why = only(against(tmp_path, *sides, paired=True)).why
        assert why == ("" if alternated else "A and B did not alternate, so --paired compares runs far apart")
        assert not only(against(tmp_path, *sides)).why


def test_verdicts_are_corrected_for_the_number_of_pairs(tmp_path: Path) -> None:
    ratio = 0.1008  # alone p = 0.03
    alone = only(against(tmp_path, timed(0.1, (0.995, 1.0, 1.005)), timed(ratio * 1.005, (0.995, 1.0, 1.005))))
    many = [spec(micro=2**n) for n in range(1, 8)]
    ours = [record for of in many for record in timed(0.1, (0.995, 1.0, 1.005), of=of)]
    theirs = [
        record for of in many
        for record in timed(ratio * 1.005 if of.batch.micro == 2 else 0.1, (0.995, 1.0, 1.005), of=of)
    ]  # fmt: skip
    first, *_ = [line for _, line in against(tmp_path, ours, theirs).lines]
    assert alone.comparison and first.comparison and alone.comparison.p_value == first.comparison.p_value < 0.05
    assert (alone.status, first.status) == ("slower", "equal within 3 %")


@pytest.mark.parametrize(
    ("ours", "theirs", "status", "why"),
    [
        (run(), failed("oom", reason="rank 1"), "failed in B", "oom: rank 1"),
        (failed("oom", reason="rank 1"), run(), "failed in A", "oom: rank 1"),
        (failed("oom"), failed("error"), "failed in both", "A oom: why; B error: why"),
        (run(), run(drill="rank=1 step=3 action=exit"), "failed in B", "all runs are drills, with an injected fault"),
    ],
)
def test_failure_is_the_status_of_its_pair(
    tmp_path: Path, ours: RunRecord, theirs: RunRecord, status: str, why: str
) -> None:
    line = only(against(tmp_path, [ours], [theirs]))
    assert (line.status, line.why, line.comparison) == (status, why, None)


def test_changes_list_parameters_collectives_and_memory(tmp_path: Path) -> None:
    gathered = {"all_gather": Collective(calls=3, payload_bytes=800)}
    more = gathered | {"reduce": Collective(calls=1, payload_bytes=8)}
    before, after = run(collectives=gathered), run(parameters=410, memory=memory(2, peak=12 * MIB), collectives=more)
    assert {change.name: (change.a, change.b) for change in only(against(tmp_path, [before], [after])).changes} == {
        "parameters": ((402, 402), (410, 410)),
        "reduce_calls": ((0, 0), (1, 1)),
        "reduce_payload_bytes": ((0, 0), (8, 8)),
        "peak_allocated_bytes": ((11 * MIB, 11 * MIB), (13 * MIB, 13 * MIB)),
    }


def test_value_missing_on_one_side_is_no_change(tmp_path: Path) -> None:
    counted = run(collectives={"all_gather": Collective(calls=3, payload_bytes=800)})
    assert only(against(tmp_path, [counted], [run(memory=())])).changes == ()
