"""Where every point of a sweep stands, from what the folder shows and what the scheduler says. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

from bench.scheduling import JobState
from bench.store import RunAttempt
from bench.sweep.definition import RunKey, SweepDefinition, SweepPoint
from bench.sweep.policy import explain_given_up, find_answer
from bench.sweep.snapshot import StudySnapshot, UnfinishedAttempt

State = Literal["answered", "running", "pending", "waiting", "given up"]

JobTask = tuple[str, int | None]
"""A job's name and task, as a scheduler knows it."""


class PointStatus(NamedTuple):
    """One point: where it stands, and why."""

    key: RunKey
    point: SweepPoint
    sweep: SweepDefinition
    state: State
    outcome: str  # of the last attempt that has one
    why: str
    attempts: int
    folder: str  # of the attempt that tells most
    job: str = ""  # that is to take it, while a scheduler has it

    @property
    def final(self) -> bool:
        return self.state == "answered"


def list_statuses(
    wanted: Mapping[RunKey, tuple[SweepDefinition, SweepPoint]], seen: StudySnapshot, queue: Mapping[JobTask, JobState]
) -> list[PointStatus]:
    """Return where everything asked for stands, in the order in which it was asked."""
    view = _StatusReader(seen, queue)
    return [view.read_status(key, sweep, point) for key, (sweep, point) in wanted.items()]


class _StatusReader:
    """The folder and the scheduler beside each other."""

    def __init__(self, seen: StudySnapshot, queue: Mapping[JobTask, JobState]) -> None:
        self._seen, self._queue = seen, queue
        self._submitted: Counter[RunKey] = Counter()
        self._places: dict[RunKey, JobTask] = {}
        for job in seen.jobs:
            for key, task in job.points:
                self._submitted[key] += 1
                if (state := queue.get((job.name, task))) and state.live:
                    self._places[key] = (job.name, task)

    def read_status(self, key: RunKey, sweep: SweepDefinition, point: SweepPoint) -> PointStatus:
        done, place = self._seen.of(key), self._places.get(key)
        state, explanation = self._state(key, sweep, done, place)
        last = find_answer(done, prune=sweep.rules.prune) or (done[-1] if done else None)
        return PointStatus(
            key,
            point,
            sweep,
            state,
            outcome=str(last.outcome) if last else "",
            why=explanation or (last.reason if last else ""),
            attempts=len(done),
            folder=last.folder.relative_to(self._seen.folder).as_posix() if last else "",
            job=place[0] if place else "",
        )

    def _state(
        self, key: RunKey, sweep: SweepDefinition, done: list[RunAttempt], place: JobTask | None
    ) -> tuple[State, str]:
        if find_answer(done, prune=sweep.rules.prune):
            return "answered", ""
        for attempt in self._seen.open.get(key, ()):
            if self._alive(attempt):
                return "running", attempt.doing()
        if place:
            return "pending", self._pending(place)
        if reason := explain_given_up(done, sweep.rules.budget.attempts, self._submitted[key]):
            return "given up", reason
        return "waiting", f"again after: {done[-1].reason}" if done else ""

    def _alive(self, attempt: UnfinishedAttempt) -> bool:
        """Whether an attempt without a record is under way: as its scheduler says, else by its last sign of life."""
        if attempt.dead_here:
            return False
        state = self._queue.get((attempt.job, attempt.task)) if attempt.job else None
        if state is None:
            return attempt.fresh
        return state.live and not state.pending and (state.restarts or 0) <= attempt.restart

    def _pending(self, place: JobTask) -> str:
        name, task = place
        state = self._queue[place]
        explanation = f"{state.state.lower()} ({state.reason})" if state.pending else "its turn comes"
        return f"in job {name}{'' if task is None else f'[{task}]'}: {explanation}"
