"""The summary of a report: the question, the answer, and its uncertainty."""

from typing import Any

import pytest
from records import MIB, failed, machine, memory, results, run, scattered, spec, steps

from analysis.questions import describe_choice
from analysis.report.caveats import list_caveats
from analysis.report.evidence import read_evidence
from analysis.report.findings import ReportFindings, compute_findings
from analysis.report.page import render_page
from analysis.report.texts import describe_answers, describe_setup, describe_winners
from analysis.results import Results
from analysis.scaling.best import as_table
from bench.core.record import RunRecord


def at(engine: str, seconds: float, jitter: float = 0.0, micro: int = 2, **more: Any) -> RunRecord:
    window = scattered(seconds - jitter, seconds, seconds + jitter)
    return run(spec(engine, micro), steps=steps(window), **more)


def allocations(engine: str, *seconds: float, **more: Any) -> list[RunRecord]:
    """Return one run in each of several allocations."""
    slurm = [{"slurm": {"SLURM_JOB_ID": str(job)}} for job in range(len(seconds))]
    return [at(engine, s, repeat=job, environment=slurm[job], **more) for job, s in enumerate(seconds)]


def doubted(of: Results) -> str:
    found = compute_findings(of)
    return " ".join(list_caveats(of, found.best, found.drifts, found.origin))


def test_what_varies_is_told_apart_from_what_was_held_equal() -> None:
    found = describe_setup(
        compute_findings(results(at("ddp", 0.1), at("zero1", 0.1, micro=4), failed("oom", spec("zero3")))).rows
    )
    assert found.varied == (("engine", "ddp, zero1, zero3"), ("micro-batch", "2, 4"))
    assert {"model": "tiny", "nodes": "1", "precision": "fp32"}.items() <= dict(found.constant).items()
    assert found.ran == "3 runs of 3 configurations: 2 ok, 1 oom"


def test_the_answer_names_the_fastest_its_ties_and_who_is_slower() -> None:
    lean = memory(2, peak=MIB)
    times = {"ddp": (0.09, 0.1, 0.11), "zero1": (0.09, 0.105, 0.12), "zero2": (0.2, 0.201, 0.202)}
    records = [record for engine, seconds in times.items() for record in allocations(engine, *seconds)]
    records += allocations("zero3", 0.4, 0.401, 0.402, memory=lean)
    (answer,) = describe_answers(compute_findings(results(*records, failed("oom", spec("zero0")))).best)
    assert (answer.name, answer.fastest, answer.rate) == ("tiny · 2 ranks", "ddp, micro 2", "400")
    assert answer.interval.replace("\xa0", " ").endswith("(75 %, range of repeats, n = 3)")
    (tie,) = answer.tied
    assert tie.replace("\xa0", " ").startswith("zero1, micro 2 (+5 %, 95 %: −")
    assert answer.slower.replace("\xa0", " ").startswith(
        "2 others are detectably slower, the next of them zero2, micro 2: +102 %, 95 %: +59"
    )
    assert (answer.undecided, answer.leanest, answer.peak) == ("", "zero3, micro 2", "2.000 MiB")
    assert answer.failed == "1 oom"


def test_the_answer_says_which_rivals_are_equal_within_three_per_cent() -> None:
    """Repeats scatter by 0.6 %. So a rival 0.3 % slower is equal within 3 %, and a rival 1.4 % slower may not be."""
    records = [
        at(engine, s * by, repeat=repeat)
        for engine, s in (("ddp", 0.1), ("zero1", 0.1003), ("zero2", 0.1014))
        for repeat, by in enumerate((0.994, 1.0, 1.006))
    ]
    (answer,) = describe_answers(compute_findings(results(*records)).best)
    (equal,), (tied,) = ([text.replace("\xa0", " ") for text in texts] for texts in (answer.equal, answer.tied))
    assert equal.startswith("zero1, micro 2 (+0.3 %, 95 %: −") and tied.startswith("zero2, micro 2 (+1.4 %, 95 %: −")
    assert (answer.slower, answer.undecided) == ("", "")


def test_within_an_answer_and_a_table_two_protocols_have_two_names_and_figures_one_series() -> None:
    both = [at("ddp", 0.1), run(spec("ddp", measure={"min_steps": 40}), steps=steps(scattered(0.19, 0.2, 0.21)))]
    found = compute_findings(results(*both, at("zero1", 0.3), at("ddp", 0.4, micro=4)))
    (answer,) = describe_answers(found.best)
    assert answer.fastest == "ddp (min_steps=30), micro 2" and "ddp (min_steps=40), micro 2" in answer.undecided
    names = [describe_choice(row) for row in found.list_configurations(9)]
    assert names == ["ddp (min_steps=30), micro 2", "ddp (min_steps=40), micro 2", "zero1, micro 2", "ddp, micro 4"]
    assert set(found.summary["variant"]) == {""}


def test_one_run_each_is_answered_with_an_effect_and_without_a_verdict() -> None:
    (answer,) = describe_answers(
        compute_findings(results(at("ddp", 0.10, 0.01), at("zero2", 0.20), at("zero3", 0.40))).best
    )
    assert (answer.fastest, answer.tied, answer.slower) == ("ddp, micro 2", (), "")
    assert answer.undecided.replace("\xa0", " ").startswith(
        "2 others took longer in these runs, too few repeats to tell, the next of them zero2, micro 2: +100 %, 95 %: +"
    )


def test_where_nothing_was_measured_the_answer_says_so() -> None:
    (answer,) = describe_answers(compute_findings(results(failed("oom"), failed("error", spec("zero2")))).best)
    assert (answer.fastest, answer.tied, answer.slower) == ("", (), "")
    assert answer.failed == "1 oom, 1 error"


def test_of_several_questions_the_engines_that_win_are_counted() -> None:
    one = [at("ddp", 0.1), at("zero1", 0.3)]
    two = [run(spec(engine, ranks=1), steps=steps((0.1,) * 30)) for engine in ("ddp", "zero1")]
    assert describe_winners(compute_findings(results(*one, *two)).best).startswith("ddp in 2 of 2")
    assert describe_winners(compute_findings(results(*one)).best) == ""


def test_an_engine_that_alone_has_a_number_wins_its_question() -> None:
    pairs = [(engine, s, ranks) for ranks in (1, 2) for engine, s in (("ddp", 0.1), ("zero1", 0.3))]
    rivals = [run(spec(engine, ranks=ranks), steps=steps(scattered(0.9 * s, s, 1.1 * s))) for engine, s, ranks in pairs]
    alone = run(spec("zero2", ranks=4), steps=steps((0.1,) * 30))
    assert (
        describe_winners(compute_findings(results(*rivals, alone)).best)
        == "ddp in 2 of 3, zero2 in 1 of 3 (alone in 1)"
    )


def test_winners_are_counted_over_all_questions() -> None:
    """zero2 is faster on two node counts and runs out of memory on six, where zero3 runs."""
    records = [
        run(spec(engine, nodes=nodes, ranks=1), steps=steps((seconds,) * 30))
        if engine == "zero3" or nodes > 6
        else failed("oom", spec(engine, nodes=nodes, ranks=1))
        for nodes in range(1, 9)
        for engine, seconds in (("zero2", 0.1), ("zero3", 0.2))
    ]
    found = describe_winners(compute_findings(results(*records)).best)
    assert found == "zero3 in 6 of 8 (alone in 6), zero2 in 2 of 8"


def test_the_answer_says_how_many_repeats_failed_and_which_configurations_were_busy() -> None:
    survivors = [*(at("zero1", 0.09, repeat=n) for n in range(3)), *(failed("oom", repeat=n) for n in range(3, 10))]
    busy = at("zero3", 0.01, load=({"node": 0, "others_share": 0.3},))
    rivals = [at("zero2", 0.1, repeat=n) for n in range(3)]
    found = compute_findings(results(*survivors, busy, *rivals)).best
    (answer,) = describe_answers(found)
    assert answer.fastest == "zero1, micro 2 (7 of 10 repeats oom)"
    assert answer.failed == "1 busy"
    assert as_table(found)["standing"].tolist()[-1] == "busy"


def test_one_run_each_is_a_doubt_and_so_are_comparisons_within_runs() -> None:
    said = doubted(results(at("ddp", 0.1), at("zero1", 0.2), failed("oom", spec("zero3"))))
    assert "Every configuration ran once (n = 1)" in said
    assert "1 of 1 comparisons with a fastest configuration have too few repeats to tell, for want of 3" in said
    assert "1 of 3 configurations have no number: 1 oom." in said
    assert "1 of 1 ok runs of other engines have losses verified beside ddp." in said


def test_comparisons_between_allocations_are_no_such_doubt() -> None:
    said = doubted(results(*allocations("ddp", 0.1, 0.11, 0.12), *allocations("zero1", 0.2, 0.21, 0.22)))
    assert "too few repeats" not in said
    assert "Configurations ran 3 to 3 times" in said


def controls(first: float, last: float) -> Results:
    """Return one point twice in an allocation, with another point in between."""
    slurm = {"slurm": {"SLURM_JOB_ID": "7"}}
    times = [("ddp", 0, first), ("zero1", 0, 0.1), ("ddp", 1, last)]
    return results(*(at(engine, s, s / 50, repeat=repeat, environment=slurm) for engine, repeat, s in times))


def test_a_control_point_that_became_slower_is_a_doubt() -> None:
    (found,) = compute_findings(controls(0.1, 0.12)).drifts
    assert found.drift.change == pytest.approx(0.2)
    assert (found.allocation, found.configuration) == ("7", "ddp, micro 2")
    assert "too few to tell drift" in doubted(controls(0.1, 0.12))
    assert "at most ddp, micro 2 in 7, +20 % at the end" in doubted(controls(0.1, 0.12))
    slurm = {"slurm": {"SLURM_JOB_ID": "7"}}
    grown = [at("ddp", s, s / 50, repeat=n, environment=slurm) for n, s in enumerate((0.1, 0.101, 0.1022, 0.1029))]
    assert "drifted by more than two runs of it differ: at most ddp, micro 2 in 7, +3.0 %" in doubted(results(*grown))


def test_one_that_did_not_is_said_to() -> None:
    slurm = {"slurm": {"SLURM_JOB_ID": "7"}}
    alike = [at("ddp", s, s / 50, repeat=n, environment=slurm) for n, s in enumerate((0.1, 0.101, 0.0995, 0.1002))]
    assert "No drift was detected" in doubted(results(*alike))
    assert "drift" not in doubted(results(at("ddp", 0.1), at("zero1", 0.2)))


def test_drift_is_not_sought_across_allocations_or_outside_of_slurm() -> None:
    assert not compute_findings(results(*allocations("ddp", 0.1, 0.2))).drifts
    here = [at("ddp", 0.1), at("ddp", 0.2, repeat=1)]
    assert not compute_findings(results(*here, failed("error", spec("ddp"), repeat=2))).drifts


def test_the_studies_are_quoted_in_their_own_words_and_a_price_makes_costs() -> None:
    around = {"study": "smoke", "repeat": 0, "attempt": 0, "machine": {"name": "cpu"}, "question": "Which?"}
    record = at("ddp", 0.1)
    asking = record.model_copy(update={"circumstance": type(record.circumstance).model_validate(around)})
    found: ReportFindings = compute_findings(results(asking), price=3.6)
    assert found.questions == ("Which?",)
    # 400 tokens/s on 2 devices at 3.6 an hour: 0.002 a second, 5 for a million
    assert [row["cost_per_million_tokens"] for row in found.rows] == [pytest.approx(5.0)]
    assert found.summary["cost_per_million_tokens"].tolist() == [pytest.approx(5.0)]


def test_what_differs_between_machines_is_told_and_what_does_not_is_not() -> None:
    fast = machine(fp32=2.0).model_copy(update={"name": "fast"})
    origin = compute_findings(results(run(machine=machine(fp32=1.0)), run(machine=fast))).origin
    assert [(fact.name, fact.values) for fact in origin.unlike] == [("peak tflops", ("fp32 1", "fp32 2"))]
    assert not compute_findings(results(run(), run(repeat=1))).origin.unlike


@pytest.mark.parametrize(("questions", "sentences"), [(6, True), (7, False)])
def test_many_questions_are_answered_by_a_table(questions: int, sentences: bool) -> None:
    of = results(*(run(spec(model={"name": f"m{n}"}), steps=steps((0.1,) * 30)) for n in range(questions)))
    left = {place: read_evidence(of, place) for place in range(questions)}
    html = render_page(compute_findings(of), None, left)
    answer = html[html.index('id="answer"') : html.index('id="sure"')]
    assert answer.count("is the fastest that was measured") == (questions if sentences else 0)
    assert ('data-table="best"' in answer) is not sentences
