"""Tests of successive halving, a search that trains many configurations briefly and continues the best. Trainings are
simulated, and their losses are given by a formula."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from simulated_search import section

from bench.cli.search import format_verdict
from bench.core.machine import Machine
from bench.core.quantities import MeasuredStep, RunQuantities
from bench.core.spec import RunSpec
from bench.core.study import RungSection, SearchSection
from bench.sweep.definition import SweepPoint, Trial
from bench.sweep.policy import TrialResult
from bench.sweep.search.halving import choose_bracket, list_rung_tokens, select_furthest
from bench.sweep.search.planning import build_proposer
from bench.sweep.search.space import CandidatePool, SearchSpace, format_key
from bench.sweep.search.verdict import conclude, foresee

TOKENS = 9_000
RATES = [0.001 * number for number in range(1, 28)]
Loss = Callable[[float, int], float | None]
"""Returns the loss of a training with this learning rate after a number of tokens; None if the training fails."""


def a_section(**given: Any) -> SearchSection:
    plain = {"objective": "validation_loss", "sampler": "random", "rungs": {"least": 1_000}}
    return section({"optimizer.lr": RATES}, **plain | given)


def pool(of: SearchSection) -> CandidatePool:
    """Return the candidates of a search: trainings of 9,000 tokens with different learning rates."""

    def build(values: Mapping[str, Any]) -> SweepPoint:
        spec = {
            "model": {"name": "m", "family": "t5", "shape": {}},
            "engine": {"name": "ddp", "backend": "ddp"},
            "data": {"name": "text", "source": "text"},
            "batch": {"micro": 1},
            "optimizer": {"lr": values["optimizer.lr"]},
            "learning": {"tokens": TOKENS, "stop_after": values.get("learning.stop_after")},
        }
        name = format_key(values)
        return SweepPoint(
            config_id=name, line=name, machine="cpu", nodes=1, devices_per_node=1, time_limit_min=1, overrides=(),
            spec=RunSpec.model_validate(spec).model_dump(mode="json", by_alias=True),
        )  # fmt: skip

    return CandidatePool(of, SearchSpace(of), build, Machine(name="cpu", device="cpu"))


def search(of: SearchSection, loss: Loss) -> list[TrialResult]:
    """Run a new search, and return the results of all its trials in order. `loss` gives the loss of a learning rate
    after a number of tokens."""
    return list(go_on(of, loss, []))


def go_on(of: SearchSection, loss: Loss, results: list[TrialResult]) -> Iterator[TrialResult]:
    """Continue a search whose earlier trials have these `results`. Yield the result of each further trial until the
    search ends."""
    candidates = pool(of)
    proposer, known = build_proposer(candidates), [*results]
    while proposal := proposer.propose(known):
        trial = Trial(number=len(known), **proposal._asdict())
        found = loss(trial.values["optimizer.lr"], end(trial))
        quantities = RunQuantities(MeasuredStep(0.1), MeasuredStep(0.1), 1, None, 1, validation_loss=found)
        known.append(TrialResult(trial, "ok", quantities) if found else TrialResult(trial, "invalid"))
        yield known[-1]


def end(trial: Trial) -> int:
    learning = trial.point.spec["learning"]
    return int(learning["stop_after"] or learning["tokens"])


def flat(rate: float, tokens: int) -> float:
    """Return the simulated loss of a training with the learning rate `rate` after `tokens` tokens. It falls with
    tokens. At every number of tokens, a learning rate of 0.020 has the lowest loss."""
    return 2.0 + abs(rate - 0.020) * 100 + 1_000 / tokens


def test_rungs_are_the_training_divided_by_powers_of_the_factor() -> None:
    assert list_rung_tokens(RungSection(least=1_000), TOKENS) == [1_000, 3_000, 9_000]
    assert list_rung_tokens(RungSection(least=1_001), TOKENS) == [3_000, 9_000]
    assert list_rung_tokens(RungSection(least=10_000), TOKENS) == [9_000]
    assert list_rung_tokens(RungSection(least=1, factor=2), 10) == [1, 2, 5, 10]


def test_of_27_trainings_about_nine_and_three_are_promoted() -> None:
    """A third of the trainings is promoted, which means that they continue until they have three times as many tokens.
    Promotion does not wait until all trainings have results. So a training is promoted if it is among the best third of
    the trainings so far, even if better trainings follow."""
    results = search(a_section(), flat)
    counted = Counter(end(result.trial) for result in results)
    assert counted[1_000] == 27
    assert 9 <= counted[3_000] <= 14
    assert 3 <= counted[9_000] <= 7
    (best,) = (one for one in [conclude(pool(a_section()), results).best] if one)
    assert best.trial.values["optimizer.lr"] == pytest.approx(0.020)


def test_halving_needs_less_than_half_the_tokens_of_all_full_trainings() -> None:
    spent, before = 0, {1_000: 0, 3_000: 1_000, 9_000: 3_000}
    for result in search(a_section(), flat):
        spent += end(result.trial) - before[end(result.trial)]
    assert spent < 0.5 * len(RATES) * TOKENS


def test_promoted_training_continues_its_own_run() -> None:
    results = search(a_section(), flat)
    by_id = {result.trial.point.config_id: result.trial for result in results}
    assert len(by_id) == len(results), "no run twice"
    for trial in by_id.values():
        before = trial.point.goes_on_from
        assert (before is None) == (end(trial) == 1_000)
        if before:
            assert by_id[before].values == trial.values
            assert end(trial) == 3 * end(by_id[before])
            assert by_id[before].number < trial.number


def test_promoted_training_is_among_the_best_third_of_its_rung() -> None:
    results = search(a_section(), flat)
    for number, result in enumerate(results):
        if result.trial.point.goes_on_from:
            there = [one for one in results[:number] if end(one.trial) == end(result.trial) // 3]
            losses = sorted(flat(one.trial.values["optimizer.lr"], 1) for one in there)
            assert flat(result.trial.values["optimizer.lr"], 1) <= losses[len(losses) // 3 - 1]


def test_failed_training_is_not_promoted() -> None:
    def fails_above(rate: float, tokens: int) -> float | None:
        return flat(rate, tokens) if rate < 0.015 else None

    rates = {
        result.trial.values["optimizer.lr"] for result in search(a_section(), fails_above) if result.quantities is None
    }
    assert rates == {rate for rate in RATES if rate >= 0.015}
    assert all(end(one.trial) == 1_000 for one in search(a_section(), fails_above) if one.quantities is None)


def test_resumed_search_continues_with_the_same_trials() -> None:
    whole = search(a_section(), flat)
    for number in (0, 1, 5, 20, len(whole) - 1):
        assert [*whole[:number], *go_on(a_section(), flat, whole[:number])] == whole


def test_verdict_ignores_losses_of_unfinished_trainings() -> None:
    def better_at_first(rate: float, tokens: int) -> float:
        return 1.0 if tokens < TOKENS else 2.0

    results = search(a_section(), better_at_first)
    assert {end(one.trial) for one in select_furthest(a_section(), results)} == {TOKENS}
    verdict = conclude(pool(a_section()), results)
    assert verdict.best and verdict.best.quantities and verdict.best.quantities.validation_loss == 2.0
    assert verdict.is_over
    assert list(verdict.reached) == [1_000, 3_000, 9_000]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_with_few_points_the_best_is_trained_to_its_end(count: int) -> None:
    few = section({"optimizer.lr": RATES[:count]}, objective="validation_loss", sampler="grid", rungs={"least": 1_000})
    results = search(few, flat)
    counted = Counter(end(result.trial) for result in results)
    assert counted[1_000] == count and counted[TOKENS] >= 1
    verdict = conclude(pool(few), results)
    assert verdict.is_over and not verdict.none_ended and verdict.best
    assert verdict.best.trial.values["optimizer.lr"] == RATES[count - 1], "the nearest to 0.020"


def test_next_best_is_trained_to_its_end_if_the_best_fails() -> None:
    few = section({"optimizer.lr": RATES[:4]}, objective="validation_loss", sampler="grid", rungs={"least": 1_000})
    results = search(few, lambda rate, tokens: None if rate == RATES[3] and tokens > 1_000 else flat(rate, tokens))
    verdict = conclude(pool(few), results)
    assert verdict.best and verdict.best.trial.values["optimizer.lr"] == RATES[2] and end(verdict.best.trial) == TOKENS


def test_last_promotion_waits_for_all_results_of_the_rung() -> None:
    few = section({"optimizer.lr": RATES[:2]}, objective="validation_loss", sampler="grid", rungs={"least": 1_000})
    first, second = search(few, flat)[:2]
    asked = build_proposer(pool(few))
    assert asked.propose([first, second._replace(outcome=None, quantities=None)]) is None
    assert asked.propose([first, second]) is not None


def test_verdict_reports_a_budget_spent_before_any_training_ended(tmp_path: Path) -> None:
    few = a_section(trials=5)
    verdict = conclude(pool(few), search(few, flat))
    assert verdict.is_spent and verdict.none_ended
    told = format_verdict(verdict, tmp_path, as_json=False)
    assert "no training reached its end at 9,000 tokens" in told and "raise search.trials" in told
    assert "no training" not in format_verdict(
        conclude(pool(a_section()), search(a_section(), flat)), tmp_path, as_json=False
    )


def test_number_of_trainings_per_bracket_matches_hyperband() -> None:
    """A bracket is a run of successive halving with its own number of trainings. For at most 81 units per training and
    a factor of 3, table 1 of arXiv 1603.06560 has brackets of 81, 34, 15, 8 and 5 trainings."""
    rungs, begun = RungSection(least=1, brackets=5), Counter[int]()
    for _ in range(143):
        begun[choose_bracket(begun, rungs, last=4)] += 1
    assert [begun[rung] for rung in range(5)] == pytest.approx([81, 34, 15, 8, 5], abs=1)


def test_trainings_of_a_later_bracket_begin_at_its_rung() -> None:
    results = search(a_section(rungs={"least": 1_000, "brackets": 2}), flat)
    firsts = Counter(end(result.trial) for result in results if result.trial.point.goes_on_from is None)
    assert set(firsts) == {1_000, 3_000}


def test_trial_budget_counts_every_rung() -> None:
    assert len(search(a_section(trials=10), flat)) == 10


@pytest.mark.parametrize("given", ({}, {"trials": 10}, {"rungs": {"least": 1_000, "brackets": 2}}))
def test_foreseen_trials_and_time_are_near_those_that_follow(given: dict[str, Any]) -> None:
    """A simulated trial takes one second per 1,000 tokens of training. The whole search is simulated. At each trial,
    the search predicts the total number of trials and the remaining time. Both predictions are compared with the
    simulation."""
    tokens = [0, 1_000, 3_000, 9_000]

    def compute_seconds(trial: Trial) -> float:
        begin = tokens[tokens.index(end(trial)) - 1] if trial.point.goes_on_from else 0
        return (end(trial) - begin) / 1_000

    of = a_section(**given)
    results = [one._replace(node_hours=compute_seconds(one.trial) / 3600) for one in search(of, flat)]
    total, candidates = len(results), pool(of)
    for place in range(1, total):
        current = results[place]._replace(outcome=None, quantities=None, node_hours=0.0)
        outlook = foresee(candidates, [*results[:place], current], current)
        assert outlook.trials == pytest.approx(total, rel=0.2) and outlook.bound == "about"
        assert outlook.left == outlook.trials - place
    assert (outlook.trials, outlook.left) == (total, 1)
    half = total // 2
    current = results[half]._replace(outcome=None, quantities=None, node_hours=0.0)
    left_s = sum(compute_seconds(one.trial) for one in results[half:])
    if not given:  # with few trials, or with brackets, the number of promoted trainings depends on the order of results
        assert foresee(candidates, [*results[:half], current], current).left_s == pytest.approx(left_s, rel=0.35)
