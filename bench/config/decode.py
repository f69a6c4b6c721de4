"""Decode plain dicts into a Request (a decoded point), and check the rules between its spec, machine and launcher. This
module does not depend on Hydra.

The points of a study share most of their config groups. The decoded value of each group is cached by its content.
"""

import difflib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from bench import data, engines, launchers, models, objectives
from bench.core import plugins, quality
from bench.core.errors import UserError, suggest_nearest
from bench.core.field_errors import build_error, list_fields, list_models, select_first
from bench.core.files import find_group_files, read_engine_preset, read_model_counts, read_yaml
from bench.core.machine import Machine, check_plausible
from bench.core.network import count_parameters
from bench.core.private import mask_tokens
from bench.core.record import Limits
from bench.core.scheduling import SchedulingOptions
from bench.core.spec import AdapterSpec, DataSpec, EngineSpec, ModelSpec, RunSpec
from bench.measure.environment import count_local_devices, find_device_kind, read_device_name
from bench.models import checkpoint as checkpoints

_Model = TypeVar("_Model", bound=BaseModel)


class Request(NamedTuple):
    """A decoded point: the spec of the run, its machine, its launcher and the launcher's options. `launcher_file` is
    the file of conf/launcher that the user chose, such as a site file; messages name it."""

    spec: RunSpec
    machine: Machine
    launcher: str
    launcher_options: Limits
    launcher_file: str


def decode(plain: Mapping[str, Any], launcher_file: str | None = None) -> Request:
    """Decode a composed config tree. The plug-ins that it names decode the options of engine, data, model and launcher.
    `launcher_file` is the file of conf/launcher that the user chose, or None."""
    parts = {group: _decode_part(group, plain[group]) for group in _PARTS}
    machine, (launcher, options) = parts.pop("machine"), parts.pop("launcher")
    rest = {key: value for key, value in plain.items() if key not in _PARTS and key != "hydra"}
    rest["sequence"] = complete_lengths(parts["objective"], plain.get("sequence"))
    spec = decode_model(RunSpec, {**rest, **parts})
    # A secret in a spec cannot be masked: the point's config_id is a hash of the spec.
    written = spec.model_dump_json().encode()
    if (masked := mask_tokens(written)) != written:
        shown = masked[max(0, masked.index(b"***") - 40) :][:60].decode(errors="replace")
        raise UserError(f"…{shown}…", "contains an access token, but specs are published", "export it in your shell")
    return Request(spec, machine, launcher, options, launcher_file or launcher)


def complete_lengths(objective: str, given: Any) -> Any:
    """Return the tokens per sample of each kind of tokens, such as encoder tokens. Kinds that are not given have the
    objective's default length. Raise UserError for a kind that the objective does not have."""
    known = {kind.name: kind.length for kind in objectives.load(objective).KINDS}
    if not isinstance(given, Mapping | None):
        return given  # RunSpec refuses the type
    for kind in given or {}:
        if kind not in known:
            remedy = suggest_nearest(f"sequence.{kind}", {f"sequence.{name}" for name in known})
            raise UserError(f"sequence.{kind}", f"objective={objective} has no such tokens", remedy)
    return {**known, **(given or {})}


def fill_in_devices(plain: Mapping[str, Any], launcher_file: str | None = None) -> dict[str, Any]:
    """Return a composed config tree with `devices_per_node` filled in.

    A null value is replaced by the number in the machine's file. If the file has none and the run is on this machine,
    the local devices are counted. Raise UserError if both numbers are unknown.
    """
    if plain.get("devices_per_node") is not None:
        return dict(plain)
    machine, (launcher, _) = _decode_part("machine", plain["machine"]), _decode_part("launcher", plain["launcher"])
    counted = machine.devices_per_node or _count_local_devices(machine, launcher, launcher_file or launcher)
    return {**plain, "devices_per_node": counted}


def with_objective(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a composed config tree with the default objective of its model, for a user who chose no objective. The
    tree is unchanged if the model has no default objective."""
    try:
        decoded = _decode_part("model", plain["model"])
        family = models.load(decoded.family)
        kinds = family.token_kinds(decode_cached(family.Shape, decoded.shape))
    except UserError:
        return plain  # `decode` raises it again, unless an exclude rule removes the point first
    chosen = objectives.usual(kinds)
    return plain if chosen is None else {**plain, "objective": {"name": chosen}}


_ROUNDED_TO = 100_000
"""`fit_engine` rounds a reduced bucket size up to a multiple of this number of elements. The size is then easy to read,
and the whole model still fits in a bucket."""


def fit_engine(plain: Mapping[str, Any], given: Collection[str]) -> Mapping[str, Any]:
    """Return a composed config tree in which sizes from the engine's preset, such as bucket sizes, are reduced if they
    exceed the model's number of parameters.

    The engine plug-in names these sizes in `FITTED_TO_MODEL`. A key in `given`, which the user or a study has set,
    keeps its value.
    """
    engine = plain["engine"]
    try:
        sizes = getattr(engines.load(str(engine.get("backend"))), "FITTED_TO_MODEL", ())
        parameters = models.count_expected_parameters(_decode_part("model", plain["model"]))
    except UserError:
        return plain  # `decode` reports this error, unless an exclude rule removes the point first
    if parameters is None:
        return plain
    largest = -(-parameters // _ROUNDED_TO) * _ROUNDED_TO
    preset = read_engine_preset(str(engine.get("name")))
    fitted = {
        name: min(preset[name], largest)
        for name in sizes
        if name in preset and engine.get(name) == preset[name] and f"engine.{name}" not in given
    }
    return {**plain, "engine": {**engine, **fitted}}


def _count_local_devices(machine: Machine, launcher: str, launcher_file: str) -> int:
    """Return the number of devices of this machine. Raise UserError if they cannot be counted, or if the plug-in
    `launcher` has a queue: its runs use other machines. `launcher_file` is the name of the launcher's file in
    conf/launcher."""
    kind, give = machine.device or find_device_kind(), "set devices_per_node=8, or the number of devices per node"
    if launchers.load(launcher).QUEUES:
        rule = f"launcher={launcher_file} uses other machines, whose devices cannot be counted here"
        raise UserError("devices_per_node", rule, give)
    count, name = count_local_devices(kind), read_device_name(kind)
    if machine.device_names and not (count and machine.accepts(name or "")):
        # Report both problems in one error: a user who adds devices_per_node alone would next fail on the missing GPU.
        here = f"this machine has {name if count and name else 'no GPU that torch can use'}"
        run = f"to run here choose machine={'auto' if count else 'cpu'}"
        remedy = f"{run}; to predict, advise or submit, set devices_per_node=8, or the number of devices per node"
        raise UserError(f"machine={machine.name}", here, remedy)
    if not count:
        rule = "this machine's GPUs cannot be counted" if count is None else "there is no GPU here that torch can use"
        raise UserError("devices_per_node", rule, give)
    return count


# ---------------------------------------- rules between the parts


def check(composed: Request, device: str | None) -> None:
    """Raise UserError if the spec of a point does not fit its machine, its launcher or, if known, its device ("cpu" or
    "cuda")."""
    check_rank(composed, device)
    checkpoints.check_weights(composed.spec.model.checkpoint)
    name, options = composed.launcher, composed.launcher_options
    launchers.load(name).check(options, composed.spec)
    launcher = launchers.load_queueing(name)
    if launcher and not launcher.ARRAYS and isinstance(options, SchedulingOptions) and options.mode == "array":
        remedy = "set launcher.mode=packed or launcher.mode=point"
        raise UserError("launcher.mode=array", f"launcher={composed.launcher_file} has no job arrays", remedy)


def check_rank(composed: Request, device: str | None) -> None:
    """Apply all rules of `check` except the launcher's. A configuration that passes can be rehearsed: a single rank of
    it can run on this machine."""
    spec, machine, device = composed.spec, composed.machine, composed.machine.device or device
    if machine.devices_per_node and spec.devices_per_node > machine.devices_per_node:
        has = f"machine={machine.name} has {machine.devices_per_node} devices per node"
        raise UserError(f"devices_per_node={spec.devices_per_node}", has, "set fewer, or use more nodes")
    if spec.precision in machine.unsupported:
        remedy = suggest_nearest("", {"bf16", "fp16", "fp32"} - set(machine.unsupported))
        raise UserError(f"precision={spec.precision}", f"machine={machine.name} does not support it", remedy)
    if spec.model.attention == "flex" and (device == "cpu" or spec.model.dropout):
        rule = "flex attention needs a GPU and no dropout"
        raise UserError("model.attention=flex", rule, "set model.attention=sdpa, or model.dropout=0 on a GPU")
    _check_model(spec)
    engine: Any = engines.load(spec.engine.backend)  # any: a machine's device may be any word
    source = data.load(spec.data.source)
    engine.check(decode_cached(engine.Options, spec.engine.options), spec, device)
    engines.check_decay_rates(spec)
    engines.check_layout(spec)
    engines.check_adapter(spec)
    models.check_adapter(spec.model, spec.adapter)
    if (cut := engines.facts(spec).cut) is not None:
        cut(spec, models.get_network(spec.model))
    source.check(decode_cached(source.Options, spec.data.options), spec)
    if objectives.weighs_targets(spec) and not engines.facts(spec).divides_by_tokens:
        rule = f"engine {spec.engine.name} does not count target tokens, whose number in data={spec.data.name} varies"
        raise UserError("loss_mean=tokens", rule, "set loss_mean=micro_batches, or choose another engine, such as ddp")
    if spec.learning.tokens is not None:
        _check_learning(spec)


def _check_learning(spec: RunSpec) -> None:
    """Raise UserError for a training (`learning.tokens`) that the engine or the data source does not support. Examples
    are an engine without evaluation, and data without held-out text."""
    learning, members = spec.learning, engines.facts(spec).members
    saves = learning.checkpoint_every is not None or learning.stop_after is not None
    needed = ["evaluate", "set_learning_rate", *["save", "load"] * saves, *["list_weights"] * learning.save_model]
    needed += ["predict_tokens"] * bool(learning.quality)
    if missing := [name for name in needed if name not in members]:
        rule = f"engine {spec.engine.name} has no {', '.join(missing)}"
        raise UserError(f"learning.tokens={learning.tokens}", rule, "choose another engine, such as ddp")
    if learning.save_model and spec.adapter.rank is not None and spec.model.checkpoint is None:
        rule = "without model.checkpoint the adapters belong to random weights, which are not saved"
        raise UserError("learning.save_model=true", rule, "set model.checkpoint, or remove learning.save_model")
    if not data.can_hold_out(spec.data.source):
        rule = "has no held-out text to evaluate a model on"
        raise UserError(f"data={spec.data.name} with learning.tokens", rule, "choose data=text or data=instructions")
    for name in learning.quality:
        quality.load(name)
    if learning.quality and not data.has_prompts(spec.data.source):
        value = f"learning.quality={','.join(learning.quality)}"
        raise UserError(value, f"data={spec.data.name} has no prompts with answers", "choose data=instructions")
    each = spec.batch.micro * spec.data_parallel
    if learning.evaluation_samples % each:
        value = f"learning.evaluation_samples={learning.evaluation_samples}"
        rule = f"not a multiple of batch.micro={spec.batch.micro} × {spec.data_parallel} data-parallel ranks"
        raise UserError(value, rule, f"choose {-(-learning.evaluation_samples // each) * each}")


def _check_model(spec: RunSpec) -> None:
    """Raise UserError if the model needs other kinds of tokens than the objective has, or if the model does not support
    some other setting of the spec."""
    family = models.load(spec.model.family)
    shape = decode_cached(family.Shape, spec.model.shape)
    read = family.token_kinds(shape)
    if tuple(spec.sequence) != read:
        wanted, given = (
            f"{' and '.join(kind for kind in kinds if kind != 'tokens')} tokens".lstrip()
            for kinds in (read, spec.sequence)
        )
        rule = f"a model of family {spec.model.family} learns from {wanted}, it gives {given}"
        known = objectives.list_matching(read)
        remedy = suggest_nearest("", known) if known else "choose another model"
        raise UserError(f"objective={spec.objective}", rule, remedy)
    family.check(shape, spec)


# ---------------------------------------- parts, each decoded once


class PluginGroup(NamedTuple):
    """A config group whose files each name a plug-in. A file has the keys of the group and those of its plug-in."""

    spec: type[BaseModel] | None  # the keys that every file of the group has
    names: str  # the key that names the plug-in
    holder: str  # the field of `spec` in which the plug-in's keys are nested
    part: str  # the name of the plug-in's class that declares its keys
    kind: plugins.Kind[Any]
    prefix: str  # prefix of the plug-in's keys on the command line

    def load_options(self, name: str) -> type[BaseModel]:
        """Return the class whose fields are a plug-in's own config keys. Raise UserError for an unusable plug-in."""
        options: type[BaseModel] = getattr(plugins.load(self.kind, name), self.part)
        return options


PLUGIN_GROUPS = {
    "model": PluginGroup(ModelSpec, "family", "shape", "Shape", plugins.FAMILY, "model.shape"),
    "engine": PluginGroup(EngineSpec, "backend", "options", "Options", plugins.ENGINE, "engine"),
    "data": PluginGroup(DataSpec, "source", "options", "Options", plugins.DATA, "data"),
    "launcher": PluginGroup(None, "name", "", "Options", plugins.LAUNCHER, "launcher"),
}


class _ContentKey(str):
    """Plain data as a cache key. Two keys are equal if their data have the same `repr`."""

    plain: Any

    @classmethod
    def of(cls, plain: Any) -> "_ContentKey":
        key = cls(repr(plain))
        key.plain = plain
        return key


@functools.lru_cache(maxsize=8192)
def _call_cached(function: Callable[[dict[str, Any]], Any], content: _ContentKey) -> Any:
    return function(dict(content.plain))


def decode_cached(kind: type[BaseModel], plain: Mapping[str, Any]) -> Any:
    """Return the options of a plug-in, or the shape (sizes) of a model, decoded from the plain data in a spec. The
    result is cached."""
    return _call_cached(kind.model_validate, _ContentKey.of(plain))


def _decode_part(group: str, plain: Mapping[str, Any]) -> Any:
    """Decode one section of a config tree, such as that of the group `model`. The result is cached by content."""
    if group == "model" and ("config_file" in plain or plain.get("checkpoint")):
        plain = _read_shape_file(dict(plain))  # read anew: a file may change
    return _call_cached(_PARTS[group], _ContentKey.of(plain))


def _decode_machine(flat: dict[str, Any]) -> Machine:
    decoded = decode_model(Machine, flat, "machine")
    check_plausible(decoded)
    return decoded


def _decode_launcher(flat: dict[str, Any]) -> tuple[str, Limits]:
    name = str(flat.pop("name", ""))
    return name, decode_model(launchers.load(name).Options, flat, "launcher")


def _decode_plugin_part(name: str, flat: dict[str, Any]) -> BaseModel:
    """Decode the flat YAML of a config group. The YAML names a plug-in, and the keys of that plug-in are moved into
    a nested field, such as `options`."""
    group = PLUGIN_GROUPS[name]
    assert group.spec is not None
    shared = group.spec.model_fields.keys() - {group.holder}
    own = {key: flat.pop(key) for key in shared & flat.keys()}
    kind = group.load_options(str(own.get(group.names, "")))
    options = decode_model(kind, flat, name, shared).model_dump(mode="json", exclude_defaults=True)
    return decode_model(group.spec, {**own, group.holder: options}, name)


def _read_shape_file(flat: dict[str, Any]) -> dict[str, Any]:
    """Return a config's model section `flat` with a shape. The shape is read from the Hugging Face config file
    `config_file` or from the checkpoint's config.json. Without `config_file`, a shape that the section already has is
    kept. Raise UserError if this shape is not the checkpoint's shape."""
    path, checkpoint = flat.pop("config_file", None), flat.get("checkpoint")
    if path is None and not checkpoint:
        remedy = "give the path of a config.json, or set model.checkpoint to a folder that has one"
        raise UserError("model.config_file", "missing", remedy)
    given = f"model.checkpoint={checkpoint}" if path is None else f"model.config_file={path}"
    config = checkpoints.describe(str(checkpoint)) if path is None else checkpoints.read_json(Path(str(path)), given)
    name = flat.get("family") or models.find_family(config)
    family = models.load(str(name))
    try:
        # The user's file may lack keys, have unknown keys, or be nested too deeply.
        shape = family.from_hugging_face(config)
    except ValidationError as error:
        raise _build_error(error, family.Shape, f"{given}: shape") from error
    except (ValueError, RecursionError) as error:
        raise UserError(given, f"not a readable config.json ({str(error).splitlines()[0]})") from error
    if path is None and "shape" in flat:
        own = decode_model(family.Shape, flat["shape"], "model.shape")
        checkpoints.check_shape(str(flat.get("name")), own.model_dump(), shape.model_dump(), str(checkpoint))
        return flat
    return {**flat, "family": name, "shape": shape.model_dump()}


def _decode_model_part(flat: dict[str, Any]) -> ModelSpec:
    family = models.load(str(flat.get("family", "t5")))
    shape, published = decode_model(family.Shape, flat.get("shape"), "model.shape"), flat.get("parameters")
    network = family.stacks(shape)
    count = None if network is None else count_parameters(network)
    # The shape decides predicted FLOPs and memory, so a wrong shape must not carry the name of a published model.
    if isinstance(published, int) and count is not None and published != count:
        # A user's copy of a shipped file may still have the parameter count of the original. Ignore that count.
        counts = read_model_counts()
        if flat.get("name") in counts or published not in counts.values():
            rule = f"its shape has {count} parameters and the published model {published}"
            remedy = "set another model.name for your own shape, and remove model.parameters"
            raise UserError(f"model.name={flat.get('name')}", rule, remedy)
        flat["parameters"] = None
    flat["shape"] = shape.model_dump(mode="json", exclude_defaults=True)
    below = {f"shape.{name}" for name in family.Shape.model_fields}
    return decode_model(ModelSpec, flat, "model", below)


def _decode_objective(flat: dict[str, Any]) -> str:
    name = str(flat.pop("name", ""))
    if flat:
        raise UserError(f"objective.{next(iter(flat))}", "no such key", "an objective has no options")
    objectives.load(name)
    return name


_PARTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "model": _decode_model_part,
    "adapter": lambda flat: decode_model(AdapterSpec, flat, "adapter"),
    "objective": _decode_objective,
    "engine": functools.partial(_decode_plugin_part, "engine"),
    "data": functools.partial(_decode_plugin_part, "data"),
    "machine": _decode_machine,
    "launcher": _decode_launcher,
}


# ---------------------------------------- errors in the user's words

_LISTED = 150
"""Maximum length of a list of all keys in an error message, in characters. A longer list would hide the error:
DeepSpeed has 60 options."""


def decode_model(kind: type[_Model], plain: Any, path: str = "", also: Collection[str] = ()) -> _Model:
    """Decode plain data into a frozen model. Raise UserError for the first error in the data. The UserError has the
    full dotted name of the wrong key, such as `batch.micro`. `path` is the dotted key of the data. `also` are other
    keys of the same YAML section, which are suggested for a misspelt key."""
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        raise _build_error(error, kind, path, also) from error


def _build_error(error: ValidationError, kind: type[Any], path: str, also: Collection[str] = ()) -> UserError:
    """Return a one-line UserError for the first error in a pydantic ValidationError. `path` and `also` are as in
    `decode_model`."""
    first = select_first(error)
    if first["type"] != "extra_forbidden":
        return build_error(error, kind, path)
    name = ".".join(str(part) for part in (path, *first["loc"]) if part != "")
    return UserError(name or str(first["input"]), "no such key", _suggest_key(name, kind, first["loc"], also))


def _suggest_key(name: str, kind: type[BaseModel], location: Sequence[Any], also: Collection[str]) -> str:
    """Return the remedy for an unknown key: another file of the same config group that has this key, otherwise similar
    keys, otherwise all known keys."""
    inside, _, word = name.rpartition(".")
    known = list_fields(kind, location[:-1])
    # A key at the top of a section may belong in a sub-section, or to another file of the group.
    if len(location) == 1:
        parts = ((part, inner) for part, field in kind.model_fields.items() for inner in list_models(field.annotation))
        known |= {*also, *(f"{part}.{below}" for part, inner in parts for below in list_fields(inner, ()))}
        if choices := [] if word in known else _find_choices(inside, word):
            return f"choose {' or '.join(f'{inside}={choice}' for choice in choices)}, which has it"
    by_word = {key.rpartition(".")[2]: key for key in sorted(known, key=lambda key: (-key.count("."), key))}
    found = (
        [key for key in sorted(known) if key.endswith(f".{word}")]
        or [by_word[near] for near in difflib.get_close_matches(word, by_word, n=1, cutoff=0.55)]
        or [key for key in sorted(known) if word in key.replace(".", "_").split("_")]
    )
    # Keys of a study are written without `study.`, both in its file and in overrides.
    full = [f"{inside}.{key}".removeprefix("study").lstrip(".") for key in found or sorted(known)]
    if found:
        return f"did you mean {' or '.join(full)}?"
    listed = f"choose from {', '.join(full)}"
    return listed if len(listed) <= _LISTED else f"`{f'zeroscale explain {inside}'.strip()}` lists the keys"


def _find_choices(group: str, word: str) -> list[str]:
    """Return the names of the files in a config group (a folder of conf/) whose plug-in has the config key `word`. For
    example, the plug-in of `data=text` has keys that the plug-in of `data=hub` lacks."""
    if group not in PLUGIN_GROUPS or PLUGIN_GROUPS[group].holder == "shape":
        return []
    known, found = PLUGIN_GROUPS[group], []
    for name, path in find_group_files(group).items():
        plugin = read_yaml(path, f"{group}={name}").get(known.names)  # a site file begins with another file's name
        if plugin and word in known.load_options(plugin).model_fields:
            found.append(name)
    return found
