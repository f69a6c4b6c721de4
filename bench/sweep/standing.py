"""Where every point of a sweep stands, from what the folder shows and what the scheduler says. Pure."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from bench.record import FINAL
from bench.store import Attempt
from bench.sweep.asked import Key, Point, Sweep
from bench.sweep.jobs import Submitted
from bench.sweep.survey import Survey

State = Literal["answered", "running", "pending", "waiting", "given up"]
_PATIENCE = 10  # so many times the attempts allowed, where it was not the point's own fault

Place = tuple[str, int | None]
"""A job's name and task, as a scheduler knows it."""


class Queued(Protocol):
    """What a scheduler says of a job, or of one task of it."""

    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def restarts(self) -> int | None: ...
    @property
    def pending(self) -> bool: ...
    @property
    def live(self) -> bool: ...


class Standing(NamedTuple):
    """One point: where it stands, and why."""

    key: Key
    point: Point
    sweep: Sweep
    state: State
    outcome: str  # of the last attempt that has one
    why: str
    attempts: int
    folder: str  # of the attempt that tells most

    @property
    def final(self) -> bool:
        return self.state == "answered"


def standings(wanted: Mapping[Key, tuple[Sweep, Point]], seen: Survey, queue: Mapping[Place, Queued]) -> list[Standing]:
    """Return where everything asked for stands, in the order in which it was asked."""
    places: dict[Key, tuple[Submitted, int | None]] = {}
    for job in seen.jobs:
        for key, task in job.points:
            state = queue.get((job.name, task))
            if state and state.live:
                places[key] = (job, task)
    return [_standing(key, *wanted[key], seen, queue, places.get(key)) for key in wanted]


def _standing(
    key: Key,
    sweep: Sweep,
    point: Point,
    seen: Survey,
    queue: Mapping[Place, Queued],
    place: tuple[Submitted, int | None] | None,
) -> Standing:
    done = seen.of(key)
    state, told = _state(key, sweep, done, seen, queue, place)
    last = answer(done, sweep) or (done[-1] if done else None)
    outcome = str(last.outcome) if last else ""
    why = told or (last.reason if last else "")
    folder = last.folder.relative_to(seen.folder).as_posix() if last else ""
    return Standing(key, point, sweep, state, outcome, why, len(done), folder)


def _state(
    key: Key,
    sweep: Sweep,
    done: list[Attempt],
    seen: Survey,
    queue: Mapping[Place, Queued],
    place: tuple[Submitted, int | None] | None,
) -> tuple[State, str]:
    if answer(done, sweep):
        return "answered", ""
    for attempt in seen.open.get(key, ()):
        state = queue.get((attempt.job, attempt.task)) if attempt.job else None
        alive = not attempt.dead_here and (
            (state.live and not state.pending and (state.restarts or 0) <= attempt.restart) if state else attempt.fresh
        )
        if alive:
            return "running", attempt.doing()
    if place:
        job, task = place
        state = queue[job.name, task]
        named = job.name if task is None else f"{job.name}[{task}]"
        return (
            "pending",
            f"in job {named}: {f'{state.state.lower()} ({state.reason})' if state.pending else 'its turn comes'}",
        )
    if given_up(done, sweep.rules.budget.attempts):
        return "given up", f"after {len(done)} attempts; the last: {done[-1].reason}"
    return "waiting", f"again after: {done[-1].reason}" if done else ""


def answer(done: list[Attempt], sweep: Sweep) -> Attempt | None:
    """Return the attempt that answers a point for good; where nothing may be pruned, that is no answer."""
    accept = FINAL if sweep.rules.prune else FINAL - {"pruned"}
    return next((attempt for attempt in done if attempt.outcome in accept), None)


def given_up(done: list[Attempt], limit: int) -> bool:
    """Whether a point has had its attempts. Preemption and cancellation are not its fault, but have an end too."""
    own = [attempt for attempt in done if attempt.outcome not in ("preempted", "cancelled")]
    return len(own) >= limit or len(done) >= _PATIENCE * limit
