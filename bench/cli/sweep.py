"""Measure every point of a study, or of comma lists, one after the other on this machine.

  zeroscale sweep study=smoke
  zeroscale sweep model=tiny engine=ddp,zero1,zero2,zero3 batch.micro=2,4,8 --dry-run

Points that already have a final answer on this machine in this environment are skipped, so that a sweep that was
interrupted goes on where it ended.
"""

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench import config, store
from bench.cli import asking, point
from bench.config import Request
from bench.errors import UserError
from bench.spec import config_id
from bench.study import Study, expand, order


def arguments(parser: argparse.ArgumentParser) -> None:
    asking.arguments(parser)


_SHOWN = {
    "model", "engine", "data", "machine", "precision", "nodes", "devices_per_node", "batch.micro", "batch.accumulation",
    "batch.global", "sequence.encoder", "sequence.decoder", "activation_checkpointing",
}  # fmt: skip
"""Overrides that a point's one line shows already."""


class Point(NamedTuple):
    """One repeat of one point."""

    asked: Request
    repeat: int
    overrides: tuple[str, ...]
    apart: tuple[str, ...]  # those of them that tell it from other points and that its one line does not show


def run(args: argparse.Namespace) -> int:
    """Return 0 if every point has a final answer and every answer is `ok`."""
    study, points = _points(args)
    if args.dry_run:
        print(
            _json(points) if args.json else "\n".join([*map(_line, points), f"{len(points)} points, nothing started"])
        )
        return 0
    sweep = Sweep(args, study)
    todo = [wanted for wanted in points if not sweep.knows(wanted)]
    with asking.live(quiet=args.json) as sweep.follow:
        for number, wanted in enumerate(todo, start=1):
            sweep.answer(wanted, number, len(todo))
    print(sweep.summary())
    return 0 if set(sweep.kinds) == {"ok"} else 1


class Sweep:
    """A sweep under way: which points have answers, and how long the next may take."""

    def __init__(self, args: argparse.Namespace, study: Study) -> None:
        self.args, self.study = args, study
        self.folder: Path = args.results / study.name
        self.kinds: list[str] = []
        self.seconds: list[float] = []
        self.follow: Callable[[str], None] = lambda text: None

    def knows(self, wanted: Point) -> bool:
        """Whether a point has its final answer on this machine in this environment; count it if so."""
        spec, machine = wanted.asked.spec, wanted.asked.machine.name
        environment = asking.environment_here(wanted.asked)
        done = store.answered(self.folder / config_id(spec), wanted.repeat, machine, environment)
        if done:
            self.kinds.append(str(done.outcome))
        return done is not None

    def answer(self, wanted: Point, number: int, count: int) -> None:
        """Measure a point, the `number`th of `count` that have no answer yet."""
        left = ""
        if self.seconds:
            left = f", about {_duration(statistics.median(self.seconds) * (count - number + 1))} left"
        heading, begin = f"[{number}/{count}{left}] {asking.line(wanted.asked)}", time.monotonic()
        _, record = point.measure(
            wanted.asked,
            self.args.results,
            self.study,
            wanted.repeat,
            wanted.overrides,
            lambda doing: self.follow(f"{heading}: {doing}"),
        )
        self.seconds.append(time.monotonic() - begin)
        self.kinds.append(record.outcome.kind)
        if not self.args.json:
            print(f"[{number}/{count}] {_line(wanted)}\n    {asking.result(record)}", flush=True)

    def summary(self) -> str:
        """Return how the points ended."""
        outcomes, skipped = Counter(self.kinds), len(self.kinds) - len(self.seconds)
        if self.args.json:
            plain = {"study": self.study.name, "outcomes": outcomes, "skipped": skipped, "folder": str(self.folder)}
            return json.dumps(plain)
        told = ", ".join(f"{count} {kind}" for kind, count in outcomes.most_common())
        return f"{told}; {skipped} already had an answer; {self.folder}"


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
    texts = [tuple(f"{key}={value}" for key, value in pairs) for pairs in combinations]
    shared = Counter(itertools.chain(*texts))
    apart = {text for text, count in shared.items() if count < len(texts) and text.partition("=")[0] not in _SHOWN}
    return study, [
        Point(asked[index], repeat, texts[index], tuple(text for text in texts[index] if text in apart))
        for repeat, index in order(len(combinations), study)
    ]


def _line(todo: Point) -> str:
    return "  ".join([asking.line(todo.asked), f"repeat {todo.repeat}", *todo.apart])


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
