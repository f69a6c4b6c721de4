"""Values exchanged with launchers: work to start, scheduling options, states of jobs, node lists."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from bench.core.errors import UserError
from bench.core.record import Limits, Network, OutcomeKind
from bench.core.spec import Device, Positive

Mode = Literal["point", "array", "packed"]
"""One job per point; one task of a job array per point; or one allocation for many points in sequence."""
Span = Literal["node", "device"]
"""Scope of a supervisor: the ranks of a node, or one rank."""
Phase = Literal["pending", "running", "ended"]


class SchedulerUnavailable(UserError):
    """The scheduler did not answer, so that the state of its jobs is unknown."""


class SchedulingOptions(Limits):
    """Options of a sweep's jobs that every scheduler supports. A queueing launcher adds the options of its site."""

    setup_min: float = Field(10.0, ge=0, description="time for the start, added to the time of a point")
    network: Network = Network()
    span: Span = "node"
    mode: Mode = "packed"
    job_max_min: Positive = Field(240, description="maximum length of a packed job")
    throttle: Positive | None = Field(None, description="maximum number of running jobs, or array tasks, of a sweep")
    max_queued: Positive | None = Field(None, description="maximum number of a sweep's jobs in the queue")
    warning_s: int = Field(60, ge=0, description="SIGTERM reaches all processes this long before a job ends; 0: never")

    @model_validator(mode="after")
    def _there_is_time_after_the_warning(self) -> Self:
        limit = self.time_limit_min
        if limit is not None and 60 * limit <= self.warning_s:
            rule = f"ends before its warning, warning_s={self.warning_s} before the end"
            raise ValueError(f"time_limit_min={limit:g} {rule}; give it more time, or warn later")
        return self


class JobState(NamedTuple):
    """A job, or one task of a job array, in the view of its scheduler."""

    handle: str  # of the whole job, as `submit` returned it
    name: str
    task: int | None
    phase: Phase
    state: str  # in the scheduler's own term
    reason: str = ""  # for its wait, in the scheduler's own term
    outcome: OutcomeKind | None = None  # of an attempt without a record; None: its end alone decides nothing
    why: str = ""  # the outcome in a sentence; empty for an error, which its log explains
    restarts: int | None = None  # number of times it was requeued
    nodes: int | None = None
    started_at: float | None = None  # seconds since the epoch; the expected start of a pending job
    ended_at: float | None = None
    source: str = ""  # the program that reported this state
    words: str = ""  # that program's own line, for the record
    exit_code: int | None = None  # of its command; None while it runs, after a signal, and where unknown
    exit: str = ""  # a failure of its command, in words; empty after success, and where unknown
    stuck: str = ""  # reason why it cannot start without a change by a person; empty: it may start by itself
    follows: bool = False  # it waits only for another job to end

    @property
    def number(self) -> str:
        """The handle; for a task of an array, with the number of the task."""
        return self.handle if self.task is None else f"{self.handle}_{self.task}"

    @property
    def pending(self) -> bool:
        return self.phase == "pending"

    @property
    def running(self) -> bool:
        return self.phase == "running"

    @property
    def live(self) -> bool:
        """True until it has ended: it waits, runs, or is being cleaned up."""
        return self.phase != "ended"


class ClusterLimits(NamedTuple):
    """Limits of a cluster. None: no limit, or an unknown one."""

    max_array_size: int | None = None  # tasks of one job array
    max_submit_jobs: int | None = None  # of this user in the queue at once; each task of an array counts
    max_time_min: int | None = None
    max_nodes: int | None = None  # of one job
    max_devices_per_node: int | None = None  # as far as a node's cores suffice
    max_gpus_per_node: int | None = None  # 0: no node has any


class JobSetup(NamedTuple):
    """Environment of a job's command, as far as the options define it."""

    device: Device | None = None  # that a job requests; "cpu": it requests no GPU; None: not defined
    gpu_override: str = ""  # an override that makes a job request GPUs, for remedies in messages
    image: str | None = None  # of the container
    python: tuple[str, ...] | None = None  # the command that starts Python; None: the submitting Python
    variables: dict[str, str] = {}  # set for the command


class JobContext(NamedTuple):
    """Place of this process in a scheduler's job. The defaults are those of a process outside any job."""

    job_id: str = ""  # the scheduler's name of this job, or of this task of an array; empty: outside any job
    name: str = ""  # of its Work
    number: int = 0  # of this process among the parallel processes of the work; 0 leads
    processes: int = 1  # number of parallel processes
    nodes: int = 1
    cluster: str = ""  # name, where several clusters number their jobs independently
    nodelist: str = ""  # its hosts, as `gpu1,gpu2` or `gpu[1-2]`; empty where unknown
    task: int | None = None  # of a job array
    restart: int = 0  # number of times it was requeued before this start
    cores: int | None = None  # of each of these processes; None where unknown
    ends_at: float | None = None  # seconds since the epoch; None where unknown
    variables: dict[str, str] = {}  # that identify the job, for the record

    @property
    def allocation(self) -> str:
        """The name of this period on these nodes. Tasks of an array have own ids; a requeued job counts its starts."""
        return f"{self.job_id or 'local'}.{self.restart}"

    def end(self, time_limit_min: float, began_at: float) -> float:
        """Return the end of the allocation, in seconds since the epoch; by the job's time limit where it is unknown."""
        return self.ends_at or began_at + 60 * time_limit_min


class Work(NamedTuple):
    """Work for a launcher: one command on each of a number of nodes.

    `python -m MODULE ARGUMENT …` runs once on every node. `folder` is for the launcher's own files. The study's folder
    is two levels above it, on a POSIX file system that every node and the submitting machine share: mkdir claims runs
    there, files are linked into place, and the nodes of a job find each other through it.
    """

    name: str  # unique, safe in a shell and as a file name
    folder: Path
    module: str
    arguments: tuple[str, ...]
    nodes: int = 1
    devices_per_node: int = 0  # 0: it needs none, and runs once, on the first node
    time_limit_min: int | None = None  # None: the launcher's choice
    tasks: int | None = None  # of a job array: the command runs once for each
    after: tuple[str, ...] = ()  # handles of earlier work that must have ended, successfully or not
    exclude: tuple[str, ...] = ()  # nodes that it must not use


class LaunchPlan(NamedTuple):
    """How work starts: a command, additions to its environment, the folder of the work, and files to write.

    A dry run shows `files`. A person could type the command after writing them.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    files: dict[Path, str] = {}


_ENTRY = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_NUMBERS = re.compile(r"\[([^\]]*)\]")


def find_foreign(hosts: Sequence[str], nodelist: str) -> tuple[str, ...]:
    """Return the hosts of a run, its first node's first, that are not on its allocation's list of nodes.

    The list comes from the first node. If that is missing from it, hosts have other names than the scheduler's nodes,
    and the answer is unknown: empty.
    """
    # For example, a container may have its own host name.
    if not hosts or not is_listed(hosts[0], nodelist):
        return ()
    return tuple(host for host in hosts if not is_listed(host, nodelist))


def is_listed(host: str, nodelist: str) -> bool:
    """Return True for a host on a list of nodes such as `login,rack[1-2]n[01-16]`, domains ignored."""
    name, *_ = host.lower().split(".")
    return any(_is_entry_of(name, entry.partition(".")[0].lower()) for entry in _ENTRY.findall(nodelist))


def _is_entry_of(host: str, entry: str) -> bool:
    # An entry is not expanded into its names: it may stand for millions.
    literal = map(re.escape, _NUMBERS.split(entry)[::2])
    found = re.fullmatch(r"(\d+)".join(literal), host)
    return found is not None and all(map(_is_within, found.groups(), _NUMBERS.findall(entry)))


def _is_within(number: str, ranges: str) -> bool:
    """Return True if ranges such as `01-03,7` contain a number, written with as many zeros as theirs."""
    for one in ranges.split(","):
        low, _, high = one.partition("-")
        # Zeros are part of a name: n1 is not n01.
        if low.isdigit() and int(low) <= int(number) <= int(high or low) and number == str(int(number)).zfill(len(low)):
            return True
    return False
