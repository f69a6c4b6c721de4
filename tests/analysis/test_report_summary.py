"""Tests of the first sections of the report: the answer, the certainty of the answer, and the settings of the runs."""

import re
from typing import Any

import pytest
from records import MIB, failed, machine, memory, results, run, scattered, spec, steps, trained

from analysis.questions import describe_choice
from analysis.report.caveats import list_caveats
from analysis.report.contents import read_evidence
from analysis.report.findings import ReportFindings, compute_findings
from analysis.report.page import render_page
from analysis.report.tables import build_best_table
from analysis.report.texts import describe_setup
from analysis.results import Results
from analysis.scaling.best import as_table
from bench.core.record import RunRecord


def at(engine: str, seconds: float, jitter: float = 0.0, micro: int = 2, **more: Any) -> RunRecord:
    window = scattered(seconds - jitter, seconds, seconds + jitter)
    return run(spec(engine, micro), steps=steps(window), **more)


def allocations(engine: str, *seconds: float, **more: Any) -> list[RunRecord]:
    """Return one run for each step time in `seconds`. Each run is in an allocation of its own."""
    slurm = [{"slurm": {"SLURM_JOB_ID": str(job)}} for job in range(len(seconds))]
    return [at(engine, s, repeat=job, environment=slurm[job], **more) for job, s in enumerate(seconds)]


def join_caveats(of: Results) -> str:
    return " ".join(list_caveats(compute_findings(of)))


def answer(*records: RunRecord) -> dict[str, str]:
    """Return the only row of the report's table of answers, as a dict from column headings to cell texts."""
    table = build_best_table(compute_findings(results(*records)).best, [])
    (row,) = table.rows
    return {heading.label: cell.full.replace("\xa0", " ") for heading, cell in zip(table.head, row, strict=True)}


def test_setup_separates_varied_from_constant_settings() -> None:
    of = results(at("ddp", 0.1), at("zero1", 0.1, micro=4), failed("oom", spec("zero3")))
    found = describe_setup(compute_findings(of).rows, of.configurations, 3)
    assert found.varied == (("engine", "ddp, zero1, zero3"), ("micro-batch", "2, 4"))
    constant = dict(found.constant)
    assert {"model": "tiny", "nodes": "1", "precision": "fp32"}.items() <= constant.items()
    assert constant["encoder length"].isdecimal() and "samples per step" not in constant, "samples follow micro-batches"
    assert found.ran == "3 recorded runs of 3 configurations: 2 ok, 1 oom"


def test_setting_that_some_runs_lack_is_not_constant() -> None:
    decoder_only = run(spec(sequence={"tokens": 8}, objective="causal_lm"))
    of = results(at("ddp", 0.1), decoder_only)
    constant = dict(describe_setup(compute_findings(of).rows, of.configurations, 2).constant)
    assert constant["precision"] == "fp32"
    assert not {"encoder length", "decoder length", "sequence length"} & constant.keys()


def test_counts_of_the_same_thing_are_equal_on_the_whole_page() -> None:
    """The report must count runs and configurations in the same way everywhere. One configuration ran on two machines,
    and another was also rehearsed. The report must state that each compared configuration has one run. Another
    configuration has three runs, but it is not compared, because its runs had background load."""
    other = machine(fp32=2.0).model_copy(update={"name": "other"})
    busy = [at("zero1", 0.05, repeat=n, load=({"node": 0, "others_share": 0.3},)) for n in range(3)]
    rehearsal = run(spec("zero2"), evidence="rehearsed")
    once = [at("ddp", 0.1), at("ddp", 0.1, machine=other), at("zero2", 0.2)]
    html = page_of(results(*once, rehearsal, *busy, failed("oom", spec("zero3"))))
    words = " ".join(re.sub("<[^>]*>", " ", html).split())
    assert "8 recorded runs of 6 configurations (4 config_ids, " in words and ": 7 ok, 1 oom" in words
    assert len(re.findall(r"<tr data-f", html[html.index('data-table="configurations"') :].split("</table>")[0])) == 6
    assert "3 of 7 ok runs were made on a busy machine" in words and "3 of 7 ok runs have the flag busy" in words
    assert words.count("Each compared configuration has one independent run; at least 3 are needed") == 2
    assert "No run of 1 configuration ended ok: 1 oom." in words


def test_questions_without_an_answer_come_last() -> None:
    unanswered = failed("oom", spec(nodes=1)), at("ddp", 0.1, machine=machine(fp32=1.0)), failed("oom", spec(nodes=2))
    found = compute_findings(results(*unanswered, run(spec("ddp", nodes=3), steps=steps((0.1,) * 30))))
    fastest = [one.fastest is not None for one in found.answers]
    assert fastest == sorted(fastest, reverse=True) and set(fastest) == {True, False}
    assert [one.fastest is not None for one in found.best] != fastest, "the questions' own order is different"


def test_setup_of_trainings_names_learning_rate_and_adapter() -> None:
    lora = {"adapter": {"name": "lora", "rank": 4}}
    of = results(trained(2.0, 0.1), trained(2.1, 0.02, seed=1), trained(2.2, 0.02, asked=lora))
    found = describe_setup(compute_findings(of).rows, of.configurations, 3)
    assert found.varied == (("adapter", "lora rank=4, none"), ("seed", "0, 1"), ("learning rate", "0.02, 0.1"))
    assert found.ran == "3 recorded runs of 3 configurations: 3 ok"
    many = results(*(trained(2.0, lr / 100) for lr in range(1, 21)))
    assert describe_setup(compute_findings(many).rows, many.configurations, 20).varied == (
        ("learning rate", "20 values from 0.01 to 0.2"),
    )


def test_setup_of_trainings_names_constant_weights_data_rate_and_length() -> None:
    asked = {
        "model": {"checkpoint": "base"},
        "data": {"name": "text", "source": "text", "options": {"files": ["a.txt"]}},
        "objective": "causal_lm",
        "sequence": {"tokens": 10},
    }
    expected = {
        "sequence length": "10 tokens",
        "model.checkpoint": "base",
        "data.files": "[a.txt]",
        "learning rate": "0.1",
        "learning.tokens": "200",
    }
    alike = [trained(2.0, 0.1, asked=asked), trained(2.1, 0.1, seed=1, asked=asked)]
    for others, missing in (
        ([], set[str]()),
        ([trained(2.2, 0.2, asked=asked | {"model": {}})], {"model.checkpoint", "learning rate"}),
        ([run(spec(**asked))], {"model.checkpoint", "data.files", "learning rate", "learning.tokens"}),
    ):
        of = results(*alike, *others)
        constant = dict(describe_setup(compute_findings(of).rows, of.configurations, 3).constant)
        assert {name: constant.get(name) for name in expected} == expected | dict.fromkeys(missing)


def test_answer_lists_the_fastest_and_its_rivals_by_verdict() -> None:
    lean = memory(2, peak=MIB)
    times = {"ddp": (0.09, 0.1, 0.11), "zero1": (0.09, 0.105, 0.12), "zero2": (0.2, 0.201, 0.202)}
    records = [record for engine, seconds in times.items() for record in allocations(engine, *seconds)]
    records += allocations("zero3", 0.4, 0.401, 0.402, memory=lean)
    row = answer(*records, failed("oom", spec("zero0")))
    assert (row["question"], row["fastest"]) == ("2 ranks", "ddp, micro 2")
    assert row["intervals"] == "75 %, range of repeats" and row["throughput"].startswith("400 (")
    assert row["rivals"].startswith("not distinguishable: zero1, micro 2 (+5 %, 95 %: −")
    assert "; slower: zero2, micro 2 (+102 %, 95 %: +59" in row["rivals"]
    assert (row["least memory"], row["without a time"]) == ("zero3, micro 2: 2.000 MiB", "1 oom")
    assert row["flags"] == "short"


def test_configurations_with_equal_least_memory_are_all_named() -> None:
    peaks = {"ddp": 2 * MIB, "zero1": MIB, "zero2": MIB, "zero3": MIB + 1}
    times = {"ddp": 0.1, "zero1": 0.3, "zero2": 0.2, "zero3": 0.4}
    row = answer(*(at(engine, times[engine], memory=memory(2, peak=peak)) for engine, peak in peaks.items()))
    assert row["least memory"] == "zero2, micro 2; zero1, micro 2: 2.000 MiB"
    same = [at("ddp", 0.1 + micro / 100, micro=micro, memory=memory(2, peak=MIB)) for micro in (1, 2, 4, 8)]
    assert answer(*same)["least memory"] == "ddp, micro 8; ddp, micro 4; ddp, micro 2 and 1 more: 2.000 MiB"


def test_answer_lists_rivals_equal_within_three_percent() -> None:
    """Repeats scatter by 0.6 %. An engine that is 0.3 % slower than the fastest is then shown to be equal within 3 %.
    For an engine that is 1.4 % slower, this cannot be shown."""
    records = [
        at(engine, s * by, repeat=repeat)
        for engine, s in (("ddp", 0.1), ("zero1", 0.1003), ("zero2", 0.1014))
        for repeat, by in enumerate((0.994, 1.0, 1.006))
    ]
    equal, tied, *_ = answer(*records)["rivals"].split("; ")
    assert equal.startswith("equal within 3 %: zero1, micro 2 (+0.3 %, 95 %: −")
    assert tied.startswith("not distinguishable: zero2, micro 2 (+1.4 %, 95 %: −")


def test_two_protocols_have_two_names_in_tables_and_one_series_in_figures() -> None:
    both = [at("ddp", 0.1), run(spec("ddp", measure={"min_steps": 40}), steps=steps(scattered(0.19, 0.2, 0.21)))]
    records = [*both, at("zero1", 0.3), at("ddp", 0.4, micro=4)]
    row, found = answer(*records), compute_findings(results(*records))
    assert row["fastest"] == "ddp (min_steps=30), micro 2" and "ddp (min_steps=40), micro 2" in row["rivals"]
    names = [describe_choice(row) for row in found.list_configurations(9)]
    assert names == ["ddp (min_steps=30), micro 2", "ddp (min_steps=40), micro 2", "zero1, micro 2", "ddp, micro 4"]
    assert set(found.summary["variant"]) == {""}


def test_difference_of_single_runs_is_indicative_without_an_interval() -> None:
    row = answer(at("ddp", 0.10, 0.01), at("zero2", 0.20), at("zero3", 0.40))
    assert row["fastest"] == "ddp, micro 2"
    assert row["rivals"] == "slower, indicative only: zero2, micro 2 (+100 %), zero3, micro 2 (+300 %)"
    assert row["intervals"] == "from the steps of one run, indicative"


def test_question_without_measured_runs_has_no_fastest() -> None:
    row = answer(failed("oom"), failed("error", spec("zero2")))
    assert (row["fastest"], row["rivals"], row["without a time"]) == ("none", "", "1 oom, 1 error")


def test_answer_counts_failed_repeats_and_busy_configurations() -> None:
    survivors = [*(at("zero1", 0.09, repeat=n) for n in range(3)), *(failed("oom", repeat=n) for n in range(3, 10))]
    busy = at("zero3", 0.01, load=({"node": 0, "others_share": 0.3},))
    records = [*survivors, busy, *(at("zero2", 0.1, repeat=n) for n in range(3))]
    row = answer(*records)
    assert (row["fastest"], row["without a time"]) == ("zero1, micro 2 (7 of 10 repeats oom)", "1 busy")
    assert as_table(compute_findings(results(*records)).best)["standing"].tolist()[-1] == "busy"


def page_of(of: Results) -> str:
    found = compute_findings(of)
    return render_page(found, None, {place: read_evidence(of, place) for place in range(len(found.rows))})


@pytest.mark.parametrize(("record", "known"), [(failed("oom"), "Nothing was measured."), (run(), "No doubt is known.")])
def test_page_without_doubts_states_whether_anything_was_measured(record: RunRecord, known: str) -> None:
    page = page_of(results(record))
    assert (known in page) == (not list_caveats(compute_findings(results(record))))
    assert ("Nothing was measured." in page) == (record.outcome.kind != "ok")


def test_the_page_begins_with_the_answer_and_the_remedy_for_busy_runs() -> None:
    busy = [at("zero1", 0.05, repeat=n, load=({"node": 0, "others_share": 0.3},)) for n in range(3)]
    html = page_of(results(*allocations("ddp", 0.1, 0.101, 0.102), *busy))
    first = html[html.index('id="answer"') :]
    assert re.findall(r"<p>(.*?)</p>", first)[:2] == [
        "On 2 ranks, ddp is the only configuration with a time.",
        "3 of 6 ok runs were made on a busy machine: times of such runs decide nothing; to add "
        "repeats without background load, run the same sweep command again with "
        '<span class="option">--repeats</span> 6 launcher.quiet_within_s=600.',
    ]
    assert first.index("<p>") < first.index("<figure") if "<figure" in first else True


def test_page_begins_with_the_compared_settings_and_the_date() -> None:
    html = page_of(results(at("ddp", 0.1), at("zero1", 0.2)))
    assert "<title>zeroscale: smoke (2026-11-24)</title>" in html
    assert '<p class="lead">Measured 2026-11-24. Compared: engine ddp, zero1.</p>' in html


def test_names_between_backticks_are_code_on_the_page() -> None:
    html = page_of(results(at("ddp", 0.1, load=({"node": 0, "others_share": 0.3},))))
    assert "a note <code>known_busy</code>" in html
    assert "`" not in re.sub("<script.*?</script>", "", html, flags=re.DOTALL)


def test_rows_of_busy_runs_are_grey_and_their_time_is_replaced_by_the_reason() -> None:
    busy = at("zero1", 0.05, load=({"node": 0, "others_share": 0.3},))
    html = page_of(results(at("ddp", 0.1), at("ddp", 0.1, repeat=1), busy))
    rows = re.findall(r'<tr data-f="[^"]*" class="disturbed">.*?</tr>', html, re.DOTALL)
    assert len(rows) == 2, "one of configurations, one of runs"
    assert ">busy<" in rows[0] and "busy short" in rows[1]
    assert "grey rows: made on a busy machine" in html.lower()


def test_a_table_of_runs_is_shown_only_if_some_configuration_has_several() -> None:
    once, twice = (page_of(results(*(at("ddp", 0.1, repeat=n) for n in range(repeats)))) for repeats in (1, 2))
    assert 'data-table="runs"' not in once and "Every configuration has one run" in once
    assert 'data-table="runs"' in twice


def test_single_runs_and_unverified_losses_are_caveats() -> None:
    caveats = join_caveats(results(at("ddp", 0.1), at("zero1", 0.2), failed("oom", spec("zero3"))))
    assert "Each compared configuration has one independent run; at least 3 are needed to compare them." in caveats
    assert "The losses of 1 of 1 ok runs of other engines were verified against those of ddp." in caveats
    assert "To verify more runs" not in caveats


def test_caveat_on_unverified_losses_names_the_remedy() -> None:
    assert (
        "The losses of 0 of 1 ok runs of other engines were verified against those of ddp. To verify more runs, run "
        "engine=ddp with the same overrides."
    ) in join_caveats(results(at("zero1", 0.2)))


def test_caveat_on_machines_names_the_fields_in_which_they_differ_without_remarks() -> None:
    fields = {"slow": (1e6, "a remark"), "fast": (1e7, "another remark")}
    slow, fast = (
        machine().model_copy(update={"name": name, "inter_node_bytes_per_s": rate, "note": note})
        for name, (rate, note) in fields.items()
    )
    caveats = join_caveats(results(run(machine=slow), run(machine=fast)))
    assert "The machines differ in inter-node bandwidth." in caveats
    alike = fast.model_copy(update={"inter_node_bytes_per_s": 1e6})
    assert "The machines differ in note." in join_caveats(results(run(machine=slow), run(machine=alike)))


def test_comparisons_between_allocations_are_not_called_indicative() -> None:
    caveats = join_caveats(results(*allocations("ddp", 0.1, 0.11, 0.12), *allocations("zero1", 0.2, 0.21, 0.22)))
    assert "indicative" not in caveats
    assert "Each compared configuration has 3 independent runs: " in caveats


def controls(first: float, last: float) -> Results:
    """Return results of one allocation in which the control configuration ddp runs twice. Its step time is `first`
    before the run of zero1, and `last` after the run of zero1."""
    slurm = {"slurm": {"SLURM_JOB_ID": "7"}}
    times = [("ddp", 0, first), ("zero1", 0, 0.1), ("ddp", 1, last)]
    return results(*(at(engine, s, s / 50, repeat=repeat, environment=slurm) for engine, repeat, s in times))


def test_drift_of_a_control_configuration_is_a_caveat() -> None:
    (found,) = compute_findings(controls(0.1, 0.12)).drifts
    assert found.drift.change == pytest.approx(0.2)
    assert (found.allocation, found.configuration) == ("7", "ddp, micro 2")
    assert "too few to distinguish drift" in join_caveats(controls(0.1, 0.12))
    assert "The largest change was +20 % (ddp, micro 2, allocation 7)." in join_caveats(controls(0.1, 0.12))
    slurm = {"slurm": {"SLURM_JOB_ID": "7"}}
    grown = [at("ddp", s, s / 50, repeat=n, environment=slurm) for n, s in enumerate((0.1, 0.101, 0.1022, 0.1029))]
    assert "The largest drift was +3.0 % (ddp, micro 2, allocation 7)." in join_caveats(results(*grown))


def test_caveats_state_that_no_drift_was_detected() -> None:
    slurm = {"slurm": {"SLURM_JOB_ID": "7"}}
    alike = [at("ddp", s, s / 50, repeat=n, environment=slurm) for n, s in enumerate((0.1, 0.101, 0.0995, 0.1002))]
    assert "No drift was detected" in join_caveats(results(*alike))
    assert "drift" not in join_caveats(results(at("ddp", 0.1), at("zero1", 0.2)))


def test_drift_is_computed_only_within_a_slurm_allocation() -> None:
    assert not compute_findings(results(*allocations("ddp", 0.1, 0.2))).drifts
    here = [at("ddp", 0.1), at("ddp", 0.2, repeat=1)]
    assert not compute_findings(results(*here, failed("error", spec("ddp"), repeat=2))).drifts


def test_findings_contain_the_questions_of_studies_and_costs_from_a_price() -> None:
    around = {"study": "smoke", "repeat": 0, "attempt": 0, "machine": {"name": "cpu"}, "question": "Which?"}
    record = at("ddp", 0.1)
    with_question = record.model_copy(update={"circumstance": type(record.circumstance).model_validate(around)})
    found: ReportFindings = compute_findings(results(with_question), price=3.6)
    assert found.questions == ("Which?",)
    # 2 devices at a price of 3.6 per hour cost 0.002 per second. A million tokens at 400 tokens/s cost 5.
    assert [row["cost_per_million_tokens"] for row in found.rows] == [pytest.approx(5.0)]
    assert found.summary["cost_per_million_tokens"].tolist() == [pytest.approx(5.0)]


def test_origin_lists_only_facts_that_differ_between_machines() -> None:
    fast = machine(fp32=2.0).model_copy(update={"name": "fast"})
    origin = compute_findings(results(run(machine=machine(fp32=1.0)), run(machine=fast))).origin
    assert [(fact.name, fact.values) for fact in origin.unlike] == [("peak tflops", ("fp32 1", "fp32 2"))]
    assert not compute_findings(results(run(), run(repeat=1))).origin.unlike
