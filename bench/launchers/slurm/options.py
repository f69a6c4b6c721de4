"""What a site file says of a Slurm cluster: conf/launcher/slurm.yaml explains every key, slurm/README.md how to write
one."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StrictFloat, StrictInt, StrictStr, model_validator

from bench.errors import UserError
from bench.private import is_secret
from bench.record import Limits, Network
from bench.spec import Frozen, Positive, RunSpec


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("is empty or not one line of text; write one line")
    return text


def _option(text: str) -> str:
    if not text.startswith("-"):
        raise ValueError("is no option of sbatch; begin it with --")
    return _one_line(text)


def _gpus(text: str) -> str:
    if "{devices}" not in text and "per-task" not in text:
        raise ValueError("asks for the same number of GPUs whatever a point needs; write {devices} for the number")
    return _option(text)


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("is no name of an environment variable; use letters, digits and _")
    if is_secret(name):
        raise ValueError("looks like a secret, and scripts and records are for others to read; export it in your shell")
    return name


Line = Annotated[str, AfterValidator(_one_line)]
Option = Annotated[str, AfterValidator(_option)]
Variable = Annotated[str, AfterValidator(_variable)]


class Container(Frozen):
    """An image that Python runs in."""

    runtime: Literal["apptainer", "pyxis"]
    image: Line
    digest: Line | None = None  # what names its content for good; by default the image as it is written
    mounts: tuple[Line, ...] = ()
    options: tuple[Line, ...] = ()


class Options(Limits):
    """What a user may set in conf/launcher/slurm.yaml and in a site's file."""

    # where
    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    reservation: Line | None = None
    extra: tuple[Option, ...] = ()

    # per point
    gpus: Annotated[Option, AfterValidator(_gpus)] | None = None
    cpus_per_device: Positive | None = None
    memory_gb: int | None = Field(None, ge=0)  # per node; 0 is all of it
    exclusive: bool = False
    setup_min: float = Field(10.0, ge=0)

    # what runs
    python: tuple[Line, ...] | None = Field(None, min_length=1)
    modules: tuple[Line, ...] = ()
    environment: dict[Variable, StrictStr | StrictInt | StrictFloat] = {}
    setup: tuple[str, ...] = ()
    container: Container | None = None
    network: Network = Network()
    span: Literal["node", "device"] = "node"
    srun: tuple[Line, ...] = ()

    # how a sweep is divided into jobs
    mode: Literal["point", "array", "packed"] = "packed"
    job_max_min: Positive = 240
    throttle: Positive | None = None

    # etiquette and interruptions
    max_queued: Positive | None = None
    nice: int | None = None
    begin: Line | None = None
    requeue: bool = True
    warning_s: int = Field(60, ge=0, le=65535)

    @model_validator(mode="after")
    def _there_is_time_after_the_warning(self) -> Self:
        limit = self.time_limit_min
        if limit is not None and 60 * limit <= self.warning_s:
            rule = f"ends before its warning, warning_s={self.warning_s} before the end"
            raise ValueError(f"time_limit_min={limit:g} {rule}; give it more time, or warn later")
        return self


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError for what a site file cannot start."""
    host = options.network.rendezvous_host
    if spec.nodes > 1 and "{host}" not in host:
        raise UserError(
            f"launcher.network.rendezvous_host={host}",
            f"nodes={spec.nodes} are any of the cluster's",
            "write {host} for the first node's name",
        )
