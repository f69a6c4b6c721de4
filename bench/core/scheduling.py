"""Types for the interface to launchers: work to start, scheduling options, states of jobs and lists of nodes."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from bench.core.errors import UserError
from bench.core.record import Limits, Network, OutcomeKind
from bench.core.spec import Device, Positive

Mode = Literal["point", "array", "packed"]
"""How points (configurations) become jobs. `point`: one job per point. `array`: one task of a job array per point.
`packed`: many points in one job, one after the other."""
Span = Literal["node", "device"]
"""Ranks that one supervisor process starts and watches: all ranks of a node, or the rank of one device."""
Phase = Literal["pending", "running", "ended"]


class SchedulerUnavailable(UserError):
    """Error: the scheduler does not respond, so that the state of its jobs is unknown."""

    exit_code = 1  # the command is valid, and can be repeated


class SchedulingOptions(Limits):
    """Options of a sweep's jobs that every scheduler supports. A launcher with a queue adds options for its scheduler
    and site."""

    has_dependencies: ClassVar[bool] = True
    """True if a job can wait for the end of another job. The autopilot (automatic resubmission) needs this."""
    setup_min: float = Field(
        10.0, ge=0, description="minutes that a job needs to start; they are added to the predicted time of its points"
    )
    network: Network = Network()
    span: Span = Field("node", description="ranks that one supervisor starts: all ranks of a node, or one device's")
    mode: Mode = Field(
        "packed",
        description="packed: many points in one job, one after the other; point: one job per point; array: one task "
        "of a job array per point",
    )
    job_max_min: Positive = Field(240, description="maximum length of a packed job in minutes")
    throttle: Positive | None = Field(
        None, description="maximum number of jobs or array tasks of a sweep that run at a time"
    )
    max_queued: Positive | None = Field(
        None, description="maximum number of jobs of a sweep in the queue, waiting or running"
    )
    warning_s: int = Field(
        60, ge=0, description="seconds before a job's time limit at which all its processes receive SIGTERM; 0: none"
    )

    @model_validator(mode="after")
    def _there_is_time_after_the_warning(self) -> Self:
        limit = self.time_limit_min
        if limit is not None and 60 * limit <= self.warning_s:
            rule = f"is not longer than warning_s={self.warning_s}"
            raise ValueError(f"time_limit_min={limit:g} {rule}; raise time_limit_min, or lower warning_s")
        if self.mode == "packed" and self.warning_s > 60 * self.job_max_min:
            rule = f"is longer than a packed job (job_max_min={self.job_max_min})"
            raise ValueError(f"launcher.warning_s={self.warning_s}: {rule}; lower warning_s, or raise job_max_min")
        return self


class JobState(NamedTuple):
    """State of a job, or of one task of a job array, as its scheduler reports it."""

    handle: str  # handle of the whole job, as returned by `submit`
    name: str
    task: int | None
    phase: Phase
    state: str  # the scheduler's own name of the state
    reason: str = ""  # why the job waits, in the scheduler's own words
    # Outcome of an attempt that left no record; None: the job's end does not determine it.
    outcome: OutcomeKind | None = None
    why: str = ""  # the reason for `outcome`; empty for an error, which the log explains
    restarts: int | None = None  # number of times it was requeued
    nodes: int | None = None
    started_at: float | None = None  # seconds since the epoch; the expected start of a pending job
    ended_at: float | None = None
    source: str = ""  # name of the scheduler's program that reported this state
    words: str = ""  # line that this program printed, for the record
    exit_code: int | None = None  # of the job's command; None while it runs, after a signal, or if unknown
    exit: str = ""  # how the job's command failed, as text; empty after success, or if unknown
    stuck: str = ""  # why the job cannot start unless a user intervenes; empty: it may start
    follows: bool = False  # True: the job waits only for another job to end

    @property
    def number(self) -> str:
        """The job's id in messages: the handle and, for a task of an array, the task's index."""
        return self.handle if self.task is None else f"{self.handle}_{self.task}"

    @property
    def pending(self) -> bool:
        return self.phase == "pending"

    @property
    def running(self) -> bool:
        return self.phase == "running"

    @property
    def live(self) -> bool:
        """True if the job has not ended: it is pending, running or being cleaned up."""
        return self.phase != "ended"


class ClusterLimits(NamedTuple):
    """Limits of a cluster. None means that there is no limit, or that it is unknown."""

    max_array_size: int | None = None  # maximum number of tasks of a job array
    max_submit_jobs: int | None = None  # maximum number of this user's jobs in the queue; every task of an array counts
    max_time_min: int | None = None
    max_nodes: int | None = None  # per job
    max_devices_per_node: int | None = None  # limited by the number of cores of a node
    max_gpus_per_node: int | None = None  # 0: no node has a GPU


class JobSetup(NamedTuple):
    """Environment in which a job's command runs, and costs of the job, as far as the launcher options define them."""

    device: Device | None = None  # device that a job requests; "cpu": no GPU; None: not defined
    device_name: str = ""  # name of the job's GPUs in their driver; empty: unknown
    gpu_note: str = ""  # why it is unknown whether a job has GPUs, such as an unknown machine type; empty: no reason
    gpu_override: str = ""  # override with which a job requests GPUs, for remedies in messages
    image: str | None = None  # container image
    python: tuple[str, ...] | None = None  # command that starts Python; None: the Python that submits
    variables: dict[str, str] = {}  # environment variables of the command
    lacks: str = ""  # missing package without which this machine cannot submit, and the remedy; empty: none is missing
    start_min: float = 0.0  # minutes that the launcher adds to the time limit of a job, for its start
    price_per_node_hour: float | None = None  # in the currency of `budget`; None: unknown, or nothing is paid
    price_note: str = ""  # doubt about the price, for a dry run; empty: none
    budget: float | None = None  # cost above which no job is submitted; None: no limit
    dockerfile: str = ""  # of the image, to which `zeroscale prepare` adds staging; empty: the image is made elsewhere
    build: tuple[tuple[str, ...], ...] = ()  # commands that build the image from the Dockerfile in `{folder}`


class JobContext(NamedTuple):
    """The scheduler's job to which this process belongs, and the position of the process in the job. The default values
    describe a process outside any job."""

    job_id: str = ""  # the scheduler's id of this job or array task; empty: outside any job, or unknown
    name: str = ""  # `Work.name` of the job
    number: int = 0  # index of this process among the processes of the work; process 0 leads
    processes: int = 1  # number of processes of the work
    nodes: int = 1
    cluster: str = ""  # name of the cluster, if several clusters number their jobs independently
    nodelist: str = ""  # hosts of the job, such as `gpu1,gpu2` or `gpu[1-2]`; empty if unknown
    task: int | None = None  # index of the task of a job array
    restart: int = 0  # number of times the job was requeued before this start
    cores: int | None = None  # cores per process; None if unknown
    ends_at: float | None = None  # seconds since the epoch; None if unknown
    variables: dict[str, str] = {}  # environment variables that identify the job, for the record
    system: str = ""  # name of the launcher or system that started the job, such as `slurm` or `torchrun`
    hosts: tuple[str, ...] = ()  # addresses of the nodes in order, the leader's first; empty if unknown

    @property
    def allocation(self) -> str:
        """Name of the allocation. It contains the restart count, because a requeued job keeps its id but gets new
        nodes. A task of an array has its own id."""
        return f"{self.job_id or 'local'}.{self.restart}"

    def end(self, time_limit_min: float, began_at: float) -> float:
        """Return the time at which the allocation ends, in seconds since the epoch. If the scheduler does not state
        this time, compute it from `began_at`, the start of the job, and the time limit."""
        return self.ends_at or began_at + 60 * time_limit_min


class Work(NamedTuple):
    """Work for a launcher: a command that runs once on each node.

    The command is `python -m MODULE ARGUMENT …`. The launcher stores its own files in `folder`, two levels below the
    study's folder. The study's folder must be on a POSIX file system that all nodes and the submitting machine share,
    because processes claim runs by mkdir, and finished files get their names by hard links. The nodes of a job also
    find each other through files in this folder. The jobs of a `StoringLauncherPlugin` use an object store instead.
    """

    name: str  # unique, and safe in a shell and as a file name
    folder: Path
    module: str
    arguments: tuple[str, ...]
    nodes: int = 1
    devices_per_node: int = 0  # 0: the command needs no device, and runs once, on the first node
    time_limit_min: int | None = None  # None: the launcher chooses the limit
    tasks: int | None = None  # number of tasks of a job array; the command runs once per task
    after: tuple[str, ...] = ()  # handles of earlier jobs that must end first, successfully or not
    exclude: tuple[str, ...] = ()  # names of nodes that the job must not use
    delay_min: int = 0  # minutes after the submission during which the job must not start


class LaunchPlan(NamedTuple):
    """A plan to start work: the command, variables added to the command's environment, the folder of the work, and
    files to write before the start.

    A dry run prints `files`. A user could write these files and enter the command by hand.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    files: dict[Path, str] = {}


_ENTRY = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_NUMBERS = re.compile(r"\[([^\]]*)\]")


def find_foreign(hosts: Sequence[str], nodelist: str) -> tuple[str, ...]:
    """Return those hosts of a run that are not in `nodelist`, the scheduler's list of the job's nodes.

    `nodelist` was read on the first node of the run, `hosts[0]`, so it must contain this node. If this node is missing,
    host names cannot be compared with the scheduler's node names. Return an empty tuple in this case.
    """
    # Host names differ, for example, in a container with its own host name.
    if not hosts or not is_listed(hosts[0], nodelist):
        return ()
    return tuple(host for host in hosts if not is_listed(host, nodelist))


def is_listed(host: str, nodelist: str) -> bool:
    """Return True if a host is in a list of nodes such as `login,rack[1-2]n[01-16]`. Domains, as in n1.example.com, are
    ignored."""
    name, *_ = host.lower().split(".")
    return any(_is_entry_of(name, entry.partition(".")[0].lower()) for entry in _ENTRY.findall(nodelist))


def _is_entry_of(host: str, entry: str) -> bool:
    # The entry is not expanded into names, because it may stand for millions of hosts.
    literal = map(re.escape, _NUMBERS.split(entry)[::2])
    found = re.fullmatch(r"(\d+)".join(literal), host)
    return found is not None and all(map(_is_within, found.groups(), _NUMBERS.findall(entry)))


def _is_within(number: str, ranges: str) -> bool:
    """Return True if `ranges`, such as `01-03,7`, contain `number`. Leading zeros must be equal: 1 is not in 01-03."""
    for one in ranges.split(","):
        low, _, high = one.partition("-")
        # Leading zeros are part of a host name: n1 is not n01.
        if low.isdigit() and int(low) <= int(number) <= int(high or low) and number == str(int(number)).zfill(len(low)):
            return True
    return False
