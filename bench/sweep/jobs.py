"""A study's files about jobs: `jobs/<name>/` for each submitted job, `excluded/<host>.json` for each unfit node."""

import contextlib
import functools
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import AliasPath, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bench.core import files, store
from bench.core.errors import UserError, make_printable
from bench.core.files import open_regular
from bench.core.formatting import format_count
from bench.core.private import mask_tokens
from bench.core.record import OutcomeKind
from bench.core.scheduling import ClusterLimits, Mode, SchedulerUnavailable, Span
from bench.core.spec import Frozen, Positive, RunSpec
from bench.sweep.definition import RequestedRun, RunKey

FOLDER = "jobs"
_JOB, _HANDLE = "job.json", "handle"


class Job(Frozen):
    """One job that is submitted to a scheduler. Each task of a job array runs one of the points (configurations). Any
    other job runs all of them."""

    name: str
    mode: Mode
    nodes: Positive
    devices_per_node: Positive
    time_limit_min: Positive
    prune: bool = True
    attempts: Positive | None = None  # failures allowed for each point, over all starts of the job; None: any number
    span: Span = "node"
    points: tuple[RequestedRun, ...]
    control: RequestedRun | None = None

    @property
    def task_count(self) -> int:
        """Number of tasks that a scheduler counts: the points of a job array, 1 for any other job."""
        return len(self.points) if self.mode == "array" else 1

    def requested(self, task: int | None) -> tuple[RequestedRun, ...]:
        """Return the points (configurations) that one array task runs; all points if `task` is None."""
        return self.points if task is None else (self.points[task],)

    def list_specs(self, task: int | None) -> list[RunSpec]:
        """Return the specs that one array task runs, or all specs if `task` is None. They include the spec of the
        control point, a reference configuration that packed jobs measure before and after their points."""
        return [requested.spec for requested in (*self.requested(task), self.control) if requested]


class AllocationPeriod(NamedTuple):
    """One period in which a job, or a task of a job array, had nodes. Each start or restart begins a new period."""

    job_id: str
    task: int | None
    restart: int
    nodes: int
    began_at: float  # seconds since the epoch
    ended_at: float | None  # None if it has not ended, or if its end was not written


class JobEnd(NamedTuple):
    """Describes how a job or array task ended: its state, the cause, and its log. If a job ended before it had
    attempted all of its points, this description is written to a file, because the scheduler forgets ended jobs."""

    number: str
    task: int | None
    state: str
    outcome: OutcomeKind | None
    exit: str
    exit_code: int | None
    lasted_s: float | None
    ended_at: float  # seconds since the epoch
    log: str  # path relative to the study's folder; empty if there is no log
    last_line: str  # of the log: the last line that names a cause, and not only the end
    begun: bool  # whether the job began an attempt at any other point

    @property
    def faulty(self) -> bool:
        """Return True if the job failed before its first attempt, and if a new job would probably fail for the same
        cause.

        Return False if the cause is a failed node, preemption, cancellation or a full disk.
        """
        return not self.begun and self.outcome in ("error", "host_oom", "timeout") and self.exit_code != EXIT_LATER

    def describe(self) -> str:
        """Return one line that says how the job ended, with the path of its log."""
        lasted = "" if self.lasted_s is None else f" after {self.lasted_s:.0f} s"
        how = f" ({self.exit})" if self.exit else ""
        log = f"; see {self.log}" if self.log else ""
        last = f": {self.last_line}" if self.last_line else ""
        begun = "before this point was started" if self.begun else "no attempt was started"
        return f"job {self.number} {self.state}{lasted}{how}, {begun}{log}{last}"


EXIT_LATER = 75
"""Exit code of an allocation that ended because a disk was full, so that it may run again later. The value is
EX_TEMPFAIL of sysexits.h."""
_END = TypeAdapter(JobEnd, config=ConfigDict(allow_inf_nan=False))
_ALLOCATION = TypeAdapter(AllocationPeriod, config=ConfigDict(allow_inf_nan=False))


class _PointHeader(BaseModel):
    config_id: str
    machine: str = Field(validation_alias=AliasPath("circumstance", "machine", "name"))
    repeat: int = Field(validation_alias=AliasPath("circumstance", "repeat"))


class _JobHeader(BaseModel):
    """The fields of a `Job` that identify its points. Decoding all fields of many jobs would take long."""

    mode: Mode
    points: tuple[_PointHeader, ...]


class SubmittedJob(NamedTuple):
    """A job's folder, its job id at the scheduler (None until it is known), and its points (configurations)."""

    name: str
    folder: Path
    handle: str | None
    points: tuple[tuple[RunKey, int | None], ...]  # and the array task that runs each; empty for the autopilot's job

    @property
    def place(self) -> str:
        """Return the path of the job's folder, relative to the study's folder."""
        return f"{FOLDER}/{self.name}"

    @property
    def tasks(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(task for _, task in self.points)) or (None,)


def create_name(study: str) -> str:
    """Return a new unique name for a job. It identifies the job at the scheduler until its job id is known."""
    return f"{study}-{datetime.now(UTC):%m%d%H%M%S}-{secrets.token_hex(3)}"


def list_predecessors(tasks: Mapping[str, int], own: int, throttle: int | None) -> list[str]:
    """Return the ids of the jobs that must end before a new job of `own` tasks starts, so that at most `throttle` jobs
    or array tasks run at a time. `tasks` has the number of tasks of each job in the queue, oldest first.

    The new job must wait for all of these jobs, and not only for the latest one: if a waiting job is cancelled, the
    jobs for which it waited may still run.
    """
    if throttle is None:
        return []
    # Slurm runs at most `throttle` tasks of one array at a time.
    handles, free = list(tasks), throttle - min(own, throttle)
    while handles and (needed := min(tasks[handles[-1]], throttle)) <= free:
        free -= needed
        handles.pop()
    return handles


def check_shape(job: Job, cluster: ClusterLimits) -> None:
    """Raise UserError for a job that the cluster could never start. The scheduler would keep such a job in its
    queue."""
    if cluster.max_nodes is not None and job.nodes > cluster.max_nodes:
        most = format_count(cluster.max_nodes, "node")
        rule = f"the partition allows at most {most} per job"
        raise UserError(f"nodes={job.nodes}", rule, "use fewer nodes, or choose another partition")
    if cluster.max_devices_per_node is not None and job.devices_per_node > cluster.max_devices_per_node:
        rule = "no node of the partition has as many cores as launcher.cpus_per_device requests"
        raise UserError(f"devices_per_node={job.devices_per_node}", rule, "request fewer cores or devices")
    if cluster.max_gpus_per_node is not None and job.devices_per_node > cluster.max_gpus_per_node:
        rule = f"a node of the partition has only {cluster.max_gpus_per_node} of the GPUs that launcher.gpus requests"
        raise UserError(f"devices_per_node={job.devices_per_node}", rule, "use fewer, or choose another partition")


def write(study_folder: Path, job: Job) -> Path:
    """Create a job's folder and write its definition."""
    folder = study_folder / FOLDER / job.name
    folder.mkdir(parents=True)
    store.write_json(folder / _JOB, job)
    return folder


def withdraw(folder: Path) -> None:
    """Delete the definition of a job that the scheduler refused. Its script is kept, so that the reason can be
    found."""
    for name in (_JOB, _HANDLE):
        (folder / name).unlink(missing_ok=True)


def read(folder: Path) -> Job:
    """Return the definition of the job in a folder."""
    return store.read_value(folder / _JOB, Job)


def hand_over(folder: Path, launcher: str, submit: Callable[[], object]) -> str:
    """Submit a job by calling `submit`, a function of a launcher. Return the scheduler's id of the job. The job's
    folder must already be written. If the job is refused, its definition is deleted."""
    try:
        with explain_failure(launcher, "submit", folder.parents[1]):
            handle = submit()
    except SchedulerUnavailable:
        raise  # the scheduler may have accepted the job
    except (OSError, UserError):
        withdraw(folder)
        raise
    if isinstance(handle, int):
        handle = str(handle)  # many schedulers have numbers
    if not isinstance(handle, str) or not handle:
        rule = f"its function submit returned {handle!r} instead of the job's id as text (str)"
        remedy = f"correct the launcher; the job {folder.name} may have been submitted"
        raise UserError(f"launcher={launcher}", rule, remedy)
    write_handle(folder, handle)
    return handle


def write_handle(folder: Path, handle: str) -> None:
    """Write the scheduler's id of a job. Without this file, the job is still found by its name."""
    store.write_atomically(folder / _HANDLE, handle.encode())


@contextlib.contextmanager
def explain_failure(launcher: str, function: str, folder: Path) -> Iterator[None]:
    """Replace an OSError from the block with a UserError. The message names the launcher and the launcher's function.
    Exception: an OSError is not replaced if it is about a file below `folder`, or about a full disk."""
    try:
        yield
    except OSError as error:
        if files.is_disk_full(error) or folder.resolve() in Path(str(error.filename)).resolve().parents:
            raise
        rule = f"its function {function} failed ({type(error).__name__}: {error})"
        raise UserError(f"launcher={launcher}", rule, "correct the launcher, or install what it needs") from error


def list_submitted(study_folder: Path) -> tuple[list[SubmittedJob], list[store.Unreadable]]:
    """Return every job of a study, oldest first, and the files that cannot be read, each with the reason."""
    folder = study_folder / FOLDER
    names: list[str] = []
    unreadable: list[store.Unreadable] = []
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        pass
    except OSError as error:
        unreadable.append(store.Unreadable(folder, error.strerror or str(error)))
    return [found for name in names if (found := _read_submitted(folder / name, unreadable))], unreadable


def _read_submitted(folder: Path, unreadable: list[store.Unreadable]) -> SubmittedJob | None:
    """Return the job in a folder; None if the folder has neither a definition nor a job id.

    A job whose definition cannot be read is returned without its points. Unreadable files are added to `unreadable`.
    """
    handle = _read_handle(folder / _HANDLE, unreadable)
    try:
        return SubmittedJob(folder.name, folder, handle, _read_keys(folder))
    except store.Unreadable as error:
        unreadable.append(error)
    except (FileNotFoundError, NotADirectoryError):
        pass  # a job of the autopilot; or the submitting process died before it wrote job.json
    return SubmittedJob(folder.name, folder, handle, ()) if handle else None


def _read_handle(path: Path, unreadable: list[store.Unreadable]) -> str | None:
    """Return the scheduler's job id from a file; None if the file does not exist or cannot be read."""
    try:
        return files.read_regular(path).decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        unreadable.append(store.Unreadable(path, f"not the scheduler's number ({error})"))
        return None


@functools.lru_cache(maxsize=100_000)  # a job is written once and never changed
def _read_keys(folder: Path) -> tuple[tuple[RunKey, int | None], ...]:
    job = store.read_value(folder / _JOB, _JobHeader)
    keys = (RunKey(point.config_id, point.machine, point.repeat) for point in job.points)
    return tuple((key, task if job.mode == "array" else None) for task, key in enumerate(keys))


def begin_allocation(folder: Path, allocation: AllocationPeriod) -> Path:
    """Write the start of an allocation to a file. Return the path of this file, which `end_allocation` needs."""
    prefix, suffix = _name_allocation(allocation.task, allocation.job_id)
    path = folder / f"{prefix}.{allocation.restart}{suffix}"
    store.write_atomically(path, json.dumps(allocation._asdict()).encode())
    return path


def _name_allocation(task: int | None, job_id: str) -> tuple[str, str]:
    """Return the parts of an allocation's file name before and after its restart number."""
    # The id, because a job that is resubmitted by hand uses the same folder. Files of older versions have no id.
    part = "." + re.sub(r"[^\w-]", "_", job_id) if job_id else ""
    return "allocation" if task is None else f"allocation-{task}", f"{part}.json"


def find_latest_restart(folder: Path, task: int | None, job_id: str) -> int:
    """Return the restart number of the latest start of a job, or of one of its array tasks: 0 for the first start, 1
    after one restart, -1 if it has not started yet. `job_id` is the id of this job, or of the array task.

    Only file names are read, since a job may have thousands of tasks.
    """
    prefix, suffix = _name_allocation(task, job_id)
    found = folder.glob(f"{prefix}.*{suffix}")
    numbers = (path.name.removeprefix(f"{prefix}.").removesuffix(suffix) for path in found)
    return max((int(number) for number in numbers if number.isdecimal()), default=-1)


def end_allocation(path: Path, ended_at: float) -> None:
    """Write the time at which an allocation ended, in seconds since the epoch. An end time that was written before is
    kept."""
    # The job itself and a later `status` may both write an end: the first one counts.
    noted = _ALLOCATION.validate_json(path.read_bytes())
    if noted.ended_at is None:
        store.write_atomically(path, json.dumps(noted._replace(ended_at=ended_at)._asdict()).encode())


def list_allocations(folder: Path) -> Iterator[tuple[Path, AllocationPeriod]]:
    """Yield the path and content of every file that describes a period in which a job had nodes. Unreadable files are
    skipped."""
    for path in sorted(folder.glob("allocation*.json")):
        with contextlib.suppress(OSError, ValueError):
            yield path, _ALLOCATION.validate_json(files.read_regular(path))


def write_end(folder: Path, end: JobEnd) -> None:
    """Write to a file how a job, or an array task, ended. Called if at least one of its points has no attempt."""
    task = "" if end.task is None else f"-{end.task}"
    store.write_atomically(folder / f"ended{task}.json", json.dumps(end._asdict()).encode())


def list_ends(folder: Path) -> Iterator[JobEnd]:
    """Yield a description of how a job, or an array task of the job, ended: one for each file that `write_end` wrote.
    Unreadable files are skipped."""
    for path in sorted(folder.glob("ended*.json")):
        with contextlib.suppress(OSError, ValueError):
            yield _END.validate_json(files.read_regular(path))


_END_BYTES = 16_384
_LINE_CHARACTERS = 300
_ONLY_THE_END = re.compile(
    r"exit code \d|: Killed$|: Terminated$|Terminated StepId|CANCELLED|Terminating (job step|StepId)|job step aborted",
    re.IGNORECASE,
)
"""Pattern of log lines that report the end of a process without its cause. Such lines add nothing to what the
scheduler reports."""


def read_end(path: Path, size_bytes: int = _END_BYTES) -> list[str]:
    """Return the lines in the last `size_bytes` of a text file, with access tokens masked. Raise OSError if it is not a
    regular file."""
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - size_bytes))
        lines = mask_tokens(file.read()).decode(errors="replace").splitlines()
    return lines[1:] if size > size_bytes else lines  # the first line may be incomplete


def find_last_line(path: Path | None) -> str:
    """Return the line of a log that probably names the cause of an error. Lines that report only the end of a process,
    such as `Killed`, are skipped. Of the other lines, the last is returned.

    If every line reports only an end, return the last line. If the log is empty or cannot be read, return an empty
    text.
    """
    try:
        lines = [line.strip() for line in read_end(path)] if path else []
    except OSError:
        return ""
    written = [line for line in lines if line]
    telling = [line for line in written if not _ONLY_THE_END.search(line)]
    return make_printable((telling or written or [""])[-1])[-_LINE_CHARACTERS:]


EXCLUDED = "excluded"


class Exclusion(Frozen):
    """A node that is unfit for measurements, with the reason and the runs that showed its defect."""

    host: str
    reason: str
    runs: tuple[str, ...]
    at: str  # ISO 8601, UTC


def write_exclusion(study_folder: Path, found: Exclusion) -> None:
    """Add a node to the study's list of excluded nodes. Later jobs of the study do not run on this node."""
    (study_folder / EXCLUDED).mkdir(exist_ok=True)
    store.write_json(study_folder / EXCLUDED / f"{found.host}.json", found)


def read_exclusions(study_folder: Path) -> list[Exclusion]:
    """Return the excluded nodes of a study. There is one file per excluded node. A node is used again if a user deletes
    its file."""
    found = []
    for path in sorted((study_folder / EXCLUDED).glob("*.json")):
        with contextlib.suppress(OSError, ValidationError):
            found.append(Exclusion.model_validate_json(path.read_bytes()))
    return found
