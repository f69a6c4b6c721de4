"""Propose trials with Optuna's samplers. For each proposal, a new Optuna study is built from the trials so far.

There is no state besides the trials. A sampler's own state is kept in each trial's file. Random numbers depend only on
the seed of the search and the number of the trial, so that an interrupted search makes the same proposals.

A trial that failed, or that violates a constraint of the search, is reported to Optuna as a violated constraint. If the
sampler does not support constraints, the trial is reported with a worse value than all other trials instead.

Samplers treat all trials as equally noisy. But a short run, or a run on a busy machine, is noisier than other runs. The
value of a noisy trial is therefore moved towards the mean of all trials.
"""

import importlib
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from bench.core.errors import UserError
from bench.core.study import Dimension
from bench.sweep.policy import Proposal, TrialResult
from bench.sweep.search.proposers import compute_cost, compute_told_costs, is_settled, is_spent
from bench.sweep.search.space import CandidatePool, SearchCandidate, Values

_STUDY = "zeroscale"
_ENQUEUED = 10  # number of points with the best predictions that are tried first, in place of random ones
_MOST_FITTED = 60  # maximum number of trials for a Gaussian process, whose time grows with the cube of this number
_PENALTY = 1.0  # added to the log cost: a failed trial counts as e times worse than the worst result
_CONSTRAINT = "runs"
_PER_TRIAL, _PER_STUDY = "trial", "study"


class OptunaProposer:
    """Proposes the points (configurations) with the best predictions first, then points that one of Optuna's samplers
    suggests.

    If a suggested point cannot run or was tried before, the nearest untried point replaces it.
    """

    def __init__(self, pool: CandidatePool) -> None:
        """Raise UserError if Optuna, or another package that the sampler needs, is not installed."""
        self._pool, self._section = pool, pool.section
        self._optuna = _import_optuna(self._section.sampler)
        self._knows_constraints = self._section.sampler in ("tpe", "gp", "nsga2")
        self._ordinal = self._section.sampler in ("qmc", "cma_es")  # these samplers do not sample categories jointly
        self._distributions = {key: self._build_distribution(one) for key, one in pool.space.dimensions.items()}
        self._candidates = [one for one in pool.list_all() if one.may_fit]
        self._enqueued = self._list_enqueued()

    def propose(self, results: Sequence[TrialResult]) -> Proposal | None:
        """Return the first untried point of the list with the best predictions. If all of them were tried, return a
        point from the sampler.

        None if the budget is used up, if the latest trials improved the best result too little, or if every point was
        tried.
        """
        if is_spent(self._section, results) or is_settled(self._section, results):
            return None
        tried = {result.trial.point.config_id for result in results}
        left = [one for one in self._candidates if one.point.config_id not in tried]
        enqueued = [one for one in self._enqueued if one.point.config_id not in tried]
        if enqueued:
            return Proposal(enqueued[0].point, enqueued[0].values, "among the predicted best")
        # The suggestion is asked from a new study every time: all state comes from the trials.
        study, storage, identity = self.build_study(self._select_fitted(results))
        trial = study.ask()
        values = self._suggest(trial)
        found = self._pool.find(values)
        if found is None or not found.may_fit or found.point.config_id in tried:
            if not left:
                return None
            found = min(left, key=lambda one: self._compute_distance(one.values, values))
        kept = {
            _PER_TRIAL: dict(study.trials[trial.number].system_attrs),
            _PER_STUDY: dict(storage.get_study_system_attrs(identity)),
        }
        return Proposal(found.point, found.values, sampler_state=kept)

    def _list_enqueued(self) -> list[SearchCandidate]:
        """Return the points to try before the sampler is used. First comes the point with the best prediction for each
        engine. Then come the other points with the best predictions, until there are `_ENQUEUED` points in total.
        Points without a prediction are not listed.

        Both groups are sorted, with the best prediction first.
        """
        known = [
            (cost, place, one) for place, one in enumerate(self._candidates)
            if (cost := compute_cost(self._section.objective, one.predicted)) is not None
        ]  # fmt: skip
        ordered = [one for _, _, one in sorted(known)]
        firsts = {one.point.spec["engine"]["name"]: one for one in reversed(ordered)}
        begin = [one for one in ordered if firsts[one.point.spec["engine"]["name"]] is one]
        return [*begin, *(one for one in ordered if one not in begin)][: max(_ENQUEUED, len(begin))]

    def _compute_distance(self, one: Values, other: Values) -> float:
        """Return the distance of two points: the sum of the distances of their fields.

        For an ordered field, the distance is the difference of the two values, divided by the width of the field's
        range. The quotient lies between 0 and 1. For any other field, the distance is 1 if the values differ, and
        otherwise 0. For a field that only one of the points has, the distance is 1.
        """
        apart, codes, others = 0.0, self._encode(one), self._encode(other)
        for key in dict.fromkeys([*codes, *others]):  # in the same order in every process
            if key not in codes or key not in others:
                apart += 1
                continue
            here, there, distribution = codes[key], others[key], self._distributions[key]
            if isinstance(distribution, self._optuna.distributions.CategoricalDistribution):
                apart += here != there
            elif here != there:
                ends = distribution.low, distribution.high, here, there
                low, high, here, there = map(math.log, ends) if distribution.log else ends
                apart += abs(here - there) / (high - low)
        return apart

    def _select_fitted(self, results: Sequence[TrialResult]) -> Sequence[TrialResult]:
        """Return the trials to give to the sampler. For the sampler `gp` (Gaussian process), these are at most
        `_MOST_FITTED` trials: the latest trials, and the best of the earlier trials. All other samplers get all
        trials."""
        if self._section.sampler != "gp" or len(results) <= _MOST_FITTED:
            return results
        earlier, latest = results[: -_MOST_FITTED // 2], results[-_MOST_FITTED // 2 :]
        costs = [math.inf if cost is None else cost for cost in compute_told_costs(self._section, earlier)]
        best = sorted(range(len(earlier)), key=costs.__getitem__)[: _MOST_FITTED - len(latest)]
        return [*(earlier[index] for index in sorted(best)), *latest]

    def build_study(self, results: Sequence[TrialResult]) -> tuple[Any, Any, int]:
        """Build an Optuna study that contains these trials. Return three values: the study, its storage in memory, and
        the id of the study in this storage."""
        optuna = self._optuna
        storage = optuna.storages.InMemoryStorage()
        with warnings.catch_warnings():  # about interfaces that may change: constraints.txt pins the version
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = self._build_sampler(results[-1].trial.number + 1 if results else 0)
        study = optuna.create_study(study_name=_STUDY, storage=storage, sampler=sampler, direction="minimize")
        identity, costs = storage.get_study_id_from_name(_STUDY), compute_told_costs(self._section, results)
        worst = max((cost for cost in costs if cost is not None), default=0.0)
        for result, cost in zip(results, costs, strict=True):
            study.add_trial(self._build_trial(result, cost, worst))
            for name, value in result.trial.sampler_state.get(_PER_STUDY, {}).items():
                storage.set_study_system_attr(identity, name, value)
        return study, storage, identity

    def _build_trial(self, result: TrialResult, cost: float | None, worst: float) -> Any:
        optuna, parameters = self._optuna, self._encode(result.trial.values)
        attributes = dict(result.trial.sampler_state.get(_PER_TRIAL, {}))
        answered = result.outcome is not None
        if answered and self._knows_constraints:
            attributes[f"constraints:{_CONSTRAINT}"] = 1.0 if cost is None else -1.0
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState.COMPLETE if answered else optuna.trial.TrialState.RUNNING,
            value=(worst + _PENALTY if cost is None else cost) if answered else None,
            params=parameters,
            distributions={key: self._distributions[key] for key in parameters},
            system_attrs=attributes,
            user_attrs={"config_id": result.trial.point.config_id, "outcome": result.outcome or ""},
        )

    def _build_sampler(self, number: int) -> Any:
        """Return the sampler, seeded for the trial with this number."""
        samplers, seed = self._optuna.samplers, (self._section.seed * 1_000_003 + number) % 2**32
        match self._section.sampler:
            case "tpe":
                return samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
            case "gp":
                return samplers.GPSampler(seed=seed)
            case "cma_es":
                return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
            case "nsga2":
                return samplers.NSGAIISampler(seed=seed, population_size=min(50, max(4, self._section.trials // 5)))
        # One quasi-random sequence serves the whole search; other random values depend on the trial's number.
        beside = samplers.RandomSampler(seed=seed)
        return samplers.QMCSampler(
            seed=self._section.seed,
            scramble=True,
            independent_sampler=beside,
            warn_independent_sampling=False,
            warn_asynchronous_seeding=False,
        )

    def _suggest(self, trial: Any) -> Values:
        """Return the sampler's suggestion: one value for each dimension whose condition holds."""
        values: Values = {}
        for key, dimension in self._pool.space.dimensions.items():
            if self._pool.space.is_active(key, values):
                values[key] = self._suggest_value(trial, key, dimension)
        return values

    def _build_distribution(self, dimension: Dimension) -> Any:
        """Return Optuna's distribution for a dimension. If the dimension is a list of values, the distribution is over
        the indices of this list."""
        kinds = self._optuna.distributions
        if dimension.values is not None:
            numbers = range(len(dimension.values))
            if self._ordinal or all(isinstance(one, int | float) for one in dimension.values):
                return kinds.IntDistribution(0, len(numbers) - 1)
            return kinds.CategoricalDistribution(list(numbers))
        assert dimension.from_ is not None and dimension.to is not None
        if dimension.whole:
            step = int(dimension.step or 1)
            return kinds.IntDistribution(int(dimension.from_), int(dimension.to), log=dimension.log, step=step)
        return kinds.FloatDistribution(dimension.from_, dimension.to, log=dimension.log, step=dimension.step)

    def _suggest_value(self, trial: Any, key: str, dimension: Dimension) -> Any:
        kinds, wanted = self._optuna.distributions, self._distributions[key]
        if isinstance(wanted, kinds.CategoricalDistribution):
            suggested = trial.suggest_categorical(key, wanted.choices)
        else:
            suggest = trial.suggest_int if isinstance(wanted, kinds.IntDistribution) else trial.suggest_float
            suggested = suggest(key, wanted.low, wanted.high, step=wanted.step, log=wanted.log)
        return dimension.values[suggested] if dimension.values is not None else suggested

    def _encode(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of each dimension of a trial as Optuna represents it."""
        lists = {key: self._pool.space.dimensions[key].values for key in values}
        return {key: value if (listed := lists[key]) is None else listed.index(value) for key, value in values.items()}


def _import_optuna(sampler: str) -> Any:
    """Return the module `optuna`. Raise UserError if it, or another package that the sampler needs, is not
    installed."""
    wanted = {"cma_es": ("optuna", "cmaes"), "gp": ("optuna", "torch")}.get(sampler, ("optuna",))
    for name in wanted:
        try:
            importlib.import_module(name)
        except ImportError as error:
            extra = "run" if name == "torch" else "search"
            remedy = f"pip install 'zeroscale[{extra}]', or search.sampler={'tpe' if name == 'torch' else 'random'}"
            rule = f"needs the package {name}, which is not installed"
            raise UserError(f"search.sampler={sampler}", rule, remedy) from error
    optuna: Any = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
