"""Measure every point of a study, or of comma lists, one after the other on this machine.

  zeroscale sweep study=smoke
  zeroscale sweep model=tiny engine=ddp,zero1,zero2,zero3 batch.micro=2,4,8 --dry-run

Points that already have a final answer on this machine in this environment are skipped, so that a sweep that was
interrupted goes on where it ended.
"""

import argparse
import json
import statistics
import time
from typing import NamedTuple

from bench import config, store
from bench.cli import asking, point
from bench.config import Request
from bench.errors import UserError
from bench.spec import config_id
from bench.study import Study, expand, order


def arguments(parser: argparse.ArgumentParser) -> None:
    asking.arguments(parser)


class Point(NamedTuple):
    """One repeat of one point."""

    asked: Request
    repeat: int
    overrides: tuple[str, ...]


def run(args: argparse.Namespace) -> int:
    """Return 0 if every point has a final answer and every answer is `ok`."""
    study, points = _points(args)
    if args.dry_run:
        print(
            _json(points) if args.json else "\n".join([*map(_line, points), f"{len(points)} points, nothing started"])
        )
        return 0
    folder = args.results / study.name
    kinds, seconds = [], []
    with asking.live(quiet=args.json) as follow:
        for number, todo in enumerate(points, start=1):
            environment = asking.environment_here(todo.asked)
            machine, where = todo.asked.machine.name, folder / config_id(todo.asked.spec)
            if done := store.answered(where, todo.repeat, machine, environment):
                kinds.append(done.outcome)
                continue
            left = (
                f", about {_duration(statistics.median(seconds) * (len(points) - number + 1))} left" if seconds else ""
            )
            heading = f"[{number}/{len(points)}{left}] {asking.line(todo.asked)}"
            begin = time.monotonic()
            _, record = point.measure(
                todo.asked,
                args.results,
                study.name,
                todo.repeat,
                todo.overrides,
                lambda t, h=heading: follow(f"{h}: {t}"),
            )
            seconds.append(time.monotonic() - begin)
            kinds.append(record.outcome.kind)
            if not args.json:
                print(f"[{number}/{len(points)}] {asking.line(todo.asked)}\n    {asking.result(record)}", flush=True)
    summary = {str(kind): kinds.count(kind) for kind in sorted(set(map(str, kinds)))}
    skipped = len(points) - len(seconds)
    if args.json:
        print(json.dumps({"study": study.name, "outcomes": summary, "skipped": skipped, "folder": str(folder)}))
    else:
        told = ", ".join(f"{count} {kind}" for kind, count in summary.items())
        print(f"{told}; {skipped} already had an answer; {folder}")
    return 0 if set(kinds) == {"ok"} else 1


def _points(args: argparse.Namespace) -> tuple[Study, list[Point]]:
    parsed = config.parse(args.overrides)
    named = [values for key, values in parsed if key == "study"]
    if any(len(values) != 1 for values in named):
        raise UserError("study", "a sweep is one study", "call sweep once for each")
    study = config.study(str(named[0][0]), args.config_dir) if named else Study(name="adhoc")
    combinations = expand(study, [(key, values) for key, values in parsed if key != "study"])
    asked = []
    for pairs in combinations:
        asked.append(config.request(pairs, args.config_dir))
        config.check(asked[-1], asking.here(asked[-1]))
    return study, [
        Point(asked[index], repeat, tuple(f"{key}={value}" for key, value in combinations[index]))
        for repeat, index in order(len(combinations), study)
    ]


def _line(todo: Point) -> str:
    return f"{asking.line(todo.asked)}  repeat {todo.repeat}"


def _json(points: list[Point]) -> str:
    return json.dumps(
        [
            {
                "config_id": config_id(todo.asked.spec),
                "repeat": todo.repeat,
                "overrides": todo.overrides,
                "spec": todo.asked.spec.model_dump(mode="json", by_alias=True),
            }
            for todo in points
        ],
        indent=1,
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
