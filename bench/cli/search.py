"""Find the best point of a study's space in the fewest node-hours: its `search` section says what varies and is sought.

  zeroscale search study=search_smoke --dry-run
  zeroscale search study=search_smoke
  zeroscale search study=search_smoke search.sampler=random
  zeroscale resume results/runs/search_smoke

Every trial is a run in processes of its own, and stands in the results folder: a search that was ended goes on with
the same command, or with `resume`, and `status` and `report` read it as any study. With a scheduler a few trials at a
time are submitted; `--autopilot` asks for the next ones when these have ended.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from bench import api
from bench.cli import options, sweep
from bench.core import terminal
from bench.core.formatting import format_count
from bench.core.quantities import OBJECTIVES
from bench.core.study import SearchSection
from bench.sweep.policy import Proposal, TrialResult
from bench.sweep.search.planning import PlannedSearch
from bench.sweep.search.proposers import PATIENCE
from bench.sweep.search.verdict import SearchVerdict, find_interval
from bench.sweep.submitting import SubmitResult


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_points(parser)
    options.add_autopilot(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if the search is at its end and has found something; with a scheduler, if it took the jobs."""
    options.check_notify(args)
    plan = api.plan_search(overrides=args.overrides, config_dir=args.config_dir)
    folder: Path = args.results / plan.sweep.study
    if args.dry_run:
        print(format_plan(plan, as_json=args.json))
        return 0
    with options.explain_end(folder), terminal.progress(quiet=args.json) as follow:
        done = api.search(
            plan,
            results=args.results,
            autopilot=args.autopilot,
            notify=args.notify,
            tell=terminal.teller(quiet=args.json),
            follow=follow,
            describe=options.describe_run,
        )
    if isinstance(done, SubmitResult) and not done.has_ended:
        print(sweep.format_submitted(done, folder, as_json=args.json))
        return 0 if done.good else 1
    return print_verdict(folder, as_json=args.json)


def print_verdict(folder: Path, *, as_json: bool) -> int:
    """Print what a search has found; return the exit code, 0 if that is anything."""
    verdict = api.search_verdict(folder)
    print(format_verdict(verdict, folder, as_json=as_json))
    return 0 if verdict.best else 1


_SHOWN = 5  # first trials of a plan, and equals of the best


def format_plan(plan: PlannedSearch, *, as_json: bool) -> str:
    """Return the space, what of it is never tried, and the first trials."""
    section, listed = plan.pool.section, plan.pool.space.list_all() is not None
    candidates = plan.pool.list_all()
    feasible = [candidate for candidate in candidates if candidate.may_fit]
    first = _list_first(plan)
    if as_json:
        plain = {
            "study": plan.sweep.study,
            "points": len(candidates) if listed else None,
            "cannot_run": len(plan.pool.explain_left_out()),
            "never_feasible": len(candidates) - len(feasible),
            "first": [{"config_id": one.point.config_id, "values": one.values, "why": one.why} for one in first],
        }
        return json.dumps(plain, indent=1)
    size = format_count(len(candidates), "point") + ("" if listed else ", drawn from a larger space,")
    lines = [
        f"{size} by {', '.join(section.space)}",
        f"sought: the {OBJECTIVES[section.objective]} {section.objective}{_format_constraints(section)}",
    ]
    if left_out := plan.pool.explain_left_out():
        lines.append(f"cannot run, and are not tried: {format_count(len(left_out), 'point')}, such as: {left_out[0]}")
    if len(feasible) < len(candidates):
        lines.append(f"predicted far out of memory, and not tried: {len(candidates) - len(feasible):,}")
    lines.append(f"by {section.sampler}, first:")
    for one in first:
        candidate = plan.pool.find(one.values)
        predicted = "" if candidate is None or candidate.predicted is None else f"  predicted {candidate.predicted:.3g}"
        lines.append(f"  {one.point.line}{predicted}{f'  {one.why}' if one.why else ''}")
    hours = "" if section.node_hours is None else f" and {section.node_hours:g} node-hours"
    until = f", or until {PATIENCE} in a row gain less than {100 * section.gain:g} % together"
    settles = section.trials > PATIENCE and section.sampler not in ("grid", "random") and not section.rungs
    lines.append(f"at most {format_count(section.trials, 'trial')}{hours}{until if settles else ''}; nothing started")
    return "\n".join(lines)


def _list_first(plan: PlannedSearch) -> list[Proposal]:
    """Return the trials that are asked for before any has an answer."""
    from bench.sweep.definition import Trial

    results: list[TrialResult] = []
    found: list[Proposal] = []
    while len(found) < _SHOWN and (proposal := plan.proposer.propose(results)):
        found.append(proposal)
        results.append(TrialResult(Trial(number=len(results), **proposal._asdict())))
    return found


def _format_constraints(section: SearchSection) -> str:
    words = [f"{name} {bound}" for name, bound in section.constraints.items()]
    return f", with {' and '.join(words)}" if words else ""


def format_verdict(verdict: SearchVerdict, folder: Path, *, as_json: bool) -> str:
    """Return the best, what cannot be told apart from it, what it cost, and what may be left to gain."""
    if as_json:
        return json.dumps(_build_plain(verdict, folder), indent=1)
    section = verdict.section
    lines = [f"best {section.objective}: {_format_trial(section, verdict.best)}"] if verdict.best else []
    if verdict.best and verdict.best.quantities and (noise := verdict.best.quantities.noise(section.objective)):
        lines.append(
            f"its run is no sound measurement (busy machine, few or unsteady steps): it may be off by "
            f"{100 * math.expm1(2 * noise):.0f} %; measure it again, `zeroscale run` with its overrides"
        )
    if not verdict.best:
        lines.append(verdict.unmet or "nothing that was tried ended well")
    if verdict.equals:
        lines.append(f"not told apart from it by their intervals, each of one run: {len(verdict.equals)}")
        lines += [f"  {_format_trial(section, one)}" for one in verdict.equals[:_SHOWN]]
    outcomes = ", ".join(f"{number} {kind}" for kind, number in verdict.outcomes.most_common())
    of = "" if verdict.candidates is None else f" of {verdict.candidates:,} points"
    early = f", {verdict.ended_early} of them ended early, for they could not win" if verdict.ended_early else ""
    spent = f"{verdict.node_hours:.3g} node-hours"
    lines.append(f"{format_count(sum(verdict.outcomes.values()), 'trial')}{of}: {outcomes or 'none'}{early}; {spent}")
    if verdict.reached:
        furthest = ", ".join(f"{number} to {tokens:,}" for tokens, number in verdict.reached.items())
        lines.append(f"trainings by the tokens that they came to: {furthest}")
    if verdict.none_ended:
        why = "; raise search.trials or search.node_hours, then resume" if verdict.is_spent else ""
        lines.append(
            f"no training came to its end at {verdict.whole_tokens:,} tokens: the best led in mid-schedule only{why}"
        )
    if verdict.pending:
        lines.append(f"without an answer: {format_count(verdict.pending, 'trial')}")
    if verdict.environments > 1:
        lines.append(f"trials ran in {verdict.environments} environments, which may differ by more than points do")
    if verdict.is_settled:
        lines.append(f"ended: its last {PATIENCE} trials gained less than {100 * section.gain:g} % together")
    elif verdict.is_spent:
        lines.append("ended: its budget is spent")
    lines.append(str(folder))
    return "\n".join(lines)


def _format_trial(section: SearchSection, result: TrialResult) -> str:
    assert result.quantities
    low, high = find_interval(section, result)
    value, knows_interval = result.quantities.get(section.objective), low < high
    return f"{value:.4g}{f' ({low:.4g} to {high:.4g})' if knows_interval else ''}  {result.trial.point.line}"


def _build_plain(verdict: SearchVerdict, folder: Path) -> dict[str, Any]:
    section = verdict.section

    def plain(result: TrialResult) -> dict[str, Any]:
        assert result.quantities
        low, high = find_interval(section, result)
        value = result.quantities.get(section.objective)
        point = result.trial.point
        return {"config_id": point.config_id, "values": result.trial.values, "value": value, "low": low, "high": high}

    return {
        "folder": str(folder),
        "objective": section.objective,
        "best": plain(verdict.best) if verdict.best else None,
        "equals": [plain(one) for one in verdict.equals],
        "outcomes": verdict.outcomes,
        "ended_early": verdict.ended_early,
        "pending": verdict.pending,
        "environments": verdict.environments,
        "points": verdict.candidates,
        "never_feasible": verdict.never_feasible,
        "unmet": verdict.unmet or None,
        "node_hours": verdict.node_hours,
        "none_ended": verdict.none_ended,
        "reached": {str(tokens): number for tokens, number in verdict.reached.items()},
        "settled": verdict.is_settled,
        "over": verdict.is_over,
    }
