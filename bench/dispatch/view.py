"""A study at one moment, as its folder and its scheduler show it."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bench import launchers
from bench.scheduling import JobState
from bench.store import Attempt
from bench.sweep import asked, jobs
from bench.sweep.asked import Key, Point, Sweep
from bench.sweep.policy import answer
from bench.sweep.pruning import Kin, kinships
from bench.sweep.standing import Place, Standing, standings
from bench.sweep.survey import Survey, spent_node_hours, survey


class View(NamedTuple):
    """A study as its folder and the scheduler show it at one moment."""

    folder: Path
    sweeps: list[Sweep]
    seen: Survey
    queue: Mapping[Place, JobState]
    standings: list[Standing]

    @property
    def live(self) -> list[jobs.Submitted]:
        """The jobs that the scheduler still has, oldest first."""
        return [job for job in self.seen.jobs if any(self.is_live(job.name, task) for task in job.tasks)]

    def kin(self) -> dict[tuple[str, str], Kin]:
        """Return who is related to whom, by config_id and machine."""
        return kinships((standing.key, standing.point.spec) for standing in self.standings)

    def tried(self, config_id: str) -> list[Attempt]:
        return self.seen.tried.get(config_id, [])

    def spent_node_hours(self) -> float:
        return spent_node_hours(self.seen.jobs)

    def is_live(self, name: str, task: int | None) -> bool:
        """Whether the scheduler still has a job, or a task of it."""
        state = self.queue.get((name, task))
        return state is not None and state.live


def look(folder: Path, *, ask: bool = True, about_all: bool = False) -> View:
    """Look at a study's folder and ask its scheduler at once about every job that may go on, or `about_all` there ever
    were, unless told not to; change nothing."""
    sweeps = asked.read(folder)
    seen, wanted = survey(folder), asked.union(sweeps)
    names = [job.name for job in seen.jobs if about_all or _may_go_on(job, seen, wanted)]
    launcher = launchers.queueing(str(sweeps[-1].launcher["name"]))
    queue = launcher.ask(names) if launcher and ask and names else {}
    return View(folder, sweeps, seen, queue, standings(wanted, seen, queue))


def _may_go_on(job: jobs.Submitted, seen: Survey, wanted: Mapping[Key, tuple[Sweep, Point]]) -> bool:
    """Whether a job may still do something: any but one whose points have their final answers and whose allocations
    have ended. A job that was put back into the queue has no allocation, and its points have records as well."""
    if not job.points or any(attempt.job == job.name for attempts in seen.open.values() for attempt in attempts):
        return True
    answered = all(key in wanted and answer(seen.of(key), prune=wanted[key][0].rules.prune) for key, _ in job.points)
    return not answered or _unended(job)


def _unended(job: jobs.Submitted) -> bool:
    ends = [allocation.ended_at for _, allocation in jobs.allocations(job.folder)]
    return len(ends) < len(job.tasks) or None in ends
