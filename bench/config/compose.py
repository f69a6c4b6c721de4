"""Compose points from Hydra's YAML files and a user's overrides. The only module that uses Hydra.

Hydra composes the group files, once for all points that share them, and the result becomes a plain dict at once. Values
are set in that dict, and a single decode into frozen models checks everything before any process starts.
"""

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.config import exclude_rules
from bench.config.decode import (
    Request,
    check,
    decode,
    decode_model,
    fill_in_devices,
    fit_engine,
    format_in_one_line,
    with_objective,
)
from bench.config.exclude_rules import ExcludeRule, collect_fields, collect_fields_of_tree, list_field_names
from bench.core.errors import UserError, suggest_nearest
from bench.core.files import find_conf_folder, format_reason, read_yaml
from bench.core.spec import config_id
from bench.core.study import Overrides, Pair, Study, expand_study

__all__ = [
    "GROUPS", "Expansion", "Pair", "Request", "StudyPoint", "check", "compose_points", "compose_request",
    "find_conf_folder", "parse_overrides", "parse_single", "read_study",
]  # fmt: skip

# Once per key and value: a study repeats them in every point.
_warn_once = functools.cache(logging.getLogger(__name__).warning)

_LONGEST_NAME = 200
"""Characters of the name of a group's file. File systems allow 255 bytes."""
GROUPS = ("model", "objective", "engine", "data", "measure", "machine", "launcher")


class StudyPoint(NamedTuple):
    """One point of a study that is to be measured."""

    composed: Request
    overrides: tuple[Pair, ...]  # of the study and the user, the axes in their order
    config_id: str
    turn: int = 0  # index of the first of the study's `first` rules that holds; their number if none holds


class Expansion(NamedTuple):
    """The points of a study, and counts of those that are left out."""

    points: list[StudyPoint]
    excluded: dict[str, int]  # points by rule; a point counts for the first rule that holds
    merged: int  # points that are the same run as an earlier one


def parse_overrides(overrides: Sequence[str]) -> list[tuple[str, list[Any]]]:
    """Parse overrides in Hydra's grammar into keys with their values; a comma list has several."""
    parser, parsed = OverridesParser.create(), []
    for text in overrides:
        shown = format_in_one_line(text)
        try:
            override = _parse_override(parser, text)
        except _NOT_PARSED as error:
            rule = f"not an override ({format_reason(error)})"
            raise UserError(shown, rule, "write KEY=VALUE, quoted for the shell") from error
        key, swept = override.key_or_group, override.is_sweep_override()
        if not key:
            raise UserError(shown, "not an override", "write KEY=VALUE")
        if override.is_delete():
            raise UserError(shown, "nothing can be deleted", f"set {key}=null")
        if swept and override.value_type not in (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP):
            raise UserError(shown, "not a list", "write the values with commas between them")
        values = override.sweep_iterator() if swept else [override.value()]
        parsed.append((key, [getattr(value, "text", value) for value in values]))  # quoted strings have a text
    return parsed


_NOT_PARSED = HydraException, ValueError, RecursionError
"""Errors of the parser; the last two for numbers of 5,000 digits and for unclosed brackets."""
_LIST_ITEM = re.compile(r"""\s*("[^"]*"|'[^']*'|[^,]+)""")


def _parse_override(parser: OverridesParser, text: str) -> Override:
    """Parse one override. If the grammar refuses a launcher's option, parse it again with its strings quoted: options
    of a scheduler such as `--gres=gpu:8` hold a `=`, which Hydra refuses in a value without quotes."""
    try:
        return parser.parse_override(text)
    except _NOT_PARSED:
        key, _, value = text.partition("=")
        if not key.lstrip("+").startswith("launcher."):
            raise
        is_list = value.startswith("[") and value.endswith("]")
        quoted = f"[{','.join(map(_quote, _LIST_ITEM.findall(value[1:-1])))}]" if is_list else _quote(value)
        with contextlib.suppress(*_NOT_PARSED):
            return parser.parse_override(f"{key}={quoted}")
        raise


def _quote(value: str) -> str:
    value = value.strip()
    is_quoted = len(value) > 1 and value[0] in "\"'" and value[-1] == value[0]
    return value if is_quoted else '"' + value.replace('"', '\\"') + '"'


def parse_single(overrides: Sequence[str]) -> list[Pair]:
    """Parse the overrides of one run. Raise UserError for a comma list."""
    parsed = parse_overrides(overrides)
    for key, values in parsed:
        if len(values) != 1:
            listed = ",".join(map(str, values))
            raise UserError(f"{key}={listed}", "a list of values is a sweep", "use `zeroscale sweep`, or choose one")
    return [(key, value) for key, (value,) in parsed]


def compose_request(pairs: Sequence[Pair], config_dir: Path | None = None) -> Request:
    """Compose and decode one point. Raise UserError for the first error in it."""
    return decode(_build_tree(pairs, config_dir))


def compose_points(
    study: Study,
    overrides: Overrides,
    config_dir: Path | None = None,
    device: Callable[[Request], str | None] = lambda composed: None,
    check: Callable[[Request, str | None], None] = check,
) -> Expansion:
    """Decode and check every point of a study that no rule excludes, in the order of its axes; `overrides` win.

    `device` returns the kind of device of a point, for `check`. A plan that starts nothing passes `check_rank`, which
    ignores the launcher's rules. Points that are one run on one machine are merged into the first, such as those along
    an axis without effect on an engine.
    """
    rules, first = (
        [exclude_rules.parse_rule(text, list_field_names()) for text in texts] for texts in (study.exclude, study.first)
    )
    excluded, merged = dict.fromkeys((rule.text for rule in rules), 0), 0
    found: dict[tuple[str, str], StudyPoint] = {}
    expanded = expand_study(study, overrides)
    for pairs in expanded:
        composed = _decode_or_exclude(_build_tree(pairs, config_dir), rules)
        if isinstance(composed, ExcludeRule):
            excluded[composed.text] += 1
        # The same spec on another machine is another run: the machine is not part of the config_id.
        elif (run := (config_id(composed.spec), composed.machine.name)) in found:
            merged += 1
        else:
            check(composed, device(composed))
            known = collect_fields(composed) if first else {}
            turn = next((number for number, rule in enumerate(first) if rule.holds(known)), len(first))
            found[run] = StudyPoint(composed, pairs, run[0], turn)
    if not found:
        left = f"none of its {len(expanded)} points is left"
        raise UserError(f"study={study.name}", left, "see axes and exclude in its file")
    return Expansion(list(found.values()), excluded, merged)


def _decode_or_exclude(tree: Mapping[str, Any], rules: Sequence[ExcludeRule]) -> Request | ExcludeRule:
    """Decode a point, or return the first rule that excludes it."""
    try:
        composed = decode(tree)
    except UserError:  # a rule may exclude an impossible point, such as a batch that does not divide
        known = collect_fields_of_tree(tree)
        for rule in rules:
            with contextlib.suppress(UserError):
                if rule.holds(known):
                    return rule
        raise
    known = collect_fields(composed) if rules else {}
    return next((rule for rule in rules if rule.holds(known)), composed)


def read_study(name: str, config_dir: Path | None = None) -> Study:
    """Read conf/study/<name>.yaml, or the file at the path `name`."""
    is_path = name.endswith((".yaml", ".yml"))
    path = Path(name) if is_path else _find_file("study", name, config_dir)
    plain = read_yaml(path, "study" if is_path else _format_choice("study", name))
    decoded: Study = decode_model(Study, plain, "study")
    return decoded


# ---------------------------------------- the plain tree of a point


def _build_tree(pairs: Sequence[Pair], config_dir: Path | None) -> dict[str, Any]:
    """Return the plain tree of a point: its composed group files with its values set."""
    choices = tuple((key, value) for key, value in pairs if key in GROUPS)
    for group, name in choices:
        if not isinstance(name, str):
            remedy = suggest_nearest("", _list_names(group, config_dir))
            raise UserError(f"{group}={name}", f"names no file in conf/{group}", remedy)
    tree, unresolved = _compose(choices, config_dir)
    for key, value in pairs:
        if key not in GROUPS:
            nested = functools.reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value)
            tree = _merge(tree, nested)
            unresolved = unresolved or _is_unresolved(value)
    # After all values are set: an interpolation may name any of them.
    tree = _resolve(tree) if unresolved else tree
    if isinstance(protocol := tree.get("measure"), Mapping):
        tree = {**tree, "measure": _rename_old_keys(protocol)}
    # After the values: they may change the family of the model, whose objective is the default.
    if not any(key.partition(".")[0] == "objective" for key, _ in pairs):
        tree = dict(with_objective(tree))
    return fill_in_devices(fit_engine(tree, {key for key, _ in pairs}))


_OLD_KEYS = {
    "min_s": ("is called measure.window_s", "window_s"),
    "max_steps": ("no longer used; set measure.window_s and measure.min_steps", None),
    "width": ("no longer used; set measure.window_s, and repeats for precision", None),
    "warmup_max_steps": ("no longer used; set measure.warmup_steps and measure.gpu_warmup_s", None),
}
"""Keys of the protocol before version 3 of a record: a message for each, and the key that replaced it."""


def _rename_old_keys(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """Return a measurement protocol with today's keys, and log a warning about each old key."""
    renamed = {key: value for key, value in protocol.items() if key not in _OLD_KEYS}
    for key, (message, new) in _OLD_KEYS.items():
        if key in protocol:
            _warn_once(f"measure.{key}={protocol[key]}: {message}")
            renamed |= {new: protocol[key]} if new else {}
    return renamed


def _merge(old: Any, new: Any) -> Any:
    """Return `old` with the values of a mapping set; `decode` finds unknown keys. Unchanged parts are shared."""
    if not isinstance(new, dict):
        return new
    old = old if isinstance(old, dict) else {}
    return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}


def _is_unresolved(plain: Any) -> bool:
    """Return whether plain data seem to hold an interpolation or a mandatory value, which OmegaConf has to resolve."""
    # On the text, which is fast. A false positive costs time only.
    text = repr(plain)
    return "${" in text or "???" in text


def _resolve(tree: dict[str, Any]) -> dict[str, Any]:
    try:
        plain = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(str(error.full_key), str(error).splitlines()[0], "set it on the command line") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


# ---------------------------------------- group files


@functools.cache
def _compose(choices: tuple[tuple[str, str], ...], config_dir: Path | None) -> tuple[dict[str, Any], bool]:
    """Compose a choice of group files. Return the tree, which must not be changed, and whether it is unresolved."""
    if config_dir and not config_dir.is_dir():
        raise UserError(f"--config-dir {config_dir}", "no such folder", "give one laid out like conf/")
    for group, name in choices:
        _check_group_file(group, name, config_dir)
    tree = _compose_each(choices, config_dir) or _compose_by_hydra(choices, config_dir)
    return tree, _is_unresolved(tree)


def _compose_each(choices: tuple[tuple[str, str], ...], config_dir: Path | None) -> dict[str, Any] | None:
    """Return the tree of a choice from Hydra's trees of each file alone. Hydra takes 80 ms for a tree, and a study has
    far fewer files than combinations of files. None where a file may change another group."""
    distinct = len({group for group, _ in choices}) == len(choices) > 1
    if not distinct or _may_depend_on_others(config_dir):
        return None
    base = _compose_by_hydra((), config_dir)
    tree = dict(base)
    for group, name in choices:
        alone = _compose_by_hydra(((group, name),), config_dir)
        if {**alone, group: None} != {**base, group: None}:
            return None  # the file has keys of another group
        tree[group] = alone[group]
    return tree


@functools.cache
def _may_depend_on_others(config_dir: Path | None) -> bool:
    """Return whether a group's file seems to set keys of other groups, or to choose files by other groups' choices."""
    files = (path for group in GROUPS for folder in _list_folders(group, config_dir) for path in folder.rglob("*.yaml"))
    texts = (path.read_bytes() for path in files if path.is_file())
    return any(b"@package" in text or (b"defaults" in text and b"${" in text) for text in texts)


@functools.cache
def _compose_by_hydra(choices: tuple[tuple[str, str], ...], config_dir: Path | None) -> dict[str, Any]:
    overrides = [f"{group}={name}" for group, name in choices]
    shown = " ".join(_format_choice(group, name) for group, name in choices)
    if config_dir:
        # The value is parsed by Hydra's grammar: quotes and backslashes of the path have to be escaped.
        path = str(config_dir.resolve()).replace("\\", "\\\\").replace("'", "\\'")
        overrides.append(f"hydra.searchpath=['file://{path}']")
    try:
        # version_base=None: the behaviour of the installed Hydra, without its warning.
        with initialize_config_dir(str(find_conf_folder().resolve()), version_base=None):
            tree = hydra_compose("config", overrides)
        plain = OmegaConf.to_container(tree, resolve=False)
    except Exception as error:  # Hydra raises many kinds of errors for files that it cannot compose
        raise UserError(shown, format_reason(error), "correct the file, or those in its defaults") from error
    assert isinstance(plain, dict)
    for group in GROUPS:
        if not isinstance(plain.get(group), dict):
            remedy = "let the file begin without `@package`, and with keys of its group"
            raise UserError(shown, f"leaves no keys for {group}", remedy)
    return {str(key): value for key, value in plain.items()}


@functools.cache
def _check_group_file(group: str, name: str, config_dir: Path | None) -> None:
    """Raise UserError for an unreadable file; read once for all choices with it."""
    read_yaml(_find_file(group, name, config_dir), _format_choice(group, name))


def _format_choice(group: str, name: str) -> str:
    return f"{group}={format_in_one_line(name)}"


def _list_folders(group: str, config_dir: Path | None) -> list[Path]:
    return [root / group for root in (config_dir, find_conf_folder()) if root]


def _list_names(group: str, config_dir: Path | None) -> list[str]:
    return [path.stem for folder in _list_folders(group, config_dir) for path in folder.glob("*.yaml")]


def _find_file(group: str, name: str, config_dir: Path | None) -> Path:
    folders = _list_folders(group, config_dir) if len(name) <= _LONGEST_NAME else []
    found = [place for folder in folders if (place := folder / f"{name}.yaml").is_file()]
    if len(found) > 1:  # Hydra would silently take the one that ships
        rule = f"both {found[0]} and one that ships are called so"
        raise UserError(_format_choice(group, name), rule, "give yours another name")
    if found:
        return found[0]
    remedy = suggest_nearest(name, _list_names(group, config_dir))
    raise UserError(_format_choice(group, name), f"no such file in conf/{group}", remedy)
