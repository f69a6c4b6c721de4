"""Tests of the report's answer in sentences: the order of the sentences, and that no statement is made if there are too
few runs."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from clusters import asked, measured, out_of_memory
from records import machine, results, run, trained

from analysis.answer import describe_answer
from bench.core.record import NodeLoad, RunRecord


def answer(*groups: list[RunRecord]) -> list[str]:
    return list(describe_answer(results(*(record for group in groups for record in group))))


def test_answer_compares_the_fastest_with_next_and_slowest_and_names_ties() -> None:
    told = answer(
        measured(asked(1, engine="ddp"), 1.0),
        measured(asked(1, engine="zero1"), 1.002),
        measured(asked(1, engine="zero2"), 1.1),
        measured(asked(1, engine="zero3"), 1.5),
    )
    (line,) = told
    assert re.match(
        r"On 2 ranks, ddp is (1\.1000|1\.100) ± 0\.00\d+ times faster than zero2 and (1\.5000|1\.500) ± 0\.00\d+ times "
        r"faster than zero3; ",
        line,
    )
    assert line.endswith("; ddp and zero1 are equal within 3 %.")


@pytest.mark.parametrize(("runs", "had"), [([1.0], "one independent run"), ([1.0, 1.01], "at most 2 independent runs")])
def test_answer_of_fewer_than_three_runs_is_indicative_and_names_the_remedy(runs: list[float], had: str) -> None:
    told = answer(measured(asked(1, engine="ddp"), runs), measured(asked(1, engine="zero1"), [2 * s for s in runs]))
    assert told == [
        "On 2 ranks, ddp was the fastest measured; zero1 took 2.00 times as long, which is indicative only.",
        f"Each compared configuration has {had}; at least 3 are needed to compare them: add --repeats 5.",
    ]


def test_answer_counts_configurations_with_few_runs_and_gives_one_remedy() -> None:
    loads: Any = (NodeLoad(node=0, others_share=0.4),)
    groups = [measured(asked(1, engine=engine), 1.0) for engine in ("ddp", "zero1")]
    few = measured(asked(1, engine="zero3"), [2.0, 2.1])
    told = answer(*groups, few)
    assert told[1:] == [
        "1 of 3 compared configurations has fewer than 3 independent runs; at least 3 are needed to compare it: add "
        "--repeats 5."
    ]
    busy = [record.model_copy(update={"repeat": 2}) for record in measured(asked(1, engine="zero3"), [2.0], load=loads)]
    told = answer(*groups, few, busy)
    assert sum(line.count("--repeats") for line in told) == 1, "the repeats for busy runs are enough for both"


def test_busy_runs_are_not_ranked_and_come_after_the_answers() -> None:
    loads: Any = (NodeLoad(node=0, others_share=0.4),)
    busy = measured(asked(1, engine="zero1"), 0.5, load=loads)
    told = answer(measured(asked(1, engine="ddp"), 1.0), busy)
    assert told == [
        "On 2 ranks, ddp is the only configuration with a time.",
        "3 of 6 ok runs were made on a busy machine: times of such runs decide nothing; to add "
        "repeats without background load, run the same sweep command again with --repeats 6 "
        "launcher.quiet_within_s=600.",
    ]


def test_answer_counts_failures_and_names_different_micro_batches() -> None:
    told = answer(measured(asked(1, micro=2), 1.0), measured(asked(1, micro=4), 1.5), out_of_memory(asked(1, micro=8)))
    assert told[0].startswith("On 2 ranks, zero2 (micro 4) is 1.3333 ± 0.00")
    assert told[1] == "No run of 1 configuration ended ok: 1 oom."


def test_range_of_ratios_that_round_to_one_value_is_one_value() -> None:
    engines = {"ddp": 1.0, "zero1": 1.181, "zero2": 1.1812}
    (line, _) = answer(*(measured(asked(1, engine=engine), [s]) for engine, s in engines.items()))
    assert "zero1 and zero2 took 1.18 times as long" in line


def test_paused_runs_are_not_called_busy() -> None:
    paused = [
        one.model_copy(update={"outcome": one.outcome.model_copy(update={"evidence": {"paused_s": 5.0}})})
        for one in measured(asked(1, engine="zero1"), 0.5)
    ]
    told = answer(measured(asked(1, engine="ddp"), 1.0), paused)
    assert told[1].startswith("3 of 6 ok runs were paused: ")


def lead(leads: Sequence[str]) -> list[list[RunRecord]]:
    """Return runs on 1, 2, … nodes, one number of nodes for each engine in `leads`. On each number of nodes, two
    engines were measured: the engine in `leads` takes 1 s per step, and fsdp takes 1.5 s."""
    return [
        measured(asked(nodes, engine=engine), seconds)
        for nodes, leading in enumerate(leads, 1)
        for engine, seconds in ((leading, 1.0), ("fsdp", 1.5))
    ]


def test_more_than_three_questions_have_a_summary_and_a_sentence_each() -> None:
    summary, *each = answer(*lead(["ddp"] * 3 + ["zero1"]))
    assert summary == (
        "ddp was fastest as measured in 3 of the 4 answered questions (zero1 in 1). In 4 questions every other engine "
        "with a time is slower."
    )
    assert [line.partition(",")[0] for line in each] == ["On 2 ranks", *(f"On {n} × 2 ranks" for n in (2, 3, 4))]
    assert all(" is 1.50" in line for line in each)


def test_more_than_eight_questions_are_only_counted() -> None:
    """Engines are compared on nine numbers of nodes. ddp is fastest on five of them, and four other engines on one
    each."""
    leads = ("ddp", "ddp", "ddp", "ddp", "ddp", "zero0", "zero1", "zero2", "zero3")
    others = "zero0 in 1, zero1 in 1, zero2 in 1, zero3 in 1"
    assert answer(*lead(leads)) == [
        f"ddp was fastest as measured in 5 of the 9 answered questions ({others}). In 9 questions every other "
        "engine with a time is slower."
    ]


def test_summary_counts_ties_and_undecided_questions_apart_from_clear_answers() -> None:
    """ddp is measured as the fastest on 1, 2, 3 and 4 nodes. On 1 node, zero1 is slower. On 2 nodes, zero1 cannot be
    distinguished from ddp. On 3 nodes, zero1 has too few runs for a verdict. On 4 nodes, zero1 has no time."""
    rivals = [1.5] * 3, [1.0, 1.4, 1.2], [1.5], None
    groups = [measured(asked(nodes, engine="ddp"), [1.0, 1.01, 1.02]) for nodes in range(1, 5)]
    groups += [measured(asked(nodes, engine="zero1"), times) for nodes, times in enumerate(rivals, 1) if times]
    assert answer(*groups)[0] == (
        "ddp was fastest as measured in all 4 answered questions. In 1 question every other engine with a time is "
        "slower, in 1 another engine cannot be distinguished from the fastest, in 1 another engine has too few runs "
        "for a verdict, in 1 no other engine has a time."
    )


def test_answer_names_nodes_and_machines_if_each_node_has_one_device() -> None:
    slow, fast = (machine().model_copy(update={"name": name}) for name in ("slow", "fast"))
    one = {"devices_per_node": 1}
    lines = answer(*(measured(asked(n, engine="ddp", **one), 1.0, machine=at) for n in (1, 2) for at in (slow, fast)))
    assert [line.partition(", ddp")[0] for line in lines[1:]] == [
        f"On {nodes} ({at})" for nodes in ("1 node", "2 nodes") for at in ("slow", "fast")
    ]


def test_rehearsals_have_no_answer() -> None:
    assert answer([run(evidence="rehearsed")]) == []


def test_trainings_are_answered_by_their_mean_held_out_loss_before_their_speed() -> None:
    """The answer compares two learning rates, with three seeds each, by their mean held-out losses: 2.1 and 3.1.

    Student's quantile for two degrees of freedom is 4.303. The losses of the first learning rate have a standard
    deviation of 0.1. So the margin of error of the mean loss 2.1 is 4.303 × 0.1 / √3 = 0.25.

    The differences between the two losses with the same seed are 1.0, 1.2 and 0.8. Their standard deviation is 0.2. So
    the margin of error of the mean difference 1.0 is 4.303 × 0.2 / √3 = 0.50.
    """
    lines = answer(
        [trained(loss, 0.1, seed) for seed, loss in enumerate((2.0, 2.1, 2.2))],
        [trained(loss, 0.2, seed) for seed, loss in enumerate((3.0, 3.3, 3.0))],
    )
    assert lines == [
        "Held-out loss after 200 tokens: zero1 (lr=0.1) reached the lowest, 2.10 ± 0.25 nats per token as the mean of "
        "3 seeds; its loss is 1.0 ± 0.5 below that of zero1 (lr=0.2).",
        "On 2 ranks, zero1 (lr=0.1) and zero1 (lr=0.2) are equal within 3 %.",
    ]


def test_losses_that_scatter_more_than_they_differ_cannot_be_distinguished() -> None:
    lines = answer(
        [trained(loss, 0.1, seed) for seed, loss in enumerate((2.0, 2.5, 2.2))],
        [trained(loss, 0.2, seed) for seed, loss in enumerate((2.3, 2.1, 2.6))],
        [trained(loss, 0.3, seed) for seed, loss in enumerate((9.0, 9.1, 9.4))],
    )
    assert lines[0].startswith("Held-out loss after 200 tokens: zero1 (lr=0.1) reached the lowest, 2.2 ± 0.6 nats")
    assert lines[0].endswith(
        " below that of zero1 (lr=0.3); zero1 (lr=0.1) and zero1 (lr=0.2) cannot be distinguished yet."
    )


def test_interval_of_a_loss_does_not_reach_below_zero() -> None:
    """The mean of the losses is 0.2, and the margin of error is 4.303 × 0.1 / √3 = 0.25."""
    losses = [trained(loss, 0.1, seed) for seed, loss in enumerate((0.1, 0.2, 0.3))]
    assert answer(losses)[0] == (
        "Held-out loss after 200 tokens: zero1 reached 0.20 (0.00 to 0.45) nats per token as the mean of 3 seeds."
    )
    row = results(*losses).summary.iloc[0]
    assert (row["validation_loss_low"], row["validation_loss_high"]) == (0, pytest.approx(0.448, abs=1e-3))


def test_equal_losses_are_called_equal() -> None:
    lines = answer(
        [trained(loss, 0.1, seed) for seed, loss in enumerate((2.000, 2.101, 2.200))],
        [trained(loss, 0.2, seed) for seed, loss in enumerate((2.001, 2.101, 2.201))],
    )
    assert lines[0].endswith("; zero1 (lr=0.1) and zero1 (lr=0.2) are equal within 0.03 nats.")


def test_repeats_with_one_seed_are_no_evidence_on_losses() -> None:
    lines = answer(
        [trained(2.1, 0.1, repeat=repeat) for repeat in range(3)],
        [trained(2.6, 0.2, repeat=repeat) for repeat in range(3)],
    )
    assert lines[0] == (
        "Held-out loss after 200 tokens: zero1 (lr=0.1) reached the lowest, 2.1 nats per token with one seed; the loss "
        "of zero1 (lr=0.2) is 0.50 higher, which is indicative only."
    )
    assert lines[-1] == "Each configuration has one seed; at least 3 are needed to compare losses: add seed=0,1,2."


def test_losses_on_different_data_from_equally_named_files_are_not_compared() -> None:
    """The file of the data was replaced before the trainings with the second learning rate, and then once more before
    its last repeat."""

    def read_from(record: RunRecord, text: str) -> RunRecord:
        assert record.observations
        data = {"data": {"corpus": {"name": "mine.jsonl", "sha256": text * 64}}}
        return record.model_copy(update={"observations": record.observations.model_copy(update=data)})

    first = [read_from(trained(loss, 0.1, seed), "a") for seed, loss in enumerate((3.0, 3.1, 3.2))]
    second = [read_from(trained(loss, 0.2, seed), "b") for seed, loss in enumerate((2.0, 2.1, 2.2))]
    alone = "nats per token as the mean of 3 seeds"
    assert answer(first, second)[:2] == [
        f"Held-out loss after 200 tokens (contents of the data=aaaaaaaa): zero1 reached 3.10 ± 0.25 {alone}.",
        f"Held-out loss after 200 tokens (contents of the data=bbbbbbbb): zero1 reached 2.10 ± 0.25 {alone}.",
    ]
    mixed = [*second[:2], read_from(trained(2.2, 0.2, 2), "c")]
    assert answer(mixed)[0].endswith(
        "; the runs of 1 configuration read different data from equally named files, so do not rely on these losses."
    )


def test_losses_are_compared_between_adapters_but_not_with_trainings_that_stopped_earlier() -> None:
    lora = [{"adapter": {"name": "lora", "rank": rank}} for rank in (4, 8)]
    stopped = trained(0.5, 0.1, asked={"learning": {"tokens": 400, "stop_after": 200}})
    whole = {"learning": {"tokens": 400}}
    lines = answer(
        [
            trained(2.0, 0.1, asked=whole),
            trained(2.5, 0.1, asked=whole | lora[0]),
            trained(3.0, 0.1, asked=whole | lora[1]),
        ],
        [stopped],
    )
    assert lines[0] == (
        "Held-out loss after 200 tokens: zero1 (none) reached the lowest, 2 nats per token with one seed; the loss of "
        "zero1 + lora (lora rank=4) and zero1 + lora (lora rank=8) is 0.50 to 1.00 higher, which is indicative only; "
        "1 configuration stopped earlier, which is not compared."
    )


def test_losses_on_different_data_are_never_compared() -> None:
    text = {"data": {"name": "text", "source": "text"}}
    lines = answer([trained(2.0, 0.1)], [trained(1.0, 0.1, asked=text)])
    assert [line.partition(" nats")[0] for line in lines[:2]] == [
        "Held-out loss after 200 tokens (data.name=synthetic): zero1 reached 2",
        "Held-out loss after 200 tokens (data.name=text): zero1 reached 1",
    ]


def test_diverged_loss_is_far_above_the_lowest() -> None:
    """The loss is so large that its exponential overflows to infinity."""
    losses = (2.0, 2.1, 2.2), (1000.0, 1001.0, 1002.0)
    lines = answer(
        *([trained(loss, lr, seed) for seed, loss in enumerate(of)] for lr, of in zip((0.1, 0.2), losses, strict=True))
    )
    assert lines[0].startswith("Held-out loss after 200 tokens: zero1 (lr=0.1) reached the lowest, 2.10 ± 0.25 nats")
    assert "; its loss is more than 98 below that of zero1 (lr=0.2)" in lines[0]
