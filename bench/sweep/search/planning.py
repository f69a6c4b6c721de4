"""Plan a search from a study and overrides, or restore a search from a study's folder."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench import launchers
from bench.config import compose
from bench.config.compose import GROUPS, StudyPoint
from bench.config.decode import decode_model
from bench.config.exclude_rules import list_field_names
from bench.core.errors import UserError, suggest_nearest
from bench.core.formatting import format_count, format_number
from bench.core.spec import RunSpec
from bench.core.study import Dimension, Pair, SearchSection, Study
from bench.sweep import definition, inputs, plan
from bench.sweep.definition import SearchRequest, SweepDefinition, SweepPoint, SweepRules, Trial
from bench.sweep.forecast import FAR_OUT_FACTOR
from bench.sweep.inputs import GivenOverrides, find_study, format_overrides
from bench.sweep.lost import finalize_lost, keep_ends
from bench.sweep.policy import Proposer
from bench.sweep.search.halving import HalvingProposer, list_rung_tokens
from bench.sweep.search.proposers import EarlyEnd, ListProposer
from bench.sweep.search.space import CandidatePool, SearchCandidate, SearchSpace, list_pairs
from bench.sweep.snapshot import TrialReader
from bench.sweep.status import read_state

_TRIED_FOR_FIRST = 200  # combinations of values to try until one gives a point that can run
_MAY_CHANGE = {"trials", "node_hours", "gain", "parallel"}  # settings that may change when a search is resumed
_SECTION = "search."
_ONE_OF = ("machine", "launcher")  # all trials share one machine and one launcher, so that their results compare


class SearchPoints:
    """The points (configurations) of a search's space. Each point is composed and checked when it is first needed."""

    def __init__(
        self, study: Study, overrides: tuple[str, ...], config_dir: Path | None, machine: str | None = None
    ) -> None:
        """Raise UserError for a study without a `search` section, for an override with several values, and for an
        unknown field.

        `machine` is the name of the machine on which an interrupted search began. With it, a resumed search stays on
        that machine even if the default machine in conf/config.yaml has changed.
        """
        if study.search is None:
            if study.name == "adhoc" and not study.axes:
                rule, remedy = "no study is named", "name one with a search section, such as study=search_smoke"
                raise UserError("search", rule, remedy)
            rule = "has no search section"
            remedy = "add a search section with space and objective, or use `zeroscale sweep`"
            raise UserError(f"study={study.name}", rule, remedy)
        self.overrides, self.config_dir = overrides, config_dir
        given = compose.parse_single(overrides)
        self._pinned = [(key, value) for key, value in given if not key.startswith(_SECTION)]
        section = _change_section(study.search, [(key, value) for key, value in given if key.startswith(_SECTION)])
        space = {key: one for key, one in section.space.items() if key not in dict(self._pinned)}
        if not space:
            raise UserError("search.space", "overrides fix all of its fields", "remove one of these overrides")
        for key, dimension in space.items():
            _check_fields(key, dimension)
        if section.rungs and "learning.stop_after" in {*study.base, *dict(self._pinned)}:
            rule = "a search with rungs sets this key itself"
            raise UserError("learning.stop_after", rule, "remove it, or remove search.rungs")
        self.section = section.model_copy(update={"space": space})
        base = study.base if machine is None else {"machine": machine} | study.base
        self.study = study.model_copy(update={"search": self.section, "base": base})

    def build(self, values: Mapping[str, Any]) -> StudyPoint:
        """Return the point (configuration) with these values of the search space's dimensions; study, overrides and
        config files give all other fields. Raise UserError if a rule excludes the point or it cannot run."""
        pinned = [(key, [value]) for key, value in self._pinned]
        study = self.study.model_copy(update={"base": self.study.base | dict(list_pairs(values)), "axes": {}})
        expanded = compose.compose_points(study, pinned, self.config_dir, inputs.find_device, plan.check_runnable)
        found = expanded.points[0]
        if self.section.objective == "validation_loss" and found.composed.spec.learning.tokens is None:
            rule = "needs trainings of a fixed number of tokens"
            raise UserError("search.objective=validation_loss", rule, "set learning.tokens in base")
        _check_rungs(self.section, found.composed.spec)
        return found

    def build_sweep_point(self, values: Mapping[str, Any]) -> SweepPoint:
        """Return the point with these values of the space as a `SweepPoint`, with its prediction."""
        varied = {f"{key}={value}" for key, value in list_pairs(values) if not plan.is_shown_in_line(key)}
        return plan.build_point(self.build(values), varied, predict=self.study.budget.attempts > 1)


def _check_rungs(section: SearchSection, spec: RunSpec) -> None:
    """Raise UserError if two successive rungs are so close that a training resumed at the first would reach the second
    without an optimizer step. A rung is a number of tokens after which trainings stop."""
    if section.rungs and spec.learning.tokens is not None:
        pairs = pairwise(list_rung_tokens(section.rungs, spec.learning.tokens))
        if same := [pair for pair in pairs if spec.count_steps(pair[0]) == spec.count_steps(pair[1])]:
            fewer, more = same[-1]
            rule = f"rungs at {fewer:,} and {more:,} tokens end at the same step of {spec.tokens_per_step:,} tokens"
            remedy = f"set search.rungs.least={fewer + 1} or more"
            raise UserError(f"search.rungs.least={section.rungs.least}", rule, remedy)


class PlannedSearch(NamedTuple):
    """Definition of a search, the pool of points that it may try, and the proposer that chooses the next point from the
    pool."""

    sweep: SweepDefinition
    pool: CandidatePool
    proposer: Proposer

    def __repr__(self) -> str:
        section = self.pool.section
        space = f"{section.objective} over {', '.join(section.space)}"
        return f"<PlannedSearch {self.sweep.study}: {space}, at most {format_count(section.trials, 'trial')}>"

    @property
    def queues(self) -> bool:
        """Return whether the search's launcher submits trials to a scheduler's queue."""
        return bool(launchers.load(str(self.sweep.launcher["name"])).QUEUES)


def plan_search(
    study: Study | str | Path | None, overrides: GivenOverrides, config_dir: Path | None, etiquette: Mapping[str, Any]
) -> PlannedSearch:
    """Return the planned search. Raise UserError if none of its points can run or its settings are wrong. `etiquette`
    holds options that limit the load on a scheduler's queue, by name: `max_queued`, `nice` and `begin`."""
    found, _ = find_study(study, overrides, config_dir, "search")
    texts = tuple(text for text in format_overrides(overrides) if not text.startswith(("study=", "budget.")))
    points = SearchPoints(found, texts, config_dir)
    pool_space = SearchSpace(points.section, points.study.base)
    refused: dict[str, UserError] = {}  # by message
    for values in pool_space.list_candidates(points.section.seed, _TRIED_FOR_FIRST):
        try:
            first = points.build(values)
        except UserError as error:
            refused.setdefault(str(error), error)
        else:
            planned = _build_search(points, pool_space, _define_search(points, first, etiquette))
            _check_within_reach(planned.pool)
            return planned
    first_error = next(iter(refused.values()), None)
    # An error that all points have, and that names none of the varied fields, does not depend on the space.
    words = ("study", *pool_space.dimensions)
    if first_error and len(refused) == 1 and first_error.value.partition("=")[0] not in words:
        raise first_error
    rule = f"no point of the space can run; refusal of the first: {first_error}"
    raise UserError("search.space", rule, "change the space, or the rules in exclude")


def _define_search(points: SearchPoints, first: StudyPoint, etiquette: Mapping[str, Any]) -> SweepDefinition:
    """Return the definition of a search that has no trials yet. `first` is any of its points; the search uses the
    launcher and the machine of this point. `etiquette` holds options that limit the load on a scheduler's queue."""
    options, study = plan.merge_options([first], etiquette, False), points.study
    config_dir = str(points.config_dir) if points.config_dir else None
    request = SearchRequest(study=study, overrides=points.overrides, config_dir=config_dir)
    budget = study.budget.model_copy(update={"node_hours": points.section.node_hours or study.budget.node_hours})
    rules = SweepRules(budget=budget)
    return plan.define_sweep(study, [first.composed], options, rules, points=(), order=(), search=request)


def _check_within_reach(pool: CandidatePool) -> None:
    """Raise UserError if every point is predicted to need far more memory than a device has, or than the constraint
    `peak_bytes` allows."""
    bound = pool.section.constraints.get("peak_bytes")
    most = math.inf if bound is None or bound.at_most is None else bound.at_most
    looked_at = (pool.find(values) for values in pool.space.list_candidates(pool.section.seed))
    if any(one and one.may_fit and _predict_peak(one) <= FAR_OUT_FACTOR * most for one in looked_at):
        return
    candidates = [one for one in pool.list_all() if one.may_fit]
    if not candidates:
        count = format_count(len(pool.list_all()), "point")
        rule = f"each of its {count} is predicted to need far more memory than a device of {pool.machine.name} has"
        raise UserError("search.space", rule, "change the space or the machine")
    rule = f"must be {bound}, but each of the {format_count(len(candidates), 'point')} is predicted to need more"
    least = f"at least {format_number(min(map(_predict_peak, candidates)), 4)}"
    raise UserError("search.constraints.peak_bytes", f"{rule}, {least}", "relax the constraint, or change the space")


def _predict_peak(candidate: SearchCandidate) -> float:
    """Return the predicted bytes of a candidate's live tensors at their peak; 0 if there is no prediction."""
    forecast = candidate.point.forecast
    return forecast.room.tensor_bytes if forecast and forecast.room else 0


def restore_search(sweep: SweepDefinition) -> PlannedSearch:
    """Return the search that a study's folder defines."""
    request = sweep.search
    assert request
    config_dir = Path(request.config_dir) if request.config_dir else None
    points = SearchPoints(request.study, request.overrides, config_dir, next(iter(sweep.machines)))
    return _build_search(points, SearchSpace(points.section, points.study.base), sweep)


def _build_search(points: SearchPoints, space: SearchSpace, sweep: SweepDefinition) -> PlannedSearch:
    machine = inputs.add_host_memory(next(iter(sweep.machines.values())), sweep.launcher["name"])
    pool = CandidatePool(points.section, space, points.build_sweep_point, machine)
    return PlannedSearch(sweep, pool, build_proposer(pool))


def build_proposer(pool: CandidatePool) -> Proposer:
    """Return the proposer of trials for a pool. Raise UserError if its sampler is not installed."""
    sampler = build_sampler(pool)
    return EarlyEnd(HalvingProposer(pool, sampler) if pool.section.rungs else sampler, pool.section)


def build_sampler(pool: CandidatePool) -> Proposer:
    """Return the proposer that chooses points from a pool by the study's sampler. Its proposals contain neither rungs
    (numbers of tokens after which trainings stop) nor step limits. `build_proposer` adds both."""
    match pool.section.sampler:
        case "grid" | "random":
            return ListProposer(pool, at_random=pool.section.sampler == "random")
    from bench.sweep.search.optuna_proposer import OptunaProposer  # needs the extra `search`

    return OptunaProposer(pool)


def write_search(folder: Path, sweep: SweepDefinition) -> None:
    """Write a search's definition unless the folder already contains the same. Raise UserError if the folder has trials
    of another search."""
    if (folder / definition.FOLDER).is_dir() and definition.read_trials(folder):
        before = definition.find_search(definition.read(folder))
        if before and before.search and sweep.search:
            known, wanted = _identify(before.search), _identify(sweep.search)
            if differ := sorted(key for key in known | wanted if known.get(key) != wanted.get(key)):
                rule = f"contains the trials of another search, which differs in {', '.join(differ)}"
                raise UserError(str(folder), rule, "rename this search, or set another --results")
            if before.search == sweep.search and before.launcher == sweep.launcher:
                return
    definition.write(folder, sweep)


def _identify(request: SearchRequest) -> dict[str, Any]:
    """Return the settings that identify a search, by key. Settings that may change when it is resumed, such as its
    budget and options of its launcher, are not included. The study's `search` section already has the overrides of its
    settings."""
    study = request.study.model_dump(mode="json", by_alias=True, exclude={"question", "budget", "search"})
    assert request.study.search
    section = request.study.search.model_dump(mode="json", by_alias=True, exclude=_MAY_CHANGE)
    given = dict(compose.parse_single(request.overrides))
    fixed = {key: value for key, value in given.items() if not key.startswith((_SECTION, "launcher."))}
    return study | {f"{_SECTION}{key}": value for key, value in section.items()} | fixed


def _change_section(section: SearchSection, given: Sequence[Pair]) -> SearchSection:
    """Return a study's `search` section with overrides applied, such as `search.sampler=random`."""
    if not given:
        return section
    plain = section.model_dump(by_alias=True, exclude_defaults=True)
    plain |= {key.removeprefix(_SECTION): value for key, value in given}
    return decode_model(SearchSection, plain, "search")


def _check_fields(key: str, dimension: Dimension) -> None:
    """Raise UserError if a dimension of the search space varies the machine, the launcher or an unknown config key."""
    values = (None,) if dimension.values is None else dimension.values
    names = {name for value in values for name in (value if isinstance(value, Mapping) else (key,))}
    known = list_field_names()
    for name in sorted(names):
        if name.partition(".")[0] in _ONE_OF:
            raise UserError(f"search.space.{name}", "a search has one machine and one launcher", "set it in base")
        if name not in known and name not in GROUPS:
            close = suggest_nearest(name, known, "see conf/config.yaml and the files of its groups")
            raise UserError(f"search.space.{name}", "no such config key", close)


def add_trials(folder: Path, sweep: SweepDefinition) -> int:
    """Write new trials (proposed points) to a study's folder. Stop when the number of trials without a final outcome
    reaches the search's setting `parallel`, or when the search has ended. Return the number of new trials."""
    state = read_state(folder)
    if finalize_lost(state) or keep_ends(state):
        state = read_state(folder)
    # Each proposal takes all earlier trials into account, those without an answer included.
    planned = restore_search(sweep)
    reader = TrialReader(folder, state.tried, sweep.rules.budget.attempts)
    given_up = {status.key.config_id for status in state.statuses if status.state == "given up"}
    added, section = 0, planned.pool.section
    while True:
        results = reader.read_results()
        waiting = sum(result.outcome is None and result.trial.point.config_id not in given_up for result in results)
        if waiting >= section.parallel or not (proposal := planned.proposer.propose(results)):
            return added
        number = len(results)
        added += definition.write_trial(folder, Trial(number=number, **proposal._asdict()))
