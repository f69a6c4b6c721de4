"""Optuna's samplers, by ask and tell: its study is made anew from the trials before every proposal.

Nothing is kept beside the trials: what a sampler stores of its own is in each trial's file, and its random numbers
begin from the search's seed and the trial's number, so that a search that was killed asks for the same. What failed, or
keeps not to the constraints, is told as a violated constraint and, for samplers that know none, as worse than the rest.
They know no noise of single trials: what a busy or short run came to is told nearer to the mean.
"""

import importlib
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from bench.errors import UserError
from bench.search.candidates import CandidatePool
from bench.search.costs import compute_told_costs
from bench.search.proposers import ListProposer, is_spent
from bench.search.space import Values
from bench.search_section import Dimension
from bench.sweep.policy import Proposal, TrialResult

_STUDY = "zeroscale"
_MOST_CALLS = 5  # of a sampler before a point is taken at random: it may name those that were tried for ever
_MOST_FITTED = 60  # trials that a Gaussian process is fitted to: seconds go with their number's third power
_PENALTY = 1.0  # in log: what failed counts as e times worse than the worst that ran
_CONSTRAINT = "runs"
_PER_TRIAL, _PER_STUDY = "trial", "study"


class OptunaProposer:
    """What one of Optuna's samplers asks for."""

    def __init__(self, pool: CandidatePool) -> None:
        """UserError where Optuna is not installed, or what the sampler needs besides."""
        self._pool, self._section = pool, pool.section
        self._optuna = _import_optuna(self._section.sampler)
        self._knows_constraints = self._section.sampler in ("tpe", "gp", "nsga2")
        self._ordinal = self._section.sampler in ("qmc", "cma_es")  # which draw no categories together
        self._distributions = {key: self._build_distribution(one) for key, one in pool.space.dimensions.items()}

    def propose(self, results: Sequence[TrialResult]) -> Proposal | None:
        """Return what the sampler asks for; None where the budget is spent or every point was tried."""
        if is_spent(self._section, results):
            return None
        study = self.build_study(self._select_fitted(results))
        storage, identity = study[1], study[2]
        costs = self._list_costs(results)
        by_id = {result.trial.point.config_id: cost for result, cost in zip(results, costs, strict=True)}
        worst = _find_worst(costs)
        for _ in range(_MOST_CALLS):
            trial = study[0].ask()
            values = self._suggest(trial)
            candidate = self._pool.find(values)
            if candidate and candidate.may_fit and candidate.point.config_id not in by_id:
                kept = {
                    _PER_TRIAL: dict(study[0].trials[trial.number].system_attrs),
                    _PER_STUDY: dict(storage.get_study_system_attrs(identity)),
                }
                return Proposal(candidate.point, values, sampler_state=kept)
            cost = by_id.get(candidate.point.config_id) if candidate else None
            if self._knows_constraints:
                trial.set_constraint(_CONSTRAINT, 1.0 if cost is None else -1.0)
            study[0].tell(trial, worst + _PENALTY if cost is None else cost)
        if self._pool.space.iterate() is None:
            return None
        return ListProposer(self._pool, at_random=True).propose(results)

    def _select_fitted(self, results: Sequence[TrialResult]) -> Sequence[TrialResult]:
        """Return the trials that a sampler is told of: for `gp` the latest, and of those before the best."""
        if self._section.sampler != "gp" or len(results) <= _MOST_FITTED:
            return results
        earlier, latest = results[: -_MOST_FITTED // 2], results[-_MOST_FITTED // 2 :]
        costs = [math.inf if cost is None else cost for cost in self._list_costs(earlier)]
        best = sorted(range(len(earlier)), key=costs.__getitem__)[: _MOST_FITTED - len(latest)]
        return [*(earlier[index] for index in sorted(best)), *latest]

    def build_study(self, results: Sequence[TrialResult]) -> tuple[Any, Any, int]:
        """Return an Optuna study in memory with these trials, its storage and its number there."""
        optuna = self._optuna
        storage = optuna.storages.InMemoryStorage()
        with warnings.catch_warnings():  # that its interface may change, which constraints.txt is for
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = self._build_sampler(results[-1].trial.number + 1 if results else 0)
        study = optuna.create_study(study_name=_STUDY, storage=storage, sampler=sampler, direction="minimize")
        identity, costs = storage.get_study_id_from_name(_STUDY), self._list_costs(results)
        worst = _find_worst(costs)
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
            params={key: value for key, (value, _) in parameters.items()},
            distributions={key: distribution for key, (_, distribution) in parameters.items()},
            system_attrs=attributes,
            user_attrs={"config_id": result.trial.point.config_id, "outcome": result.outcome or ""},
        )

    def _build_sampler(self, number: int) -> Any:
        """Return the sampler, its random numbers begun for the trial with this number."""
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
        # the sequence is one for the whole search, and what is drawn beside it is not
        beside = samplers.RandomSampler(seed=seed)
        return samplers.QMCSampler(
            seed=self._section.seed,
            scramble=True,
            independent_sampler=beside,
            warn_independent_sampling=False,
            warn_asynchronous_seeding=False,
        )

    def _list_costs(self, results: Sequence[TrialResult]) -> list[float | None]:
        return compute_told_costs(self._section, results)

    def _suggest(self, trial: Any) -> Values:
        """Ask for a value of each dimension that is set."""
        values: Values = {}
        for key, dimension in self._pool.space.dimensions.items():
            if self._pool.space.is_active(key, values):
                values[key] = self._suggest_value(trial, key, dimension)
        return values

    def _build_distribution(self, dimension: Dimension) -> Any:
        """Return the distribution of a dimension: of the numbers of its values where these are ordered."""
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

    def _encode(self, values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return a trial's values as Optuna keeps them, each with its distribution."""
        found = {}
        for key, value in values.items():
            dimension = self._pool.space.dimensions[key]
            suggested = dimension.values.index(value) if dimension.values is not None else value
            found[key] = suggested, self._distributions[key]
        return found


def _find_worst(costs: Sequence[float | None]) -> float:
    return max((cost for cost in costs if cost is not None), default=0.0)


def _import_optuna(sampler: str) -> Any:
    """Return Optuna; UserError where it, or what a sampler needs besides, is not installed."""
    wanted = {"cma_es": ("optuna", "cmaes"), "gp": ("optuna", "torch")}.get(sampler, ("optuna",))
    for name in wanted:
        try:
            importlib.import_module(name)
        except ImportError as error:
            extra = "run" if name == "torch" else "search"
            remedy = f"pip install 'zeroscale[{extra}]', or search.sampler=prior"
            raise UserError(f"search.sampler={sampler}", f"needs {name}, which is not installed", remedy) from error
    optuna: Any = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
