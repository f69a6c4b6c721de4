"""RunRecord: what one attempt observed, the contract between the harness and the analysis.

Only raw observations stand here; throughput, FLOP/s and intervals are derived in `analysis`, so that a corrected
formula never needs a re-run. Unknown is None. A failure is a record like any other.

History of the format (`schema_version`), whose readers for older versions are in `bench.core.migrations`:
1  first version
2  a step's time is the difference between the slowest rank's completions; fields for the extremes of steps, the load of
   the machine, device use, transport, phases, idle time, trainable parameters, evaluations, checkpoints and traces;
   `before_collectives_s` is gone
3  a window's length is fixed: `measure.window_s` and `gpu_warmup_s` in place of `min_s`, `max_steps`, `width` and
   `warmup_max_steps`, `stopped` may be `window`, and `steady` is not written any more
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, RootModel, SerializerFunctionWrapHandler, model_serializer, model_validator

from bench.core.machine import Machine
from bench.core.spec import Frozen, Positive, RunSpec

SCHEMA_VERSION = 3
"""Version of a record's format."""

OutcomeKind = Literal[
    "ok", "oom", "host_oom", "hang", "timeout", "comm_error", "node_failure", "preempted", "cancelled",
    "invalid", "error", "pruned", "infeasible",
]  # fmt: skip
FINAL: frozenset[OutcomeKind] = frozenset({"ok", "invalid", "oom", "host_oom", "pruned", "infeasible"})
"""Answers that running again would not change; every other outcome is tried again."""

Evidence = Literal["measured", "rehearsed", "predicted"]


class MemoryShortage(Frozen):
    """What filled the memory that ran out on a rank, and what was lacking, in bytes as it failed."""

    rank: int
    where: Literal["device", "host"]
    requested_bytes: int | None = Field(None, description="by the allocation that failed, in its exception's own words")
    lacking_bytes: int | None = Field(None, description="of those")
    free_bytes: int | None = Field(
        None, description="of the device; of the host or of the narrowest limit on this process"
    )
    total_bytes: int | None = Field(None, description="of the same")
    live_bytes: int | None = Field(None, description="in tensors of this rank")
    peak_bytes: int | None = Field(None, description="the most that were live so far in this phase")
    reserved_bytes: int | None = Field(None, description="by the caching allocator, live ones included; None on a host")
    resident_bytes: int | None = Field(None, description="resident set of this rank; None on a device")
    others_bytes: int | None = Field(None, description="of processes on the device that are not of the run")


class Outcome(Frozen):
    """How an attempt ended, and the typed evidence that this was decided from."""

    kind: OutcomeKind
    reason: str = Field("", description="one line for the table; empty when ok")
    evidence: dict[str, Any] = {}
    shortage: MemoryShortage | None = Field(None, description="where memory ran out and the rank could still tell")

    @property
    def final(self) -> bool:
        return self.kind in FINAL

    @property
    def paused_s(self) -> float:
        """Seconds for which the attempt was paused: a suspended job, SIGSTOP, a machine that slept."""
        return float(self.evidence.get("paused_s") or 0.0)

    @model_serializer(mode="wrap")
    def _as_before_where_nothing_ran_out(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if key != "shortage" or value is not None}


class Limits(Frozen):
    """When a supervisor gives up on a run."""

    time_limit_min: float | None = Field(None, gt=0, description="for the whole attempt; None waits for ever")
    hang_s: float = Field(300.0, gt=0, description="without a step, once steps are being made")
    startup_s: float = Field(
        1800.0, gt=0, description="in the first step, and in any one phase before and after the steps"
    )
    silence_s: float = Field(30.0, gt=1, description="a node of a run that sent nothing for so long is lost …")
    agent_silence_s: float = Field(60.0, gt=1, description="… and so is the first node, for the others")
    quiet_within_s: float | None = Field(
        None,
        ge=0,
        description="others have so long to leave the machine, else it is given up; None measures beside them, "
        "flagged `busy`",
    )

    @model_validator(mode="after")
    def _first_node_decides(self) -> Self:
        if self.agent_silence_s <= self.silence_s:
            rule = f"is not longer than silence_s={self.silence_s:g}: the first node has to notice a cut link first"
            raise ValueError(f"agent_silence_s={self.agent_silence_s:g} {rule}; set twice silence_s or more")
        return self


class Network(Frozen):
    """How the nodes of a run reach each other. By default by host name, over whatever interface that resolves to."""

    rendezvous_host: str = Field("{host}", description='of the first node; e.g. "{host}-ib0"')
    interface: str | None = Field(None, description="for gloo's and NCCL's sockets")
    expects: Literal["infiniband", "sockets"] | None = Field(
        None, description="between nodes; a run over anything else is `invalid`"
    )

    def address(self, host: str) -> str:
        """Return the name under which the others reach `host`."""
        return self.rendezvous_host.replace("{host}", host)


class Circumstance(Frozen):
    """How and where an attempt was started: everything about it that is not its identity."""

    study: str
    question: str = Field("", description="what the study asks, in its own words")
    repeat: int = Field(ge=0)
    attempt: int = Field(ge=0)
    machine: Machine
    launcher: dict[str, Any] = Field({}, description="name and options")
    limits: Limits = Limits()
    network: Network = Network()
    step_limit_s: float | None = Field(
        None, gt=0, description="the window ends once a step surely takes longer; None: never"
    )
    goes_on_from: str | None = Field(
        None, description="config_id of the run whose checkpoint a training begins with; None: with none"
    )
    rehearsed_rank: int | None = Field(
        None, ge=0, description="the only real rank of a rehearsal; None: all of them are real"
    )
    shapes_only: bool = Field(False, description="rehearsed without doing what only makes values")
    overrides: tuple[str, ...] = Field((), description="what was asked, word for word")
    started_at: str = Field("", description="ISO 8601, UTC")

    @model_serializer(mode="wrap")
    def _as_before_where_nothing_is_special(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        usual = {"step_limit_s": None, "goes_on_from": None, "shapes_only": False}
        return {key: value for key, value in serialize(self).items() if key not in usual or value != usual[key]}


class EnvironmentClass(Frozen):
    """What decides whether two answers may be pooled; `environment_id` is its hash."""

    device: str = Field(description="the device's own name")
    devices_per_node: int
    container: str | None = Field(None, description="image digest")
    versions: dict[str, str | None] = Field({}, description="torch, cuda, nccl, driver, deepspeed, transformers")
    cores: int | None = Field(None, description="that its first rank may use")
    threads: int | None = Field(None, description="per rank")
    quota_cores: float | None = Field(None, description="processor time that the control group allows, in cores")
    openmp_wait: str | None = Field(
        None, description="how OpenMP threads of a rank on a CPU wait; None: of older records, or of one thread"
    )


class ScheduledJob(Frozen):
    """The job of a scheduler that an attempt ran in, whichever scheduler that is."""

    job_id: str
    cluster: str = Field("", description="of several that number their jobs by themselves")
    restart: int = Field(0, description="how often it had been put back into the queue")
    nodelist: str = Field("", description="its hosts, as `gpu1,gpu2` or `gpu[1-2]`; empty where nobody says")

    @property
    def allocation(self) -> str | None:
        """The name of this stretch of time on these nodes; None of a job without an id."""
        parts = (self.cluster, self.job_id, str(self.restart or ""))
        return ".".join(part for part in parts if part) if self.job_id else None


class Environment(Frozen):
    """Where an attempt ran. `classification` is what its answer depends on; the rest is for the reader."""

    environment_id: str
    classification: EnvironmentClass
    versions: dict[str, str | None] = Field(
        {}, description="every package that takes part, Python and the operating system"
    )
    git: dict[str, Any] | None = Field(None, description="commit, dirty")
    hosts: tuple[str, ...] = Field((), description="by node")
    cpus: dict[str, Any] = Field({}, description="model, cores, affinity per rank, threads per rank")
    devices: tuple[dict[str, Any], ...] = Field(
        (), description="per device: clocks, power cap, temperature, at the start …"
    )
    devices_after: tuple[dict[str, Any], ...] = Field((), description="… and as the window ended")
    job: ScheduledJob | None = Field(None, description="None: in no job, or of a record that has `slurm` alone")
    slurm: dict[str, str] = Field(
        {}, description="variables of the scheduler whose job it was in, Slurm's or another's"
    )
    variables: dict[str, str] = Field({}, description="from an allow-list; never a secret")

    @model_serializer(mode="wrap")
    def _as_before_where_there_is_no_job(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if key != "job" or value is not None}


class RankMemory(Frozen):
    """Memory of one rank in bytes. `allocated` is live tensor bytes by the device's allocator (on a CPU by one that
    wraps torch's own); `drift` is how far it is from the storages that Python can reach between steps, relative."""

    rank: int
    init_peak_bytes: int | None = Field(None, description="while the model and the engine were built")
    warmup_peak_bytes: int | None = Field(
        None, description="from there to the window; the whole run's peak is the largest of the three"
    )
    resident_bytes: int | None = Field(None, description="between steps")
    peak_allocated_bytes: int | None = Field(None, description="over steady steps")
    peak_reserved_bytes: int | None = Field(None, description="what the caching allocator holds; None on a CPU")
    device_used_bytes: int | None = Field(None, description="what the device says is in use, by all")
    init_reserved_bytes: int | None = Field(
        None, description="peak reserved while the model and the engine were built …"
    )
    warmup_reserved_bytes: int | None = Field(None, description="… and from there to the window")
    device_peak_bytes: int | None = Field(None, description="highest use of the device by all processes")
    init_rss_bytes: int | None = Field(
        None, description="resident set of the process after initialisation, its peak so far"
    )
    peak_rss_bytes: int | None = None
    loaders_rss_bytes: int | None = Field(
        None, description="resident sets of the rank's loader processes together, their peak"
    )
    drift: float | None = None


class Collective(Frozen):
    """One kind of collective in one optimizer step of one rank. Payload as nccl-tests counts it: the tensor
    reduced or broadcast, the gathered output, the input to be scattered."""

    calls: int
    payload_bytes: int


_PADDING = "_padding"


class Tokens(RootModel[dict[str, float]]):
    """Tokens per optimizer step, averaged over the window: of each of the objective's kinds, under its name, those of
    all data-parallel ranks with padding, and under `<kind>_padding` the padding among them."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _in_pairs(self) -> Self:
        kinds = self.root.keys() - {name for name in self.root if name.endswith(_PADDING)}
        if not kinds or self.root.keys() != kinds | {f"{kind}{_PADDING}" for kind in kinds}:
            raise ValueError(f"not tokens by kind, each with its padding: {', '.join(self.root)}")
        return self

    @classmethod
    def counted(cls, tokens: Mapping[str, float], padding: Mapping[str, float]) -> Self:
        """Return the tokens of these kinds, with the padding among them."""
        return cls({**tokens, **{f"{kind}{_PADDING}": padding[kind] for kind in tokens}})

    def of(self, kind: str) -> float | None:
        """Return the tokens of one kind, padding included; None where there is no such kind."""
        return self.root.get(kind)

    @property
    def all(self) -> float:
        """Tokens of all kinds, padding included."""
        return sum(count for name, count in self.root.items() if not name.endswith(_PADDING))

    @property
    def padding(self) -> float:
        """Padding of all kinds."""
        return sum(count for name, count in self.root.items() if name.endswith(_PADDING))


class Link(Frozen):
    """What the ranks really talk over: a short all-reduce before the window, and where there are several nodes an
    exchange between the first ranks of each two neighbours."""

    backend: str
    interfaces: tuple[str, ...] = ()
    payload_bytes: int
    bus_bytes_per_s: float | None = Field(description="None for one rank")
    nodes_bytes_per_s: tuple[float | None, ...] = Field(
        (), description="by node: the better of those with its two neighbours"
    )
    ranks_bytes_per_s: tuple[float | None, ...] | None = Field(
        None, description="by rank: with the same local rank of a neighbour node"
    )
    transport: str | None = Field(
        None, description="what carried the bytes, as counters tell it: infiniband, sockets, …"
    )
    sent_bytes: dict[str, int] | None = Field(
        None, description="by interface or port, during the probe, over all nodes"
    )


class NodeLoad(Frozen):
    """What others took of one node during the window; a share is of the time of the cores that the run may use."""

    node: int
    others_share: float | None = Field(None, description="processor time of processes that are not of this run")
    stolen_share: float | None = Field(None, description="taken by the hypervisor")
    throttled_s: float | None = Field(None, description="the control group's quota held this run's processes back")
    cpu_pressure_share: float | None = Field(
        None, description="of the window: some task, the run's too, waited for a core …"
    )
    memory_pressure_share: float | None = Field(None, description="… for memory …")
    io_pressure_share: float | None = Field(None, description="… for a disk")


class DeviceUse(Frozen):
    """What one rank's own device did during the window."""

    rank: int
    uuid: str | None = None
    clock_mhz: float | None = Field(None, description="median")
    power_w: float | None = Field(None, description="mean")
    temperature_c: float | None = Field(None, description="highest")
    power_throttled_s: float | None = None
    thermal_throttled_s: float | None = None
    other_processes: int | None = Field(None, description="that are not of this run")
    other_bytes: int | None = Field(None, description="of their memory")


class Evaluation(Frozen):
    """The loss on held-out data after so many optimizer steps."""

    step: int
    loss: float | None = Field(description="mean per target token; None where it was not finite")
    target_tokens: int
    seconds: float = Field(description="that it took")
    trained_s: float | None = Field(
        None, description="of the steps before it, those of the attempts that were gone on from included"
    )


class Checkpoint(Frozen):
    """One time that the state of the training was saved or loaded."""

    kind: Literal["save", "load"]
    step: int
    seconds: float
    bytes: int = Field(description="over all ranks")


class ProfiledSteps(Frozen):
    """A profiled stretch of steps outside the window, on some ranks."""

    ranks: tuple[int, ...]
    steps: int
    files: tuple[str, ...] = Field((), description="in the run's folder")
    slowdown: float | None = Field(None, description="a profiled step over a timed one")
    exposed_s: dict[str, float] | None = Field(
        None, description="of a step, by kind of communication: nothing was computed meanwhile …"
    )
    overlapped_s: dict[str, float] | None = Field(None, description="… or something was")


class Steps(Frozen):
    """The optimizer steps in order, warm-up included; index `cut` is the first of the window.

    A step's seconds lie between the slowest rank's completion of the step before and of this one, so that steps add up
    to the window; data_wait_s is the maximum over ranks. Every rank's own series is in `steps.parquet`.
    """

    cut: int
    steady: bool | None = Field(
        None, description="before version 3: the warm-up ended by a test of its steps, not by its budget"
    )
    stopped: Literal["window", "time", "steps", "slower", "width", "invalid"] = Field(
        description="window: it has its seconds and steps; time: its most seconds came first; steps: the end of a "
        "training. Before version 3 steps was a budget as well, and width an interval as narrow as asked"
    )
    step_s: tuple[float, ...]
    fastest_rank_s: tuple[float, ...] | None = Field(
        None, description="the least of the ranks' own seconds of each step …"
    )
    slowest_rank_s: tuple[float, ...] | None = Field(None, description="… and the most")
    data_wait_s: tuple[float, ...]
    loss: tuple[float | None, ...] = Field(
        description="mean over the ranks that have one; None where it was not finite"
    )
    gradient_norm: tuple[float | None, ...] = Field(
        (), description="before clipping; empty where the engine tells none"
    )
    summed_norms: int = Field(0, description="of them, those of the first updates, whose squares were summed in fp64")
    micro_gradient_norm: tuple[float | None, ...] | None = Field(
        None, description="of micro-batch gradients: root of their mean square"
    )
    skipped: tuple[int, ...] = Field((), description="steps whose update was skipped (loss-scale overflow)")
    window_s: float = Field(
        description="from the first to the last step of the window, blocks added up, the gaps between them out"
    )


class TimedPass(NamedTuple):
    """A forward or backward of a stage for one micro-batch, in seconds from the begin of its rank's step."""

    kind: str
    stage: int
    micro_batch: int
    begin_s: float
    end_s: float


class Observations(Frozen):
    """Everything measured in one attempt, unreduced but for the maximum over ranks."""

    parameters: Positive = Field(description="counted on the built model, partitions included")
    trainable_parameters: int | None = Field(None, description="those of them that are trained")
    engine_config: dict[str, Any] = Field(
        description="what the engine was really given, nothing left to its silent defaults"
    )
    phases_s: dict[str, float] = Field({}, description="start to first step, by part")
    steps: Steps | None = None
    tokens: Tokens | None = None
    memory: tuple[RankMemory, ...] = ()
    collectives: dict[str, Collective] | None = None
    outside_collectives_s: tuple[float, ...] = Field(
        (), description="per rank: an untimed step less its collectives and waited transfers"
    )
    counted_flops: int | None = Field(
        None, description="of a step over all ranks, recomputation included, where no formula tells them"
    )
    uninspected: str | None = Field(
        None, description="why the untimed look after the window failed; None where it did not"
    )
    compute_s: tuple[float, ...] = Field((), description="rehearsed: of the window's steps, communication absent")
    step_phases_s: dict[str, tuple[float, ...]] | None = Field(
        None, description="of a step, per rank, by phase: forward, backward, …"
    )
    idle_s: tuple[float | None, ...] | None = Field(
        None, description="of a step, per rank: waiting for its turn in a schedule"
    )
    passes: tuple[tuple[TimedPass, ...], ...] | None = Field(
        None, description="of one untimed step, by place of a pipeline: first rank"
    )
    link: Link | None = None
    load: tuple[NodeLoad, ...] | None = Field(None, description="by node")
    device_use: tuple[DeviceUse, ...] | None = Field(None, description="by rank")
    known_busy: str | None = Field(
        None, description="how a person knows that the machine was busy, where no load was recorded"
    )
    energy_j: tuple[float | None, ...] = Field((), description="per device …")
    energy_s: tuple[float | None, ...] | None = Field(None, description="… over so many seconds")
    evaluations: tuple[Evaluation, ...] | None = None
    checkpoints: tuple[Checkpoint, ...] | None = None
    trace: ProfiledSteps | None = None
    data: dict[str, Any] = Field({}, description="what the source says of itself: corpus hash, tokenizer")
    drill: str | None = Field(None, description="a fault planted on purpose; never a measurement")


class RunRecord(Frozen):
    """One attempt at one point: `record.json` of a run directory."""

    schema_version: int = SCHEMA_VERSION
    config_id: str
    evidence: Evidence = "measured"
    spec: RunSpec
    circumstance: Circumstance
    environment: Environment | None = None
    outcome: Outcome
    observations: Observations | None = None
