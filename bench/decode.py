"""From plain dicts to one decoded Request, and the rules that hold between its parts. It knows no Hydra.

A study's points share most of their parts: each is decoded once and known again by its content.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from bench import data, engines, launchers, models, objectives
from bench.errors import UserError, nearest
from bench.machine import Machine, check_plausible
from bench.measure.environment import device_kind, device_name, devices_here
from bench.record import Limits
from bench.scheduling import SchedulingOptions
from bench.spec import DataSpec, EngineSpec, ModelSpec, RunSpec
from bench.stacks import parameter_count


class Request(NamedTuple):
    """What is asked for, decoded and checked: the point itself, and the circumstances it is to run in."""

    spec: RunSpec
    machine: Machine
    launcher: str
    launcher_options: Limits


def decode(plain: Mapping[str, Any]) -> Request:
    """Decode a composed tree; the options of engine, data, model and launcher by the files that they name."""
    parts = {group: _shared(group, plain[group]) for group in _PARTS}
    machine, (launcher, options) = parts.pop("machine"), parts.pop("launcher")
    rest = {key: value for key, value in plain.items() if key not in _PARTS and key != "hydra"}
    rest["sequence"] = lengths(parts["objective"], plain.get("sequence"))
    return Request(model(RunSpec, {**rest, **parts}), machine, launcher, options)


def lengths(objective: str, given: Any) -> Any:
    """Return the tokens per sample by kind, those that are not given by default; UserError for a kind that the
    objective has not."""
    known = {kind.name: kind.length for kind in file_of(objectives, objective).KINDS}
    if not isinstance(given, Mapping | None):
        return given  # refused with all else that is of the wrong type
    for kind in given or {}:
        if kind not in known:
            remedy = nearest(f"sequence.{kind}", {f"sequence.{name}" for name in known})
            raise UserError(f"sequence.{kind}", f"objective={objective} has no such tokens", remedy)
    return {**known, **(given or {})}


_SHOWN = 200
"""Characters of a value that a message shows at most."""


def with_devices(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a composed tree with its `devices_per_node`: where it is null, what the machine's file says or, if the
    machine is this one and the launcher starts here, the devices that are here; UserError where nobody says it."""
    if plain.get("devices_per_node") is not None:
        return dict(plain)
    machine, (launcher, _) = _shared("machine", plain["machine"]), _shared("launcher", plain["launcher"])
    return {**plain, "devices_per_node": machine.devices_per_node or _devices_here(machine, launcher)}


def with_objective(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a composed tree, of which nobody chose the objective, with the one that its model learns as a rule."""
    try:
        decoded = _shared("model", plain["model"])
        family = file_of(models, decoded.family)
        kinds = family.token_kinds(valid(family.Shape, decoded.shape))
    except UserError:
        return plain  # told by the decode, or left out by a rule
    chosen = objectives.usual(kinds)
    return plain if chosen is None else {**plain, "objective": {"name": chosen}}


def _devices_here(machine: Machine, launcher: str) -> int:
    """Return the number of devices of this machine; UserError for what does not start here."""
    kind, give = machine.device or device_kind(), "give devices_per_node=8, or how many a node has"
    if file_of(launchers, launcher).QUEUES:
        raise UserError("devices_per_node", f"launcher={launcher} starts elsewhere, where none can be counted", give)
    count = devices_here(kind)
    if machine.device_names and not (count and machine.accepts(device_name(kind) or "")):
        rule = f"machine={machine.name} is not this machine, and its file says nothing of it"
        raise UserError("devices_per_node", rule, give)
    if not count:
        rule = "this machine's GPUs cannot be counted" if count is None else "there is no GPU here that torch can use"
        raise UserError("devices_per_node", rule, give)
    return count


def check(asked: Request, device: str | None) -> None:
    """Check the rules that hold between spec, machine, launcher and, where it is known, the device ("cpu", "cuda")."""
    check_rank(asked, device)
    _check_launcher(asked)


def check_rank(asked: Request, device: str | None) -> None:
    """Check all of it but the launcher's: what decides whether a single rank can run."""
    spec, machine = asked.spec, asked.machine
    device = machine.device or device
    if machine.devices_per_node and spec.devices_per_node > machine.devices_per_node:
        has = f"machine={machine.name} has {machine.devices_per_node} devices a node"
        raise UserError(f"devices_per_node={spec.devices_per_node}", has, "ask for fewer, or for more nodes")
    if spec.precision in machine.unsupported:
        remedy = nearest("", {"bf16", "fp16", "fp32"} - set(machine.unsupported))
        raise UserError(f"precision={spec.precision}", f"machine={machine.name} cannot compute in it", remedy)
    if spec.model.attention == "flex" and (device == "cpu" or spec.model.dropout):
        rule = "flex attention needs a GPU and no dropout"
        raise UserError("model.attention=flex", rule, "set model.attention=sdpa, or model.dropout=0 on a GPU")
    _check_model(spec)
    engine, source = file_of(engines, spec.engine.backend), file_of(data, spec.data.source)
    engine.check(valid(engine.Options, spec.engine.options), spec, device)
    engines.check_layout(spec)
    source.check(valid(source.Options, spec.data.options), spec)


def _check_model(spec: RunSpec) -> None:
    """Raise UserError for an objective that the model cannot learn, and for what it cannot do."""
    family = file_of(models, spec.model.family)
    shape = valid(family.Shape, spec.model.shape)
    read = family.token_kinds(shape)
    if tuple(spec.sequence) != read:
        rule = f"a model of family {spec.model.family} learns from {_tokens(read)}, it gives {_tokens(spec.sequence)}"
        known = objectives.named(read)
        raise UserError(f"objective={spec.objective}", rule, nearest("", known) if known else "choose another model")
    family.check(shape, spec)


def _tokens(kinds: Iterable[str]) -> str:
    """Return kinds of tokens as a message names them."""
    named = [kind for kind in kinds if kind != "tokens"]
    return f"{' and '.join(named)} tokens".lstrip()


def _check_launcher(asked: Request) -> None:
    """Raise UserError for what the launcher cannot start, or cannot divide into jobs as it is to be."""
    name, options = asked.launcher, asked.launcher_options
    launchers.load(name).check(options, asked.spec)
    launcher = launchers.queueing(name)
    if launcher and not launcher.ARRAYS and isinstance(options, SchedulingOptions) and options.mode == "array":
        remedy = "set launcher.mode=packed or launcher.mode=point"
        raise UserError("launcher.mode=array", f"launcher={name} has no job arrays", remedy)


@functools.cache
def file_of(package: Any, name: str) -> ModuleType:
    """Return a package's file by the name that a user gave it; UserError if there is none."""
    file: ModuleType = package.load(name)
    return file


class _Content:
    """Plain data as a key: equal to what reads the same."""

    def __init__(self, plain: Any) -> None:
        self.plain, self._text = plain, repr(plain)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Content) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


def valid(kind: type[BaseModel], plain: Mapping[str, Any]) -> Any:
    """Return options, or a shape, that a spec holds as plain data and that were decoded before."""
    return _valid(kind, _Content(plain))


@functools.lru_cache(maxsize=4096)
def _valid(kind: type[BaseModel], content: _Content) -> BaseModel:
    return kind.model_validate(content.plain)


def _shared(group: str, plain: Mapping[str, Any]) -> Any:
    """Decode the part of one group."""
    if group == "model" and "config_file" in plain:
        plain = _with_shape_of_file(dict(plain))  # read anew: a file may change
    return _decoded(group, _Content(plain))


@functools.lru_cache(maxsize=4096)
def _decoded(group: str, content: _Content) -> Any:
    return _PARTS[group](dict(content.plain))


def _machine(flat: dict[str, Any]) -> Machine:
    decoded: Machine = model(Machine, flat, "machine")
    check_plausible(decoded)
    return decoded


def _launcher(flat: dict[str, Any]) -> tuple[str, Limits]:
    name = str(flat.pop("name", ""))
    return name, model(file_of(launchers, name).Options, flat, "launcher")


def _part(kind: type[BaseModel], path: str, names: str, package: Any, flat: dict[str, Any]) -> BaseModel:
    """Split a group's flat YAML into the spec's own fields and the options of the file it names, which decodes them."""
    own = {key: flat.pop(key) for key in list(flat) if key in kind.model_fields and key != "options"}
    file = file_of(package, str(own.get(names, "")))
    options = model(file.Options, flat, path, also=set(kind.model_fields) - {"options"})
    decoded: BaseModel = model(kind, {**own, "options": options.model_dump(mode="json", exclude_defaults=True)}, path)
    return decoded


def _with_shape_of_file(flat: dict[str, Any]) -> dict[str, Any]:
    """Replace `config_file` by the shape in the Hugging Face config file that it names."""
    path = Path(str(flat.pop("config_file")))
    try:
        config = json.loads(path.read_text())
        name = flat.get("family") or models.family_of(config)
        family = file_of(models, str(name))
        shape = family.from_hugging_face(config)
    except ValidationError as error:
        raise _refusal(error, family.Shape, f"model.config_file={path}: shape") from error
    except (OSError, ValueError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        raise UserError(f"model.config_file={path}", f"not a readable config.json ({why})") from error
    return {**flat, "family": name, "shape": shape.model_dump()}


def _model(flat: dict[str, Any]) -> ModelSpec:
    family = file_of(models, str(flat.get("family", "t5")))
    shape, published = model(family.Shape, flat.get("shape"), "model.shape"), flat.get("parameters")
    network = family.stacks(shape)
    count = None if network is None else parameter_count(network)
    if isinstance(published, int) and count is not None and published != count:
        raise UserError(
            f"model.name={flat.get('name')}",
            f"its shape has {count} parameters and its name stands for {published}",
            "give your own shape a name of its own and parameters=null",
        )
    flat["shape"] = shape.model_dump(mode="json", exclude_defaults=True)
    decoded: ModelSpec = model(ModelSpec, flat, "model")
    return decoded


def _objective(flat: dict[str, Any]) -> str:
    name = str(flat.pop("name", ""))
    if flat:
        raise UserError(f"objective.{next(iter(flat))}", "no such key", "an objective has a name alone")
    file_of(objectives, name)
    return name


_PARTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "model": _model,
    "objective": _objective,
    "engine": functools.partial(_part, EngineSpec, "engine", "backend", engines),
    "data": functools.partial(_part, DataSpec, "data", "source", data),
    "machine": _machine,
    "launcher": _launcher,
}


def model(kind: type[Any], plain: Any, path: str = "", also: set[str] | None = None) -> Any:
    """Decode plain data into a frozen model; UserError with the first thing that is wrong, in the user's words.

    `also` are keys that stand beside the model's own in the same YAML, as neighbours for a misspelt one.
    """
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        raise _refusal(error, kind, path, also) from error


def _refusal(error: ValidationError, kind: type[Any], path: str, also: set[str] | None = None) -> UserError:
    """Return the first thing that is wrong."""
    first = error.errors()[0]
    where = [str(part) for part in (path, *first["loc"]) if part != ""]
    if first["type"] == "extra_forbidden":
        known = _fields(kind, first["loc"][:-1]) | (also or set())
        return UserError(".".join(where) or str(first["input"]), "no such key", nearest(str(first["loc"][-1]), known))
    given = "" if isinstance(first["input"], Mapping | BaseModel) else f"={in_one_line(first['input'])}"
    message = first["msg"].removeprefix("Value error, ")
    name = ".".join(where)
    return UserError(f"{name}{given}" if name else "", message[0].lower() + message[1:])


def in_one_line(value: Any) -> str:
    """Return what a user gave as an error message shows it."""
    text = str(value) if len(str(value)) <= _SHOWN else f"{str(value)[:_SHOWN]} …"
    return text if text.isprintable() else repr(text)


def _fields(kind: type[BaseModel], location: Sequence[Any]) -> set[str]:
    """Return the names that are known at a place in a model."""
    for part in location:
        field = kind.model_fields.get(str(part))
        inner = models_in(getattr(field, "annotation", None))
        if not inner:
            return set()
        kind = inner[0]
    return {field.alias or name for name, field in kind.model_fields.items()}


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a field's annotation names."""
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return [kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)]
