"""Go through the points of a sweep on this machine, one after the other."""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench import store
from bench.cli import asking, live, point
from bench.measure.environment import classify, device_kind, environment_id
from bench.sweep import unrun
from bench.sweep.asked import Key, Point, Sweep, Todo
from bench.sweep.feasible import far_out, infeasible
from bench.sweep.neighbourhood import Neighbourhood
from bench.sweep.pruning import Kin, kinships, pruned, to_confirm
from bench.sweep.standing import given_up


class Asked(NamedTuple):
    """One repeat of one point."""

    key: Key
    sweep: Sweep
    point: Point


class Here:
    """A sweep under way: which points have answers, and how long the next may take."""

    def __init__(self, folder: Path, asked: list[Asked], *, quiet: bool, retry: bool) -> None:
        """`retry` goes on with points whose attempts are used up: somebody asked for them by name."""
        self.folder, self._asked, self._quiet, self._retry = folder, asked, quiet, retry
        self._kin = kinships((one.key, one.point.spec) for one in asked)
        self._attempts: dict[str, list[store.Attempt]] = {}
        tried = (attempt for config_id in {one.key.config_id for one in asked} for attempt in self._tried(config_id))
        self._neighbourhood = Neighbourhood((one.point for one in asked), tried)
        self.kinds: list[str] = []
        self.seconds: list[float] = []
        self._skipped = 0

    def run(self) -> bool:
        """Measure what has no answer yet; return whether everything asked for ended `ok`."""
        todo = [one for one in self._asked if not self._known(one)]
        with live.line(quiet=self._quiet) as follow:
            for number, one in enumerate(self._sequence(todo), start=1):
                self._measure(one, number, max(number, len(todo)), follow)
        return set(self.kinds) == {"ok"}

    def _sequence(self, todo: list[Asked]) -> Iterator[Todo]:
        """Yield what is to be run: the control point first and last, and what needs a second look once more."""
        sweep, control = (todo[0].sweep, next(iter(todo[0].sweep.controls), None)) if todo else (None, None)
        if sweep and control:
            yield sweep.todo(control, 0, control=True)
        for one in todo:
            if one.sweep.rules.prune and self._prune(one):
                continue
            ready = one.sweep.todo(one.point, one.key.repeat)
            yield ready
            if one.sweep.rules.prune and to_confirm(self._kin_of(one), self._tried):
                yield ready
        if sweep and control:
            yield sweep.todo(control, 0, control=True)

    def _known(self, one: Asked) -> bool:
        """Whether a point has its final answer on this machine in this environment; count it if so."""
        done = self._answered(one)
        if done is None and not self._retry:
            place = one.key.repeat, one.key.machine
            tried = [a for a in self._tried(one.key.config_id) if a.outcome and (a.repeat, a.machine) == place]
            if given_up(tried, one.sweep.rules.budget.attempts):
                done = tried[-1]
        if done:
            self.kinds.append(str(done.outcome))
            self._skipped += 1
        return done is not None

    def _answered(self, one: Asked) -> store.Attempt | None:
        """Return the attempt that answers a point: a real run if there is one, and no prediction that measured
        neighbours have taken back."""
        accept = unrun.accepted(prune=one.sweep.rules.prune)
        machine = one.sweep.machines[one.key.machine]
        environment = environment_id(classify(machine.device or device_kind(), one.point.devices_per_node))
        place = self.folder / one.key.config_id, one.key.repeat, one.key.machine, environment
        done = store.answered(*place, accept)
        if done and done.outcome in unrun.NEVER_RAN:
            done = store.answered(*place, accept - unrun.NEVER_RAN) or done
        if done and done.outcome == "infeasible":
            correction = self._neighbourhood.correction(one.point)
            return done if far_out(one.point.forecast, machine, correction) else None
        return done

    def _prune(self, one: Asked) -> bool:
        """Record that a point need not run, if so."""
        machine, correction = one.sweep.machines[one.key.machine], self._neighbourhood.correction(one.point)
        outcome = pruned(self._kin_of(one), self._tried)
        outcome = outcome or infeasible(one.point.spec, one.point.forecast, machine, correction)
        if outcome:
            unrun.conclude(self.folder, one.sweep.todo(one.point, one.key.repeat), outcome)
            self.kinds.append(outcome.kind)
            self._print(f"{one.point.line}  repeat {one.key.repeat}\n    {outcome.kind}: {outcome.reason}")
        return outcome is not None

    def _kin_of(self, one: Asked) -> Kin:
        return self._kin[one.key.config_id, one.key.machine]

    def _tried(self, config_id: str) -> list[store.Attempt]:
        """Return the attempts at a configuration, read again only after another."""
        if config_id not in self._attempts:
            self._attempts[config_id] = store.attempts(self.folder / config_id)
        return self._attempts[config_id]

    def _measure(self, todo: Todo, number: int, count: int, follow: Callable[[str], None]) -> None:
        left = ""
        if self.seconds:
            left = f", about {_duration(statistics.median(self.seconds) * (count - number + 1))} left"
        line, begin = asking.describe(todo.spec, todo.config_id), time.monotonic()
        heading = f"[{number}/{count}{left}] {line}"
        _, record = point.measure(todo, self.folder, lambda doing: follow(f"{heading}: {doing}"))
        self._attempts.pop(todo.config_id, None)
        self._neighbourhood.add(record)
        self.seconds.append(time.monotonic() - begin)
        self.kinds.append(record.outcome.kind)
        what = "control" if todo.control else f"repeat {record.circumstance.repeat}"
        self._print(f"[{number}/{count}] {line}  {what}\n    {asking.result(record)}")

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)

    def summary(self, as_json: bool) -> str:
        """Return how the points ended."""
        outcomes, skipped = Counter(self.kinds), self._skipped
        if as_json:
            plain = {"study": self.folder.name, "outcomes": outcomes, "skipped": skipped, "folder": str(self.folder)}
            return json.dumps(plain)
        told = ", ".join(f"{count} {kind}" for kind, count in outcomes.most_common())
        return f"{told}; {skipped} already had an answer; {self.folder}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
