"""RunRecord: the observations of one attempt (one try at a run), written by the harness and read by the analysis.

A record contains raw observations only. The package `analysis` derives throughput, FLOP/s and intervals, so that runs
need not be repeated when a formula is corrected. None means unknown. A failed attempt has a record, too.

History of the format (`schema_version`); `bench.core.record_checks` converts records of older versions:
1  First version.
2  The time of a step is the difference between the slowest rank's completions of successive steps. There are new fields
   for the fastest and slowest rank of a step, background load, device use, transport, phases, idle time, trainable
   parameters, evaluations, checkpoints and traces. The field `before_collectives_s` is removed.
3  The length of a window is fixed before the run. In `measure`, `window_s` and `gpu_warmup_s` replace `min_s`,
   `max_steps`, `width` and `warmup_max_steps`. The field `stopped` may be `window`. The field `steady` is unused.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, RootModel, model_validator

from bench.core.machine import Machine
from bench.core.spec import Extensible, Frozen, Positive, RunSpec

SCHEMA_VERSION = 3
"""Version of the record format that this code writes."""

OutcomeKind = Literal[
    "ok", "oom", "host_oom", "hang", "timeout", "comm_error", "node_failure", "preempted", "cancelled",
    "invalid", "error", "pruned", "infeasible",
]  # fmt: skip
# An out-of-memory error recurs with the same spec; a lost node or a hang may not.
FINAL: frozenset[OutcomeKind] = frozenset({"ok", "invalid", "oom", "host_oom", "pruned", "infeasible"})
"""Final outcomes. After one of these, another attempt would have the same outcome, so there is none. After any other
outcome, the run is attempted again."""

Evidence = Literal["measured", "rehearsed", "predicted"]


class MemoryShortage(Frozen):
    """Facts about the memory that ran out on a rank. Bytes are those at the time of the failed allocation."""

    rank: int = Field(description="rank that ran out of memory")
    where: Literal["device", "host"] = Field(description="memory that ran out: of the device, or of the host")
    requested_bytes: int | None = Field(None, description="size of the failed allocation in bytes")
    lacking_bytes: int | None = Field(None, description="bytes by which the failed allocation exceeded the free memory")
    free_bytes: int | None = Field(
        None, description="free bytes of the device or host, or bytes left within the process's limit"
    )
    total_bytes: int | None = Field(None, description="bytes of the device or host, or the process's limit")
    live_bytes: int | None = Field(None, description="bytes of the rank's live tensors")
    peak_bytes: int | None = Field(None, description="peak bytes of live tensors in the failed phase")
    reserved_bytes: int | None = Field(
        None, description="bytes reserved by the caching allocator; None for host memory"
    )
    resident_bytes: int | None = Field(None, description="resident set of the rank's process; None for device memory")
    others_bytes: int | None = Field(None, description="bytes of the device used by processes outside the run")


class Outcome(Extensible):
    """Outcome of an attempt (one try at a run), and the facts from which the outcome was determined."""

    LATER_FIELDS = frozenset({"shortage"})

    kind: OutcomeKind = Field(description="how the attempt ended")
    reason: str = Field("", description="reason in one line; empty if the outcome is ok")
    evidence: dict[str, Any] = Field({}, description="facts from which the outcome was determined, by name")
    shortage: MemoryShortage | None = Field(None, description="use of the memory that ran out, if the rank reported it")

    @property
    def final(self) -> bool:
        return self.kind in FINAL

    @property
    def paused_s(self) -> float:
        """Seconds during which the attempt was paused: its job was suspended, it received SIGSTOP, or the machine
        slept."""
        return float(self.evidence.get("paused_s") or 0.0)


class Limits(Frozen):
    """Time limits after which a supervisor (the process that watches a node's ranks) ends a run."""

    time_limit_min: float | None = Field(None, gt=0, description="maximum minutes of the whole attempt; None: no limit")
    hang_s: float = Field(300.0, gt=0, description="maximum seconds without a completed step, after the first step")
    startup_s: float = Field(1800.0, gt=0, description="maximum seconds of the first step, and of each phase before it")
    silence_s: float = Field(30.0, gt=1, description="seconds without a message after which a node counts as lost")
    agent_silence_s: float = Field(
        60.0, gt=1, description="seconds without a message from the first node after which other nodes end the run"
    )
    quiet_within_s: float | None = Field(
        None,
        ge=0,
        description="maximum seconds to wait for background load to end; then the attempt ends without a run. None: "
        "run at once, and flag a run with background load as `busy`",
    )

    @model_validator(mode="after")
    def _first_node_decides(self) -> Self:
        if self.agent_silence_s <= self.silence_s:
            rule = f"must be above silence_s={self.silence_s:g}, so that the first node notices a cut link first"
            raise ValueError(f"agent_silence_s={self.agent_silence_s:g} {rule}; set 2 × silence_s or more")
        return self


class Network(Frozen):
    """Network names and interfaces that the nodes of a run use for communication. By default, these are the host names
    and the interfaces to which the host names resolve."""

    rendezvous_host: str = Field("{host}", description='address of the first node, such as "{host}-ib0"')
    interface: str | None = Field(None, description="network interface of gloo's and NCCL's sockets, such as ib0")
    expects: Literal["infiniband", "sockets"] | None = Field(
        None, description="transport between nodes; a run over any other transport ends as `invalid`"
    )

    def address(self, host: str) -> str:
        """Return the host name or address at which other nodes reach `host`."""
        return self.rendezvous_host.replace("{host}", host)


class Circumstance(Extensible):
    """Circumstances of an attempt (one try at a run): how and where it was started. Runs of one configuration are
    repeats of each other, even if their circumstances differ."""

    LATER_FIELDS = frozenset({"step_limit_s", "goes_on_from", "shapes_only"})

    study: str = Field(description="name of the study")
    question: str = Field("", description="question that the study answers, as written in its file")
    repeat: int = Field(ge=0, description="number of the repeat, from 0")
    attempt: int = Field(ge=0, description="number of the attempt at this repeat, from 0")
    machine: Machine = Field(description="machine file of the run, without calibration and rental offers")
    launcher: dict[str, Any] = Field({}, description="name and options of the launcher")
    limits: Limits = Field(Limits(), description="time limits that end the run")
    network: Network = Field(Network(), description="network names and interfaces of the nodes")
    step_limit_s: float | None = Field(
        None, gt=0, description="in a search: the window ends early if steps surely take longer than these seconds"
    )
    goes_on_from: str | None = Field(None, description="config_id of the run whose checkpoint the training resumes")
    rehearsed_rank: int | None = Field(None, ge=0, description="rank that a rehearsal runs alone; None: a whole run")
    shapes_only: bool = Field(False, description="True: a rehearsal of memory only, without computing values")
    overrides: tuple[str, ...] = Field((), description="overrides on the command line, as KEY=VALUE")
    started_at: str = Field("", description="start of the attempt in UTC, as ISO 8601")


class EnvironmentClass(Frozen):
    """Properties of an environment that two runs must share for their results to be pooled. `environment_id` is their
    hash."""

    device: str = Field(description="name that the device reports")
    devices_per_node: int = Field(description="number of devices that the run uses on each node")
    container: str | None = Field(None, description="digest of the container image; None: no container")
    versions: dict[str, str | None] = Field({}, description="versions by name: torch, cuda, nccl, driver, deepspeed, …")
    cores: int | None = Field(None, description="number of cores that the first rank may use")
    threads: int | None = Field(None, description="number of threads per rank")
    quota_cores: float | None = Field(None, description="CPU quota of the control group, in cores; None: no quota")
    openmp_wait: str | None = Field(None, description="OpenMP variables that set how threads wait; None: one thread")


class ScheduledJob(Frozen):
    """The scheduler's job in which an attempt ran, in a form that does not depend on the scheduler."""

    job_id: str = Field(description="the scheduler's identifier of the job")
    cluster: str = Field("", description="name of the cluster, where job numbers are unique only within a cluster")
    restart: int = Field(0, description="number of times the job was requeued")
    nodelist: str = Field("", description="hosts of the job, such as `gpu1,gpu2` or `gpu[1-2]`; empty if unknown")

    @property
    def allocation(self) -> str | None:
        """Name of the allocation; None if `job_id` is empty. Each start of a job has its own allocation, because a
        requeued job gets new nodes."""
        parts = (self.cluster, self.job_id, str(self.restart or ""))
        return ".".join(part for part in parts if part) if self.job_id else None


class Environment(Extensible):
    """Environment of an attempt. Only `classification` decides which results may be pooled; the other fields are for
    human readers."""

    LATER_FIELDS = frozenset({"job"})

    environment_id: str = Field(description="hash of `classification`")
    classification: EnvironmentClass = Field(description="properties that pooled runs must share")
    versions: dict[str, str | None] = Field({}, description="versions of packages, Python and operating system")
    git: dict[str, Any] | None = Field(None, description="commit of the code; dirty: files differ from that commit")
    hosts: tuple[str, ...] = Field((), description="host name of each node")
    cpus: dict[str, Any] = Field({}, description="processor: model, cores, cores and threads of each rank")
    devices: tuple[dict[str, Any], ...] = Field((), description="each device at the start: clocks, power cap, …")
    devices_after: tuple[dict[str, Any], ...] = Field((), description="the same facts as `devices`, after the window")
    job: ScheduledJob | None = Field(None, description="None: no job, or an older record (see `slurm`)")
    slurm: dict[str, str] = Field({}, description="environment variables that the scheduler set")
    variables: dict[str, str] = Field({}, description="other environment variables, of an allow-list without secrets")


class RankMemory(Extensible):
    """Memory of one rank in bytes. Fields named `allocated` count the bytes of live tensors. The count comes from the
    device's allocator or, on a CPU, from a wrapper of torch's allocator. As a check, `drift` is the relative difference
    between this count and the bytes of all tensor storages that Python can reach between steps."""

    LATER_FIELDS = frozenset({"least_reserved_bytes"})

    rank: int = Field(description="rank, from 0")
    init_peak_bytes: int | None = Field(None, description="peak of live tensors while model and engine are built")
    warmup_peak_bytes: int | None = Field(None, description="peak of live tensors between initialisation and window")
    resident_bytes: int | None = Field(None, description="bytes of live tensors between two steps")
    peak_allocated_bytes: int | None = Field(None, description="peak of live tensors in the window")
    peak_reserved_bytes: int | None = Field(
        None, description="peak bytes reserved by the caching allocator; None on a CPU"
    )
    device_used_bytes: int | None = Field(None, description="use of the device by all processes, from its driver")
    init_reserved_bytes: int | None = Field(None, description="peak of reserved bytes while model and engine are built")
    warmup_reserved_bytes: int | None = Field(
        None, description="peak of reserved bytes between initialisation and window"
    )
    least_reserved_bytes: int | None = Field(
        None, description="rehearsal by shapes: least memory with which the caching allocator of a GPU does not fail"
    )
    device_peak_bytes: int | None = Field(None, description="highest sampled use of the device by all processes")
    init_rss_bytes: int | None = Field(None, description="peak resident set of the process during initialisation")
    peak_rss_bytes: int | None = Field(None, description="peak resident set of the process in the whole run")
    loaders_rss_bytes: int | None = Field(None, description="sum of the loader processes' peak resident sets")
    drift: float | None = Field(None, description="relative difference of two counts of live bytes between steps")


class Collective(Frozen):
    """Calls and bytes of one kind of collective, such as an all-reduce, in one optimizer step of one rank. The payload
    is counted as in nccl-tests: the tensor of a reduction or broadcast, the output of a gather, or the input of a
    scatter."""

    calls: int = Field(description="calls per step")
    payload_bytes: int = Field(description="bytes of all calls of a step")


_PADDING = "_padding"


class Tokens(RootModel[dict[str, float]]):
    """Tokens per optimizer step, summed over all data-parallel ranks and averaged over the steps of the window.

    For each kind of tokens of the objective (such as encoder tokens) there are two keys: `<kind>` for tokens including
    padding, and `<kind>_padding` for padding alone.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _in_pairs(self) -> Self:
        # Without this check, a kind without its padding, or the reverse, would silently change the derived throughput.
        kinds = self.root.keys() - {name for name in self.root if name.endswith(_PADDING)}
        if not kinds or self.root.keys() != kinds | {f"{kind}{_PADDING}" for kind in kinds}:
            listed = ", ".join(self.root)
            raise ValueError(f"must have KIND and KIND_padding for each kind of tokens, and has: {listed}")
        return self

    @classmethod
    def counted(cls, tokens: Mapping[str, float], padding: Mapping[str, float]) -> Self:
        """Return Tokens from counts by kind of tokens: `tokens` includes padding, `padding` is padding alone."""
        return cls({**tokens, **{f"{kind}{_PADDING}": padding[kind] for kind in tokens}})

    def of(self, kind: str) -> float | None:
        """Return the number of tokens of one kind, padding included; None if there is no such kind."""
        return self.root.get(kind)

    @property
    def all(self) -> float:
        """Number of tokens, padding included, summed over all kinds of tokens."""
        return sum(count for name, count in self.root.items() if not name.endswith(_PADDING))

    @property
    def padding(self) -> float:
        """Number of padding tokens, summed over all kinds of tokens."""
        return sum(count for name, count in self.root.items() if name.endswith(_PADDING))


class Link(Frozen):
    """Measured bandwidth between ranks. It comes from a short all-reduce before the window and, on several nodes, from
    an exchange between the first ranks of neighbouring nodes."""

    backend: str = Field(description="gloo or nccl")
    interfaces: tuple[str, ...] = Field((), description="interfaces that the run must use; empty: any")
    payload_bytes: int = Field(description="bytes of the tensor in the all-reduce")
    bus_bytes_per_s: float | None = Field(description="bus bandwidth of a large all-reduce; None for one rank")
    nodes_bytes_per_s: tuple[float | None, ...] = Field(
        (), description="bandwidth by node: the higher bandwidth of its links to two neighbouring nodes"
    )
    ranks_bytes_per_s: tuple[float | None, ...] | None = Field(
        None, description="bandwidth of each rank to a rank on another node"
    )
    transport: str | None = Field(
        None, description="transport according to byte counters of the interfaces: infiniband, sockets, …"
    )
    sent_bytes: dict[str, int] | None = Field(
        None, description="bytes sent during this measurement, by interface or port, over all nodes"
    )


class NodeLoad(Frozen):
    """Background load of one node during the window. Fields named `share` are fractions of the time of the cores that
    the run may use."""

    node: int = Field(description="number of the node, from 0")
    others_share: float | None = Field(None, description="share of processor time used by processes outside this run")
    stolen_share: float | None = Field(None, description="share of processor time taken by the hypervisor")
    throttled_s: float | None = Field(None, description="seconds in which the CPU quota stopped the run")
    cpu_pressure_share: float | None = Field(None, description="share of the window in which a process lacked a core")
    memory_pressure_share: float | None = Field(
        None, description="share of the window in which a process waited for memory"
    )
    io_pressure_share: float | None = Field(
        None, description="share of the window in which a process waited for input or output"
    )


class DeviceUse(Frozen):
    """Use of one rank's device during the window: clock, power, temperature, and processes of other programs."""

    rank: int = Field(description="rank, from 0")
    uuid: str | None = Field(None, description="the driver's identifier of the device")
    clock_mhz: float | None = Field(None, description="median clock in the window")
    power_w: float | None = Field(None, description="mean power in the window")
    temperature_c: float | None = Field(None, description="highest temperature in the window")
    power_throttled_s: float | None = Field(None, description="seconds with clocks reduced by the power limit")
    thermal_throttled_s: float | None = Field(None, description="seconds with clocks reduced by heat")
    other_processes: int | None = Field(None, description="processes of other programs on the device")
    other_bytes: int | None = Field(None, description="device memory of `other_processes`")


class Evaluation(Extensible):
    """Loss on held-out data after a number of optimizer steps, and the quality of answers to held-out prompts."""

    LATER_FIELDS = frozenset({"quality"})

    step: int = Field(description="number of optimizer steps before the evaluation")
    loss: float | None = Field(description="mean loss per target token; None if it was not finite")
    target_tokens: int = Field(description="number of target tokens in the held-out samples")
    seconds: float = Field(description="seconds of the evaluation itself")
    trained_s: float | None = Field(None, description="seconds of all earlier steps, also of earlier attempts")
    quality: dict[str, float] | None = Field(None, description="value of each measure in learning.quality")


class Checkpoint(Frozen):
    """The saving or loading of one checkpoint, or the writing of the trained model."""

    kind: Literal["save", "load", "model"] = Field(description="model: the trained model was written")
    step: int = Field(description="number of optimizer steps before it")
    seconds: float = Field(description="seconds of saving, loading or writing")
    bytes: int = Field(description="bytes of the checkpoint over all ranks")


class ProfiledSteps(Frozen):
    """Steps before or after the window that the profiler recorded on some ranks."""

    ranks: tuple[int, ...] = Field(description="ranks with a profile")
    steps: int = Field(description="number of profiled steps")
    files: tuple[str, ...] = Field((), description="file names of the profiles in the run's folder")
    slowdown: float | None = Field(None, description="time of a profiled step divided by that of a timed step")
    exposed_s: dict[str, float] | None = Field(
        None, description="seconds per step in which only communication runs, by kind of communication"
    )
    overlapped_s: dict[str, float] | None = Field(
        None, description="seconds per step in which communication and computation overlap, by kind of communication"
    )


class Steps(Frozen):
    """Optimizer steps of a run in order, warm-up included. The first step of the window has the index `cut`.

    The time of a step is from the slowest rank's completion of the previous step to the slowest rank's completion of
    this step. The step times therefore add up to the length of the window. `data_wait_s` is the longest wait of a rank
    for data. The file `steps.parquet` has each rank's own times.
    """

    cut: int = Field(description="index of the first step of the window")
    steady: bool | None = Field(None, description="before version 3: True if the warm-up ended with steady step times")
    stopped: Literal["window", "time", "steps", "slower", "width", "invalid"] = Field(
        description="why the window ended. window: minimum seconds and steps reached; time: max_s reached; steps: end "
        "of the training; slower: steps longer than step_limit_s; invalid: loss or norm not finite. Before "
        "version 3: steps: max_steps reached; width: interval of the median narrow enough"
    )
    step_s: tuple[float, ...] = Field(description="seconds of each step")
    fastest_rank_s: tuple[float, ...] | None = Field(None, description="seconds of each step on its fastest rank")
    slowest_rank_s: tuple[float, ...] | None = Field(None, description="seconds of each step on its slowest rank")
    data_wait_s: tuple[float, ...] = Field(description="longest wait of a rank for data in each step, in seconds")
    loss: tuple[float | None, ...] = Field(
        description="loss by step: the mean over the ranks that compute it; None if it was not finite"
    )
    gradient_norm: tuple[float | None, ...] = Field(
        (), description="global norm by step before clipping; empty if the engine has none"
    )
    summed_norms: int = Field(0, description="number of first steps whose norm is summed in fp64")
    micro_gradient_norm: tuple[float | None, ...] | None = Field(
        None, description="root mean square of the gradient norms of a step's micro-batches, by step"
    )
    skipped: tuple[int, ...] = Field((), description="steps without an update, due to overflow of the loss scale")
    window_s: float = Field(description="seconds of the window's blocks of steps, without the gaps between blocks")


class TimedPass(NamedTuple):
    """A forward or backward pass of a pipeline stage for one micro-batch. Times are seconds from the beginning of the
    step on the same rank."""

    kind: str
    stage: int
    micro_batch: int
    begin_s: float
    end_s: float


class Observations(Frozen):
    """Measurements of one attempt (one try at a run). Times are stored for each rank, or as the maximum over ranks."""

    parameters: Positive = Field(description="number of parameters of the built model, over all partitions")
    trainable_parameters: int | None = Field(None, description="number of trained parameters")
    engine_config: dict[str, Any] = Field(description="complete configuration of the engine, its defaults included")
    phases_s: dict[str, float] = Field({}, description="seconds of each phase of the run until its first step")
    steps: Steps | None = Field(None, description="optimizer steps in order")
    tokens: Tokens | None = Field(None, description="tokens per step by kind, with and without padding")
    memory: tuple[RankMemory, ...] = Field((), description="memory by rank")
    collectives: dict[str, Collective] | None = Field(None, description="collectives of a step by kind")
    outside_collectives_s: tuple[float, ...] = Field(
        (), description="seconds of an untimed step outside collectives, by rank"
    )
    counted_flops: int | None = Field(
        None, description="FLOPs of a step over all ranks, counted by torch, recomputation included"
    )
    uninspected: str | None = Field(None, description="why untimed steps after the window failed or are missing")
    compute_s: tuple[float, ...] = Field((), description="in a rehearsal: seconds of each step, without communication")
    step_phases_s: dict[str, tuple[float, ...]] | None = Field(
        None, description="seconds of each phase of a step, by rank"
    )
    idle_s: tuple[float | None, ...] | None = Field(None, description="idle seconds per step of each rank")
    passes: tuple[tuple[TimedPass, ...], ...] | None = Field(
        None, description="forward and backward passes of an untimed step, by pipeline position"
    )
    link: Link | None = Field(None, description="measured bandwidth between ranks")
    load: tuple[NodeLoad, ...] | None = Field(None, description="background load by node")
    device_use: tuple[DeviceUse, ...] | None = Field(None, description="clock, power and load of each rank's device")
    known_busy: str | None = Field(None, description="a user's note that the machine was busy, without recorded load")
    energy_j: tuple[float | None, ...] = Field((), description="energy in joules, by device")
    energy_s: tuple[float | None, ...] | None = Field(None, description="seconds over which `energy_j` was measured")
    evaluations: tuple[Evaluation, ...] | None = Field(None, description="evaluations of a training, in order")
    checkpoints: tuple[Checkpoint, ...] | None = Field(None, description="saved, loaded and written checkpoints")
    trace: ProfiledSteps | None = Field(None, description="steps recorded by the profiler")
    data: dict[str, Any] = Field({}, description="facts of the data source, such as corpus hash and tokenizer")
    drill: str | None = Field(None, description="injected fault; the run is then not a measurement")


class RunRecord(Frozen):
    """Record of one attempt, which is one try at a run: the file `record.json` of a run directory."""

    schema_version: int = Field(SCHEMA_VERSION, description="version of the record format")
    config_id: str = Field(description="identifier of `spec`: 10 hexadecimal digits of a hash")
    evidence: Evidence = Field("measured", description="rehearsed: one rank ran alone; predicted: computed, no run")
    spec: RunSpec = Field(description="complete configuration of the run")
    circumstance: Circumstance = Field(description="how and where the attempt was started")
    environment: Environment | None = Field(None, description="hardware and software of the attempt")
    outcome: Outcome = Field(description="how the attempt ended")
    observations: Observations | None = Field(None, description="measurements; None if nothing was measured")
