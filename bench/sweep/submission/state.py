"""A study at one moment, as its folder and its scheduler show it."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bench import launchers
from bench.scheduling import JobState
from bench.store import RunAttempt
from bench.sweep import definition, jobs
from bench.sweep.definition import RunKey, SweepDefinition, SweepPoint
from bench.sweep.policy import find_answer
from bench.sweep.pruning import Siblings, find_siblings
from bench.sweep.snapshot import StudySnapshot, compute_spent_node_hours, read_snapshot
from bench.sweep.status import JobTask, PointStatus, list_statuses


class StudyState(NamedTuple):
    """A study as its folder and the scheduler show it at one moment."""

    folder: Path
    sweeps: list[SweepDefinition]
    seen: StudySnapshot
    queue: Mapping[JobTask, JobState]
    statuses: list[PointStatus]
    is_reached: bool = True  # whether the scheduler was asked, and answered

    def find_log(self, job: jobs.SubmittedJob, task: int | None) -> Path | None:
        """Return where a job's output goes, or a task's; None before the scheduler has taken it."""
        launcher = launchers.load_queueing(str(self.sweeps[-1].launcher["name"]))
        return launcher.find_log(job.folder, job.handle, task) if launcher and job.handle else None

    @property
    def live(self) -> list[jobs.SubmittedJob]:
        """The jobs that the scheduler still has, oldest first."""
        return [job for job in self.seen.jobs if any(self.is_live(job.name, task) for task in job.tasks)]

    def list_live(self) -> list[tuple[jobs.SubmittedJob, JobState]]:
        """Return what the scheduler still has, every task by itself, oldest first."""
        found = [(job, self.queue.get((job.name, task))) for job in self.seen.jobs for task in job.tasks]
        return [(job, state) for job, state in found if state and state.live]

    def kin(self) -> dict[tuple[str, str], Siblings]:
        """Return who is related to whom, by config_id and machine."""
        return find_siblings((point_status.key, point_status.point.spec) for point_status in self.statuses)

    def tried(self, config_id: str) -> list[RunAttempt]:
        return self.seen.tried.get(config_id, [])

    def spent_node_hours(self) -> float:
        return compute_spent_node_hours(self.seen.jobs)

    def is_live(self, name: str, task: int | None) -> bool:
        """Whether the scheduler still has a job, or a task of it."""
        state = self.queue.get((name, task))
        return state is not None and state.live


def read_state(folder: Path, *, ask: bool = True, about_all: bool = False) -> StudyState:
    """Look at a study's folder and ask its scheduler at once about every job that may go on, or `about_all` there ever
    were, unless told not to; change nothing."""
    sweeps = definition.read(folder)
    seen, wanted = read_snapshot(folder), definition.merge_sweeps(sweeps)
    names = [job.name for job in seen.jobs if about_all or _may_go_on(job, seen, wanted)]
    launcher = launchers.load_queueing(str(sweeps[-1].launcher["name"]))
    queue = launcher.ask(names) if launcher and ask and names else {}
    return StudyState(folder, sweeps, seen, queue, list_statuses(wanted, seen, queue, is_reached=ask), ask)


def _may_go_on(
    job: jobs.SubmittedJob, seen: StudySnapshot, wanted: Mapping[RunKey, tuple[SweepDefinition, SweepPoint]]
) -> bool:
    """Whether a job may still do something: any but one whose points have their final answers and whose allocations
    have ended. A job that was put back into the queue has no allocation, and its points have records as well."""
    if not job.points or any(attempt.job == job.name for attempts in seen.open.values() for attempt in attempts):
        return True
    answered = all(
        key in wanted and find_answer(seen.of(key), prune=wanted[key][0].rules.prune) for key, _ in job.points
    )
    ends = [allocation.ended_at for _, allocation in jobs.list_allocations(job.folder)] if answered else []
    return len(ends) < len(job.tasks) or None in ends
