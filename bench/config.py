"""From Hydra's YAML and a user's overrides to decoded points: the only user of Hydra.

Hydra composes a choice of group files, once for all points that share it, and is left at once for plain dicts; values
are set on those, and one decode into frozen models checks everything, before any process starts.
"""

import contextlib
import functools
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

from bench import constraints, yaml_file
from bench.constraints import Rule
from bench.decode import Request, check, decode, in_one_line, model, with_devices, with_objective
from bench.errors import UserError, nearest
from bench.facts import facts, facts_of_tree, names
from bench.presets import conf_dir
from bench.spec import config_id
from bench.study import Overrides, Pair, Study, expand

__all__ = [
    "GROUPS", "Expansion", "Pair", "Point", "Request", "check", "conf_dir", "parse", "points", "request", "single",
    "study",
]  # fmt: skip

_LONGEST_NAME = 200
"""Of a group's file: file systems take 255 bytes."""
GROUPS = ("model", "objective", "engine", "data", "measure", "machine", "launcher")


class Point(NamedTuple):
    """One point of a study that is to be measured."""

    asked: Request
    overrides: tuple[Pair, ...]  # what the study and the user set, the axes in their order
    config_id: str
    turn: int = 0  # which of the study's `first` rules holds for it; their number where none does


class Expansion(NamedTuple):
    """A study's points, and what became of the others."""

    points: list[Point]
    excluded: dict[str, int]  # how many each rule left out; where several hold, the first is counted
    merged: int  # points that are the same run as an earlier one


def parse(overrides: Sequence[str]) -> list[tuple[str, list[Any]]]:
    """Parse overrides of Hydra's grammar into keys and their values, more than one for a comma list."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError, RecursionError) as error:  # numbers of 5,000 digits, brackets without end
            rule = f"not an override ({yaml_file.reason(error)})"
            raise UserError(_shown(text), rule, "write KEY=VALUE, quoted for the shell") from error
        if not override.key_or_group:
            raise UserError(_shown(text), "not an override", "write KEY=VALUE")
        parsed.append((override.key_or_group, _values(override)))
    return parsed


def _shown(text: str) -> str:
    """Return what was given as a message shows it: in one line, and not all of it where it is long."""
    return in_one_line(text if len(text) <= 100 else f"{text[:100]} …")


def _values(override: Override) -> list[Any]:
    if override.is_delete():
        raise UserError(_shown(str(override.input_line)), "nothing can be deleted", f"set {override.key_or_group}=null")
    if override.is_sweep_override():
        if override.value_type not in (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP):
            raise UserError(_shown(str(override.input_line)), "not a list", "write the values with commas between them")
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
    return decode(_tree(pairs, config_dir))


def points(
    study: Study,
    overrides: Overrides,
    config_dir: Path | None = None,
    device: Callable[[Request], str | None] = lambda asked: None,
    check: Callable[[Request, str | None], None] = check,
) -> Expansion:
    """Decode and check every point of a study that no rule leaves out, in the order of its axes; `overrides` win.

    `device` tells which kind of device a point would run on, as `check` takes it; a plan that starts nothing leaves the
    launcher's rules out with `check_rank`. Points that are one run on one
    machine, such as those along an axis that changes nothing for an engine, are merged into the first.
    """
    rules, first = ([constraints.read(text, names()) for text in texts] for texts in (study.exclude, study.first))
    excluded, merged = dict.fromkeys((rule.text for rule in rules), 0), 0
    found: dict[tuple[str, str], Point] = {}
    expanded = expand(study, overrides)
    for pairs in expanded:
        asked = _asked(_tree(pairs, config_dir), rules)
        if isinstance(asked, Rule):
            excluded[asked.text] += 1
        elif (run := (config_id(asked.spec), asked.machine.name)) in found:
            merged += 1
        else:
            check(asked, device(asked))
            found[run] = Point(asked, pairs, run[0], _turn(asked, first))
    if not found:
        left = f"none of its {len(expanded)} points is left"
        raise UserError(f"study={study.name}", left, "see axes and exclude in its file")
    return Expansion(list(found.values()), excluded, merged)


def _asked(tree: Mapping[str, Any], rules: Sequence[Rule]) -> Request | Rule:
    """Decode a point, or return the first rule that leaves it out."""
    try:
        asked = decode(tree)
    except UserError:  # what cannot be, such as a batch that does not divide, may be left out all the same
        known = facts_of_tree(tree)
        for rule in rules:
            with contextlib.suppress(UserError):
                if rule.holds(known):
                    return rule
        raise
    known = facts(asked) if rules else {}
    return next((rule for rule in rules if rule.holds(known)), asked)


def _turn(asked: Request, first: Sequence[Rule]) -> int:
    """Return the number of the first rule that holds for a point, or of all rules if none does."""
    known = facts(asked) if first else {}
    return next((number for number, rule in enumerate(first) if rule.holds(known)), len(first))


def study(name: str, config_dir: Path | None = None) -> Study:
    """Read conf/study/<name>.yaml, or the file itself where `name` is a path to one."""
    of_file = name.endswith((".yaml", ".yml"))
    path = Path(name) if of_file else _find("study", name, config_dir)
    called = "study" if of_file else f"study={in_one_line(name)}"
    decoded: Study = model(Study, yaml_file.read(path, called), "study")
    return decoded


def _tree(pairs: Sequence[Pair], config_dir: Path | None) -> dict[str, Any]:
    """Return the plain tree of a point: its group files composed, and its values set."""
    choices = tuple((key, value) for key, value in pairs if key in GROUPS)
    for group, name in choices:
        if not isinstance(name, str):
            raise UserError(f"{group}={name}", f"names no file in conf/{group}", nearest("", _names(group, config_dir)))
    tree, unresolved = _composed(choices, config_dir)
    for key, value in pairs:
        if key not in GROUPS:
            nested = functools.reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value)
            tree = _merged(tree, nested)
            unresolved = unresolved or _unresolved(value)
    tree = _resolved(tree) if unresolved else tree
    if not any(key.partition(".")[0] == "objective" for key, _ in pairs):
        tree = dict(with_objective(tree))
    return with_devices(tree)


def _merged(old: Any, new: Any) -> Any:
    """Return `old` with a mapping's values set, whether or not it has the keys: what nobody knows is found by the
    decode, with its neighbours. What is not set is shared with `old`."""
    if not isinstance(new, dict):
        return new
    old = old if isinstance(old, dict) else {}
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def _unresolved(plain: Any) -> bool:
    """Whether there is, or seems to be, an interpolation or a mandatory value: OmegaConf's to deal with."""
    text = repr(plain)
    return "${" in text or "???" in text


def _resolved(tree: dict[str, Any]) -> dict[str, Any]:
    try:
        plain = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(str(error.full_key), str(error).splitlines()[0], "set it on the command line") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@functools.cache
def _composed(choices: tuple[tuple[str, str], ...], config_dir: Path | None) -> tuple[dict[str, Any], bool]:
    """Compose a choice of group files, once: it costs 60 ms. Return the tree, which is not to be changed, and whether
    something in it is to be resolved."""
    _check_folder(config_dir)
    for group, name in choices:
        yaml_file.read(_find(group, name, config_dir), f"{group}={in_one_line(name)}")
    overrides = [f"{group}={name}" for group, name in choices]
    if config_dir:
        path = str(config_dir.resolve()).replace("\\", "\\\\").replace("'", "\\'")
        overrides.append(f"hydra.searchpath=['file://{path}']")
    try:
        with initialize_config_dir(str(conf_dir().resolve()), version_base=None):
            tree = hydra_compose("config", overrides)
        plain = OmegaConf.to_container(tree, resolve=False)
    except Exception as error:  # Hydra raises whatever it likes for files that it cannot put together
        raise UserError(
            _named(choices), yaml_file.reason(error), "correct the file, or those in its defaults"
        ) from error
    assert isinstance(plain, dict)
    for group in GROUPS:
        if not isinstance(plain.get(group), dict):
            rule = f"leaves no keys for {group}"
            raise UserError(_named(choices), rule, "let the file begin without `@package`, and with keys of its group")
    return {str(key): value for key, value in plain.items()}, _unresolved(plain)


def _named(choices: Sequence[tuple[str, str]]) -> str:
    return " ".join(f"{group}={in_one_line(name)}" for group, name in choices)


def _folders(group: str, config_dir: Path | None) -> list[Path]:
    return [root / group for root in (config_dir, conf_dir()) if root]


def _check_folder(config_dir: Path | None) -> None:
    if config_dir and not config_dir.is_dir():
        raise UserError(f"--config-dir {config_dir}", "no such folder", "give one laid out like conf/")


def _names(group: str, config_dir: Path | None) -> list[str]:
    return [path.stem for folder in _folders(group, config_dir) for path in folder.glob("*.yaml")]


def _find(group: str, name: str, config_dir: Path | None) -> Path:
    asked = f"{group}={_shown(name)}"
    places = [folder / f"{name}.yaml" for folder in _folders(group, config_dir)] if len(name) <= _LONGEST_NAME else []
    found = [place for place in places if place.is_file()]
    if len(found) > 1:  # Hydra would take the one that ships, and say nothing
        raise UserError(asked, f"both {found[0]} and one that ships are called so", "give yours another name")
    if found:
        return found[0]
    raise UserError(asked, f"no such file in conf/{group}", nearest(name, _names(group, config_dir)))
