"""Tests of the trials that searches propose on grids of points. The result of each point is computed by a formula
instead of measured."""

import importlib
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from simulated_search import OVERRIDES, SPACE, answer, pool, search, section

from bench.cli.search import format_verdict
from bench.core.errors import UserError
from bench.sweep.definition import Trial
from bench.sweep.policy import TrialResult
from bench.sweep.search import optuna_proposer
from bench.sweep.search.optuna_proposer import OptunaProposer
from bench.sweep.search.planning import build_sampler
from bench.sweep.search.proposers import (
    PATIENCE,
    EarlyEnd,
    ListProposer,
    compute_step_limit_s,
    compute_told_costs,
    is_settled,
)
from bench.sweep.search.verdict import conclude, find_interval, foresee

SPEED = {"ddp": 1.0, "zero1": 1.1, "zero3": 1.6}
OPTUNA = ("tpe", "gp", "cma_es", "nsga2", "random", "qmc")


def step_s(values: Mapping[str, Any]) -> float:
    """Return a step time that grows with the micro-batch and, slowly, with the nodes.

    The function `run` below simulates a run with this step time, or a failure. Of the points that do not fail, zero1
    with micro-batch 8 on 8 nodes processes the most samples per second.
    """
    return SPEED[values["engine"]] * (0.2 + 0.1 * values["batch.micro"]) * (1 + 0.02 * values["nodes"])


def run(values: Mapping[str, Any]) -> float | str:
    """Return the simulated step time of a point in seconds, or "oom" for ddp with a micro-batch of 4 or more."""
    return "oom" if values["engine"] == "ddp" and values["batch.micro"] >= 4 else step_s(values)


BEST = {"engine": "zero1", "batch.micro": 8, "nodes": 8}


def test_grid_search_tries_every_point_once_in_order() -> None:
    done = search(build_sampler(pool(section(sampler="grid"))), run, 1_000)
    assert len(done) == 48
    assert [one.trial.values for one in done[:2]] == [
        {"engine": "ddp", "batch.micro": 1, "nodes": 1},
        {"engine": "ddp", "batch.micro": 1, "nodes": 2},
    ]


def test_random_search_tries_every_point_once_in_an_order_set_by_the_seed() -> None:
    orders = {}
    for seed in (1, 2):
        done = search(build_sampler(pool(section(sampler="random", seed=seed))), run, 99)
        orders[seed] = [one.trial.point.config_id for one in done]
    assert len(set(orders[1])) == 48 and orders[1] != orders[2] and set(orders[1]) == set(orders[2])


BY_RATIOS = {"from": 1, "to": 64, "log": True}


@pytest.mark.parametrize("sampler", ("random", "tpe"))
def test_logarithmic_range_of_integers_is_sampled_uniformly_in_its_logarithm(sampler: str) -> None:
    """The middle of a logarithmic range from 1 to 64 is 8, so about half of the first trials have at most 8. With
    uniform draws, only one in eight would have at most 8."""
    asked = (
        build_sampler(pool(section({"engine": ["ddp"], "batch.micro": BY_RATIOS}, sampler=sampler, seed=seed)))
        for seed in range(80)
    )
    found = [proposal.values["batch.micro"] for one in asked if (proposal := one.propose([]))]
    assert sum(value <= 8 for value in found) / 80 == pytest.approx(0.5, abs=0.2)


def test_grid_of_a_logarithmic_range_begins_with_powers_of_two() -> None:
    asked = build_sampler(pool(section({"engine": ["ddp"], "batch.micro": BY_RATIOS}, sampler="grid")))
    done = search(asked, lambda values: 1.0, 99)
    assert [one.trial.values["batch.micro"] for one in done[:9]] == [1, 2, 4, 8, 16, 32, 64, 3, 5]
    assert len(done) == 64


def test_logarithmic_range_too_large_to_list_is_sampled_uniformly_in_its_logarithm() -> None:
    """In a logarithmic range up to a million, about half of the draws are at most a thousand. With uniform draws, only
    one in a thousand would be."""
    space = {"engine": ["ddp"], "batch.micro": BY_RATIOS | {"to": 10**6}}
    asked = build_sampler(pool(section(space, sampler="random")))
    found = [one.trial.values["batch.micro"] for one in search(asked, lambda values: 1.0, 60)]
    assert sum(value <= 1_000 for value in found) / 60 == pytest.approx(0.5, abs=0.2)


def test_random_search_of_a_large_space_composes_only_the_points_that_it_draws() -> None:
    composed: list[Any] = []
    space = {"engine": ["ddp"], "batch.micro": [1], "seed": {"from": 0, "to": 10**9}}
    asked = section(space, sampler="random", trials=7)
    done = search(build_sampler(pool(asked, composed.append)), lambda values: 1.0, 7)
    assert len(done) == 7 and len(composed) == 7


def test_range_of_a_billion_integers_is_sampled() -> None:
    space = {"engine": ["ddp"], "batch.micro": [1], "seed": {"from": 0, "to": 10**9}}
    done = search(build_sampler(pool(section(space, sampler="random"))), lambda values: 1.0, 30)
    seeds = [one.trial.values["seed"] for one in done]
    assert len(set(seeds)) == 30 and min(seeds) < 5e8 < max(seeds) <= 10**9


def test_predicted_best_of_each_engine_comes_first_and_exact_predictions_end_the_search() -> None:
    candidates = pool(section(gain=0.01), step_s)
    done = search(build_sampler(candidates), step_s, 99)
    assert [one.trial.values for one in done[:3]] == [
        {"engine": "ddp", "batch.micro": 8, "nodes": 8},
        {"engine": "zero1", "batch.micro": 8, "nodes": 8},
        {"engine": "zero3", "batch.micro": 8, "nodes": 8},
    ]
    assert len(done) == 1 + PATIENCE, "no other gains 1 %"
    verdict = conclude(candidates, done)
    assert verdict.best and verdict.best.trial.values == done[0].trial.values
    assert verdict.is_over and verdict.is_settled and not verdict.is_spent


BUSY = 0.3
"""Noise of a step time, as the standard deviation of its logarithm."""


def disturb(result: TrialResult) -> TrialResult:
    """Return a copy of a trial's result, changed as if the machine had been busy: its step time has a large noise."""
    return result._replace(quantities=result.quantities and result.quantities._replace(step_noise=BUSY))


def test_trials_within_the_noise_of_a_busy_best_trial_are_reported_as_equal() -> None:
    """The best of 48 trials has 55 samples/s but ran on a busy machine. Its true rate lies between e^-0.59 and e^0.59
    times this value. So all trials with at least 31 samples/s are reported as equal to the best."""
    candidates = pool(section(sampler="grid"))
    done = search(build_sampler(candidates), step_s, 99)
    sound = conclude(candidates, done)
    assert sound.best and sound.best.quantities and len(sound.equals) == 0
    rates = [one.quantities.get("samples_per_s") or 0 for one in done if one.quantities]
    verdict = conclude(candidates, [disturb(one) if one == sound.best else one for one in done])
    low = math.exp(-1.96 * BUSY) * max(rates)
    assert verdict.best and find_interval(candidates.section, verdict.best)[0] == pytest.approx(low)
    assert len(verdict.equals) == sum(rate / 0.99 > low for rate in rates) - 1 > 0


def test_step_limit_of_a_trial_allows_for_the_noise_of_earlier_trials() -> None:
    """A trial is ended early if its steps are certainly slower than the best trial so far. Each earlier trial has an
    interval of its step time. The limit is 1.1 × the lowest upper end of these intervals.

    The first trial has 0.5 s, on a busy machine. Its interval reaches to 0.9 s, so the limit is 0.99 s. The second
    trial has 0.6 s, on a quiet machine. Its interval reaches to 0.606 s, so the limit becomes 0.67 s.
    """
    asked = section(objective="step_s", sampler="grid", space={"engine": ["ddp"], "batch.micro": [1, 2, 4]})
    candidates = pool(asked)
    seconds = {1: 0.5, 2: 0.6, 4: 1.0}
    first, second, third = search(build_sampler(candidates), lambda values: seconds[values["batch.micro"]], 3)
    assert compute_step_limit_s(asked, third.trial.point, [disturb(first)]) == pytest.approx(
        1.1 * 0.5 * math.exp(0.588)
    )
    limit_s = compute_step_limit_s(asked, third.trial.point, [disturb(first), second])
    assert limit_s == pytest.approx(1.1 * 0.6 * 1.01)


def test_costs_of_busy_trials_are_shrunk_towards_the_mean_for_samplers_without_noise() -> None:
    """Some samplers do not support noise. They get costs in which noisy values are moved towards the mean. Here the
    costs are the logarithms of 1, 2 and 4 s, and the last was measured on a busy machine.

    The variance of the three costs is 0.320. On average, 0.030 of it is noise, so the true costs have a variance of
    0.290. The noise of the last cost has a variance of 0.090. So the distance of the last cost from the mean is
    multiplied by 0.290 / (0.290 + 0.090).
    """
    asked = section(objective="step_s", sampler="grid", space={"engine": ["ddp"], "batch.micro": [1, 2, 4]})
    sound = search(build_sampler(pool(asked)), lambda values: float(values["batch.micro"]), 3)
    assert compute_told_costs(asked, sound) == pytest.approx([0, math.log(2), math.log(4)])
    told = compute_told_costs(asked, [*sound[:2], disturb(sound[2])])
    spread = 2 / 3 * math.log(2) ** 2 - BUSY**2 / 3
    middle = (math.log(2) / spread + math.log(4) / (spread + 0.09)) / (2 / spread + 1 / (spread + 0.09))
    assert told[:2] == pytest.approx([0, math.log(2)])
    assert told[2] == pytest.approx(middle + (math.log(4) - middle) * spread / (spread + 0.09))
    assert middle < told[2] < math.log(4)
    assert compute_told_costs(asked, [disturb(sound[0]), sound[1]._replace(outcome="oom", quantities=None)])[1] is None


@pytest.mark.parametrize("sampler", ("tpe", "gp"))
def test_optuna_gets_the_shrunk_costs(sampler: str) -> None:
    asked = section(objective="step_s", sampler=sampler)
    done = search(build_sampler(pool(asked)), step_s, 6)
    done[3] = disturb(done[3])
    made = OptunaProposer(pool(asked)).build_study(done)[0]
    assert [trial.value for trial in made.trials] == pytest.approx(compute_told_costs(asked, done))
    assert made.trials[3].value != pytest.approx(math.log(step_s(done[3].trial.values)))


def test_noisy_best_trial_of_a_busy_machine_does_not_settle_a_search() -> None:
    """A search is settled, and ends, if its latest trials hardly improved the best result.

    The first of 30 trials took 0.5 s, the next 28 took 1 s, and the last took 0.9 s. If the first trial was measured on
    a quiet machine, the last trial is no improvement. If the first trial was measured on a busy machine, its time is
    uncertain. Then the last trial counts as an improvement.
    """
    asked = section(objective="step_s", sampler="tpe", space={"engine": ["ddp"], "seed": {"from": 1, "to": 30},
                                                              "batch.micro": [1]})  # fmt: skip
    seconds = {1: 0.5, 30: 0.9}
    values = [{"engine": "ddp", "seed": seed, "batch.micro": 1} for seed in range(1, 31)]
    candidates = [pool(asked).find(one) for one in values]
    done = [
        answer(Trial(number=number, point=one.point, values=one.values), lambda of: seconds.get(of["seed"], 1.0))
        for number, one in enumerate(candidates) if one
    ]  # fmt: skip
    assert len(done) == 30 and is_settled(asked, done), "nothing is better than the first"
    assert not is_settled(asked, [disturb(done[0]), *done[1:]])


def test_verdict_recommends_another_measurement_after_runs_on_a_busy_machine(tmp_path: Path) -> None:
    candidates = pool(section(sampler="grid"), step_s)
    done = search(build_sampler(candidates), step_s, 5)
    busy = [disturb(one) for one in done]
    text = format_verdict(conclude(candidates, busy), tmp_path, as_json=False)
    assert "its measurement was disturbed" in text
    text = format_verdict(
        conclude(candidates, busy), tmp_path, as_json=False, command="sweep", given=["--config-dir", "my"]
    )
    command = text.partition("measure it again:\n")[2].partition("\n")[0].split()
    assert command == ["zeroscale", "sweep", *OVERRIDES, "launcher.quiet_within_s=600", "--config-dir", "my"]
    assert "disturbed" not in format_verdict(conclude(candidates, done), tmp_path, as_json=False)


def test_measured_runs_correct_wrong_predictions() -> None:
    def predict(values: Mapping[str, Any]) -> float:  # zero3 is predicted to be the fastest, but is the slowest
        return step_s(values) / (3 if values["engine"] == "zero3" else 1)

    candidates = pool(section(gain=0.01), predict)
    done = search(build_sampler(candidates), run, 99)
    verdict = conclude(candidates, done)
    assert verdict.best and verdict.best.trial.values == BEST
    assert len(done) < 30


def test_ten_predicted_best_points_are_enqueued() -> None:
    """Of 48 points, the ten with the best predictions are tried first. These ten include at least one point of each
    engine, even of the slowest engine."""
    done = search(build_sampler(pool(section(), step_s)), step_s, 12)
    assert len({one.trial.values["engine"] for one in done[:3]}) == 3
    assert [one.trial.why for one in done] == ["among the predicted best"] * 10 + [""] * 2


def test_search_without_predictions_finds_the_best_point_among_some_out_of_memory() -> None:
    done = search(build_sampler(pool(section(gain=0.005))), run, 99)
    assert len(done) < 48 and any(one.trial.values == BEST for one in done)


def test_suggestion_tried_before_is_replaced_by_an_untried_point() -> None:
    """All but two of the points were tried before, so the sampler suggests points that were tried. Each suggestion is
    replaced by one of the two untried points. Then the search ends."""
    candidates = pool(section(sampler="qmc", gain=0))
    everything = search(ListProposer(candidates, at_random=False), run, 99)
    done = search(build_sampler(candidates), run, 99, everything[2:])
    assert {one.trial.point.config_id for one in done[46:]} == {one.trial.point.config_id for one in everything[:2]}


@pytest.mark.parametrize("sampler", ("gp", "random", "tpe", "qmc", "nsga2"))
def test_search_killed_after_any_trial_proposes_the_same_trials(sampler: str) -> None:
    asked = section(sampler=sampler, seed=3, gain=0)
    whole = search(build_sampler(pool(asked)), run, 14)
    for killed_after in (1, 6, 11):
        again = search(build_sampler(pool(asked)), run, 14, whole[:killed_after])
        assert [one.trial for one in again] == [one.trial for one in whole]


@pytest.mark.parametrize("sampler", OPTUNA)
def test_every_sampler_finds_a_good_point_and_proposes_none_twice(sampler: str) -> None:
    if sampler == "cma_es":
        pytest.importorskip("cmaes")
    done = search(
        build_sampler(pool(section(sampler=sampler, seed=1))), run, 13
    )  # some samplers draw the first ten points at random
    assert len({one.trial.point.config_id for one in done}) == len(done) == 13
    rates = [one.quantities.get("samples_per_s") for one in done if one.quantities]
    assert max(rate for rate in rates if rate) > 0.6 * 64 / step_s(BEST)


def test_trials_without_a_result_are_not_proposed_again() -> None:
    asked = build_sampler(pool(section()))
    done = search(asked, run, 5)
    under_way = [one._replace(outcome=None, quantities=None) for one in done]
    for results in (done[:3] + under_way[3:], under_way):
        proposal = asked.propose(results)
        assert proposal and proposal.point.config_id not in {one.trial.point.config_id for one in results}


def test_search_ends_when_its_budget_is_spent() -> None:
    assert len(search(build_sampler(pool(section(trials=4))), run, 99)) == 4
    assert len(search(build_sampler(pool(section(node_hours=0.05, gain=0))), run, 99)) == 5, "each takes 0.01"


def test_best_trial_keeps_to_the_constraints() -> None:
    candidates = pool(section(constraints={"step_s": {"at_most": 0.5}}))
    verdict = conclude(candidates, search(build_sampler(candidates), run, 99))
    assert verdict.best and verdict.best.quantities and verdict.best.quantities.median.s <= 0.5


@pytest.mark.parametrize(
    ("constraints", "told"),
    [
        ({"step_s": {"at_most": 0.05}}, ".step_s: must be at most 0.05, but none of the 48 trials with outcome ok is; "
         "the nearest value is 0.306; relax it, or change the space"),
        ({"step_s": {"at_least": 3}}, ".step_s: must be at least 3, but none of the 48 trials with outcome ok is; "
         "the nearest value is 1.856; relax it, or change the space"),
        ({"peak_bytes": {"at_most": 9}}, ".peak_bytes: must be at most 9, but none of the 48 trials with outcome ok "
         "is; its value is unknown; relax it, or change the space"),
        ({"step_s": {"at_most": 0.4}, "samples_per_s": {"at_least": 30}}, ": step_s, samples_per_s: none of the 48 "
         "trials with outcome ok fulfils all of them; relax one, or change the space"),
    ],
)  # fmt: skip
def test_constraints_that_no_trial_keeps_to_are_reported_in_one_line(
    tmp_path: Path, constraints: dict[str, Any], told: str
) -> None:
    """The fastest step takes 0.306 s (ddp, one sample, one node), and the slowest 1.856 s (zero3, 64 samples on 8
    nodes).

    The last case has two constraints that exclude each other: a maximum step time of 0.4 s, and a minimum rate of 30
    samples/s. A step within 0.4 s has at most 8 samples, which is a rate of at most 23 samples/s. The highest rate of
    all trials, 55 samples/s, has a step time of 1.16 s.
    """
    candidates = pool(section(sampler="grid", constraints=constraints))
    verdict = conclude(candidates, search(build_sampler(candidates), step_s, 99))
    assert verdict.best is None and verdict.is_over
    assert format_verdict(verdict, tmp_path, as_json=False).splitlines()[0] == f"search.constraints{told}"


def test_failed_trials_are_not_reported_as_violated_constraints(tmp_path: Path) -> None:
    candidates = pool(section(sampler="grid", constraints={"step_s": {"at_most": 0.05}}))
    verdict = conclude(candidates, search(build_sampler(candidates), lambda values: "oom", 99))
    assert format_verdict(verdict, tmp_path, as_json=False).startswith("no trial has the outcome ok\n")


@pytest.mark.parametrize(
    ("objective", "limit_s"),
    [
        ("step_s", 1.1 * 0.505),  # the best trial: median 0.5 s, upper end of its interval 0.505 s
        ("samples_per_s", 1.1 * 0.505 * 8 / 2),  # with four times as many samples, a step may take four times as long
        ("samples_per_node_hour", 1.1 * 0.505 * 8 / 2 / 4),  # on four times as many nodes
        ("peak_bytes", None),  # does not follow from the step time
    ],
)
def test_step_limit_is_a_tenth_above_the_best_trial_for_the_same_work(objective: str, limit_s: float | None) -> None:
    asked = section(objective=objective, sampler="grid", space={"engine": ["ddp"], "batch.micro": [2], "nodes": [1, 4]})
    proposer = EarlyEnd(ListProposer(pool(asked), at_random=False), asked)
    first = proposer.propose([])
    assert first and first.point.step_limit_s is None, "there is nothing to win against"
    ended = answer(Trial(number=0, **first._asdict()), lambda values: 0.5)
    assert ended.quantities
    ended = ended._replace(quantities=ended.quantities._replace(peak_bytes=5))
    second = proposer.propose([ended])
    assert second and second.point.step_limit_s == (limit_s and pytest.approx(limit_s))


def test_conditional_field_is_left_out_unless_its_condition_holds() -> None:
    space = {**SPACE, "engine.stage": {"values": [1, 2], "when": {"engine": ["zero1"]}}}
    listed = pool(section(space)).space.list_candidates(0)
    assert len(listed) == 16 + 2 * 16 + 16
    assert all(("engine.stage" in values) == (values["engine"] == "zero1") for values in listed)


def test_missing_optuna_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(optuna_proposer, "importlib", type("none", (), {"import_module": staticmethod(refuse)}))
    with pytest.raises(
        UserError, match=r"search.sampler=tpe: needs the package optuna.*pip install 'zeroscale\[search\]'"
    ):
        build_sampler(pool(section(sampler="tpe")))
    assert importlib.import_module("json"), "nothing else is touched"


@pytest.mark.parametrize(("given", "trials", "bound"), (
    ({"sampler": "grid"}, 48, "exactly"),
    ({"sampler": "random", "trials": 12}, 12, "exactly"),
    ({"sampler": "random", "trials": 12, "node_hours": 1.0}, 12, "at most"),
    ({"sampler": "gp", "trials": 30}, 30, "at most"),
))  # fmt: skip
def test_outlook_counts_the_trials_of_the_whole_search(given: dict[str, Any], trials: int, bound: str) -> None:
    candidates = pool(section(**given))
    done = search(ListProposer(candidates, at_random=False), step_s, 5)
    current = done[4]._replace(outcome=None, quantities=None, node_hours=0.0)
    assert foresee(candidates, [current], current).left_s is None, "no trial has a result"
    outlook = foresee(candidates, [*done[:4], current], current)
    assert (outlook.trials, outlook.bound, outlook.left) == (trials, bound, trials - 4)
    each_s = statistics.median(36 / one.trial.point.nodes for one in done[:4])
    assert (outlook.run_s, outlook.left_s) == pytest.approx((each_s, (trials - 4) * each_s))
