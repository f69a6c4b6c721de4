"""From what a user asks to a search that can propose its trials, new or gone on with."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.errors import UserError
from bench.formatting import format_count
from bench.search.candidates import CandidatePool, SearchCandidate
from bench.search.early_end import EarlyEnd
from bench.search.halving import HalvingProposer
from bench.search.proposers import ListProposer, PriorProposer
from bench.search.space import SearchSpace
from bench.study import Study
from bench.sweep import definition
from bench.sweep.definition import SearchRequest, SweepDefinition
from bench.sweep.forecast import FAR_OUT_FACTOR
from bench.sweep.planning import search_plan
from bench.sweep.planning.overrides import GivenOverrides
from bench.sweep.planning.search_plan import SearchPoints
from bench.sweep.policy import Proposer

_TRIED_FOR_FIRST = 200  # values of a space of which one has to make a point that can run
_MAY_CHANGE = {"trials", "node_hours", "gain", "parallel"}  # of a search that goes on


class PlannedSearch(NamedTuple):
    """A search that is planned and not started."""

    sweep: SweepDefinition
    pool: CandidatePool
    proposer: Proposer

    @property
    def queues(self) -> bool:
        """Whether its trials start by a queue, and not here and now."""
        return search_plan.queues(self.sweep)


def plan_search(
    study: Study | str | Path | None, overrides: GivenOverrides, config_dir: Path | None, etiquette: Mapping[str, Any]
) -> PlannedSearch:
    """Return the search that is asked for; UserError for one that cannot be."""
    points = search_plan.plan_search(study, overrides, config_dir)
    pool_space = SearchSpace(points.section, points.study.base)
    refused: UserError | None = None
    for values in pool_space.list_candidates(points.section.seed, _TRIED_FOR_FIRST):
        try:
            first = points.build(values)
        except UserError as error:
            refused = refused or error
        else:
            planned = _build_search(points, pool_space, search_plan.define_search(points, first, etiquette))
            _check_within_reach(planned.pool)
            return planned
    rule = f"none of its points can run; of the first the reason is: {refused}"
    raise UserError("search.space", rule, "change the space, or the rules that leave points out")


def _check_within_reach(pool: CandidatePool) -> None:
    """Raise UserError where every point is predicted far out of a device's memory, or of what a constraint leaves."""
    bound = pool.section.constraints.get("peak_bytes")
    most = math.inf if bound is None or bound.at_most is None else bound.at_most
    looked_at = (pool.find(values) for values in pool.space.list_candidates(pool.section.seed))
    if any(one and one.may_fit and _predict_peak(one) <= FAR_OUT_FACTOR * most for one in looked_at):
        return
    candidates = [one for one in pool.list_all() if one.may_fit]
    if not candidates:
        count = format_count(len(pool.list_all()), "point")
        rule = f"each of its {count} is predicted far out of memory of a device of {pool.machine.name}"
        raise UserError("search.space", rule, "change the space, or the machine")
    rule = f"{bound}, and each of its {format_count(len(candidates), 'point')} is predicted to need more"
    least = f"the least {min(map(_predict_peak, candidates)):.4g}"
    raise UserError("search.constraints.peak_bytes", f"{rule}, {least}", "loosen it, or change the space")


def _predict_peak(candidate: SearchCandidate) -> float:
    """Return the bytes of live tensors that are predicted of a candidate; 0 where nothing is."""
    forecast = candidate.point.forecast
    return forecast.room.tensor_bytes if forecast and forecast.room else 0


def restore_search(sweep: SweepDefinition) -> PlannedSearch:
    """Return a search that was asked for before."""
    request = sweep.search
    assert request
    config_dir = Path(request.config_dir) if request.config_dir else None
    points = SearchPoints(request.study, request.overrides, config_dir, next(iter(sweep.machines)))
    return _build_search(points, SearchSpace(points.section, points.study.base), sweep)


def _build_search(points: SearchPoints, space: SearchSpace, sweep: SweepDefinition) -> PlannedSearch:
    machine = next(iter(sweep.machines.values()))
    pool = CandidatePool(points.section, space, points.build_sweep_point, machine)
    return PlannedSearch(sweep, pool, build_proposer(pool))


def build_proposer(pool: CandidatePool) -> Proposer:
    """Return what asks for the trials of a pool; UserError where its sampler is not installed."""
    sampler = _build_sampler(pool)
    return EarlyEnd(HalvingProposer(pool, sampler) if pool.section.rungs else sampler, pool.section)


def _build_sampler(pool: CandidatePool) -> Proposer:
    match pool.section.sampler:
        case "prior":
            return PriorProposer(pool)
        case "grid" | "random":
            return ListProposer(pool, at_random=pool.section.sampler == "random")
    from bench.search.optuna_proposer import OptunaProposer  # which needs the extra

    return OptunaProposer(pool)


def write_search(folder: Path, sweep: SweepDefinition) -> None:
    """Write down what was asked, unless it is what the folder holds already; UserError where that is another search."""
    if (folder / definition.FOLDER).is_dir() and definition.read_trials(folder):
        before = next((one for one in reversed(definition.read(folder)) if one.search), None)
        if before and before.search and sweep.search:
            if _identify(before.search) != _identify(sweep.search):
                rule = "holds the trials of another search"
                raise UserError(str(folder), rule, "give this one another name, or --results DIR")
            if before.search == sweep.search and before.launcher == sweep.launcher:
                return
    definition.write(folder, sweep)


def _identify(request: SearchRequest) -> dict[str, Any]:
    """Return what makes a search what it is: how far it goes may change."""
    plain = request.model_dump(mode="json", by_alias=True)
    study = {key: value for key, value in plain["study"].items() if key not in ("question", "budget")}
    study["search"] = {key: value for key, value in study["search"].items() if key not in _MAY_CHANGE}
    return {"study": study, "overrides": plain["overrides"]}
