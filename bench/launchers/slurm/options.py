"""Options of a Slurm site. conf/launcher/slurm.yaml explains every option. slurm/README.md explains how to write a site
file."""

import re
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from bench.core.errors import UserError, suggest_nearest
from bench.core.private import is_secret
from bench.core.scheduling import JobSetup, SchedulingOptions
from bench.core.spec import Extensible, Frozen, Positive, RunSpec

# Options that select another cluster. Only sbatch would obey them, so other Slurm programs would not find the job.
_OTHER_CLUSTER = re.compile(r"--cluster|-M")
_GPU_OPTION = re.compile(r"--(gpus|gres|tres-per)|-G")
"""Pattern of sbatch options that request GPUs."""


def _check_one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("is empty or not one line of text; write one line")
    return text


def _check_option(text: str) -> str:
    if not text.startswith("-"):
        raise ValueError("is not an option of sbatch; begin it with --")
    if _OTHER_CLUSTER.match(text):
        rule = "selects another cluster, but squeue, sacct and scancel would use the default cluster"
        raise ValueError(f"{rule}; remove it, and export SLURM_CLUSTERS=NAME in the shell that runs zeroscale")
    return _check_one_line(text)


def _check_gpus(text: str) -> str:
    if "{devices}" not in text and "per-task" not in text:
        raise ValueError("requests the same number of GPUs for every point; write {devices} in place of the number")
    return _check_option(text)


_DAY = r"(?:0?[1-9]|[12]\d|3[01])"
_MOMENTS = ("today", "tomorrow", "midnight", "noon", "elevenses", "fika", "teatime", "now")
_DELTA = r"(?:\s*[+-]\s*\d+\s*(?:(?:second|minute|hour|day|week)s?)?)?"
_DATE = rf"\d{{4}}-(?:0[1-9]|1[0-2])-{_DAY}|(?:0[1-9]|1[0-2]|[1-9](?=[./]))[./]?{_DAY}[./]?(?:\d\d)?"
_MINUTE = r":[0-5]\d(?::[0-5]\d)?"
_TIME = rf"(?:[01]?\d|2[0-3]){_MINUTE}(?!\s*[ap]m)|(?:0?\d|1[0-2]){_MINUTE}\s*[ap]m"
_BEGIN = re.compile(rf"uts\d{{7,}}|(?:(?:{'|'.join(_MOMENTS)}{_DELTA}|{_TIME}|{_DATE})[\s\-T]*)+", re.IGNORECASE)
"""Pattern of the value of `sbatch --begin`, as Slurm's parse_time() reads it."""


def _check_begin(text: str) -> str:
    if not _BEGIN.fullmatch(_check_one_line(text)):
        example = "write for example 20:00, tomorrow, now+2hours or 2030-12-31T20:00"
        remedy = suggest_nearest(text.lower(), _MOMENTS, example)
        raise ValueError(f"is not a time that sbatch --begin accepts; {remedy}")
    return text


def _check_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("is not a name of an environment variable; use letters, digits and _")
    _check_not_secret(name, "")
    return name


def _check_value(value: str | int | float) -> str | int | float:
    _check_not_secret("", str(value))
    return value


def _check_not_secret(name: str, value: str) -> None:
    if is_secret(name, value):
        raise ValueError(
            "looks like a secret, but other users can read scripts and records; export it in your shell instead"
        )


OneLine = Annotated[str, AfterValidator(_check_one_line)]
Begin = Annotated[str, AfterValidator(_check_begin)]
Option = Annotated[str, AfterValidator(_check_option)]
Variable = Annotated[str, AfterValidator(_check_variable)]


class Container(Extensible):
    """Container image in which a job's Python runs."""

    LATER_FIELDS = frozenset({"command"})

    runtime: Literal["apptainer", "pyxis", "command"] = Field(description="container runtime; command: any other")
    image: OneLine = Field(description="path or name of the image")
    digest: OneLine | None = Field(
        None, description="digest of the image, recorded to identify its content; None: the image's name is recorded"
    )
    mounts: tuple[OneLine, ...] = Field((), description="folders to mount, each as SOURCE:TARGET or SOURCE:TARGET:ro")
    options: tuple[OneLine, ...] = Field((), description="more options of the runtime")
    command: tuple[OneLine, ...] = Field(
        (), description="with runtime=command: command before the program to run; {image} and {study} are replaced"
    )

    @model_validator(mode="after")
    def _check_command(self) -> Self:
        if (self.runtime == "command") != bool(self.command):
            raise ValueError("needs both `runtime: command` and `command`, or neither; write both or neither")
        if self.command and (self.mounts or self.options):
            raise ValueError("mounts and options are only used by apptainer and pyxis; write them into `command`")
        return self


class Autopilot(Frozen):
    """Options of the small job that `--autopilot` submits, which resumes the sweep after its other jobs have ended. It
    needs one core and no GPU. By default, `partition` and `qos` are those of the other jobs.
    """

    partition: OneLine | None = None
    qos: OneLine | None = None
    begin: Begin | None = Field(
        None, description="earliest start of the autopilot's job; None: at once, also if other jobs begin later"
    )


class Options(SchedulingOptions):
    """Options in conf/launcher/slurm.yaml and in a site file."""

    # where jobs run
    partition: OneLine | None = None
    account: OneLine | None = None
    qos: OneLine | None = None
    constraint: OneLine | None = None
    reservation: OneLine | None = None
    extra: tuple[Option, ...] = ()

    # resources of each point
    gpus: Annotated[Option, AfterValidator(_check_gpus)] | None = Field(None, examples=["--gres=gpu:{devices}"])
    cpus_per_device: Positive | None = None
    memory_gb: int | None = Field(None, ge=0, description="GB of memory per node; 0: all memory of the node")
    exclusive: bool = False

    # software that runs
    python: tuple[OneLine, ...] | None = Field(None, min_length=1)
    modules: tuple[OneLine, ...] = ()
    environment: dict[Variable, Annotated[StrictStr | StrictInt | StrictFloat, AfterValidator(_check_value)]] = {}
    setup: tuple[str, ...] = ()
    container: Container | None = None
    srun: tuple[OneLine, ...] = ()

    # priority and interruptions
    nice: int | None = None
    begin: Begin | None = None
    requeue: bool = True
    autopilot: Autopilot = Autopilot()
    warning_s: int = Field(60, ge=0, le=65535, description=SchedulingOptions.model_fields["warning_s"].description)


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError if a run of `spec` cannot be started with these options."""
    host = options.network.rendezvous_host
    if spec.nodes > 1 and "{host}" not in host:
        rule = f"the first of the {spec.nodes} nodes may be any node of the cluster"
        raise UserError(f"launcher.network.rendezvous_host={host}", rule, "write {host} in place of the node's name")


def job_setup(options: Options) -> JobSetup:
    """Return the device kind, container image, Python command and environment variables of a job."""
    asks = options.gpus is not None or any(map(_GPU_OPTION.match, options.extra))
    return JobSetup(
        # An exclusive job gets all GPUs of its nodes. Whether the nodes have GPUs is unknown here.
        device="cuda" if asks else None if options.exclusive else "cpu",
        gpu_override="launcher.gpus=--gres=gpu:{devices}",
        image=options.container.image if options.container else None,
        python=options.python,
        variables={name: str(value) for name, value in options.environment.items()},
    )
