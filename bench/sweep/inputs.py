"""Find the study and the overrides that a user has given, and choose defaults that suit the device."""

import contextlib
import functools
import importlib.util
import re
import shlex
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bench import data, launchers
from bench.config import compose
from bench.config.decode import Request, decode_model
from bench.core.errors import NoPrediction, UserError
from bench.core.files import find_group_files, read_yaml
from bench.core.formatting import format_count
from bench.core.machine import Machine
from bench.core.scheduling import JobSetup, SchedulingOptions
from bench.core.spec import Device, Name, RunSpec
from bench.core.study import Budget, Overrides, Pair, Study, expand_study
from bench.data.pipeline.corpus import BYT5
from bench.measure import environment
from bench.measure.environment import count_cores, count_local_devices, find_device_kind, read_device_name
from bench.predict.workload import get_network

GivenOverrides = str | Sequence[str] | Mapping[str, Any]
"""Overrides in one of three forms: a text "engine=zero2 batch.micro=4", a list ["engine=zero2", "batch.micro=4"], or a
mapping {"engine": "zero2", "batch.micro": 4}.

In a mapping, a list or tuple stands for several values, like a comma-separated list in a text.
"""
_BUDGET = "budget."
_BARE = re.compile(r"[\w./:+-]+")


def format_overrides(given: GivenOverrides, *, plain: Container[str] = ()) -> tuple[str, ...]:
    """Return overrides of any form as arguments of the command line, such as "engine=zero2". In a mapping, values with
    special characters are quoted for Hydra. Values of the keys in `plain` are never quoted, because Hydra does not
    parse these keys."""
    if isinstance(given, Mapping):
        lists = {key: value if isinstance(value, list | tuple) else [value] for key, value in given.items()}
        return tuple(
            f"{key}={','.join(map(str if key in plain else _format_value, values))}" for key, values in lists.items()
        )
    return tuple(shlex.split(given)) if isinstance(given, str) else tuple(map(str, given))


def _format_value(value: Any) -> str:
    """Return one value as text in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_format_value(key)}:{_format_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_format_value, value)) + "]"
    # Hydra's quoting: a backslash escapes a quote, and backslashes before a quote are doubled.
    text = str(value)
    if _BARE.fullmatch(text):
        return text
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"\\+$", lambda tail: 2 * tail[0], text)) + "'"


def find_study(
    study: Study | str | Path | None, given: GivenOverrides, config_dir: Path | None, command: str
) -> tuple[Study, Overrides]:
    """Return the study, and the overrides other than `study=NAME`. Overrides such as `budget.attempts=6` change the
    budget of the study, and are not returned.

    The study is given by `study` or by `study=NAME` in `given`. Without either, return an empty study named "adhoc".
    `command` is the name of the calling command, for the error message if several studies are given.
    """
    if isinstance(study, str) and "=" in study and not Path(study).exists():
        key = study.partition("=")[0]
        raise UserError(repr(study), f"is no study, but an override of {key}", f"pass it as overrides=[{study!r}]")
    parsed = compose.parse_overrides(format_overrides(given))
    name, rest = take_name(parsed, "study", study.name if isinstance(study, Study) else study, "study", command)
    found = study if isinstance(study, Study) else None
    if found is None:
        found = Study(name="adhoc") if name is None else compose.read_study(name, config_dir)
    if found.search and found.axes:
        rule = f"has axes ({', '.join(found.axes)}) and a search, but a search ignores axes"
        remedy = "move the axes into search.space, or remove one of the two sections"
        raise UserError(f"study={found.name}", rule, remedy)
    limits = {key.removeprefix(_BUDGET): values for key, values in rest if key.startswith(_BUDGET)}
    if several := next((key for key, values in limits.items() if len(values) > 1), None):
        raise UserError(f"{_BUDGET}{several}", "has several values", "give one")
    plain = found.budget.model_dump() | {key: values[0] for key, values in limits.items()}
    found = found.model_copy(update={"budget": decode_model(Budget, plain, "budget")})
    return found, [pair for pair in rest if not pair[0].startswith(_BUDGET)]


def take_name(
    parsed: Overrides, key: str, given: str | Path | None, noun: str, command: str
) -> tuple[str | None, Overrides]:
    """Return a name, and the overrides of other keys than `key`. The name is `given` by the caller, or set by the
    override `key`; otherwise it is None. Raise UserError for several names. In the error message, `noun` is the kind of
    thing that is named, such as "study", and `command` is the calling command."""
    named = [str(value) for name, values in parsed if name == key for value in values]
    named += [] if given is None else [str(given)]
    if len(named) > 1:
        remedy = f"run `zeroscale {command}` once for each {noun.partition(' ')[0]}"
        raise UserError(f"{key}={','.join(named)}", f"only one {noun} is supported", remedy)
    return next(iter(named), None), [pair for pair in parsed if pair[0] != key]


def check_name(option: str, name: str) -> None:
    """Raise UserError if the value of an option is not a name that a file or folder of zeroscale may have."""
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        rule = "a name is made of letters, digits, '.', '_' and '-', and begins with a letter or digit"
        raise UserError(f"{option} {name}", rule, "choose another") from error


def find_device(composed: Request) -> str | None:
    """Return the kind of device that `composed` runs on, "cpu" or "cuda". None if it is known only when the job runs on
    its machine."""
    if composed.machine.device or launchers.load(composed.launcher).QUEUES:
        return composed.machine.device
    return find_local_device()


def find_predicted_device(composed: Request) -> Device:
    """Return the kind of device, "cpu" or "cuda", for which to predict `composed`. If the kind is not known before the
    run, return the kind of this machine's device."""
    return "cpu" if (find_device(composed) or find_local_device()) == "cpu" else "cuda"


@functools.cache  # called for every point, and reads the file system
def find_local_device() -> str:
    """Return the kind of device of this machine, "cpu" or "cuda"."""
    return find_device_kind()


def add_host_memory(machine: Machine, launcher: str) -> Machine:
    """Return the description of a machine. If this description lacks a memory size, and if runs use the CPU of this
    host, add the size of this host's memory. `launcher` is the name of the launcher."""
    known = machine.device != "cpu" or machine.memory_bytes or machine.host_memory_bytes
    if known or launchers.load(launcher).QUEUES:
        return machine
    return machine.model_copy(update={"host_memory_bytes": environment.read_host_memory_bytes()})


_SHORTER = 4  # the smoke study's samples have a quarter of the default lengths of its objective
_PROCESSES_PER_CORE = 8  # with more processes, collectives time out


def check_devices(composed: Request) -> None:
    """Raise UserError in any of three cases:

    - A run on this machine lacks devices, an optional package or the tokenizer.
    - A job would get other devices than its `machine` describes, such as CPUs instead of GPUs.
    - The model lacks a matrix that `adapter.targets` names.
    """
    with contextlib.suppress(NoPrediction):  # otherwise only the ranks know the names
        get_network(composed.spec)
    device = find_device(composed)
    launcher, options = launchers.load_queueing(composed.launcher), composed.launcher_options
    if launcher and isinstance(options, SchedulingOptions):
        setup = launcher.job_setup(options)
        if device == "cuda" and setup.device == "cpu":
            rule = f"has GPUs, but jobs of launcher={composed.launcher_file} request none"
            rule += f": {setup.gpu_note}" if setup.gpu_note else ""
            raise UserError(f"machine={composed.machine.name}", rule, f"set {setup.gpu_override}")
        if setup.device_name and not composed.machine.accepts(setup.device_name):
            rule = f"does not match: jobs of launcher={composed.launcher_file} get {setup.device_name}"
            remedy = "choose a machine with this device, or request another device"
            raise UserError(f"machine={composed.machine.name}", rule, remedy)
    if launcher or device is None:
        return
    _check_packages(composed.spec)
    if refused := _find_tokenizer_error(composed.spec.data.options.get("tokenizer")):
        raise refused
    needed, machine = f"devices_per_node={composed.spec.devices_per_node}", composed.machine
    local_devices, name = count_local_devices(device), read_device_name(device)
    if local_devices == 0:
        remedy = f"choose machine=cpu, or {launchers.format_queueing()}, or use `zeroscale predict`"
        raise UserError(f"machine={machine.name}", "this computer has no GPU that torch can use", remedy)
    if name is not None and not machine.accepts(name):
        rule = f"expects {' or '.join(machine.device_names)}, but this computer has {name}"
        raise UserError(f"machine={machine.name}", rule, "choose machine=auto, which uses the device of this computer")
    if device == "cuda" and local_devices is not None and composed.spec.devices_per_node > local_devices:
        rule = f"this computer has {format_count(local_devices, 'GPU')}"
        raise UserError(needed, rule, f"set {local_devices} or less")
    max_processes = _PROCESSES_PER_CORE * count_cores()
    if device == "cpu" and composed.spec.devices_per_node > max_processes:
        rule = f"too many processes for {format_count(count_cores(), 'core')}"
        raise UserError(needed, rule, f"set {max_processes} or less")


def describe_unknown_machine(machine: Machine, setup: JobSetup) -> str:
    """Return a note if jobs get GPUs but the machine's file describes no GPU, as is the case for `machine=auto`.
    Otherwise return an empty text."""
    if setup.device != "cuda" or machine.device or machine.memory_bytes or machine.peak_tflops:
        return ""
    files = find_group_files("machine", None).items()
    known = {name: read_yaml(path, f"machine={name}").get("device_names", ()) for name, path in files}
    fitting = [name for name, names in known.items() if setup.device_name in names]
    remedy = f"choose the file of the machine that the jobs get, e.g. machine={(*fitting, 'h100')[0]}"
    return f"machine={machine.name}: its GPUs are unknown, so nothing is predicted; {remedy}"


@functools.cache  # called for every point
def _find_tokenizer_error(name: str | None) -> UserError | None:
    """Return the error for a tokenizer that is neither on this machine nor on the Hub; None for a usable tokenizer.
    Print a line before the Hub is used."""
    if name is None or name == BYT5 or importlib.util.find_spec("huggingface_hub") is None:
        return None
    if not data.is_tokenizer_here(name):
        print(f"zeroscale: looking for the tokenizer {name} on the Hugging Face Hub", file=sys.stderr, flush=True)
    try:
        data.check_tokenizer(name)
    except UserError as error:
        return error
    return None


def _check_packages(spec: RunSpec) -> None:
    """Raise UserError if a run needs an optional package of `zeroscale[adapters]`, and this package is not installed on
    this machine."""
    adapter, quantizes = spec.adapter, spec.adapter.quantization != "none"
    needed = [(f"adapter={adapter.name}", name) for name in ("peft", *["bitsandbytes"] * quantizes)]
    needed = needed if adapter.rank is not None else []
    if spec.optimizer.name == "adamw_8bit":
        needed.append(("optimizer.name=adamw_8bit", "bitsandbytes"))
    for value, package in needed:
        if importlib.util.find_spec(package) is None:
            rule = f"needs the package {package}, which is not installed"
            raise UserError(value, rule, "pip install 'zeroscale[adapters]'")


def choose_small(given: Overrides, composed: Request) -> list[Pair]:
    """Return overrides that make a point as small as the points of the smoke study. They set precision, sequence
    lengths and measurement protocol. Empty unless the point runs on this machine's CPU.

    `given` are the user's overrides. A key that the user sets is not in the result. The measurement protocol is an
    exception: the whole config group `measure` is returned even if the user sets some of its keys, and the user's
    values are applied after it.
    """
    if launchers.load(composed.launcher).QUEUES or find_device(composed) != "cpu":
        return []
    keys = {key for key, _ in given}
    lengths = [value for key, values in given if key == "sequence" for value in values if isinstance(value, Mapping)]
    keys.update(f"sequence.{kind}" for length in lengths for kind in length)
    smoke = compose.read_study("smoke").base
    shorter = {f"sequence.{kind}": max(length // _SHORTER, 1) for kind, length in composed.spec.sequence.items()}
    small = {"precision": smoke["precision"], **shorter, "measure": smoke["measure"]}
    return [(key, value) for key, value in small.items() if key not in keys]


@contextlib.contextmanager
def mention_small(chosen: Sequence[Pair]) -> Iterator[None]:
    """If the block raises a UserError about an override in `chosen`, add a remark that this override is a default.
    `choose_small` added these overrides, and the user did not write them."""
    try:
        yield
    except UserError as error:
        added = [f"{key}={value}" for key, value in chosen if f"{key}={value}" in error.value.split()]
        if not added or type(error) is not UserError:
            raise
        rule = f"{error.rule} ({added[0]} is a default for runs on a CPU)"
        raise UserError(error.value, rule, error.remedy) from error


def choose_small_base(study: Study, overrides: Overrides, config_dir: Path | None) -> list[Pair]:
    """Return overrides that make the points of a study as small as those of the smoke study. Return no overrides in two
    cases: the study has a section `base`, in which it sets fields of all points, or the study's first point does not
    run on this machine's CPU.

    If the models of the study read different kinds of tokens, the overrides include no sequence lengths.
    """
    if study.base:
        return []
    first, *others = expand_study(study, overrides)
    composed = compose.compose_request(first, config_dir)
    chosen = choose_small(overrides, composed)
    learners = {tuple(pair for pair in pairs if pair[0] in ("model", "objective")): pairs for pairs in others}
    for pairs in learners.values():
        with contextlib.suppress(UserError):  # raised again, or excluded by a rule, when all points are decoded
            if compose.compose_request(pairs, config_dir).spec.sequence.keys() != composed.spec.sequence.keys():
                return [(key, value) for key, value in chosen if not key.startswith("sequence.")]
    return chosen
