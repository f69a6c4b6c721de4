"""Compose the points (configurations) of a study from Hydra's YAML files and a user's overrides. This is the only
module that uses Hydra.

Hydra composes the group files once for all points that share them, and the result is converted to plain dicts.
Overrides are set in these dicts. Decoding the dicts into frozen pydantic models then checks everything before any
process starts.
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
    with_objective,
)
from bench.config.exclude_rules import ExcludeRule, collect_fields, collect_fields_of_tree, list_field_names
from bench.core.errors import UserError, suggest_nearest
from bench.core.field_errors import format_in_one_line
from bench.core.files import check_config_dir, find_conf_folder, format_reason, read_yaml
from bench.core.spec import config_id
from bench.core.study import Overrides, Pair, Study, expand_study

# Log a warning once per key and value, because every point of a study repeats them.
_warn_once = functools.cache(logging.getLogger(__name__).warning)

_LONGEST_NAME = 200
"""Maximum length of the name of a group file, in characters. A longer name may exceed the 255 bytes that file systems
allow."""
GROUPS = ("model", "adapter", "objective", "engine", "data", "measure", "machine", "launcher")


class StudyPoint(NamedTuple):
    """A point of a study: one configuration to be measured."""

    composed: Request
    overrides: tuple[Pair, ...]  # from the study and the user, in the order of the axes
    config_id: str
    turn: int = 0  # index of the first rule in the study's `first` that holds; the number of rules if none holds


class Expansion(NamedTuple):
    """Points (configurations) of a study, and the numbers of points that were excluded or merged."""

    points: list[StudyPoint]
    excluded: dict[str, int]  # number of points by rule; a point counts for the first rule that holds
    merged: int  # number of points with the same spec and machine as an earlier point


def parse_overrides(overrides: Sequence[str]) -> list[tuple[str, list[Any]]]:
    """Parse overrides in Hydra's grammar. Return (key, values) pairs; a list with commas, such as a=1,2, gives several
    values."""
    parser, parsed = OverridesParser.create(), []
    for text in overrides:
        shown = format_in_one_line(text)
        try:
            override = _parse_override(parser, text)
        except _NOT_PARSED as error:
            rule = f"not an override ({_explain_syntax(shown, error)})"
            raise UserError(shown, rule, "write KEY=VALUE, quoted for the shell") from error
        key, swept = override.key_or_group, override.is_sweep_override()
        if not key:
            raise UserError(shown, "not an override", "write KEY=VALUE")
        if override.is_delete():
            raise UserError(shown, "keys cannot be deleted", f"set {key}=null")
        if swept and override.value_type not in (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP):
            raise UserError(shown, "not a list", "separate the values with commas")
        values = override.sweep_iterator() if swept else [override.value()]
        # Hydra wraps a quoted string in an object with the attribute `text`.
        parsed.append((key, [getattr(value, "text", value) for value in values]))
    return parsed


_UNEXPECTED = re.compile(
    r"(?:(?:extraneous|mismatched) input|no viable alternative at input|token recognition error at:) '(?P<text>.*?)'"
)
"""Beginning of an error message of Hydra's parser. The rest of the message lists the grammar's names of the expected
tokens."""


def _explain_syntax(shown: str, error: Exception) -> str:
    """Return the reason why Hydra's parser refused an override. `shown` is the override in one line, and `error` is the
    parser's error. The error's message may list names of tokens in Hydra's grammar. These names are omitted."""
    if re.search(r"(?:^|[,\[({])\s*,|,\s*$", shown.partition("=")[2]):
        return "an empty value before or after a comma"
    reason = format_reason(error)
    if not (found := _UNEXPECTED.match(reason)):
        return reason
    if found["text"] == "<EOF>" or shown.endswith(found["text"]):
        return "it ends too early, for example without a closing bracket or quote"
    return f"unexpected {found['text']!r}"


_NOT_PARSED = HydraException, ValueError, RecursionError
"""Errors that Hydra's parser raises. ValueError is raised for numbers of 5,000 digits, RecursionError for many unclosed
brackets."""
_LIST_ITEM = re.compile(r"""\s*("[^"]*"|'[^']*'|[^,]+)""")


def _parse_override(parser: OverridesParser, text: str) -> Override:
    """Parse one override.

    If Hydra's grammar refuses an override of a launcher option, parse it again with its strings quoted. Scheduler
    options such as `--gres=gpu:8` contain a `=`, which Hydra refuses in a value without quotes.
    """
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
    """Parse the overrides of one run. Raise UserError for a list of values with commas."""
    rule, remedy = "is a list of values, which only sweeps support", "use `zeroscale sweep`, or choose one value"
    return require_single(parse_overrides(overrides), rule, remedy)


def require_single(parsed: Overrides, rule: str, remedy: str) -> list[Pair]:
    """Return the value of each key. Raise UserError, with this `rule` and `remedy`, for a key with several values."""
    for key, values in parsed:
        if len(values) != 1:
            raise UserError(f"{key}={','.join(map(str, values))}", rule, remedy)
    return [(key, value) for key, (value,) in parsed]


def compose_request(pairs: Sequence[Pair], config_dir: Path | None = None) -> Request:
    """Compose and decode one configuration from its overrides. Raise UserError for the first error in it."""
    return decode(_build_tree(pairs, config_dir), dict(pairs).get("launcher"))


def compose_points(
    study: Study,
    overrides: Overrides,
    config_dir: Path | None = None,
    device: Callable[[Request], str | None] = lambda composed: None,
    check: Callable[[Request, str | None], None] = check,
) -> Expansion:
    """Decode and check every point of a study that no exclude rule removes, in the order of the study's axes. The
    user's `overrides` take precedence over the study's values.

    `device(request)` returns the kind of device of a point ("cpu", "cuda" or None if unknown), which is passed to
    `check`. A caller that starts no job passes the function `check_rank`, which does not apply the launcher's rules.
    Points with the same spec and machine are merged into the first of them. Such points arise, for example, if an axis
    sets an option that has no effect for one of the engines. Raise UserError for points that differ only in the
    launcher, or in properties of a machine, since merging would ignore all values but the first.
    """
    rules, first = (
        [exclude_rules.parse_rule(text, list_field_names()) for text in texts] for texts in (study.exclude, study.first)
    )
    excluded, merged = dict.fromkeys((rule.text for rule in rules), 0), 0
    found: dict[tuple[str, str], StudyPoint] = {}
    expanded = expand_study(study, overrides)
    for pairs in expanded:
        composed = _decode_or_exclude(pairs, config_dir, rules)
        if isinstance(composed, ExcludeRule):
            excluded[composed.text] += 1
        # Compare the machine as well: it is not part of the config_id, but a run on another machine is another run.
        elif (run := (config_id(composed.spec), composed.machine.name)) in found:
            _check_merged(found[run], composed, pairs, expanded)
            merged += 1
        else:
            check(composed, device(composed))
            known = collect_fields(composed) if first else {}
            turn = next((number for number, rule in enumerate(first) if rule.holds(known)), len(first))
            found[run] = StudyPoint(composed, pairs, run[0], turn)
    if not found:
        left = f"none of its {len(expanded)} points is left"
        raise UserError(f"study={study.name}", left, "change axes or exclude in its file")
    return Expansion(list(found.values()), excluded, merged)


def _check_merged(
    kept: StudyPoint, composed: Request, pairs: Sequence[Pair], expanded: Sequence[Sequence[Pair]]
) -> None:
    """Raise UserError if a point has the same spec and machine as the point `kept`, but another launcher or other
    properties of the machine. The error names the first key whose value differs between these two points, and lists the
    values of this key in all `expanded` points."""
    machine, options = composed.machine, composed.launcher_options
    earlier = kept.composed
    if (earlier.machine, earlier.launcher, earlier.launcher_options) == (machine, composed.launcher, options):
        return
    known = dict(kept.overrides)
    key = next(
        key for key, value in pairs if key.partition(".")[0] in ("machine", "launcher") and known.get(key) != value
    )
    values = list({repr(value): value for one in expanded for name, value in one if name == key}.values())
    rule = "not part of a configuration, so its values make no separate points"
    group, _, name = key.partition(".")
    is_decimal = isinstance(getattr(machine if group == "machine" else options, name, None), float)
    texts = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    remedy = "give one value at a time"
    if is_decimal and len(texts) == 2 and all(map(str.isdecimal, texts)):  # perhaps a decimal comma
        remedy = f"write {key}={'.'.join(texts)} for a decimal number, or {remedy}"
    raise UserError(f"{key}={','.join(texts)}", rule, remedy)


def _decode_or_exclude(
    pairs: Sequence[Pair], config_dir: Path | None, rules: Sequence[ExcludeRule]
) -> Request | ExcludeRule:
    """Decode a point. If an exclude rule holds for the point, return the first such rule instead."""
    tree = _build_tree(pairs, config_dir)
    try:
        composed = decode(tree, dict(pairs).get("launcher"))
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
    """Read the study conf/study/<name>.yaml, or the study file at the path `name`."""
    is_path = name.endswith((".yaml", ".yml"))
    path = Path(name) if is_path else _find_file("study", name, config_dir)
    if is_path and not path.exists():
        rule = "no such file"
        raise UserError(_format_choice("study", name), rule, "give the path of a file, or a name of conf/study")
    plain = read_yaml(path, "study" if is_path else _format_choice("study", name))
    return decode_model(Study, plain, "study")


# ---------------------------------------- the plain tree of a point


def _build_tree(pairs: Sequence[Pair], config_dir: Path | None) -> dict[str, Any]:
    """Return the config of a point as plain dicts: the composed files of its config groups, in which the point's values
    are set."""
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
    # Resolve after all values are set, because an interpolation may name any of them.
    tree = _resolve(tree) if unresolved else tree
    if isinstance(protocol := tree.get("measure"), Mapping):
        tree = {**tree, "measure": _rename_old_keys(protocol)}
    # Choose the default objective after the values are set, because it depends on the model's family.
    if not any(key.partition(".")[0] == "objective" for key, _ in pairs):
        tree = dict(with_objective(tree))
    return fill_in_devices(fit_engine(tree, {key for key, _ in pairs}), dict(choices).get("launcher"))


_OLD_KEYS = {
    "min_s": ("is called measure.window_s", "window_s"),
    "max_steps": ("no longer used; set measure.window_s and measure.min_steps", None),
    "width": ("no longer used; set measure.window_s, and repeats for precision", None),
    "warmup_max_steps": ("no longer used; set measure.warmup_steps and measure.gpu_warmup_s", None),
}
"""Keys of the measurement protocol before record version 3. Each has a warning message and the key that replaced it, if
any."""


def _rename_old_keys(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """Return a measurement protocol with current key names. Log a warning for each old key."""
    renamed = {key: value for key, value in protocol.items() if key not in _OLD_KEYS}
    for key, (message, new) in _OLD_KEYS.items():
        if key in protocol:
            _warn_once(f"measure.{key}={protocol[key]}: {message}")
            renamed |= {new: protocol[key]} if new else {}
    return renamed


def _merge(old: Any, new: Any) -> Any:
    """Return `old`, updated with the values of the nested mapping `new`. Unchanged sub-trees are shared and not copied.
    Unknown keys are found later, by `decode`."""
    if not isinstance(new, dict):
        return new
    old = old if isinstance(old, dict) else {}
    return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}


def _is_unresolved(plain: Any) -> bool:
    """Return whether plain data may contain an interpolation (`${`) or a mandatory value (`???`), which only OmegaConf
    can resolve."""
    # Searching the text is fast, and a false positive costs only time.
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
    """Compose the chosen group files. Return the config tree, and True if it may contain unresolved interpolations.

    The tree is cached, so callers must not change it.
    """
    check_config_dir(config_dir)
    for group, name in choices:
        _check_group_file(group, name, config_dir)
    tree = _compose_each(choices, config_dir) or _compose_by_hydra(choices, config_dir)
    return tree, _is_unresolved(tree)


def _compose_each(choices: tuple[tuple[str, str], ...], config_dir: Path | None) -> dict[str, Any] | None:
    """Return the config tree of the chosen group files, built from one Hydra tree per file. Return None if a file may
    change the keys of another group, or if only one file is chosen.

    Hydra takes 80 ms for a tree, and a study uses far fewer files than combinations of files. Composing each file once
    is therefore faster than composing each combination.
    """
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
    """Return whether any group file may set keys of another group, or choose a file depending on another group's
    choice."""
    files = (path for group in GROUPS for folder in _list_folders(group, config_dir) for path in folder.rglob("*.yaml"))
    texts = (path.read_bytes() for path in files if path.is_file())
    return any(b"@package" in text or (b"defaults" in text and b"${" in text) for text in texts)


@functools.cache
def _compose_by_hydra(choices: tuple[tuple[str, str], ...], config_dir: Path | None) -> dict[str, Any]:
    overrides = [f"{group}={name}" for group, name in choices]
    shown = " ".join(_format_choice(group, name) for group, name in choices)
    if config_dir:
        # Hydra's grammar parses this value, so quotes and backslashes in the path are escaped.
        path = str(config_dir.resolve()).replace("\\", "\\\\").replace("'", "\\'")
        overrides.append(f"hydra.searchpath=['file://{path}']")
    try:
        # version_base=None selects the behaviour of the installed Hydra version, without a warning.
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
    """Raise UserError if a group file is unreadable. The check is cached, so that a study reads each file once."""
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
        rule = f"both {found[0]} and a file that ships with zeroscale have this name"
        raise UserError(_format_choice(group, name), rule, "rename your file")
    if found:
        return found[0]
    remedy = suggest_nearest(name, _list_names(group, config_dir))
    raise UserError(_format_choice(group, name), f"no such file in conf/{group}", remedy)
