"""From Hydra's YAML and a user's overrides to decoded points: the only user of Hydra.

Hydra composes group files, once for all points that share them, and is left at once for plain dicts; values are set on
those, and one decode into frozen models checks everything, before any process starts.
"""

import contextlib
import functools
import re
import sys
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
from bench.config.exclude_rules import ExcludeRule
from bench.config.rule_fields import collect_fields, collect_fields_of_tree, list_field_names
from bench.core.errors import UserError, suggest_nearest
from bench.core.files import find_conf_folder, format_reason, read_yaml
from bench.core.spec import config_id
from bench.core.study import Overrides, Pair, Study, expand_study

__all__ = [
    "GROUPS",
    "Expansion",
    "Pair",
    "Request",
    "StudyPoint",
    "check",
    "compose_points",
    "compose_request",
    "find_conf_folder",
    "parse_overrides",
    "parse_single",
    "read_study",
]  # fmt: skip

_LONGEST_NAME = 200
"""Of a group's file: file systems take 255 bytes."""
GROUPS = ("model", "objective", "engine", "data", "measure", "machine", "launcher")


class StudyPoint(NamedTuple):
    """One point of a study that is to be measured."""

    composed: Request
    overrides: tuple[Pair, ...]  # what the study and the user set, the axes in their order
    config_id: str
    turn: int = 0  # which of the study's `first` rules holds for it; their number where none does


class Expansion(NamedTuple):
    """A study's points, and what became of the others."""

    points: list[StudyPoint]
    excluded: dict[str, int]  # how many each rule left out; where several hold, the first is counted
    merged: int  # points that are the same run as an earlier one


def parse_overrides(overrides: Sequence[str]) -> list[tuple[str, list[Any]]]:
    """Parse overrides of Hydra's grammar into keys and their values, more than one for a comma list."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        override = _parse_override(parser, text)
        if not override.key_or_group:
            raise UserError(_shorten(text), "not an override", "write KEY=VALUE")
        parsed.append((override.key_or_group, _list_values(override)))
    return parsed


_NOT_PARSED = HydraException, ValueError, RecursionError
"""Errors of the parser; the last two for numbers of 5,000 digits and for brackets without end."""
_LIST_ITEM = re.compile(r"""\s*("[^"]*"|'[^']*'|[^,]+)""")


def _parse_override(parser: OverridesParser, text: str) -> Override:
    """Parse one override; a launcher's option that the grammar refuses is parsed with its strings quoted."""
    try:
        return parser.parse_override(text)
    except _NOT_PARSED as error:
        with contextlib.suppress(*_NOT_PARSED):
            return parser.parse_override(_quote_launcher_option(text))
        rule = f"not an override ({format_reason(error)})"
        raise UserError(_shorten(text), rule, "write KEY=VALUE, quoted for the shell") from error


def _quote_launcher_option(text: str) -> str:
    """Quote the strings of `launcher.KEY=VALUE`. Options of a scheduler, such as `--gres=gpu:8`, hold a `=`, which
    Hydra's grammar refuses in a value without quotes."""
    key, _, value = text.partition("=")
    if not key.lstrip("+").startswith("launcher."):
        return text
    if value.startswith("[") and value.endswith("]"):
        return f"{key}=[{','.join(map(_quote, _LIST_ITEM.findall(value[1:-1])))}]"
    return f"{key}={_quote(value)}"


def _quote(value: str) -> str:
    value = value.strip()
    is_quoted = len(value) > 1 and value[0] in "\"'" and value[-1] == value[0]
    return value if is_quoted else '"' + value.replace('"', '\\"') + '"'


def _shorten(text: str) -> str:
    """Return what was given as a message shows it: in one line, and not all of it where it is long."""
    return format_in_one_line(text if len(text) <= 100 else f"{text[:100]} …")


def _list_values(override: Override) -> list[Any]:
    if override.is_delete():
        raise UserError(
            _shorten(str(override.input_line)), "nothing can be deleted", f"set {override.key_or_group}=null"
        )
    if override.is_sweep_override():
        if override.value_type not in (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP):
            raise UserError(
                _shorten(str(override.input_line)), "not a list", "write the values with commas between them"
            )
        return [_strip_quoting(value) for value in override.sweep_iterator()]
    return [_strip_quoting(override.value())]


def _strip_quoting(value: Any) -> Any:
    """Strip the parser's own string type."""
    return value.text if hasattr(value, "text") else value


def parse_single(overrides: Sequence[str]) -> list[Pair]:
    """Parse the overrides of one run; UserError for a comma list."""
    pairs = []
    for key, values in parse_overrides(overrides):
        if len(values) != 1:
            listed = ",".join(map(str, values))
            raise UserError(f"{key}={listed}", "a list of values is a sweep", "use `zeroscale sweep`, or choose one")
        pairs.append((key, values[0]))
    return pairs


def compose_request(pairs: Sequence[Pair], config_dir: Path | None = None) -> Request:
    """Compose and decode one point; raise UserError for whatever is wrong with it."""
    return decode(_build_tree(pairs, config_dir))


def compose_points(
    study: Study,
    overrides: Overrides,
    config_dir: Path | None = None,
    device: Callable[[Request], str | None] = lambda composed: None,
    check: Callable[[Request, str | None], None] = check,
) -> Expansion:
    """Decode and check every point of a study that no rule leaves out, in the order of its axes; `overrides` win.

    `device` tells which kind of device a point would run on, as `check` takes it; a plan that starts nothing leaves the
    launcher's rules out with `check_rank`. Points that are one run on one
    machine, such as those along an axis that changes nothing for an engine, are merged into the first.
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
        elif (run := (config_id(composed.spec), composed.machine.name)) in found:
            merged += 1
        else:
            check(composed, device(composed))
            found[run] = StudyPoint(composed, pairs, run[0], _find_turn(composed, first))
    if not found:
        left = f"none of its {len(expanded)} points is left"
        raise UserError(f"study={study.name}", left, "see axes and exclude in its file")
    return Expansion(list(found.values()), excluded, merged)


def _decode_or_exclude(tree: Mapping[str, Any], rules: Sequence[ExcludeRule]) -> Request | ExcludeRule:
    """Decode a point, or return the first rule that leaves it out."""
    try:
        composed = decode(tree)
    except UserError:  # what cannot be, such as a batch that does not divide, may be left out all the same
        known = collect_fields_of_tree(tree)
        for rule in rules:
            with contextlib.suppress(UserError):
                if rule.holds(known):
                    return rule
        raise
    known = collect_fields(composed) if rules else {}
    return next((rule for rule in rules if rule.holds(known)), composed)


def _find_turn(composed: Request, first: Sequence[ExcludeRule]) -> int:
    """Return the number of the first rule that holds for a point, or of all rules if none does."""
    known = collect_fields(composed) if first else {}
    return next((number for number, rule in enumerate(first) if rule.holds(known)), len(first))


def read_study(name: str, config_dir: Path | None = None) -> Study:
    """Read conf/study/<name>.yaml, or the file itself where `name` is a path to one."""
    of_file = name.endswith((".yaml", ".yml"))
    path = Path(name) if of_file else _find_file("study", name, config_dir)
    called = "study" if of_file else f"study={format_in_one_line(name)}"
    decoded: Study = decode_model(Study, read_yaml(path, called), "study")
    return decoded


def _build_tree(pairs: Sequence[Pair], config_dir: Path | None) -> dict[str, Any]:
    """Return the plain tree of a point: its group files composed, and its values set."""
    pairs = _read_old_keys(pairs)
    choices = tuple((key, value) for key, value in pairs if key in GROUPS)
    for group, name in choices:
        if not isinstance(name, str):
            raise UserError(
                f"{group}={name}", f"names no file in conf/{group}", suggest_nearest("", _list_names(group, config_dir))
            )
    tree, unresolved = _compose(choices, config_dir)
    for key, value in pairs:
        if key not in GROUPS:
            nested = functools.reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value)
            tree = _merge(tree, nested)
            unresolved = unresolved or _is_unresolved(value)
    tree = _resolve(tree) if unresolved else tree
    if isinstance(protocol := tree.get("measure"), Mapping) and not protocol.keys().isdisjoint(_OLD_KEYS):
        renamed = _read_old_keys([(f"measure.{key}", value) for key, value in protocol.items()])
        tree = tree | {"measure": {key.removeprefix("measure."): value for key, value in renamed}}
    if not any(key.partition(".")[0] == "objective" for key, _ in pairs):
        tree = dict(with_objective(tree))
    return fill_in_devices(fit_engine(tree, {key for key, _ in pairs}))


_OLD_KEYS = {
    "min_s": ("is called measure.window_s", "window_s"),
    "max_steps": ("no longer used; set measure.window_s and measure.min_steps", None),
    "width": ("no longer used; set measure.window_s, and repeats for precision", None),
    "warmup_max_steps": ("no longer used; set measure.warmup_steps and measure.gpu_warmup_s", None),
}
"""Keys of the protocol before version 3 of a record: what has become of each, and the key that replaced it."""


def _read_old_keys(pairs: Sequence[Pair]) -> list[Pair]:
    """Return pairs of today's keys, and say once of each old one what has become of it."""
    found: list[Pair] = []
    for key, value in pairs:
        group, _, name = key.partition(".")
        words, replaced = _OLD_KEYS.get(name, ("", None)) if group == "measure" else ("", None)
        if words:
            _print_once(f"zeroscale: {key}={value}: {words}")
        if replaced or not words:
            found.append((f"measure.{replaced}" if replaced else key, value))
    return found


@functools.cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr)


def _merge(old: Any, new: Any) -> Any:
    """Return `old` with a mapping's values set, whether or not it has the keys: what nobody knows is found by the
    decode, with its neighbours. What is not set is shared with `old`."""
    if not isinstance(new, dict):
        return new
    old = old if isinstance(old, dict) else {}
    return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}


def _is_unresolved(plain: Any) -> bool:
    """Whether there is, or seems to be, an interpolation or a mandatory value: OmegaConf's to deal with."""
    text = repr(plain)
    return "${" in text or "???" in text


def _resolve(tree: dict[str, Any]) -> dict[str, Any]:
    try:
        plain = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(str(error.full_key), str(error).splitlines()[0], "set it on the command line") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@functools.cache
def _compose(choices: tuple[tuple[str, str], ...], config_dir: Path | None) -> tuple[dict[str, Any], bool]:
    """Compose a choice of group files. Return the tree, which is not to be changed, and whether something in it is to
    be resolved.

    Hydra takes 80 ms, so it composes every file once, beside the other groups' defaults: of files that say nothing
    about other groups, the parts make the whole.
    """
    _check_folder(config_dir)
    for group, name in choices:
        _check_group_file(group, name, config_dir)
    tree = _put_together(choices, config_dir) if len(choices) > 1 else None
    tree = tree or _compose_by_hydra(choices, config_dir)
    return tree, _is_unresolved(tree)


def _put_together(choices: tuple[tuple[str, str], ...], config_dir: Path | None) -> dict[str, Any] | None:
    """Return the tree of a choice from what Hydra makes of each file alone; None where a file may say something about
    another group, or what it says may depend on one."""
    if _may_depend_on_others(config_dir) or len({group for group, _ in choices}) < len(choices):
        return None
    base = _compose_by_hydra((), config_dir)
    tree = dict(base)
    for group, name in choices:
        alone = _compose_by_hydra(((group, name),), config_dir)
        if {**alone, group: None} != {**base, group: None}:
            return None
        tree[group] = alone[group]
    return tree


@functools.cache
def _may_depend_on_others(config_dir: Path | None) -> bool:
    """Whether a group's file seems to place its keys elsewhere, or to choose others by what is chosen elsewhere."""
    files = (path for group in GROUPS for folder in _list_folders(group, config_dir) for path in folder.rglob("*.yaml"))
    texts = (path.read_bytes() for path in files if path.is_file())
    return any(b"@package" in text or (b"defaults" in text and b"${" in text) for text in texts)


@functools.cache
def _compose_by_hydra(choices: tuple[tuple[str, str], ...], config_dir: Path | None) -> dict[str, Any]:
    overrides = [f"{group}={name}" for group, name in choices]
    if config_dir:
        path = str(config_dir.resolve()).replace("\\", "\\\\").replace("'", "\\'")
        overrides.append(f"hydra.searchpath=['file://{path}']")
    try:
        with initialize_config_dir(str(find_conf_folder().resolve()), version_base=None):
            tree = hydra_compose("config", overrides)
        plain = OmegaConf.to_container(tree, resolve=False)
    except Exception as error:  # Hydra raises whatever it likes for files that it cannot put together
        raise UserError(
            _format_choices(choices), format_reason(error), "correct the file, or those in its defaults"
        ) from error
    assert isinstance(plain, dict)
    for group in GROUPS:
        if not isinstance(plain.get(group), dict):
            rule = f"leaves no keys for {group}"
            raise UserError(
                _format_choices(choices), rule, "let the file begin without `@package`, and with keys of its group"
            )
    return {str(key): value for key, value in plain.items()}


@functools.cache
def _check_group_file(group: str, name: str, config_dir: Path | None) -> None:
    """Raise UserError for a file that cannot be read; once for all choices that it is part of."""
    read_yaml(_find_file(group, name, config_dir), f"{group}={format_in_one_line(name)}")


def _format_choices(choices: Sequence[tuple[str, str]]) -> str:
    return " ".join(f"{group}={format_in_one_line(name)}" for group, name in choices)


def _list_folders(group: str, config_dir: Path | None) -> list[Path]:
    return [root / group for root in (config_dir, find_conf_folder()) if root]


def _check_folder(config_dir: Path | None) -> None:
    if config_dir and not config_dir.is_dir():
        raise UserError(f"--config-dir {config_dir}", "no such folder", "give one laid out like conf/")


def _list_names(group: str, config_dir: Path | None) -> list[str]:
    return [path.stem for folder in _list_folders(group, config_dir) for path in folder.glob("*.yaml")]


def _find_file(group: str, name: str, config_dir: Path | None) -> Path:
    composed = f"{group}={_shorten(name)}"
    places = (
        [folder / f"{name}.yaml" for folder in _list_folders(group, config_dir)] if len(name) <= _LONGEST_NAME else []
    )
    found = [place for place in places if place.is_file()]
    if len(found) > 1:  # Hydra would take the one that ships, and say nothing
        raise UserError(composed, f"both {found[0]} and one that ships are called so", "give yours another name")
    if found:
        return found[0]
    raise UserError(composed, f"no such file in conf/{group}", suggest_nearest(name, _list_names(group, config_dir)))
