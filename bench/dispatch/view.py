"""A study at one moment, as its folder and its scheduler show it."""

from pathlib import Path
from typing import Any, NamedTuple

from bench import launchers
from bench.store import Attempt
from bench.sweep import asked, jobs
from bench.sweep.asked import Sweep
from bench.sweep.pruning import Kin, kinships
from bench.sweep.standing import Place, Standing, standings
from bench.sweep.survey import Survey, spent_node_hours, survey


class View(NamedTuple):
    """A study as its folder and the scheduler show it at one moment."""

    folder: Path
    sweeps: list[Sweep]
    seen: Survey
    queue: dict[Place, Any]
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
        return state is not None and bool(state.live)


def look(folder: Path, *, ask: bool = True) -> View:
    """Look at a study's folder and ask its scheduler about all its jobs at once, unless told not to; change nothing."""
    sweeps = asked.read(folder)
    seen = survey(folder)
    open_jobs = _worth_asking(seen)
    launcher = launchers.load(str(sweeps[-1].launcher["name"]))
    queue: dict[Place, Any] = launcher.ask(open_jobs) if ask and launcher.QUEUES and open_jobs else {}
    return View(folder, sweeps, seen, queue, standings(asked.union(sweeps), seen, queue))


def _worth_asking(seen: Survey) -> list[str]:
    """Return the jobs that may still be under way: not those whose points all have an answer."""
    unsettled = {attempt.job for attempts in seen.open.values() for attempt in attempts}
    return [
        job.name
        for job in seen.jobs
        if not job.points or job.name in unsettled or not all(seen.of(key) for key, _ in job.points) or _unended(job)
    ]


def _unended(job: jobs.Submitted) -> bool:
    ends = [allocation.ended_at for _, allocation in jobs.allocations(job.folder)]
    return len(ends) < len(job.tasks) or None in ends
