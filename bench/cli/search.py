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
from pathlib import Path

from bench import api, terminal
from bench.cli import options, search_text, sweep_text
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
        print(search_text.format_plan(plan, as_json=args.json))
        return 0
    with terminal.progress(quiet=args.json) as follow:
        done = api.search(
            plan,
            results=args.results,
            autopilot=args.autopilot,
            notify=args.notify,
            tell=terminal.teller(quiet=args.json),
            follow=follow,
        )
    if isinstance(done, SubmitResult) and not done.has_ended:
        print(sweep_text.format_submitted(done, folder, as_json=args.json))
        return 0 if done.good else 1
    return print_verdict(folder, as_json=args.json)


def print_verdict(folder: Path, *, as_json: bool) -> int:
    """Print what a search has found; return the exit code, 0 if that is anything."""
    verdict = api.search_verdict(folder)
    print(search_text.format_verdict(verdict, folder, as_json=as_json))
    return 0 if verdict.best else 1
