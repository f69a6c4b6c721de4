"""From Hydra's YAML and a user's overrides to one decoded Request: the only user of Hydra.

Hydra composes a choice of group files and is left at once for plain dicts; values are set on those, and one decode into
frozen models checks everything, before any process starts.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from bench import data, engines, launchers, models
from bench.errors import UserError, nearest
from bench.machine import Machine
from bench.spec import DataSpec, EngineSpec, ModelSpec, RunSpec
from bench.study import Study

GROUPS = ("model", "engine", "data", "machine", "launcher")
Pair = tuple[str, Any]
"""One override: a group and its file's name, or a dotted key and its value."""


class Request(NamedTuple):
    """What is asked for, decoded and checked: the point itself, and the circumstances it is to run in."""

    spec: RunSpec
    machine: Machine
    launcher: str
    launcher_options: BaseModel


def conf_dir() -> Path:
    """Return the folder of the configuration files: beside the packages in a checkout, inside `bench` in a wheel."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "conf"


def parse(overrides: Sequence[str]) -> list[tuple[str, list[Any]]]:
    """Parse overrides of Hydra's grammar into keys and their values, more than one for a comma list."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            why = str(error).splitlines()[0]
            raise UserError(text, f"not an override ({why})", "write KEY=VALUE, quoted for the shell") from error
        if not override.key_or_group:
            raise UserError(text, "not an override", "write KEY=VALUE")
        parsed.append((override.key_or_group, _values(override)))
    return parsed


def _values(override: Override) -> list[Any]:
    if override.is_delete():
        raise UserError(str(override.input_line), "nothing can be deleted", f"set {override.key_or_group}=null")
    if override.is_sweep_override():
        if not override.is_choice_sweep():
            raise UserError(str(override.input_line), "not a list", "write the values with commas between them")
        return [_plain(value) for value in override.sweep_iterator()]
    return [_plain(override.value())]


def _plain(value: Any) -> Any:
    """Strip the parser's own string type."""
    return value.text if hasattr(value, "text") else value


def single(overrides: Sequence[str]) -> list[Pair]:
    """Parse the overrides of one run; UserError for a comma list."""
    pairs = []
    for key, values in parse(overrides):
        if len(values) != 1:
            listed = ",".join(map(str, values))
            raise UserError(f"{key}={listed}", "a list of values is a sweep", "use `zeroscale sweep`, or choose one")
        pairs.append((key, values[0]))
    return pairs


def request(pairs: Sequence[Pair], config_dir: Path | None = None) -> Request:
    """Compose and decode one point; raise UserError for whatever is wrong with it."""
    choices = tuple((key, value) for key, value in pairs if key in GROUPS)
    tree = OmegaConf.create(_composed(choices, config_dir))
    for key, value in pairs:
        if key not in GROUPS:
            _set(tree, key, value)
    try:
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(str(error.full_key), str(error).splitlines()[0], "set it on the command line") from error
    assert isinstance(plain, dict)
    return _decode({str(key): value for key, value in plain.items()})


def check(asked: Request, device: str | None) -> None:
    """Check the rules that hold between spec, machine, launcher and, where it is known, the device ("cpu", "cuda")."""
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
    engine, source = engines.load(spec.engine.backend), data.load(spec.data.source)
    engine.check(engine.Options.model_validate(spec.engine.options), spec, device)
    source.check(source.Options.model_validate(spec.data.options), spec)
    launchers.load(asked.launcher).check(asked.launcher_options, spec)


def study(name: str, config_dir: Path | None = None) -> Study:
    """Read conf/study/<name>.yaml, or the file itself where `name` is a path to one."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else _find("study", name, config_dir)
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, OmegaConfBaseException) as error:
        raise UserError(f"study={name}", str(error).splitlines()[0]) from error
    decoded: Study = _model(Study, plain, "study")
    return decoded


@functools.lru_cache(maxsize=256)
def _composed(choices: tuple[tuple[str, str], ...], config_dir: Path | None) -> dict[str, Any]:
    """Compose a choice of group files, once: it costs 40 ms. The result is not to be changed."""
    for group, name in choices:
        if not isinstance(name, str):
            raise UserError(f"{group}={name}", f"names no file in conf/{group}", nearest("", _names(group, config_dir)))
        _find(group, name, config_dir)
    overrides = [f"{group}={name}" for group, name in choices]
    if config_dir:
        path = str(config_dir.resolve()).replace("\\", "\\\\").replace("'", "\\'")
        overrides.append(f"hydra.searchpath=['file://{path}']")
    try:
        with initialize_config_dir(str(conf_dir().resolve()), version_base=None):
            tree = hydra_compose("config", overrides)
    except HydraException as error:
        raise UserError(" ".join(overrides), str(error).splitlines()[0]) from error
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _folders(group: str, config_dir: Path | None) -> list[Path]:
    return [root / group for root in (config_dir, conf_dir()) if root]


def _names(group: str, config_dir: Path | None) -> list[str]:
    return [path.stem for folder in _folders(group, config_dir) for path in folder.glob("*.yaml")]


def _find(group: str, name: str, config_dir: Path | None) -> Path:
    for folder in _folders(group, config_dir):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise UserError(f"{group}={name}", f"no such file in conf/{group}", nearest(name, _names(group, config_dir)))


def _set(tree: DictConfig, key: str, value: Any) -> None:
    """Set a value whether or not the key exists: what nobody knows is found by the decode, with its neighbours."""
    try:
        OmegaConf.update(tree, key, value, force_add=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{key}={value}", str(error).splitlines()[0], "see conf/config.yaml") from error


def _decode(plain: dict[str, Any]) -> Request:
    """Decode the composed tree; the options of engine, data, model and launcher by the files that they name."""
    plain.pop("hydra", None)
    machine = _model(Machine, plain.pop("machine"), "machine")
    launcher = dict(plain.pop("launcher"))
    launcher_file = launchers.load(str(launcher.pop("name", "")))
    launcher_options = _model(launcher_file.Options, launcher, "launcher")
    parts = {
        "model": _model_part(dict(plain.pop("model"))),
        "engine": _part(EngineSpec, dict(plain.pop("engine")), "engine", "backend", engines),
        "data": _part(DataSpec, dict(plain.pop("data")), "data", "source", data),
    }
    spec = _model(RunSpec, {**plain, **parts}, "")
    return Request(spec, machine, launcher_file.__name__.rpartition(".")[2], launcher_options)


def _part(kind: type[BaseModel], flat: dict[str, Any], path: str, names: str, package: Any) -> dict[str, Any]:
    """Split a group's flat YAML into the spec's own fields and the options of the file it names, which decodes them."""
    own = {key: flat.pop(key) for key in list(flat) if key in kind.model_fields and key != "options"}
    file = package.load(str(own.get(names, "")))
    options = _model(file.Options, flat, path, also=set(kind.model_fields) - {"options"})
    return {**own, "options": options.model_dump(mode="json", exclude_defaults=True)}


def _model_part(flat: dict[str, Any]) -> dict[str, Any]:
    """Decode the shape by its family, from a Hugging Face config file if one is named."""
    family = models.load(str(flat.get("family", "t5")))
    if "config_file" in flat:
        path = Path(str(flat.pop("config_file")))
        try:
            flat["shape"] = family.from_hugging_face(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise UserError(f"model.config_file={path}", f"not a readable config.json ({error})") from error
    else:
        flat["shape"] = _model(family.Shape, flat.get("shape"), "model.shape")
    shape, published = flat["shape"], flat.get("parameters")
    count = family.parameter_count(shape)
    if isinstance(published, int) and published != count:
        raise UserError(
            f"model.name={flat.get('name')}",
            f"its shape has {count} parameters and its name stands for {published}",
            "give your own shape a name of its own and parameters=null",
        )
    flat["shape"] = shape.model_dump(mode="json", exclude_defaults=True)
    decoded: ModelSpec = _model(ModelSpec, flat, "model")
    return decoded.model_dump()


def _model(kind: type[Any], plain: Any, path: str, also: set[str] | None = None) -> Any:
    """Decode plain data into a frozen model; UserError with the first thing that is wrong, in the user's words.

    `also` are keys that stand beside the model's own in the same YAML, as neighbours for a misspelt one.
    """
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = [str(part) for part in (path, *first["loc"]) if part != ""]
        if first["type"] == "extra_forbidden":
            known = _fields(kind, first["loc"][:-1]) | (also or set())
            raise UserError(
                ".".join(where) or str(first["input"]), "no such key", nearest(str(first["loc"][-1]), known)
            ) from error
        given = "" if isinstance(first["input"], Mapping | BaseModel) else f"={first['input']}"
        message = first["msg"].removeprefix("Value error, ")
        name = ".".join(where)
        raise UserError(f"{name}{given}" if name else "", message[0].lower() + message[1:]) from error


def _fields(kind: type[BaseModel], location: Sequence[Any]) -> set[str]:
    """Return the names that are known at a place in a model."""
    for part in location:
        field = kind.model_fields.get(str(part))
        inner = getattr(field, "annotation", None)
        candidates = [inner, *getattr(inner, "__args__", ())]
        kinds = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not kinds:
            return set()
        kind = kinds[0]
    return {field.alias or name for name, field in kind.model_fields.items()}
