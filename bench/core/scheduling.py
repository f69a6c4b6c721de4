"""Values that pass between a launcher and the rest: work to start, scheduling options, states of jobs, node lists."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from bench.core.errors import UserError
from bench.core.record import Limits, Network, OutcomeKind
from bench.core.spec import Device, Positive

Mode = Literal["point", "array", "packed"]
"""One job per point; one task of a job array per point; or one allocation for many points, one after the other."""
Span = Literal["node", "device"]
"""What one of our supervisors looks after."""
Phase = Literal["pending", "running", "ended"]


class SchedulerAway(UserError):
    """The scheduler did not answer, which says nothing about its jobs."""


class SchedulingOptions(Limits):
    """How a sweep becomes jobs and how these behave, whatever scheduler has them. A launcher that queues adds the
    options of its site."""

    setup_min: float = Field(10.0, ge=0, description="what a start may take, added to the time of a point")
    network: Network = Network()
    span: Span = "node"
    mode: Mode = "packed"
    job_max_min: Positive = Field(240, description="a packed job is no longer than this")
    throttle: Positive | None = Field(
        None, description="so many jobs, or tasks of an array, of a sweep may run at a time"
    )
    max_queued: Positive | None = Field(None, description="so many jobs of a sweep may be in the queue at a time")
    warning_s: int = Field(
        60, ge=0, description="so long before its end every process of a job gets SIGTERM; 0: none does"
    )

    @model_validator(mode="after")
    def _there_is_time_after_the_warning(self) -> Self:
        limit = self.time_limit_min
        if limit is not None and 60 * limit <= self.warning_s:
            rule = f"ends before its warning, warning_s={self.warning_s} before the end"
            raise ValueError(f"time_limit_min={limit:g} {rule}; give it more time, or warn later")
        return self


class JobState(NamedTuple):
    """A job, or one task of a job array, as its scheduler knows it."""

    handle: str  # of the whole job, as `submit` returned it
    name: str
    task: int | None
    phase: Phase
    state: str  # the scheduler's own word
    reason: str = ""  # why it waits, in the scheduler's words
    outcome: OutcomeKind | None = None  # what its end means for an attempt without a record; None: nothing by itself
    why: str = ""  # the outcome in a sentence; of an error its word and its log tell
    restarts: int | None = None  # how often it was put back into the queue
    nodes: int | None = None
    started_at: float | None = None  # seconds since the epoch; of a pending one, when it is expected to start
    ended_at: float | None = None
    source: str = ""  # who said so
    words: str = ""  # the source's own line, for the record
    exit_code: int | None = None  # of its command; None while it runs, of one that was killed, and where nobody says
    exit: str = ""  # how its command ended, in words; empty of one that ended well, and where nobody says
    stuck: str = ""  # why it does not start until somebody changes something, in words; empty: it may start by itself

    follows: bool = False  # it waits for another job to end, and for nothing else

    @property
    def number(self) -> str:
        """The handle, of one task of an array with the task's number."""
        return self.handle if self.task is None else f"{self.handle}_{self.task}"

    @property
    def pending(self) -> bool:
        return self.phase == "pending"

    @property
    def running(self) -> bool:
        return self.phase == "running"

    @property
    def live(self) -> bool:
        """Whether it has not ended: it waits, runs, or is being cleared away."""
        return self.phase != "ended"


class ClusterLimits(NamedTuple):
    """What a cluster takes. None where there is no limit, or nobody says."""

    max_array_size: int | None = None  # tasks of one job array
    max_submit_jobs: int | None = None  # of this user in the queue at a time; each task of an array counts
    max_time_min: int | None = None
    max_nodes: int | None = None  # of one job
    max_devices_per_node: int | None = None  # whose cores a node has
    max_gpus_per_node: int | None = None  # 0: no node has any


class JobSetup(NamedTuple):
    """What the command of a job runs in, as far as the options say it."""

    device: Device | None = None  # that a job asks for; "cpu": it asks for no GPU; None: the options do not say
    gpu_override: str = ""  # makes a job ask for GPUs, as a remedy in messages
    image: str | None = None  # of the container
    python: tuple[str, ...] | None = None  # the command that starts Python; None: the Python that submits
    variables: dict[str, str] = {}  # set for the command


class JobContext(NamedTuple):
    """Where in a scheduler's job this process is; as it stands, of a process in no job."""

    job_id: str = ""  # the scheduler's name for this job, or this task of an array; empty: in none
    name: str = ""  # of its Work
    number: int = 0  # of this process among those started side by side for the work; 0 conducts
    processes: int = 1  # so many were started side by side
    nodes: int = 1
    cluster: str = ""  # of several that number their jobs by themselves
    nodelist: str = ""  # its hosts, as `gpu1,gpu2` or `gpu[1-2]`; empty where nobody says
    task: int | None = None  # of a job array
    restart: int = 0  # how often it was put back into the queue before this start
    cores: int | None = None  # that each of these processes was given; None where the scheduler does not say
    ends_at: float | None = None  # seconds since the epoch; None where nobody says
    variables: dict[str, str] = {}  # that tell the job from all others, kept in the record

    @property
    def allocation(self) -> str:
        """The name of this stretch of time on these nodes: every task of an array has a number of its own, and a job
        that is put back into the queue counts its starts."""
        return f"{self.job_id or 'local'}.{self.restart}"

    def end(self, time_limit_min: float, began_at: float) -> float:
        """Return when the allocation ends, in seconds since the epoch; where nobody says, by the job's limit."""
        return self.ends_at or began_at + 60 * time_limit_min


class Work(NamedTuple):
    """What a launcher is to start: one command on each of some nodes.

    `module` is run as `python -m MODULE ARGUMENT …`, on every node once, with `folder` for the launcher's own files.
    The folder of the study, two levels above it, is a POSIX file system that every node and the submitting machine
    see: runs are claimed there by mkdir, files are linked into place, and the nodes of a job find each other by it.
    """

    name: str  # unique, safe in a shell and as a file name
    folder: Path
    module: str
    arguments: tuple[str, ...]
    nodes: int = 1
    devices_per_node: int = 0  # 0: it needs none, and runs once, on the first node alone
    time_limit_min: int | None = None  # None: the launcher's own choice
    tasks: int | None = None  # of a job array: the command runs once for each of so many tasks
    after: tuple[str, ...] = ()  # handles of earlier work that must have ended, however
    exclude: tuple[str, ...] = ()  # nodes that must not be used


class LaunchPlan(NamedTuple):
    """How work starts: a command, what is added to its environment, the folder it belongs to, and files to write.

    `files` are what a dry run shows; the command is what a person would type once they are written.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    files: dict[Path, str] = {}


_ENTRY = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_NUMBERS = re.compile(r"\[([^\]]*)\]")


def find_foreign(hosts: Sequence[str], nodelist: str) -> tuple[str, ...]:
    """Return which of a run's hosts, the first node's first, are not on the list of nodes of its allocation.

    The first node's is the one that the list came from. Where that is not on it, hosts have other names than the
    scheduler's nodes, and nothing can be said.
    """
    if not hosts or not is_listed(hosts[0], nodelist):
        return ()
    return tuple(host for host in hosts if not is_listed(host, nodelist))


def is_listed(host: str, nodelist: str) -> bool:
    """Whether a host is on a list of nodes; domains are left out of account."""
    return any(_is_entry_of(_strip_domain(host), _strip_domain(entry)) for entry in _ENTRY.findall(nodelist))


def _strip_domain(name: str) -> str:
    return name.partition(".")[0].lower()


def _is_entry_of(host: str, entry: str) -> bool:
    """Whether an entry such as `rack[1-2]n[01-16]` means a host. It is not expanded: it may mean millions."""
    literal = map(re.escape, _NUMBERS.split(entry)[::2])
    found = re.fullmatch(r"(\d+)".join(literal), host)
    return found is not None and all(map(_is_within, found.groups(), _NUMBERS.findall(entry)))


def _is_within(number: str, ranges: str) -> bool:
    """Whether ranges such as `01-03,7` hold a number, written with as many zeros as theirs."""
    for one in ranges.split(","):
        low, _, high = one.partition("-")
        if low.isdigit() and int(low) <= int(number) <= int(high or low) and number == str(int(number)).zfill(len(low)):
            return True
    return False
