"""Exclude rules: expressions in a study's file that exclude points, and the names that a rule may use.

    engine == 'ddp' and model in ['mt5_xl', 'mt5_xxl']
    batch.global % (batch.micro * world_size) != 0

The library simpleeval evaluates the rules, with an allow list of operators. A rule that cannot be evaluated is reported
as an error, and does not count as false. For example, a rule uses an unknown name, compares a text with a number by
`<`, or uses null in a calculation.
"""

import ast
import contextlib
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from simpleeval import EvalWithCompoundTypes

from bench import data, engines, models
from bench.config.decode import Request, complete_lengths, decode_cached
from bench.core import plugins
from bench.core.errors import UserError, suggest_nearest
from bench.core.field_errors import list_models
from bench.core.machine import Machine
from bench.core.spec import RunSpec

_LONGEST = 50_000
"""Maximum length of a rule, in characters. A longer rule takes more than a second to parse."""
ALLOWED = "write names, numbers, 'words' and [lists] with and, or, not, in, == != < <= > >=, + - * / // %"
_YAML = {"true": True, "false": False, "null": None}
"""Names of YAML's constants in rules. Python's True, False and None are accepted as well."""
_KINDS: Mapping[str, Any] = {
    "null": type(None),
    "truth": bool,  # listed before number, because Python's bool is an int
    "number": int | float,
    "word": str,
    "list": list | tuple,
}

PointFields = Mapping[str, Any]
"""Values of a point (one configuration): nested mappings or objects with attributes. A dotted name such as
`batch.micro` is a path in them."""


class _RuleError(Exception):
    """Error in an exclude rule. Its two arguments are the reason and a remedy."""


def _find_kind(value: Any) -> str:
    """Return the kind of a value, such as `number`. Rules can compare two values only if both have the same kind."""
    return next((name for name, kind in _KINDS.items() if isinstance(value, kind)), "section")


def _format_value(value: Any) -> str:
    """Return a value as it is written in an exclude rule."""
    constants = {"null": "null", "truth": str(value).lower(), "section": "a section with keys of its own"}
    return constants.get(_find_kind(value)) or repr(value)


def _require_bool(value: Any) -> bool:
    if _find_kind(value) not in ("null", "truth"):
        raise _RuleError(f"{_format_value(value)} is neither true nor false", "compare it with a value")
    return bool(value)


def _on_numbers(compute: Callable[..., Any]) -> Callable[..., Any]:
    def compute_checked(*values: Any) -> Any:
        for value in values:
            if _find_kind(value) != "number":
                remedy = "put `NAME != null and` before it" if value is None else "compare it with ==, != or in"
                raise _RuleError(f"{_format_value(value)} is not a number", remedy)
        try:
            return compute(*values)
        except ArithmeticError as error:
            raise _RuleError(str(error), "put `NAME != 0 and` before it") from error

    return compute_checked


def _is_equal(left: Any, right: Any) -> bool:
    kinds = _find_kind(left), _find_kind(right)
    if "null" not in kinds and kinds[0] != kinds[1]:
        rule = f"{_format_value(left)} and {_format_value(right)} can never be equal"
        raise _RuleError(rule, "compare numbers with numbers and 'words' with 'words'")
    return bool(list(left) == list(right) if kinds == ("list", "list") else left == right)


def _is_in(value: Any, choices: Any) -> bool:
    if _find_kind(choices) != "list":
        raise _RuleError(f"{_format_value(choices)} is not a list", "write [one, or, several]")
    return any(_is_equal(value, choice) for choice in choices)


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    **{sign: _on_numbers(compute) for sign, compute in (
        (ast.Add, operator.add), (ast.Sub, operator.sub), (ast.Mult, operator.mul), (ast.Div, operator.truediv),
        (ast.FloorDiv, operator.floordiv), (ast.Mod, operator.mod), (ast.USub, operator.neg), (ast.Lt, operator.lt),
        (ast.LtE, operator.le), (ast.Gt, operator.gt), (ast.GtE, operator.ge),
    )},
    ast.Not: lambda value: not _require_bool(value),
    ast.Eq: _is_equal, ast.NotEq: lambda left, right: not _is_equal(left, right),
    ast.In: _is_in, ast.NotIn: lambda value, choices: not _is_in(value, choices),
}  # fmt: skip
# Calls, subscripts and comprehensions are not allowed, because a study's file may come from an untrusted source.
_NODES = (ast.Constant, ast.List, ast.Tuple, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare)


class ExcludeRule(NamedTuple):
    """An exclude rule whose syntax and names have been checked."""

    text: str
    expression: ast.expr
    names: Mapping[str, tuple[str, ...]]

    def holds(self, facts: PointFields) -> bool:
        """Return True if the rule excludes the point with the values `facts`. Raise UserError if the rule cannot be
        evaluated for this point."""

        def decide(node: ast.BoolOp) -> bool:
            either = any if isinstance(node.op, ast.Or) else all
            return either(_require_bool(evaluator.eval("", part)) for part in node.values)

        evaluator = EvalWithCompoundTypes(_OPERATORS, {}, lambda node: _get_field(facts, self.names[node.id]))
        # simpleeval's own `and` and `or` accept values of any kind, as in Python. Rules accept only booleans and null.
        evaluator.nodes[ast.BoolOp] = decide
        try:
            return _require_bool(evaluator.eval("", self.expression))
        except _RuleError as error:
            raise UserError(f"exclude: {self.text}", *error.args) from error
        except RecursionError as error:
            raise _build_depth_error(self.text) from error


def parse_rule(text: str, names: Mapping[str, tuple[str, ...]]) -> ExcludeRule:
    """Parse and check an exclude rule. `names` maps each dotted name that a rule may use to its path through a point's
    values. Raise UserError for an unknown name or invalid syntax."""
    text = " ".join(text.split())
    if len(text) > _LONGEST:
        rule = f"a rule of {len(text):,} characters; the maximum is {_LONGEST:,}"
        raise UserError(f"exclude: {text[:60]} …", rule, "write several rules, or lists: engine in ['ddp', 'zero0']")
    # Python cannot parse `batch.global`, because `global` is a keyword.
    source = re.sub(r"(?<=\bbatch\.)global\b", "global_", text)
    try:
        return ExcludeRule(text, _read_names(ast.parse(source, mode="eval").body, source.encode(), names), names)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"exclude: {text}", "not an expression", ALLOWED) from error
    except (RecursionError, MemoryError) as error:
        raise _build_depth_error(text) from error
    except _RuleError as error:
        raise UserError(f"exclude: {text}", *error.args) from error


def _build_depth_error(text: str) -> UserError:
    return UserError(f"exclude: {text[:60]} …", "too deeply nested", "write several rules")


def _read_names(node: ast.expr, source: bytes, names: Mapping[str, tuple[str, ...]]) -> ast.expr:
    """Return an expression tree of an exclude rule in which each dotted name, such as `batch.micro`, is a single Name
    node. `node` is the tree, or a part of it, that Python parsed from the text `source`. `names` has the allowed names
    as keys. Raise _RuleError for any other name and for syntax that is not allowed."""
    # Slice bytes, because ast counts columns in UTF-8 bytes.
    written = source[node.col_offset : node.end_col_offset].decode(errors="replace").replace("global_", "global")
    if isinstance(node, ast.Name | ast.Attribute) and re.fullmatch(r"\w+(\.\w+)*", written):
        if written in _YAML:
            return ast.Constant(_YAML[written])
        if written in names:
            return ast.Name(written)
        remedy = suggest_nearest(written, names, "see conf/config.yaml and the files of its groups")
        raise _RuleError(f"`{written}` is no name of a point", remedy)
    signs = [sign for sign in ast.iter_child_nodes(node) if isinstance(sign, ast.operator | ast.unaryop | ast.cmpop)]
    foreign = isinstance(node, ast.Constant) and _find_kind(node.value) == "section"  # bytes, complex, ...
    if not isinstance(node, _NODES) or foreign or any(type(sign) not in _OPERATORS for sign in signs):
        raise _RuleError(f"`{written}` is not allowed", ALLOWED)
    for field, value in ast.iter_fields(node):
        if isinstance(value, ast.expr):
            setattr(node, field, _read_names(value, source, names))
        elif isinstance(value, list):
            value[:] = [_read_names(one, source, names) if isinstance(one, ast.expr) else one for one in value]
    return node


def _get_field(value: Any, path: tuple[str, ...]) -> Any:
    """Return the value at the end of `path`. None if the point has no such field: `ddp`, for example, has no ZeRO
    stage."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


# ---------------------------------------- fields of a point


def collect_fields(composed: Request) -> dict[str, Any]:
    """Return the values of a decoded point, nested according to their dotted names.

    Options of the engine, defaults included, stand next to the fields that all engines share, such as `engine.stage`
    next to `engine.name`. The same holds for options of the data source. If a model has no published number of
    parameters, this number is computed.
    """
    spec = composed.spec
    family, engine = models.load(spec.model.family), engines.load(spec.engine.backend)
    source = data.load(spec.data.source)
    shape = decode_cached(family.Shape, spec.model.shape)
    return {
        **vars(spec),
        "model": {**vars(spec.model), "shape": shape, "parameters": models.count_expected_parameters(spec.model)},
        "engine": {**vars(spec.engine), **vars(decode_cached(engine.Options, spec.engine.options))},
        "data": {**vars(spec.data), **vars(decode_cached(source.Options, spec.data.options))},
        "batch": {"micro": spec.batch.micro, "accumulation": spec.accumulation, "global": spec.global_batch},
        "world_size": spec.world_size,
        "data_parallel": spec.data_parallel,
        "machine": composed.machine,
    }


def collect_fields_of_tree(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values of a point that are known although the point's config tree cannot be decoded."""
    objective, parallel = plain["objective"].get("name"), plain.get("parallel") or {}
    copy = math.prod(_count(parallel.get(name, 1)) for name in ("tensor", "pipeline"))
    world_size = _count(plain.get("nodes")) * _count(plain.get("devices_per_node")) or None
    known = {**plain, "objective": objective, "world_size": world_size}
    known["data_parallel"] = world_size // copy if world_size and copy else None
    with contextlib.suppress(UserError):
        known["sequence"] = complete_lengths(objective, plain.get("sequence"))
    return known


def _count(value: Any) -> int:
    """Return `value` if it is a positive integer, otherwise 0."""
    return value if isinstance(value, int) and value > 0 else 0


@functools.cache
def list_field_names() -> dict[str, tuple[str, ...]]:
    """Return every dotted name that an exclude rule may use, with the path of its value in a point. For example,
    `batch.micro` has the path ("batch", "micro").

    Options of all engines are included. The value of a config group's name, such as `engine`, is the name of the chosen
    file, such as `zero2`.
    """
    kinds: list[tuple[str, type[BaseModel]]] = [("", RunSpec), ("machine.", Machine)]
    kinds += [("engine.", engine.Options) for _, engine in plugins.list_usable(plugins.ENGINE)]
    kinds += [("data.", source.Options) for _, source in plugins.list_usable(plugins.DATA)]
    kinds += [("model.shape.", family.Shape) for _, family in plugins.list_usable(plugins.FAMILY)]
    objectives = plugins.list_usable(plugins.OBJECTIVE)
    known = ["world_size", "data_parallel", *(f"sequence.{kind.name}" for _, one in objectives for kind in one.KINDS)]
    known += [name for prefix, kind in kinds for name in _list_names_below(prefix, kind)]
    # Groups come last: the name of a group replaces the section of the same name.
    groups = {group: (group, "name") for group in ("model", "engine", "data", "machine")}
    return {name: tuple(name.split(".")) for name in known} | groups


def _list_names_below(prefix: str, kind: type[BaseModel]) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path
        for inner in list_models(field.annotation):
            yield from _list_names_below(f"{path}.", inner)
