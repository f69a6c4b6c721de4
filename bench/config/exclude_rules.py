"""Exclude rules: which points of a study are left out, as expressions that a person reads.

    engine == 'ddp' and model in ['mt5_xl', 'mt5_xxl']
    batch.global % (batch.micro * world_size) != 0

simpleeval evaluates them, restricted to a white list. Nothing is guessed: an unknown name, an order between a word and
a number, and null where a number is needed are errors, and do not count as false.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from simpleeval import EvalWithCompoundTypes

from bench.core.errors import UserError, suggest_nearest

_LONGEST = 50_000
ALLOWED = "write names, numbers, 'words' and [lists] with and, or, not, in, == != < <= > >=, + - * / // %"
_YAML = {"true": True, "false": False, "null": None}
"""Constants as the files of conf/ write them; Python's True, False and None are understood as well."""
_KINDS: Mapping[str, Any] = {
    "null": type(None),
    "truth": bool,
    "number": int | float,
    "word": str,
    "list": list | tuple,
}

PointFields = Mapping[str, Any]
"""A point's values: mappings, or objects with attributes, nested as the names are dotted."""


class _RuleError(Exception):
    """A broken rule and a remedy."""


def _find_kind(value: Any) -> str:
    """Return what a value is to a rule; only values of one kind compare."""
    return next((name for name, kind in _KINDS.items() if isinstance(value, kind)), "section")


def _format_value(value: Any) -> str:
    """Return a value as a rule would write it."""
    constants = {"null": "null", "truth": str(value).lower(), "section": "a section with keys of its own"}
    return constants.get(_find_kind(value)) or repr(value)


def _require_bool(value: Any) -> bool:
    if _find_kind(value) not in ("null", "truth"):
        raise _RuleError(f"{_format_value(value)} is neither true nor false", "compare it with something")
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
        rule = f"{_format_value(left)} and {_format_value(right)} never are equal"
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
_NODES = (ast.Constant, ast.List, ast.Tuple, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare)


class ExcludeRule(NamedTuple):
    """A rule that was read and checked."""

    text: str
    expression: ast.expr
    names: Mapping[str, tuple[str, ...]]

    def holds(self, facts: PointFields) -> bool:
        """Whether the rule holds at a point; UserError where it has no sense there."""

        def decide(node: ast.BoolOp) -> bool:
            either = any if isinstance(node.op, ast.Or) else all
            return either(_require_bool(evaluator.eval("", part)) for part in node.values)

        evaluator = EvalWithCompoundTypes(_OPERATORS, {}, lambda node: _get_field(facts, self.names[node.id]))
        evaluator.nodes[ast.BoolOp] = decide
        try:
            return _require_bool(evaluator.eval("", self.expression))
        except _RuleError as error:
            raise UserError(f"exclude: {self.text}", *error.args) from error
        except RecursionError as error:
            raise _build_depth_error(self.text) from error


def parse_rule(text: str, names: Mapping[str, tuple[str, ...]]) -> ExcludeRule:
    """Return the rule that `text` writes. `names` are the dotted names it may use, each with its path through the
    values of a point. Raise UserError for anything else."""
    text = " ".join(text.split())
    if len(text) > _LONGEST:
        rule = f"a rule of {len(text):,} characters, and at most {_LONGEST:,} are read"
        raise UserError(f"exclude: {text[:60]} …", rule, "write several rules, or lists: engine in ['ddp', 'zero0']")
    # `batch.global` is no Python name: `global` is a keyword
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
    """Return an expression whose dotted names are one node each; _RuleError for an unknown name, and for what a rule
    must not hold."""
    written = source[node.col_offset : node.end_col_offset].decode(errors="replace").replace("global_", "global")
    if isinstance(node, ast.Name | ast.Attribute) and re.fullmatch(r"\w+(\.\w+)*", written):
        if written in _YAML:
            return ast.Constant(_YAML[written])
        if written not in names:
            close = suggest_nearest(written, names)
            remedy = close if close.startswith("did you mean") else "see conf/config.yaml and the files of its groups"
            raise _RuleError(f"`{written}` is no name of a point", remedy)
        return ast.Name(written)
    signs = [sign for sign in ast.iter_child_nodes(node) if isinstance(sign, ast.operator | ast.unaryop | ast.cmpop)]
    foreign = isinstance(node, ast.Constant) and _find_kind(node.value) == "section"  # bytes, ...
    if not isinstance(node, _NODES) or foreign or any(type(sign) not in _OPERATORS for sign in signs):
        raise _RuleError(f"`{written}` is not allowed", ALLOWED)
    for field, value in ast.iter_fields(node):
        if isinstance(value, ast.expr):
            setattr(node, field, _read_names(value, source, names))
        elif isinstance(value, list):
            value[:] = [_read_names(one, source, names) if isinstance(one, ast.expr) else one for one in value]
    return node


def _get_field(value: Any, path: tuple[str, ...]) -> Any:
    """Return what lies at the end of `path`: None where a point has no such thing, as ddp has no stage."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value
