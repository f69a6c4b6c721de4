"""What passes between a launcher that queues and the rest: our options of scheduling, and what its scheduler says."""

from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from bench.errors import UserError
from bench.record import Limits, Network, OutcomeKind
from bench.spec import Device, Positive

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

    device: Device | None = None  # None: they do not say
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
