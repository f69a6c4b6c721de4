"""Go through the points of a sweep on this machine, one after the other."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench import store
from bench.local import attempt
from bench.measure.environment import classify, device_kind, environment_id
from bench.sweep import unrun
from bench.sweep.asked import Key, Point, Sweep, Todo
from bench.sweep.feasible import far_out, infeasible
from bench.sweep.neighbourhood import Neighbourhood
from bench.sweep.pruning import Kin, kinships, pruned, to_confirm
from bench.sweep.standing import given_up
from bench.wording import describe, result

Heard = Callable[[str], None]


class Asked(NamedTuple):
    """One repeat of one point."""

    key: Key
    sweep: Sweep
    point: Point


class Ended(NamedTuple):
    """How the points of a sweep ended."""

    folder: Path
    outcomes: Counter[str]  # those that had their answer before too
    skipped: int  # points that had their answer before

    @property
    def good(self) -> bool:
        """Whether everything that was asked for ended `ok`."""
        return set(self.outcomes) == {"ok"}


class Here:
    """A sweep under way: which points have answers, and how long the next may take."""

    def __init__(self, folder: Path, asked: list[Asked], *, retry: bool, tell: Heard, follow: Heard) -> None:
        """`retry` goes on with points whose attempts are used up: somebody asked for them by name. `tell` hears every
        point that ends, `follow` what the one under way is doing."""
        self.folder, self._asked, self._retry, self._tell, self._follow = folder, asked, retry, tell, follow
        self._kin = kinships((one.key, one.point.spec) for one in asked)
        self._attempts: dict[str, list[store.Attempt]] = {}
        tried = (attempt for config_id in {one.key.config_id for one in asked} for attempt in self._tried(config_id))
        self._neighbourhood = Neighbourhood((one.point for one in asked), tried)
        self.kinds: list[str] = []
        self.seconds: list[float] = []
        self._skipped = 0

    def run(self) -> Ended:
        """Measure what has no answer yet; return how everything that was asked for ended."""
        todo = [one for one in self._asked if not self._known(one)]
        for number, one in enumerate(self._sequence(todo), start=1):
            self._measure(one, number, max(number, len(todo)))
        return Ended(self.folder, Counter(self.kinds), self._skipped)

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
            self._tell(f"{one.point.line}  repeat {one.key.repeat}\n    {outcome.kind}: {outcome.reason}")
        return outcome is not None

    def _kin_of(self, one: Asked) -> Kin:
        return self._kin[one.key.config_id, one.key.machine]

    def _tried(self, config_id: str) -> list[store.Attempt]:
        """Return the attempts at a configuration, read again only after another."""
        if config_id not in self._attempts:
            self._attempts[config_id] = store.attempts(self.folder / config_id)
        return self._attempts[config_id]

    def _measure(self, todo: Todo, number: int, count: int) -> None:
        left = ""
        if self.seconds:
            left = f", about {_duration(statistics.median(self.seconds) * (count - number + 1))} left"
        line, begin = describe(todo.spec, todo.config_id), time.monotonic()
        heading = f"[{number}/{count}{left}] {line}"
        _, record = attempt.measure(todo, self.folder, lambda doing: self._follow(f"{heading}: {doing}"))
        self._attempts.pop(todo.config_id, None)
        self._neighbourhood.add(record)
        self.seconds.append(time.monotonic() - begin)
        self.kinds.append(record.outcome.kind)
        what = "control" if todo.control else f"repeat {record.circumstance.repeat}"
        self._tell(f"[{number}/{count}] {line}  {what}\n    {result(record)}")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
