"""From plain dicts to one decoded Request, and the rules that hold between its parts. It knows no Hydra.

A study's points share most of their parts: each is decoded once and known again by its content.
"""

import functools
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from bench import data, engines, launchers, models, objectives
from bench.core.errors import UserError, suggest_nearest
from bench.core.files import read_model_counts
from bench.core.machine import Machine, check_plausible
from bench.core.network import count_parameters
from bench.core.private import mask_tokens
from bench.core.record import Limits
from bench.core.scheduling import SchedulingOptions
from bench.core.spec import DataSpec, EngineSpec, ModelSpec, RunSpec
from bench.measure.environment import count_local_devices, find_device_kind, read_device_name


class Request(NamedTuple):
    """What is asked for, decoded and checked: the point itself, and the circumstances it is to run in."""

    spec: RunSpec
    machine: Machine
    launcher: str
    launcher_options: Limits


def decode(plain: Mapping[str, Any]) -> Request:
    """Decode a composed tree; the options of engine, data, model and launcher by the files that they name."""
    parts = {group: _decode_part(group, plain[group]) for group in _PARTS}
    machine, (launcher, options) = parts.pop("machine"), parts.pop("launcher")
    rest = {key: value for key, value in plain.items() if key not in _PARTS and key != "hydra"}
    rest["sequence"] = complete_lengths(parts["objective"], plain.get("sequence"))
    spec = decode_model(RunSpec, {**rest, **parts})
    _refuse_tokens(spec)
    return Request(spec, machine, launcher, options)


def _refuse_tokens(spec: RunSpec) -> None:
    """Raise UserError for a secret in a spec: its hash is the point's name, so that it cannot be masked."""
    written = spec.model_dump_json().encode()
    if (masked := mask_tokens(written)) != written:
        shown = masked[max(0, masked.index(b"***") - 40) :][:60].decode(errors="replace")
        raise UserError(f"…{shown}…", "holds a token, and specs are for others to read", "export it in your shell")


def complete_lengths(objective: str, given: Any) -> Any:
    """Return the tokens per sample by kind, those that are not given by default; UserError for a kind that the
    objective has not."""
    known = {kind.name: kind.length for kind in load_file(objectives, objective).KINDS}
    if not isinstance(given, Mapping | None):
        return given  # refused with all else that is of the wrong type
    for kind in given or {}:
        if kind not in known:
            remedy = suggest_nearest(f"sequence.{kind}", {f"sequence.{name}" for name in known})
            raise UserError(f"sequence.{kind}", f"objective={objective} has no such tokens", remedy)
    return {**known, **(given or {})}


_SHOWN = 200
"""Characters of a value that a message shows at most."""


def fill_in_devices(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a composed tree with its `devices_per_node`: where it is null, what the machine's file says or, if the
    machine is this one and the launcher starts here, the devices that are here; UserError where nobody says it."""
    if plain.get("devices_per_node") is not None:
        return dict(plain)
    machine, (launcher, _) = _decode_part("machine", plain["machine"]), _decode_part("launcher", plain["launcher"])
    return {**plain, "devices_per_node": machine.devices_per_node or _count_local_devices(machine, launcher)}


def with_objective(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a composed tree, of which nobody chose the objective, with the one that its model learns as a rule."""
    try:
        decoded = _decode_part("model", plain["model"])
        family = load_file(models, decoded.family)
        kinds = family.token_kinds(decode_cached(family.Shape, decoded.shape))
    except UserError:
        return plain  # told by the decode, or left out by a rule
    chosen = objectives.usual(kinds)
    return plain if chosen is None else {**plain, "objective": {"name": chosen}}


def _count_local_devices(machine: Machine, launcher: str) -> int:
    """Return the number of devices of this machine; UserError for what does not start here."""
    kind, give = machine.device or find_device_kind(), "give devices_per_node=8, or how many a node has"
    if load_file(launchers, launcher).QUEUES:
        raise UserError("devices_per_node", f"launcher={launcher} starts elsewhere, where none can be counted", give)
    count = count_local_devices(kind)
    if machine.device_names and not (count and machine.accepts(read_device_name(kind) or "")):
        rule = f"machine={machine.name} is not this machine, and its file says nothing of it"
        raise UserError("devices_per_node", rule, give)
    if not count:
        rule = "this machine's GPUs cannot be counted" if count is None else "there is no GPU here that torch can use"
        raise UserError("devices_per_node", rule, give)
    return count


def check(composed: Request, device: str | None) -> None:
    """Check the rules that hold between spec, machine, launcher and, where it is known, the device ("cpu", "cuda")."""
    check_rank(composed, device)
    _check_launcher(composed)


def check_rank(composed: Request, device: str | None) -> None:
    """Check all of it but the launcher's: what decides whether a single rank can run."""
    spec, machine = composed.spec, composed.machine
    device = machine.device or device
    if machine.devices_per_node and spec.devices_per_node > machine.devices_per_node:
        has = f"machine={machine.name} has {machine.devices_per_node} devices a node"
        raise UserError(f"devices_per_node={spec.devices_per_node}", has, "ask for fewer, or for more nodes")
    if spec.precision in machine.unsupported:
        remedy = suggest_nearest("", {"bf16", "fp16", "fp32"} - set(machine.unsupported))
        raise UserError(f"precision={spec.precision}", f"machine={machine.name} cannot compute in it", remedy)
    if spec.model.attention == "flex" and (device == "cpu" or spec.model.dropout):
        rule = "flex attention needs a GPU and no dropout"
        raise UserError("model.attention=flex", rule, "set model.attention=sdpa, or model.dropout=0 on a GPU")
    _check_model(spec)
    engine, source = load_file(engines, spec.engine.backend), load_file(data, spec.data.source)
    engine.check(decode_cached(engine.Options, spec.engine.options), spec, device)
    engines.check_layout(spec)
    if (cut := engines.facts(spec).cut) is not None:
        cut(spec, models.get_network(spec.model))
    source.check(decode_cached(source.Options, spec.data.options), spec)
    if objectives.weighs_targets(spec) and not engines.facts(spec).divides_by_tokens:
        rule = f"engine {spec.engine.name} does not count target tokens, whose number in data={spec.data.name} varies"
        raise UserError("loss_mean=tokens", rule, "set loss_mean=micro_batches, or choose another engine, such as ddp")
    if spec.learning.tokens is not None:
        _check_learning(spec)


def _check_learning(spec: RunSpec) -> None:
    """Raise UserError for what cannot be trained to an end, or evaluated on the way."""
    learning, members = spec.learning, engines.facts(spec).members
    saves = learning.checkpoint_every is not None or learning.stop_after is not None
    needed = ["evaluate", "set_learning_rate", *["save", "load"] * saves]
    if missing := [name for name in needed if name not in members]:
        rule = f"engine {spec.engine.name} has no {', '.join(missing)}"
        raise UserError(f"learning.tokens={learning.tokens}", rule, "choose another engine, such as ddp")
    if not data.can_hold_out(spec.data.source):
        rule = "holds nothing back that a model could be evaluated on"
        raise UserError(f"data={spec.data.name} with learning.tokens", rule, "choose data=text")
    each = spec.batch.micro * spec.data_parallel
    if learning.evaluation_samples % each:
        value = f"learning.evaluation_samples={learning.evaluation_samples}"
        rule = f"not a multiple of batch.micro={spec.batch.micro} × {spec.data_parallel} data-parallel ranks"
        raise UserError(value, rule, f"choose {-(-learning.evaluation_samples // each) * each}")


def _check_model(spec: RunSpec) -> None:
    """Raise UserError for an objective that the model cannot learn, and for what it cannot do."""
    family = load_file(models, spec.model.family)
    shape = decode_cached(family.Shape, spec.model.shape)
    read = family.token_kinds(shape)
    if tuple(spec.sequence) != read:
        given = _format_tokens(spec.sequence)
        rule = f"a model of family {spec.model.family} learns from {_format_tokens(read)}, it gives {given}"
        known = objectives.list_matching(read)
        raise UserError(
            f"objective={spec.objective}", rule, suggest_nearest("", known) if known else "choose another model"
        )
    family.check(shape, spec)


def _format_tokens(kinds: Iterable[str]) -> str:
    """Return kinds of tokens as a message names them."""
    named = [kind for kind in kinds if kind != "tokens"]
    return f"{' and '.join(named)} tokens".lstrip()


def _check_launcher(composed: Request) -> None:
    """Raise UserError for what the launcher cannot start, or cannot divide into jobs as it is to be."""
    name, options = composed.launcher, composed.launcher_options
    launchers.load(name).check(options, composed.spec)
    launcher = launchers.load_queueing(name)
    if launcher and not launcher.ARRAYS and isinstance(options, SchedulingOptions) and options.mode == "array":
        remedy = "set launcher.mode=packed or launcher.mode=point"
        raise UserError("launcher.mode=array", f"launcher={name} has no job arrays", remedy)


@functools.cache
def load_file(package: Any, name: str) -> ModuleType:
    """Return a package's file by the name that a user gave it; UserError if there is none."""
    file: ModuleType = package.load(name)
    return file


class _ContentKey:
    """Plain data as a key: equal to what reads the same."""

    def __init__(self, plain: Any) -> None:
        self.plain, self._text = plain, repr(plain)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ContentKey) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


def decode_cached(kind: type[BaseModel], plain: Mapping[str, Any]) -> Any:
    """Return options, or a shape, that a spec holds as plain data and that were decoded before."""
    return _decode_model_cached(kind, _ContentKey(plain))


@functools.lru_cache(maxsize=4096)
def _decode_model_cached(kind: type[BaseModel], content: _ContentKey) -> BaseModel:
    return kind.model_validate(content.plain)


def _decode_part(group: str, plain: Mapping[str, Any]) -> Any:
    """Decode the part of one group."""
    if group == "model" and "config_file" in plain:
        plain = _read_shape_file(dict(plain))  # read anew: a file may change
    return _decode_part_cached(group, _ContentKey(plain))


@functools.lru_cache(maxsize=4096)
def _decode_part_cached(group: str, content: _ContentKey) -> Any:
    return _PARTS[group](dict(content.plain))


def _decode_machine(flat: dict[str, Any]) -> Machine:
    decoded: Machine = decode_model(Machine, flat, "machine")
    check_plausible(decoded)
    return decoded


def _decode_launcher(flat: dict[str, Any]) -> tuple[str, Limits]:
    name = str(flat.pop("name", ""))
    return name, decode_model(load_file(launchers, name).Options, flat, "launcher")


def _decode_plugin_part(kind: type[BaseModel], path: str, names: str, package: Any, flat: dict[str, Any]) -> BaseModel:
    """Split a group's flat YAML into the spec's own fields and the options of the file it names, which decodes them."""
    own = {key: flat.pop(key) for key in list(flat) if key in kind.model_fields and key != "options"}
    file = load_file(package, str(own.get(names, "")))
    options = decode_model(file.Options, flat, path, also=set(kind.model_fields) - {"options"})
    decoded: BaseModel = decode_model(
        kind, {**own, "options": options.model_dump(mode="json", exclude_defaults=True)}, path
    )
    return decoded


def _read_shape_file(flat: dict[str, Any]) -> dict[str, Any]:
    """Replace `config_file` by the shape in the Hugging Face config file that it names."""
    path = Path(str(flat.pop("config_file")))
    try:
        config = json.loads(path.read_text())
        name = flat.get("family") or models.find_family(config)
        family = load_file(models, str(name))
        shape = family.from_hugging_face(config)
    except ValidationError as error:
        raise _build_error(error, family.Shape, f"model.config_file={path}: shape") from error
    except (OSError, ValueError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        raise UserError(f"model.config_file={path}", f"not a readable config.json ({why})") from error
    return {**flat, "family": name, "shape": shape.model_dump()}


def _decode_model_part(flat: dict[str, Any]) -> ModelSpec:
    family = load_file(models, str(flat.get("family", "t5")))
    shape, published = decode_model(family.Shape, flat.get("shape"), "model.shape"), flat.get("parameters")
    network = family.stacks(shape)
    count = None if network is None else count_parameters(network)
    if isinstance(published, int) and count is not None and published != count:
        if not _is_copied(str(flat.get("name")), published):
            rule = f"its shape has {count} parameters and the published model {published}"
            remedy = "give your own shape a name of its own, and leave parameters out"
            raise UserError(f"model.name={flat.get('name')}", rule, remedy)
        flat["parameters"] = None
    flat["shape"] = shape.model_dump(mode="json", exclude_defaults=True)
    decoded: ModelSpec = decode_model(ModelSpec, flat, "model")
    return decoded


def _is_copied(name: str, published: int) -> bool:
    """Whether a count came into a user's file with the file that ships which it began as."""
    counts = read_model_counts()
    return name not in counts and published in counts.values()


def _decode_objective(flat: dict[str, Any]) -> str:
    name = str(flat.pop("name", ""))
    if flat:
        raise UserError(f"objective.{next(iter(flat))}", "no such key", "an objective has a name alone")
    load_file(objectives, name)
    return name


_PARTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "model": _decode_model_part,
    "objective": _decode_objective,
    "engine": functools.partial(_decode_plugin_part, EngineSpec, "engine", "backend", engines),
    "data": functools.partial(_decode_plugin_part, DataSpec, "data", "source", data),
    "machine": _decode_machine,
    "launcher": _decode_launcher,
}


def decode_model(kind: type[Any], plain: Any, path: str = "", also: set[str] | None = None) -> Any:
    """Decode plain data into a frozen model; UserError with the first thing that is wrong, in the user's words.

    `also` are keys that stand beside the model's own in the same YAML, as neighbours for a misspelt one.
    """
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        raise _build_error(error, kind, path, also) from error


def _build_error(error: ValidationError, kind: type[Any], path: str, also: set[str] | None = None) -> UserError:
    """Return the first thing that is wrong."""
    first = error.errors()[0]
    where = [str(part) for part in (path, *first["loc"]) if part != ""]
    if first["type"] == "extra_forbidden":
        word = str(first["loc"][-1])
        outermost = len(first["loc"]) == 1
        known = _list_fields(kind, first["loc"][:-1]) | ((also or set()) if outermost else set())
        deeper = _find_deeper(kind, word) if outermost else []
        remedy = f"did you mean {' or '.join(deeper)}?" if deeper else suggest_nearest(word, known)
        return UserError(".".join(where) or str(first["input"]), "no such key", remedy)
    given = "" if isinstance(first["input"], Mapping | BaseModel) else f"={format_in_one_line(first['input'])}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type":  # pydantic would name the class
        message = "input should be a mapping of keys to values"
    name = ".".join(where)
    return UserError(f"{name}{given}" if name else "", message[0].lower() + message[1:])


def _find_deeper(kind: type[BaseModel], name: str) -> list[str]:
    """Return the keys, dotted, of the parts of a model that are called so: `batch.micro` of `micro`."""
    parts = ((part, inner) for part, field in kind.model_fields.items() for inner in list_models(field.annotation))
    return [f"{part}.{name}" for part, inner in parts if name in _list_fields(inner, ())]


def format_in_one_line(value: Any) -> str:
    """Return what a user gave as an error message shows it."""
    text = str(value) if len(str(value)) <= _SHOWN else f"{str(value)[:_SHOWN]} …"
    return text if text.isprintable() else repr(text)


def _list_fields(kind: type[BaseModel], location: Sequence[Any]) -> set[str]:
    """Return the names that are known at a place in a model; in a mapping of models, one name leads to each."""
    parts = iter(location)
    for part in parts:
        annotation = getattr(kind.model_fields.get(str(part)), "annotation", None)
        inner = list_models(annotation)
        if typing.get_origin(annotation) is dict:
            next(parts, None)
        if not inner:
            return set()
        kind = inner[0]
    return {field.alias or name for name, field in kind.model_fields.items()}


def list_models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a field's annotation names."""
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return [kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)]
