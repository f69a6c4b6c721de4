"""Verdicts on claims: which sets of runs test a claim of the study, what they say of it; an analogue never does."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from records import failed, memory, results, run, save, spec, steps

from analysis.claims import published
from analysis.claims.sources import CLAIMS
from analysis.claims.verdicts import Entry, judge
from bench.cli import main
from bench.config import compose
from bench.record import RunRecord, Steps
from bench.spec import config_id

XXL, BASE = ("mt5_xxl", 12_921_057_280), ("mt5_base", 582_401_280)
ON_GPU = 2**30


def window(seconds: float) -> Steps:
    """Steps of so many seconds, enough of them for a window that is not short."""
    return steps((seconds,) * max(30, math.ceil(21 / seconds)))


def at(engine: str, nodes: int, seconds: float, model: tuple[str, int] = XXL, **more: Any) -> list[RunRecord]:
    """Three independent repeats, on GPUs, of a model that counts so many parameters; 1 % apart from each other."""
    name, count = model
    reserved = more.pop("reserved", ON_GPU)
    repeats, batch = more.pop("repeats", 3), {"micro": 2, "global": more.pop("samples", 16)}
    of = spec(engine, ranks=1, nodes=nodes, batch=batch, model={"name": name, "parameters": count}, **more)
    return [
        run(
            of,
            repeat=repeat,
            parameters=count,
            steps=window(seconds * (1 + 0.01 * repeat)),
            memory=memory(nodes, peak_reserved_bytes=reserved),
            outside_collectives_s=(0.01,) * nodes,
        )
        for repeat in range(repeats)
    ]


def stages(two: float, three: float, nodes: tuple[int, ...] = (1, 2, 4), **more: Any) -> list[RunRecord]:
    """ZeRO-2 and ZeRO-3 in so many seconds per step on one node, and in proportion less on more."""
    sides = (("zero2", two), ("zero3", three))
    return [record for n in nodes for engine, s in sides for record in at(engine, n, s / n, **more)]


def entries(*records: RunRecord) -> dict[str, Entry]:
    return {entry.claim: entry for entry in judge(results(*records))}


# -- what tests a claim


def test_the_studys_own_model_on_gpus_and_several_node_counts_tests_its_claims() -> None:
    of = entries(*stages(1.0, 2.0))
    assert [of[claim].verdict for claim in ("C1", "C2", "C3")] == ["contradicted", "reproduced", "reproduced"]
    assert "3 slower" in of["C3"].why


def test_one_node_count_at_which_stage_three_is_faster_contradicts_the_third_claim() -> None:
    records = [*stages(1.0, 2.0), *at("zero2", 8, 1.0), *at("zero3", 8, 0.5)]
    assert entries(*records)["C3"].verdict == "contradicted"


def test_the_first_claim_is_of_steps_that_do_the_same_work() -> None:
    slower = [*at("zero2", 1, 1.0), *at("zero2", 2, 2.0)]
    assert entries(*slower)["C1"].verdict == "reproduced"
    assert entries(*slower)["C1"].why.endswith("by its effect, not its cause")
    grown = [*at("zero2", 1, 1.0, samples=8), *at("zero2", 2, 2.0, samples=16)]
    assert entries(*grown)["C1"].verdict == "not testable here"
    assert "the work per step grew" in entries(*grown)["C1"].why


@pytest.mark.parametrize(
    ("falls_short", "why"),
    [
        ({"model": ("tiny", 2_116_352)}, "tiny (2.12M parameters) is no mT5 of 580M to 13B"),
        ({"model": ("mt5_xxl", 12_921_057_281)}, "is no mT5 of 580M to 13B"),
        ({"model": ("mt5_small", 300_176_768)}, "is no mT5 of 580M to 13B"),
        ({"model": ("t5_11b", 11_307_321_344)}, "is no mT5 of 580M to 13B"),
        ({"model": BASE}, "mt5_base is not mT5-XXL"),
        ({"reserved": None}, "not on GPUs"),
        ({"nodes": (2,)}, "one node count only"),
    ],
    ids=str,
)
def test_what_falls_short_in_one_respect_is_an_analogue_whatever_it_shows(falls_short: Any, why: str) -> None:
    entry = entries(*stages(1.0, 2.0, **falls_short))["C3"]
    assert entry.verdict == "not testable here"
    assert why in entry.why
    assert "analogue: " in entry.why and "as in the study" in entry.why


@pytest.mark.parametrize(("on_eight", "verdict"), [(0.3, "contradicted"), (0.9, "reproduced")])
def test_the_study_of_the_paper_tests_its_first_claim(on_eight: float, verdict: str) -> None:
    """Every point of one model and stage: a step takes a second, of the same 256 samples less on more nodes."""
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


def test_two_repeats_are_an_analogue_too() -> None:
    entry = entries(*stages(1.0, 2.0, repeats=2))["C3"]
    assert entry.verdict == "not testable here"
    assert "fewer than 3 independent repeats a side" in entry.why
    assert "6" not in entry.measured and "3 too few repeats to tell" in entry.measured


def with_options(records: list[RunRecord], **options: Any) -> list[RunRecord]:
    """The same runs of engines with these options."""
    engine = records[0].spec.engine.model_copy(update={"options": options})
    of = records[0].spec.model_copy(update={"engine": engine})
    return [one.model_copy(update={"spec": of, "config_id": config_id(of)}) for one in records]


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, "nothing that differs only in this was measured"),
        ({"stage3_prefetch_bucket_size": 1}, "an option that only one of the two stages knows is not its preset's"),
    ],
    ids=str,
)
def test_a_stage_with_options_of_its_own_tests_no_claim_about_stages(option: dict[str, Any], why: str) -> None:
    slow = [record for n in (1, 2, 4) for record in with_options(at("zero3", n, 2.0 / n), **option)]
    of = entries(*(record for n in (1, 2, 4) for record in at("zero2", n, 1.0 / n)), *slow)
    assert [of[claim].verdict for claim in ("C2", "C3")] == ["not testable here"] * 2
    assert why in of["C3"].why
    assert "fewer than 3" not in of["C3"].why, "it has three"


def test_what_no_test_consists_of_is_said() -> None:
    of = entries(*stages(1.0, 2.0), failed("oom", at("zero2", 8, 1.0)[0].spec), *at("zero3", 8, 1.0))
    assert of["C3"].verdict == "reproduced"
    assert of["C3"].why.endswith("; left out: 1 where a side ran out of memory")


@pytest.mark.parametrize("on_two_nodes", ["short", "straggler", "mixed"])
def test_doubtful_runs_and_failed_repeats_test_no_claim_and_that_is_said(on_two_nodes: str) -> None:
    records = stages(1.0, 2.0)
    spoilt = [one for one in records if (one.spec.engine.name, one.spec.nodes) == ("zero3", 2)]
    if on_two_nodes == "short":
        more = [run(one.spec, repeat=0, steps=steps((1.0,) * 5), parameters=XXL[1]) for one in spoilt[:1]]
    elif on_two_nodes == "straggler":
        more = [run(spoilt[0].spec, repeat=9, steps=window(1.0), outside_collectives_s=(0.1, 0.9), parameters=XXL[1])]
    else:
        more = [failed("hang", spoilt[0].spec, repeat=9)]
    memories = memory(2, peak_reserved_bytes=ON_GPU)
    more = [
        one.model_copy(update={"observations": one.observations.model_copy(update={"memory": memories})})
        if one.observations
        else one
        for one in more
    ]
    why = entries(*records, *more)["C3"].why
    told = "some repeats of a side failed" if on_two_nodes == "mixed" else f"a side is flagged {on_two_nodes}"
    assert f"left out: 1 where {told}" in why
    assert "of 2 comparisons 2 slower" in why


def test_a_difference_that_nobody_would_act_on_is_a_finding_against_both_directions() -> None:
    """Stage 3 takes 0.1 % longer at each node count, which repeats that are equal to 0.01 % tell."""
    alike = [
        one for n in (1, 2, 4) for engine, s in (("zero2", 1.0), ("zero3", 1.001)) for one in exact(engine, n, s / n)
    ]
    of = entries(*alike)
    assert "3 equal within 3 %" in of["C3"].why
    assert [of[claim].verdict for claim in ("C2", "C3")] == ["reproduced", "contradicted"]


def exact(engine: str, nodes: int, seconds: float) -> list[RunRecord]:
    """Repeats that differ by 0.01 %."""
    told = at(engine, nodes, seconds)
    return [
        one.model_copy(
            update={
                "observations": one.observations.model_copy(
                    update={"steps": window(seconds * (1 + 0.0001 * one.circumstance.repeat))}
                )
            }
        )
        for one in told
        if one.observations
    ]


def test_weak_scaling_with_three_repeats_does_not_lack_repeats() -> None:
    grown = [*at("zero2", 1, 1.0, samples=8), *at("zero2", 2, 2.0, samples=16)]
    assert "fewer than" not in entries(*grown)["C1"].why


def test_other_models_of_the_range_test_what_is_not_of_the_largest_alone() -> None:
    of = entries(*stages(1.0, 2.0, model=BASE))
    assert (of["C2"].verdict, of["C3"].verdict) == ("reproduced", "not testable here")


def test_a_difference_that_repeats_do_not_bear_out_is_no_verdict() -> None:
    noisy = [
        record.model_copy(update={"observations": record.observations.model_copy(update={"steps": steps((s,) * 30)})})
        for (engine, nodes), seconds in {("zero2", 1): (1, 2, 3), ("zero3", 1): (1, 2, 4), ("zero2", 2): (1, 2, 3),
                                         ("zero3", 2): (1, 2, 4)}.items()
        for record, s in zip(at(engine, nodes, 1.0), seconds, strict=True)
        if record.observations
    ]  # fmt: skip
    entry = entries(*noisy)["C3"]
    assert (entry.verdict, "2 no detectable difference" in entry.why) == ("not testable here", True)


def test_machines_have_entries_of_their_own() -> None:
    moved = [
        record.model_copy(update={"circumstance": record.circumstance.model_copy(update={"machine": machine})})
        for record in stages(1.0, 2.0)
        for machine in (record.circumstance.machine, record.circumstance.machine.model_copy(update={"name": "b"}))
    ]
    third = [entry for entry in judge(results(*moved)) if entry.claim == "C3"]
    assert [(entry.machine, entry.verdict) for entry in third] == [("cpu", "reproduced"), ("b", "reproduced")]


# -- what is said in any case


def test_every_claim_has_an_entry_even_where_nothing_was_compared() -> None:
    of = entries(run(spec("zero1")))
    assert list(of) == ["C1", "C2", "C3", "C4", "C5", "C6", "F1", "F2", "L1", "L2", "L3"]
    assert {entry.verdict for entry in of.values()} == {"not testable here"}
    assert all(entry.why for entry in of.values())


def test_the_settings_say_what_of_them_is_covered() -> None:
    of = entries(run(spec("zero1", micro=4)), *at("zero2", 2, 1.0))
    assert of["C4"].measured == (
        "tiny (0.000402M parameters), mt5_xxl (12,900M parameters); of the mT5 models from 580M to 13B: mt5_xxl"
    )
    assert "micro-batch 2, 4" in of["C5"].measured
    assert of["C6"].measured == "data synthetic; loader workers 0"


def test_the_claims_are_word_for_word_those_carried_over() -> None:
    rows = {row["id"]: row["claim"] for row in published.read("claims").rows}
    weighed = {claim.id: claim.text for claims in CLAIMS.values() for claim in claims}
    assert weighed == {name: text for name, text in rows.items() if name not in ("C4", "C5", "C6")}


@pytest.mark.parametrize("name", published.names())
def test_published_numbers_name_their_source_and_are_whole(name: str) -> None:
    found = published.read(name)
    assert found.source and found.rows
    assert all(None not in row and None not in row.values() for row in found.rows)


# -- the verb


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return save(tmp_path, *stages(1.0, 2.0, model=("tiny", 7)))


@pytest.mark.parametrize("form", ["csv", "json"])
def test_programs_read_every_verdict(form: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", str(runs), "--format", form]) == 0
    text = capsys.readouterr().out
    rows = json.loads(text) if form == "json" else list(csv.DictReader(io.StringIO(text)))
    assert [row["claim"] for row in rows] == ["C1", "C2", "C3", "C4", "C5", "C6", "F1", "F2", "L1", "L2", "L3"]
    assert {row["verdict"] for row in rows} == {"not testable here"}


def test_readers_are_told_the_rule(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("text", "md"):
        main(["claims", str(runs), "--format", form])
        told = capsys.readouterr().out
        assert told.startswith("A set tests a claim of arXiv 2310.05350 only as that study did: an mT5 model")
        assert told.count("not testable here") == 11


def test_a_folder_without_records_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", str(tmp_path)]) == 2
    assert "no record below" in capsys.readouterr().err
