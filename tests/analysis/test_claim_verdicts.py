"""Tests of the verdicts on claims of published papers. They check which sets of runs can test a claim. An analogue,
which is a set of runs that differs from the paper's runs in model, device or node counts, never tests a claim."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from records import failed, memory, results, run, save, spec, steps

from analysis.claims import sources
from analysis.claims.sources import CLAIMS
from analysis.claims.verdicts import Entry, judge
from bench.cli import main
from bench.config import compose
from bench.core.record import RunRecord, Steps
from bench.core.spec import config_id

XXL, BASE = ("mt5_xxl", 12_921_057_280), ("mt5_base", 582_401_280)
ON_GPU = 2**30
DAY, NEXT_DAY = "2026-11-24T09:00:00+00:00", "2026-11-25T09:00:00+00:00"


def window(seconds: float) -> Steps:
    """Return steps of `seconds` each. There are so many steps that the run does not get the quality flag `short`."""
    return steps((seconds,) * max(30, math.ceil(61 / seconds)))


def at(
    engine: str | dict[str, Any], nodes: int, seconds: float, model: tuple[str, int] = XXL, **more: Any
) -> list[RunRecord]:
    """Return independent repeats on GPUs. Their step times differ by 1 %. `model` is the name of the model and its
    number of parameters."""
    name, count = model
    reserved = more.pop("reserved", ON_GPU)
    repeats, batch = more.pop("repeats", 3), {"micro": more.pop("micro", 2), "global": more.pop("samples", 16)}
    apart, started_at, place = (
        more.pop("apart", 0.01),
        more.pop("started_at", DAY),
        more.pop("machine", {"name": "cpu"}),
    )
    of = spec(engine, ranks=1, nodes=nodes, batch=batch, model={"name": name, "parameters": count}, **more)
    return [
        run(
            of,
            repeat=repeat,
            parameters=count,
            steps=window(seconds * (1 + apart * repeat)),
            started_at=started_at,
            machine=place,
            memory=memory(nodes, peak_reserved_bytes=reserved),
            outside_collectives_s=(0.01,) * nodes,
        )
        for repeat in range(repeats)
    ]


def stages(two: float, three: float, nodes: tuple[int, ...] = (1, 2, 4), **more: Any) -> list[RunRecord]:
    """Return runs of ZeRO-2 and ZeRO-3 on several node counts.

    A step takes `two` or `three` seconds on one node, and 1/n of this time on n nodes.
    """
    sides = (("zero2", two), ("zero3", three))
    return [record for n in nodes for engine, s in sides for record in at(engine, n, s / n, **more)]


def entries(*records: RunRecord) -> dict[str, Entry]:
    return {entry.claim: entry for entry in judge(results(*records))}


# -- what tests a claim


def test_the_studys_model_on_gpus_and_several_node_counts_tests_its_claims() -> None:
    of = entries(*stages(1.0, 2.0))
    assert [of[claim].verdict for claim in ("C1", "C2", "C3")] == ["contradicted", "reproduced", "reproduced"]
    assert "3 slower" in of["C3"].why


def test_stage_3_faster_at_one_node_count_contradicts_the_third_claim() -> None:
    records = [*stages(1.0, 2.0), *at("zero2", 8, 1.0), *at("zero3", 8, 0.5)]
    assert entries(*records)["C3"].verdict == "contradicted"


def test_first_claim_requires_equal_work_per_step() -> None:
    slower = [*at("zero2", 1, 1.0), *at("zero2", 2, 2.0)]
    assert entries(*slower)["C1"].verdict == "reproduced"
    assert entries(*slower)["C1"].why.endswith("only the effect was tested, not its cause")
    grown = [*at("zero2", 1, 1.0, samples=8), *at("zero2", 2, 2.0, samples=16)]
    assert entries(*grown)["C1"].verdict == "not testable here"
    assert "the work per step grew" in entries(*grown)["C1"].why


@pytest.mark.parametrize(
    ("violation", "why"),
    [
        ({"model": ("tiny", 2_116_352)}, "tiny (2.12M parameters) is no mT5 of 580M to 13B"),
        ({"model": ("mt5_xxl", 12_921_057_281)}, "is no mT5 of 580M to 13B"),
        ({"model": ("mt5_small", 300_176_768)}, "is no mT5 of 580M to 13B"),
        ({"model": ("t5_11b", 11_307_321_344)}, "is no mT5 of 580M to 13B"),
        ({"model": BASE}, "mt5_base is not mT5-XXL"),
        ({"reserved": None}, "not made on GPUs"),
        ({"nodes": (2,)}, "only one node count was measured"),
    ],
    ids=str,
)
def test_set_that_violates_one_condition_is_an_analogue(violation: Any, why: str) -> None:
    entry = entries(*stages(1.0, 2.0, **violation))["C3"]
    assert entry.verdict == "not testable here"
    assert why in entry.why
    assert "(as an analogue: " in entry.why and ": reproduced)" in entry.why


@pytest.mark.parametrize(("on_eight", "verdict"), [(0.3, "contradicted"), (0.9, "reproduced")])
def test_first_claim_is_testable_with_the_study_named_paper(on_eight: float, verdict: str) -> None:
    """The claim is that more nodes do not consistently increase the steps per second. A step of 256 samples takes 1.5 s
    on 1 node, 1.0 s on 2 nodes and 0.5 s on 4 nodes. If it takes longer on 8 nodes (`on_eight` seconds) than on 4, the
    claim is reproduced. If it takes less time, the claim is contradicted."""
    points = [point.composed.spec for point in compose.compose_points(compose.read_study("paper"), []).points]
    times = {1: 1.5, 2: 1.0, 4: 0.5, 8: on_eight}
    records = [
        run(
            of,
            repeat=repeat,
            parameters=of.model.parameters,
            steps=window((times[of.nodes] if of.accumulation > 1 else 1.0) * (1 + 0.01 * repeat)),
            memory=memory(of.world_size, peak_reserved_bytes=ON_GPU),
            outside_collectives_s=(0.01,) * of.world_size,
        )
        for of in points
        if (of.model.name, of.engine.name) == ("mt5_base", "zero1")
        for repeat in range(3)
    ]
    assert entries(*records)["C1"].verdict == verdict


def test_two_repeats_per_side_are_an_analogue() -> None:
    entry = entries(*stages(1.0, 2.0, repeats=2))["C3"]
    assert entry.verdict == "not testable here"
    assert "fewer than 3 independent repeats of each configuration" in entry.why
    assert "6" not in entry.measured and "3 too few repeats to tell" in entry.measured


def with_options(records: list[RunRecord], **options: Any) -> list[RunRecord]:
    """Return copies of the runs in which the engine has the given options instead of its own options."""
    engine = records[0].spec.engine.model_copy(update={"options": options})
    of = records[0].spec.model_copy(update={"engine": engine})
    return [one.model_copy(update={"spec": of, "config_id": config_id(of)}) for one in records]


@pytest.mark.parametrize(
    ("option", "why"),
    [
        (
            {"offload_optimizer": {"device": "cpu"}},
            "no two measured configurations differ only in the setting that the claim is about",
        ),
        ({"stage3_prefetch_bucket_size": 1}, "an option that only one of the two stages has differs from its preset"),
    ],
    ids=str,
)
def test_stage_with_an_option_not_in_the_other_stage_tests_no_claim(option: dict[str, Any], why: str) -> None:
    slow = [record for n in (1, 2, 4) for record in with_options(at("zero3", n, 2.0 / n), **option)]
    of = entries(*(record for n in (1, 2, 4) for record in at("zero2", n, 1.0 / n)), *slow)
    assert [of[claim].verdict for claim in ("C2", "C3")] == ["not testable here"] * 2
    assert why in of["C3"].why
    assert "fewer than 3" not in of["C3"].why, "it has three"


def test_reason_counts_comparisons_left_out_for_failures() -> None:
    of = entries(*stages(1.0, 2.0), failed("hang", at("zero2", 8, 1.0)[0].spec), *at("zero3", 8, 1.0))
    assert of["C3"].verdict == "reproduced"
    assert of["C3"].why.endswith("; excluded comparisons: 1 because a configuration has no measured value (hang)")


def test_out_of_memory_of_one_stage_counts_in_the_verdict() -> None:
    of = entries(*stages(1.0, 2.0), failed("oom", at("zero2", 8, 1.0)[0].spec), *at("zero3", 8, 1.0))
    assert of["C3"].verdict == "contradicted"
    assert "3 slower, 1 first out of memory (4 comparisons)" in of["C3"].why


@pytest.mark.parametrize(("at_four", "verdict"), [(0.8, "contradicted"), (2.4, "reproduced")])
def test_speedup_by_a_micro_batch_that_fits_only_one_stage_counts(at_four: float, verdict: str) -> None:
    """ZeRO-2 takes 2 s at micro-batch 2 and runs out of memory at micro-batch 4. ZeRO-3 fits into memory at micro-batch
    4, and takes `at_four` = 0.8 s or 2.4 s for the same number of samples."""
    records = [record for n in (1, 2) for record in stages(2.0, 2.2, nodes=(n,))]
    for n in (1, 2):
        records += at("zero3", n, at_four / n, micro=4)
        records += [failed("oom", one.spec, repeat=k) for k, one in enumerate(at("zero2", n, 1.0, micro=4))]
    assert entries(*records)["C3"].verdict == verdict


def test_all_reasons_for_which_a_comparison_tests_no_claim_are_given() -> None:
    grown = at("zero2", 2, 2.0, samples=16, started_at=NEXT_DAY)
    why = entries(*at("zero2", 1, 1.0, samples=8), *grown, failed("hang", grown[0].spec, repeat=9))["C1"].why
    assert "the work per step grew with the nodes" in why
    assert "some repeats of a configuration failed" in why
    assert "one configuration ran before the other" in why


def test_sides_that_ran_on_different_days_test_no_claim() -> None:
    """ZeRO-2 and ZeRO-3 are truly equally fast, but ZeRO-3 ran on a day when the machine was 6 % slower."""
    days = [one for n in (1, 2, 4) for one in at("zero2", n, 1.0 / n)]
    days += [one for n in (1, 2, 4) for one in at("zero3", n, 1.06 / n, started_at=NEXT_DAY)]
    entry = entries(*days)["C3"]
    assert (entry.verdict, "one configuration ran before the other" in entry.why) == ("not testable here", True)
    unknown = entries(*stages(1.0, 2.0, started_at=""))["C3"]
    assert (unknown.verdict, "the start time of a configuration is unknown" in unknown.why) == (
        "not testable here",
        True,
    )


B22 = ("gpt_22b", 22_083_710_976)
FAST, SLOW = ({"name": name, "inter_node_bytes_per_s": rate} for name, rate in (("fast", 4e11), ("slow", 1e10)))


def layered(machine: dict[str, Any], sharded: float, layered_s: float) -> list[RunRecord]:
    """Return runs of two ways to accumulate gradients, on two nodes. With `fsdp` the states are sharded, and a step
    takes `sharded` seconds. With `lga` gradients are accumulated layer by layer, and a step takes `layered_s`
    seconds."""
    kinds = (("fsdp", "fsdp", sharded), ("lga", "pipeline", layered_s))
    return [
        record
        for name, backend, seconds in kinds
        for record in at({"name": name, "backend": backend}, 2, seconds, model=B22, machine=machine)
    ]


def test_claim_about_a_slow_network_requires_two_networks() -> None:
    alone = entries(*layered(FAST, 1.2, 1.0))["L2"]
    assert alone.verdict == "not testable here"
    assert "the same two configurations were not compared on a faster network" in alone.why
    both = [one for one in judge(results(*layered(FAST, 1.0, 1.2), *layered(SLOW, 3.0, 1.5))) if one.claim == "L2"]
    assert [(one.machine, one.verdict) for one in both] == [("fast", "not testable here"), ("slow", "reproduced")]


@pytest.mark.parametrize("on_two_nodes", ["short", "straggler", "mixed"])
def test_flagged_runs_and_failed_repeats_are_excluded_and_counted(on_two_nodes: str) -> None:
    records = stages(1.0, 2.0)
    affected = [one for one in records if (one.spec.engine.name, one.spec.nodes) == ("zero3", 2)]
    if on_two_nodes == "short":
        more = [run(one.spec, repeat=0, steps=steps((1.0,) * 5), parameters=XXL[1]) for one in affected[:1]]
    elif on_two_nodes == "straggler":
        more = [run(affected[0].spec, repeat=9, steps=window(1.0), outside_collectives_s=(0.1, 0.9), parameters=XXL[1])]
    else:
        more = [failed("hang", affected[0].spec, repeat=9)]
    memories = memory(2, peak_reserved_bytes=ON_GPU)
    more = [
        one.model_copy(update={"observations": one.observations.model_copy(update={"memory": memories})})
        if one.observations
        else one
        for one in more
    ]
    why = entries(*records, *more)["C3"].why
    printed = (
        "some repeats of a configuration failed"
        if on_two_nodes == "mixed"
        else f"a configuration has the flag {on_two_nodes}"
    )
    assert f"excluded comparisons: 1 because {printed}" in why
    assert "2 slower (2 comparisons)" in why


@pytest.mark.parametrize(
    ("three", "second", "third"),
    [
        ((1.02, 1.02, 1.02), "cannot be told", "reproduced"),  # ZeRO-3 is slower by 2 % at every node count
        ((1.10, 1.10, 1.02), "reproduced", "reproduced"),
        ((0.98, 0.98, 0.98), "contradicted", "cannot be told"),  # ZeRO-3 is faster by 2 % at every node count
        ((0.95, 0.95, 1.00), "cannot be told", "contradicted"),
        ((1.10, 1.10, 1.00), "reproduced", "cannot be told"),
    ],
)
def test_verdicts_count_detected_differences_below_three_percent_but_not_equality(
    three: tuple[float, ...], second: str, third: str
) -> None:
    """`three` has the step time of ZeRO-3 divided by the step time of ZeRO-2, on 1, 2 and 4 nodes. `second` and `third`
    are the expected verdicts on the claims C2 and C3. Repeats differ by only 0.01 %, so a difference of 2 % is
    detected.

    If ZeRO-3 is slower at every node count, or faster at every node count, differences below 3 % count. As a
    counterexample at a single node count, only a difference of 3 % or more counts. A node count without a detected
    difference decides nothing: the two stages do not count as equal.
    """
    of = entries(
        *(one for n, by in zip((1, 2, 4), three, strict=True) for one in stages(1.0, by, nodes=(n,), apart=0.0001))
    )
    assert [of[claim].verdict for claim in ("C2", "C3")] == [second, third]
    for claim in ("C2", "C3"):
        assert ("differences below 3 % do not decide" in of[claim].why) is (of[claim].verdict == "cannot be told")
    assert ("3 slower by less than 3 %" in of["C3"].why) is (three == (1.02, 1.02, 1.02))


def test_equal_times_at_the_last_doubling_leave_the_first_claim_open() -> None:
    times = {1: 8.0, 2: 4.1, 4: 2.1, 8: 1.1, 16: 1.1}
    records = [one for n, s in times.items() for one in at("zero2", n, s, samples=32, apart=0.001)]
    entry = entries(*records)["C1"]
    assert entry.verdict == "cannot be told"
    assert "differences below 3 % do not decide" in entry.why and "9 faster, 1 equal within 3 %" in entry.why


def test_weak_scaling_with_three_repeats_has_enough_repeats() -> None:
    grown = [*at("zero2", 1, 1.0, samples=8), *at("zero2", 2, 2.0, samples=16)]
    assert "fewer than" not in entries(*grown)["C1"].why


def test_smaller_models_test_only_claims_about_all_models() -> None:
    of = entries(*stages(1.0, 2.0, model=BASE))
    assert (of["C2"].verdict, of["C3"].verdict) == ("reproduced", "not testable here")


def test_difference_within_the_noise_of_repeats_gives_no_verdict() -> None:
    noisy = [
        record.model_copy(update={"observations": record.observations.model_copy(update={"steps": window(s)})})
        for (engine, nodes), seconds in {("zero2", 1): (1, 2, 3), ("zero3", 1): (1, 2, 4), ("zero2", 2): (1, 2, 3),
                                         ("zero3", 2): (1, 2, 4)}.items()
        for record, s in zip(at(engine, nodes, 1.0), seconds, strict=True)
        if record.observations
    ]  # fmt: skip
    entry = entries(*noisy)["C3"]
    assert (entry.verdict, "2 no detectable difference" in entry.why) == ("cannot be told", True)


def test_each_machine_has_its_own_entry() -> None:
    moved = [
        record.model_copy(update={"circumstance": record.circumstance.model_copy(update={"machine": machine})})
        for record in stages(1.0, 2.0)
        for machine in (record.circumstance.machine, record.circumstance.machine.model_copy(update={"name": "b"}))
    ]
    third = [entry for entry in judge(results(*moved)) if entry.claim == "C3"]
    assert [(entry.machine, entry.verdict) for entry in third] == [("cpu", "reproduced"), ("b", "reproduced")]


# -- entries of every set


def test_every_claim_has_an_entry_even_without_comparisons() -> None:
    of = entries(run(spec("zero1")))
    assert list(of) == ["C1", "C2", "C3", "C4", "C5", "C6", "F1", "F2", "L1", "L2", "L3"]
    assert {entry.verdict for entry in of.values()} == {"not testable here"}
    assert all(entry.why for entry in of.values())


def test_claims_about_settings_list_the_covered_settings() -> None:
    of = entries(run(spec("zero1", micro=4)), *at("zero2", 2, 1.0))
    assert of["C4"].measured == (
        "tiny (0.000402M parameters), mt5_xxl (12,900M parameters); mT5 models from 580M to 13B among them: mt5_xxl"
    )
    assert "micro-batch 2, 4" in of["C5"].measured
    assert of["C6"].measured == "data synthetic; loader workers 0"


def test_texts_of_claims_equal_the_published_table() -> None:
    rows = {row["id"]: row["claim"] for row in sources.read_published("claims").rows}
    weighed = {claim.id: claim.text for claims in CLAIMS.values() for claim in claims}
    assert weighed == {name: text for name, text in rows.items() if name not in ("C4", "C5", "C6")}


@pytest.mark.parametrize("name", sources.list_published())
def test_published_tables_name_their_source_and_have_no_missing_cells(name: str) -> None:
    found = sources.read_published(name)
    assert found.source and found.rows
    assert all(None not in row and None not in row.values() for row in found.rows)


# -- the command


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return save(tmp_path, *stages(1.0, 2.0, model=("tiny", 7)))


@pytest.mark.parametrize("form", ["csv", "json"])
def test_csv_and_json_contain_every_verdict(form: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", str(runs), "--format", form]) == 0
    text = capsys.readouterr().out
    rows = json.loads(text) if form == "json" else list(csv.DictReader(io.StringIO(text)))
    assert [row["claim"] for row in rows] == ["C1", "C2", "C3", "C4", "C5", "C6", "F1", "F2", "L1", "L2", "L3"]
    assert {row["verdict"] for row in rows} == {"not testable here"}


def test_text_and_markdown_begin_with_the_rule(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("text", "md"):
        main(["claims", str(runs), "--format", form])
        printed = capsys.readouterr().out
        assert printed.startswith("Rule for a test of a claim of arXiv 2310.05350. The model is an mT5")
        words = " ".join(printed.split())
        assert words.count("not testable here") == 12, "the verdict of 11 claims, and the explanation of verdicts"


def test_rule_in_text_is_wrapped_and_claims_keep_one_line_per_property(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first paragraph of the output is the rule by which claims are judged. It is wrapped at 100 columns. Each
    property of a claim stays on one line, because `grep` finds a phrase only within a line."""
    main(["claims", str(runs)])
    rule, first, *_ = capsys.readouterr().out.split("\n\n")
    assert len(rule.splitlines()) > 5 and max(map(len, rule.splitlines())) <= 100
    assert [line.split()[0] for line in first.splitlines()[1:]] == ["machine", "measured", "verdict", "reason"]


def test_a_folder_without_records_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", str(tmp_path)]) == 2
    assert "contains no record" in capsys.readouterr().err
