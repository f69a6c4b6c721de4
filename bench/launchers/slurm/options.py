"""What a site file says of a Slurm cluster: conf/launcher/slurm.yaml explains every key, slurm/README.md how to write
one."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_serializer,
    model_validator,
)

from bench.core.errors import UserError
from bench.core.private import is_secret
from bench.core.scheduling import JobSetup, SchedulingOptions
from bench.core.spec import Frozen, Positive, RunSpec

_OTHER_CLUSTER = re.compile(r"--cluster|-M")


def _check_one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("is empty or not one line of text; write one line")
    return text


def _check_option(text: str) -> str:
    if not text.startswith("-"):
        raise ValueError("is no option of sbatch; begin it with --")
    if _OTHER_CLUSTER.match(text):
        rule = "names another cluster, and squeue, sacct and scancel would ask this one for the job"
        raise ValueError(f"{rule}; leave it out and export SLURM_CLUSTERS=… where you call zeroscale")
    return _check_one_line(text)


def _check_gpus(text: str) -> str:
    if "{devices}" not in text and "per-task" not in text:
        raise ValueError("asks for the same number of GPUs whatever a point needs; write {devices} for the number")
    return _check_option(text)


def _check_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("is no name of an environment variable; use letters, digits and _")
    if is_secret(name):
        raise ValueError("looks like a secret, and scripts and records are for others to read; export it in your shell")
    return name


def _check_value(value: str | int | float) -> str | int | float:
    if is_secret("", str(value)):
        raise ValueError("looks like a secret, and scripts and records are for others to read; export it in your shell")
    return value


OneLine = Annotated[str, AfterValidator(_check_one_line)]
Option = Annotated[str, AfterValidator(_check_option)]
Variable = Annotated[str, AfterValidator(_check_variable)]


class Container(Frozen):
    """An image that Python runs in."""

    runtime: Literal["apptainer", "pyxis", "command"]
    image: OneLine
    digest: OneLine | None = Field(
        None, description="what names its content for good; by default the image as it is written"
    )
    mounts: tuple[OneLine, ...] = ()
    options: tuple[OneLine, ...] = ()
    command: tuple[OneLine, ...] = Field(
        (), description="of another runtime, up to the program: {image} and {study} are filled in"
    )

    @model_validator(mode="after")
    def _check_command(self) -> Self:
        if (self.runtime == "command") != bool(self.command):
            raise ValueError("runtime: command, and no other, is told by `command`; write both or neither")
        if self.command and (self.mounts or self.options):
            raise ValueError("mounts and options are for apptainer and pyxis; write them into `command`")
        return self

    @model_serializer(mode="wrap")
    def _without_an_empty_command(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        plain: dict[str, Any] = serialize(self)
        return plain if plain.get("command") else {key: plain[key] for key in plain if key != "command"}


class Autopilot(Frozen):
    """What the small job of `--autopilot` asks for where it differs from the others: it needs a core and no GPU."""

    partition: OneLine | None = None
    qos: OneLine | None = None
    begin: OneLine | None = Field(None, description="None: at once, whatever the others have")


_WRITTEN = (
    "time_limit_min", "hang_s", "startup_s", "silence_s", "agent_silence_s", "quiet_within_s",
    "partition", "account", "qos", "constraint", "reservation", "extra",
    "gpus", "cpus_per_device", "memory_gb", "exclusive", "setup_min",
    "python", "modules", "environment", "setup", "container", "network", "span", "srun",
    "mode", "job_max_min", "throttle",
    "max_queued", "nice", "begin", "requeue", "warning_s", "autopilot",
)  # fmt: skip
"""The options in the order in which sweeps and records have them."""


class Options(SchedulingOptions):
    """What a user may set in conf/launcher/slurm.yaml and in a site's file."""

    # where
    partition: OneLine | None = None
    account: OneLine | None = None
    qos: OneLine | None = None
    constraint: OneLine | None = None
    reservation: OneLine | None = None
    extra: tuple[Option, ...] = ()

    # per point
    gpus: Annotated[Option, AfterValidator(_check_gpus)] | None = None
    cpus_per_device: Positive | None = None
    memory_gb: int | None = Field(None, ge=0, description="per node; 0 is all of it")
    exclusive: bool = False

    # what runs
    python: tuple[OneLine, ...] | None = Field(None, min_length=1)
    modules: tuple[OneLine, ...] = ()
    environment: dict[Variable, Annotated[StrictStr | StrictInt | StrictFloat, AfterValidator(_check_value)]] = {}
    setup: tuple[str, ...] = ()
    container: Container | None = None
    srun: tuple[OneLine, ...] = ()

    # etiquette and interruptions
    nice: int | None = None
    begin: OneLine | None = None
    requeue: bool = True
    autopilot: Autopilot = Autopilot()
    warning_s: int = Field(60, ge=0, le=65535, description=SchedulingOptions.model_fields["warning_s"].description)

    @model_serializer(mode="wrap")
    def _in_the_order_of_old(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        plain = serialize(self)
        return {key: plain[key] for key in _WRITTEN if key in plain}


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError for what a site file cannot start."""
    host = options.network.rendezvous_host
    if spec.nodes > 1 and "{host}" not in host:
        raise UserError(
            f"launcher.network.rendezvous_host={host}",
            f"nodes={spec.nodes} are any of the cluster's",
            "write {host} for the first node's name",
        )


def job_setup(options: Options) -> JobSetup:
    """Return what the command of a job runs in."""
    return JobSetup(
        device="cuda" if options.gpus else None,
        image=options.container.image if options.container else None,
        python=options.python,
        variables={name: str(value) for name, value in options.environment.items()},
    )
