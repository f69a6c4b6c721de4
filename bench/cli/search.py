"""Find the best point of a search space in the fewest node-hours.

  zeroscale search study=search_smoke --dry-run
  zeroscale search study=search_smoke
  zeroscale search study=search_smoke search.sampler=random
  zeroscale resume results/runs/search_smoke

The study's `search` section defines the space, the objective and the limits of the search. Every
trial is a run in separate processes, with a record in the results folder. The same command, or
`resume`, continues an interrupted search. `status` and `report` read a search like any study. With
a scheduler, a few trials at a time are submitted; `--autopilot` submits the next trials when these
have ended.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import api, launchers
from bench.cli import options
from bench.core import terminal
from bench.core.formatting import format_count, format_number
from bench.core.quantities import DEVIATIONS, OBJECTIVES
from bench.core.study import SearchSection
from bench.sweep import definition
from bench.sweep.policy import Proposal, TrialResult
from bench.sweep.search.planning import PlannedSearch
from bench.sweep.search.proposers import PATIENCE
from bench.sweep.search.verdict import SearchVerdict, find_interval
from bench.sweep.submitting import SubmitResult


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_points(parser)
    options.add_autopilot(parser)


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 if the search ended with a best point or, with a scheduler, if the jobs were
    submitted."""
    options.check_notify(args)
    busy = options.BusyWarning()
    plan = api.plan_search(overrides=args.overrides, config_dir=args.config_dir)
    folder: Path = args.results / plan.sweep.study
    if args.dry_run:
        print(format_plan(plan, as_json=args.json))
        return 0
    with options.follow_runs(args, folder, plan.sweep.launcher, busy) as listeners:
        done = api.search(plan, results=args.results, autopilot=args.autopilot, notify=args.notify, **listeners)
    if isinstance(done, SubmitResult) and not done.has_ended:
        print(options.format_submitted(done, folder, as_json=args.json))
        return 0 if done.good else 1
    return print_verdict(folder, as_json=args.json)


def print_verdict(folder: Path, *, as_json: bool) -> int:
    """Print the result of a search. Return the exit code, 0 if there is a best point."""
    verdict = api.search_verdict(folder)
    sweep = definition.find_search(definition.read(folder))
    assert sweep and sweep.search
    given = ["--config-dir", sweep.search.config_dir] if sweep.search.config_dir else []
    command = "sweep" if launchers.load(str(sweep.launcher["name"])).QUEUES else "run"
    print(format_verdict(verdict, folder, as_json=as_json, command=command, given=given))
    return 0 if verdict.best else 1


_SHOWN = 5  # maximum number of listed trials: first trials of a plan, or trials that equal the best trial


def format_plan(plan: PlannedSearch, *, as_json: bool) -> str:
    """Return the text of a search plan: the search space, points that are never tried, and the first trials (runs of
    one point each)."""
    section, listed = plan.pool.section, plan.pool.space.list_all() is not None
    first = _list_first(plan)
    # A random search of a large space composes only the points that it draws.
    candidates = plan.pool.list_all() if listed or section.sampler != "random" else []
    left_out, infeasible = plan.pool.explain_left_out(), sum(not candidate.may_fit for candidate in candidates)
    if as_json:
        plain = {
            "study": plan.sweep.study,
            "points": len(candidates) if listed else None,
            "cannot_run": len(left_out),
            "never_feasible": infeasible,
            "first": [{"config_id": one.point.config_id, "values": one.values, "why": one.why} for one in first],
        }
        return json.dumps(plain, indent=1)
    bounds = " and ".join(f"{name} {bound}" for name, bound in section.constraints.items())
    size = format_count(len(candidates), "point") + ("" if listed else ", drawn from a larger space,")
    size = size if candidates else "points drawn at random"
    lines = [
        f"{size} by {', '.join(section.space)}",
        f"objective: the {OBJECTIVES[section.objective]} {section.objective}{bounds and f', with {bounds}'}",
    ]
    if left_out:
        lines.append(
            f"excluded, because they cannot run: {format_count(len(left_out), 'point')}, such as: {left_out[0]}"
        )
    lines += [f"excluded, because predicted memory far exceeds the device's: {infeasible:,}"] if infeasible else []
    lines.append(f"first trials by the sampler {section.sampler}:")
    for one in first:
        candidate = plan.pool.find(one.values)
        value = candidate.predicted if candidate else None
        predicted = "" if value is None else f"  predicted {format_number(value)}"
        lines.append(f"  {one.point.line}{predicted}{f'  {one.why}' if one.why else ''}")
    hours = "" if section.node_hours is None else f" and {section.node_hours:g} node-hours"
    until = f", or until {PATIENCE} trials in a row improve by less than {100 * section.gain:g} % together"
    # Grid and random search end after their number of trials. A search with rungs ends when no training continues.
    settles = section.trials > PATIENCE and section.sampler not in ("grid", "random") and not section.rungs
    lines.append(f"at most {format_count(section.trials, 'trial')}{hours}{until if settles else ''}; nothing started")
    return terminal.wrap_columns("\n".join(lines))


def _list_first(plan: PlannedSearch) -> list[Proposal]:
    """Return the first trials that the search proposes before any trial has a result."""
    from bench.sweep.definition import Trial

    # Earlier proposals are passed as running trials, like jobs in a queue.
    results: list[TrialResult] = []
    found: list[Proposal] = []
    while len(found) < _SHOWN and (proposal := plan.proposer.propose(results)):
        found.append(proposal)
        results.append(TrialResult(Trial(number=len(results), **proposal._asdict())))
    return found


def format_verdict(
    verdict: SearchVerdict, folder: Path, *, as_json: bool, command: str = "run", given: Sequence[str] = ()
) -> str:
    """Return the text of a search result: the best trial, the trials that are not distinguishable from the best, the
    node-hours spent, and why the search ended.

    The text may suggest a `zeroscale` command that measures the best trial again. `command` is `run` or `sweep`,
    and `given` are its options.
    """
    if as_json:
        return json.dumps(_build_plain(verdict, folder), indent=1)
    section, best = verdict.section, verdict.best
    lines = [terminal.wrap_columns(f"best {section.objective}: {_format_trial(section, best)}")] if best else []
    if best and best.quantities and (noise := best.quantities.noise(section.objective)):
        off = f"{100 * math.expm1(DEVIATIONS * noise):.0f} %"
        lines.append(f"its measurement was disturbed (busy machine, few or unsteady steps): error up to {off}")
        words = ["zeroscale", command, *best.trial.point.overrides, "launcher.quiet_within_s=600", *given]
        lines += ["measure it again:", terminal.wrap_command(words)]
    lines += [] if best else [verdict.unmet or "no trial has the outcome ok"]
    if verdict.equals:
        some = f", the {_SHOWN} best of them:" if len(verdict.equals) > _SHOWN else ""
        lines.append(f"not distinguishable from the best, by intervals of one run each: {len(verdict.equals)}{some}")
        lines += [terminal.wrap_columns(f"  {_format_trial(section, one)}") for one in verdict.equals[:_SHOWN]]
    outcomes = ", ".join(f"{number} {kind}" for kind, number in verdict.outcomes.most_common())
    of = "" if verdict.candidates is None else f" of {verdict.candidates:,} points"
    slower = "ended early, because they were surely slower than the best"
    early = f", {verdict.ended_early} of them {slower}" if verdict.ended_early else ""
    spent = f"{verdict.node_hours:.3g} node-hours"
    lines.append(f"{format_count(sum(verdict.outcomes.values()), 'trial')}{of}: {outcomes or 'none'}{early}; {spent}")
    furthest = ", ".join(f"{number} to {tokens:,}" for tokens, number in verdict.reached.items())
    whole = f"{verdict.whole_tokens:,} tokens" if verdict.whole_tokens else ""
    more = "; raise search.trials or search.node_hours, then resume" if verdict.is_spent else ""
    gain = f"{100 * section.gain:g} %"
    notes = (
        (verdict.reached, f"number of trainings by the tokens that they reached: {furthest}"),
        (
            verdict.none_ended,
            f"no training reached its end at {whole}: the best was leading before the end of its schedule{more}",
        ),
        (verdict.pending, f"{format_count(verdict.pending, 'trial')} without a final result"),
        (verdict.environments > 1, f"trials ran in {verdict.environments} environments, which may explain differences"),
        (verdict.is_settled, f"the search ended: its last {PATIENCE} trials improved by less than {gain} together"),
        (verdict.is_spent and not verdict.is_settled, "the search ended: its budget is spent"),
    )
    return "\n".join([*lines, *(text for holds, text in notes if holds), str(folder)])


def _format_trial(section: SearchSection, result: TrialResult) -> str:
    assert result.quantities
    low, high = find_interval(section, result)
    value = result.quantities.get(section.objective)
    assert value is not None
    interval = f" ({format_number(low, 4)} to {format_number(high, 4)})" if low < high else ""
    return f"{format_number(value, 4)}{interval}  {result.trial.point.line}"


def _build_plain(verdict: SearchVerdict, folder: Path) -> dict[str, Any]:
    section = verdict.section

    def plain(result: TrialResult) -> dict[str, Any]:
        assert result.quantities
        (low, high), trial = find_interval(section, result), result.trial
        value = {"value": result.quantities.get(section.objective), "low": low, "high": high}
        return {"config_id": trial.point.config_id, "values": trial.values, **value}

    same = ("ended_early", "environments", "never_feasible", "node_hours", "none_ended", "outcomes", "pending")
    return {
        "folder": str(folder),
        "objective": section.objective,
        "best": plain(verdict.best) if verdict.best else None,
        "equals": [plain(one) for one in verdict.equals],
        "points": verdict.candidates,
        "unmet": verdict.unmet or None,
        "reached": {str(tokens): number for tokens, number in verdict.reached.items()},
        "settled": verdict.is_settled,
        "over": verdict.is_over,
        **{name: getattr(verdict, name) for name in same},
    }
