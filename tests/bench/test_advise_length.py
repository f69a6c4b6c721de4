"""Tests of `zeroscale advise` for whole trainings. The length of a training follows from a target loss, a number of
samples or a budget. The advice takes failures of nodes into account."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from bench.predict.goodput import FailureTerms, predict_goodput
from bench.predict.scaling_laws import KAPLAN, compute_critical_batch

XL = ("model=gpt2_xl", "machine=h100", "devices_per_node=8", "engine=fsdp")
Advise = Callable[..., str]


def advise(run_advise: Advise, *words: str) -> Any:
    return json.loads(run_advise(*words, "--json"))


def test_failures_lengthen_the_training(run_advise: Advise) -> None:
    words = (*XL, "nodes=16", "tokens=1e12", "price=2")
    free, failing = advise(run_advise, *words)["winner"], advise(run_advise, *words, "storage=2e9")["winner"]
    parameters = 48 * (12 * 1600**2 + 13 * 1600) + (50257 + 1024) * 1600 + 2 * 1600  # GPT-2 with 1.5 billion parameters
    expected = predict_goodput(128, FailureTerms(14 * parameters / 2e9))
    assert failing["goodput"] == pytest.approx(expected.share, rel=1e-3)
    assert failing["goodput_low"] < failing["goodput"] < failing["goodput_high"] < 1
    for name in ("hours", "node_hours", "cost"):
        assert failing[name] == pytest.approx(free[name] / failing["goodput"])
    assert "goodput" not in free


def test_goodput_has_its_source_or_is_stated_as_not_counted(run_advise: Advise) -> None:
    words = (*XL, "nodes=16", "tokens=1e12")
    assert "a job that never fails: set storage=2e9" in run_advise(*words)
    output = run_advise(*words, "storage=2e9")
    assert "arXiv 2407.21783" in output and "never fails" not in output
    (row,) = [line for line in output.splitlines() if line.startswith("  goodput")]
    assert "a checkpoint every" in row and "a failure every" in row
    assert "the failure rate of your node_mtbf" in run_advise(*words, "storage=2e9", "node_mtbf=100d", "restart=5m")


def test_deadline_counts_failures(run_advise: Advise) -> None:
    words = (*XL, "nodes=1,2,4,8", "tokens=1e11", "storage=2e9")
    slow = advise(run_advise, *words)["winner"]["hours"]
    failing = ("node_mtbf=2h", "restart=30m")
    assert advise(run_advise, *words, *failing)["winner"]["hours"] > 1.3 * slow
    assert advise(run_advise, *words, f"deadline={1.5 * slow:.3f}h")["winner"]["nodes"] == 1
    assert advise(run_advise, *words, f"deadline={1.5 * slow:.3f}h", *failing)["winner"]["nodes"] > 1


def test_target_loss_needs_the_tokens_of_its_scaling_law_and_batch(run_advise: Advise) -> None:
    answer = advise(run_advise, *XL, "loss=2.6", "best=shortest")
    winner = answer["winner"]
    batch, critical = winner["global_batch"] * 1024, compute_critical_batch(2.6)
    parameters = (
        48 * (12 * 1600**2 + 13 * 1600) + 2 * 1600
    )  # parameters without embeddings, as in the law of Kaplan and others
    least = KAPLAN.compute_least_steps(parameters, 2.6) * critical
    assert winner["critical_batch_tokens"] == pytest.approx(critical)
    assert winner["tokens"] == pytest.approx(least * (1 + batch / critical), rel=1e-6)
    assert winner["hours"] == pytest.approx(winner["tokens"] / winner["tokens_per_s"] / 3600)
    assert winner["hours"] <= 1.05 * min(row["hours"] for row in answer["nodes"] if row["fits"])


def test_batch_above_the_critical_batch_is_excluded_with_the_reason(run_advise: Advise) -> None:
    limit = math.floor(compute_critical_batch(3.5) / 1024)
    answer = advise(run_advise, *XL, "loss=3.5", "best=shortest", "max_global_batch=1000000")
    assert all(row["global_batch"] <= limit for row in [answer["winner"], *answer["nodes"]])
    assert any("beyond the critical batch" in item["why"] for item in answer["left_out"])
    assert f"ask for {limit} at most" in run_advise(*XL, "loss=3.5", f"batch.global={limit + 1}", fails=True)


def test_large_batch_of_equal_token_rate_is_worse_for_a_target_loss(run_advise: Advise) -> None:
    """For a fixed number of tokens, the larger batch is advised, because it needs fewer updates. In contrast, for a
    target loss, a smaller batch is cheaper: with a batch far below the critical batch size, fewer tokens are needed for
    the same loss."""
    words = (*XL, "nodes=1", "batch.micro=8", "batch.accumulation=1,16", "activation_checkpointing=false")
    assert (
        advise(run_advise, *words, "tokens=1e10")["winner"]["global_batch"] == 8 * 8 * 16
    )  # one update per 16 micro-steps
    assert advise(run_advise, *words, "loss=3")["winner"]["global_batch"] == 8 * 8


def test_output_names_the_chosen_scaling_law_and_its_validity(run_advise: Advise) -> None:
    output = run_advise(*XL, "nodes=1", "loss=2.6", "law=chinchilla_corrected")
    assert "arXiv 2404.10102" in output and "arXiv 2001.08361" in output
    t5 = run_advise("model=t5_v1_1_base", "machine=h100", "devices_per_node=8", "engine=ddp", "nodes=1", "loss=3.2")
    assert "an encoder with a decoder: a rough guess" in t5


def test_samples_and_budget_are_converted_to_tokens_and_node_hours(run_advise: Advise) -> None:
    words = (*XL, "nodes=1,2", "price=2")
    assert advise(run_advise, *words, "samples=1e7")["asked"]["tokens"] == 1e7 * 1024
    assert advise(run_advise, *words, "samples=2.5e6", "epochs=4")["asked"]["tokens"] == 1e7 * 1024
    bought = advise(run_advise, *words, "samples=1e7", "budget=1600")
    assert bought["asked"]["node_hours"] == 1600 / (2 * 8)
    assert bought["objective"] == "the fastest, a budget of 1,600, 100 node-hours at most"
    cheapest = advise(run_advise, *words, "samples=1e7", "budget=1600", "best=cheapest")
    assert cheapest["objective"] == "the fewest node-hours, a budget of 1,600, 100 node-hours at most"


@pytest.mark.parametrize("words", [(), ("epochs=3",), ("max_global_batch=2048",)], ids=" ".join)
def test_no_batch_is_larger_than_one_pass_over_the_data(run_advise: Advise, words: tuple[str, ...]) -> None:
    answer = advise(run_advise, *XL, "samples=100", "best=shortest", *words)
    batches = [row["global_batch"] for row in (answer["winner"], *answer["engines"], *answer["nodes"])]
    assert max(batches) == 96, "the largest multiple of 8 ranks within 100 samples"


def test_answer_restates_the_limits_and_the_few_steps(run_advise: Advise) -> None:
    output = " ".join(run_advise(*XL, "samples=100", "price=2", "deadline=3d", "budget=3", "nodes=1").split())
    assert "done in 3 days, a budget of 3, 0.1875 node-hours at most: kept" in output
    assert re.search(r"global 96, \w+ checkpointing; its batch leaves the training only 2 steps", output)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("loss=0",), "loss=0: not a number above 0; set for example loss=2.8"),
        (("loss=nan",), "loss=nan: not a number above 0"),
        (("loss=1.5",), "loss=1.5: 1.48e+09 parameters do not get below 2.278"),
        (("loss=2.6", "tokens=1e9"), "tokens loss: each of them sets the length of the training; choose one"),
        (("loss=2.6", "law=kaplen"), "law=kaplen: no such scaling law; did you mean kaplan?"),
        (("epochs=3",), "epochs: the length of one epoch is missing; add samples=1e6"),
        (
            ("loss=2.5", "adapter=lora"),
            "loss=2.5: a scaling law is for trainings from random weights, and not for",
        ),
        (("law=kaplan", "tokens=1e9"), "law: has no meaning without loss; add loss=2.8"),
        (("loss=9", "nodes=128"), "every choice has a batch beyond the critical batch"),
        (("tokens=1e9", "best=quick"), "best=quick: must be shortest or cheapest"),
        (("tokens=1e9", "storage=-1"), "storage=-1: not a number above 0; set for example storage=2e9"),
        (("tokens=1e9", "storage=2e9", "node_mtbf=-3d"), "node_mtbf=-3d: not a time above 0 with its unit"),
        (
            ("tokens=1e9", "storage=2e9", "restart=10"),
            "restart=10: not a time above 0 with its unit; write for example 90s",
        ),
        (("tokens=1e9", "restart=10m"), "restart: has no meaning without storage; add storage=2e9"),
        (("tokens=1e9", "storage=1e-9"), "less than 1% of the time is progress; give faster storage"),
        (("tokens=1e9", "storage=2e9", "node_mtbf=1s"), "less than 1% of the time is progress"),
        (("tokens=1e9", "budget=10"), "budget=10: the price of a device is unknown; add for example price=2.5"),
        (("storage=2e9",), "storage: the training has no length; add tokens=1e12"),
        (("samples=1.5",), "samples=1.5: not a whole number of samples; set for example samples=1e9"),
        (("tokens=100",), "tokens=100: less than one sample, which has 1024 tokens; ask for more"),
        (("tokens=1e9", "deadline=30x"), "deadline=30x: not a time above 0; write hours, or for example 45m, 12h, 30"),
        (("samples=9", "batch.global=16"), "batch.global=16: the training has only 9 samples; ask for 9 at most"),
        (("samples=4", "nodes=1"), "8 ranks: the training has only 4 samples for their micro-batches"),
        (
            ("tokens=1e10", "nodes=1", "price=2", "deadline=6m", "budget=3"),
            "done in 6 min, a budget of 3, 0.1875 node-hours at most: no choice keeps this",
        ),
    ],
)
def test_invalid_length_question_is_refused_in_one_line(run_advise: Advise, words: tuple[str, ...], line: str) -> None:
    assert line in run_advise(*XL, *words, fails=True)


def test_device_without_a_published_failure_rate_needs_node_mtbf(run_advise: Advise) -> None:
    words = ("model=tiny", "machine=cpu", "machine.memory_bytes=8e9", "devices_per_node=2", "nodes=1", "tokens=1e6",
             "storage=1e9")  # fmt: skip
    assert "published failure rates are those of GPUs; add for example node_mtbf=300d" in run_advise(*words, fails=True)


def test_training_time_is_shown_in_seconds_minutes_or_hours(run_advise: Advise) -> None:
    words = ("model=mt5_xl", "machine=h200", "devices_per_node=8", "engine=zero1", "nodes=1", "batch.micro=16")
    for tokens, unit in (("1e6", "s"), ("1e8", "min"), ("1e10", "h")):
        (row,) = [line for line in run_advise(*words, f"tokens={tokens}").splitlines() if line.startswith("  time ")]
        assert row.endswith(f") {unit}")
