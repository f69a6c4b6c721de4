"""Exclude rules: which points of a study are left out, as expressions that a person reads and nothing evaluates.

    engine == 'ddp' and model in ['mt5_xl', 'mt5_xxl']
    batch.global % (batch.micro * world_size) != 0

Python's parser reads the text; a white list of what may stand in it becomes nested functions, once for thousands of
points. Nothing is guessed: a name that does not exist, an order between a word and a number, a part that is null where
a number is needed are told, not taken for false.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bench.errors import UserError, suggest_nearest

_LONGEST = 50_000

PointFields = Mapping[str, Any]
"""A point's values: mappings, or objects with attributes, nested as the names are dotted."""
Expression = Callable[[PointFields], Any]
"""A part of a rule: its value at a point."""

ALLOWED = "write names, numbers, 'words' and [lists] with and, or, not, in, == != < <= > >=, + - * / // %"
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_YAML = {"true": True, "false": False, "null": None}
"""Constants as the files of conf/ write them; Python's True, False and None are understood as well."""

_KINDS: dict[str, Any] = {
    "null": type(None), "truth": bool, "number": int | float, "word": str, "list": list | tuple,
}  # fmt: skip


class ExcludeRule(NamedTuple):
    """A rule that was read and checked."""

    text: str
    part: Expression

    def holds(self, facts: PointFields) -> bool:
        """Whether the rule holds at a point; UserError where it has no sense there."""
        try:
            return _require_bool(self.part(facts), self.text)
        except _RuleError as error:
            raise UserError(f"exclude: {self.text}", *error.args) from error


class _RuleError(Exception):
    """A rule and a remedy."""


def parse_rule(text: str, names: Mapping[str, tuple[str, ...]]) -> ExcludeRule:
    """Return the rule that `text` writes. `names` are the dotted names it may use, each with its way through the facts
    of a point. Raise UserError for anything else."""
    text = " ".join(text.split())
    if len(text) > _LONGEST:
        rule = f"a rule of {len(text):,} characters, and at most {_LONGEST:,} are read"
        raise UserError(f"exclude: {text[:60]} …", rule, "write several rules, or lists: engine in ['ddp', 'zero0']")
    # `batch.global` is no Python name: `global` is a keyword
    source = re.sub(r"(?<=\bbatch\.)global\b", "global_", text)
    try:
        return ExcludeRule(text, _ExpressionBuilder(source, names).part(ast.parse(source, mode="eval").body))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"exclude: {text}", "not an expression", ALLOWED) from error
    except (RecursionError, MemoryError) as error:
        raise UserError(f"exclude: {text[:60]} …", "too deeply nested", "write several rules") from error
    except _RuleError as error:
        raise UserError(f"exclude: {text}", *error.args) from error


class _ExpressionBuilder:
    """Turns the parser's nodes into functions, those on the white list only."""

    def __init__(self, source: str, names: Mapping[str, tuple[str, ...]]) -> None:
        self._source, self._names = source.encode(), names

    def part(self, node: ast.expr) -> Expression:
        match node:
            case ast.Constant(value=str() | int() | float() | None as value):
                return lambda facts: value
            case ast.Name() | ast.Attribute():
                return self._name(node)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                parts = [self.part(element) for element in elements]
                return lambda facts: [part(facts) for part in parts]
            case ast.BoolOp():
                return self._boolean(node)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._not(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                part, text_of = self.part(operand), self._get_source(operand)
                return lambda facts: -_require_number(part(facts), text_of)
            case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
                return self._arithmetic(node, _ARITHMETIC[type(op)])
            case ast.Compare():
                return self._comparison(node)
        raise _RuleError(f"`{self._get_source(node)}` is not allowed", ALLOWED)

    def _get_source(self, node: ast.expr) -> str:
        """Return a part of the rule as it was written."""
        part = self._source[node.col_offset : node.end_col_offset]  # one line, whose bytes are what offsets count
        return part.decode(errors="replace").replace("global_", "global")

    def _name(self, node: ast.Name | ast.Attribute) -> Expression:
        name = self._get_source(node)
        if name in _YAML:
            return lambda facts: _YAML[name]
        if not re.fullmatch(r"\w+(\.\w+)*", name):
            raise _RuleError(f"`{name}` is not allowed", ALLOWED)
        if name not in self._names:
            close = suggest_nearest(name, self._names)
            remedy = close if close.startswith("did you mean") else "see conf/config.yaml and the files of its groups"
            raise _RuleError(f"`{name}` is no name of a point", remedy)
        path = self._names[name]
        return lambda facts: _get_field(facts, path)

    def _boolean(self, node: ast.BoolOp) -> Expression:
        parts = [(self.part(value), self._get_source(value)) for value in node.values]
        decide = all if isinstance(node.op, ast.And) else any
        return lambda facts: decide(_require_bool(part(facts), text_of) for part, text_of in parts)

    def _not(self, operand: ast.expr) -> Expression:
        part, text_of = self.part(operand), self._get_source(operand)
        return lambda facts: not _require_bool(part(facts), text_of)

    def _arithmetic(self, node: ast.BinOp, compute: Callable[[Any, Any], Any]) -> Expression:
        left, right = self.part(node.left), self.part(node.right)
        text_of_left, text_of_right, text_of = (
            self._get_source(node.left),
            self._get_source(node.right),
            self._get_source(node),
        )

        def value(facts: PointFields) -> Any:
            try:
                return compute(_require_number(left(facts), text_of_left), _require_number(right(facts), text_of_right))
            except ArithmeticError as error:
                raise _RuleError(f"`{text_of}`: {error}", f"put `{text_of_right} != 0 and` before it") from error

        return value

    def _comparison(self, node: ast.Compare) -> Expression:
        operands = [(self.part(operand), self._get_source(operand)) for operand in (node.left, *node.comparators)]
        tests = [self._test(op) for op in node.ops]

        def value(facts: PointFields) -> bool:
            sides = [(part(facts), text_of) for part, text_of in operands]
            return all(test(*left, *right) for test, left, right in zip(tests, sides, sides[1:], strict=False))

        return value

    def _test(self, op: ast.cmpop) -> Callable[[Any, str, Any, str], bool]:
        if type(op) in _ORDER:
            ordered = _ORDER[type(op)]
            return lambda a, text_of_a, b, text_of_b: ordered(
                _require_number(a, text_of_a), _require_number(b, text_of_b)
            )
        if isinstance(op, ast.Is | ast.IsNot):
            raise _RuleError("`is` is not allowed", ALLOWED)
        test = _is_in if isinstance(op, ast.In | ast.NotIn) else _is_equal
        expected = isinstance(op, ast.In | ast.Eq)
        return lambda a, text_of_a, b, text_of_b: test(a, text_of_a, b, text_of_b) is expected


def _get_field(value: Any, path: tuple[str, ...]) -> Any:
    """Return what lies at the end of `path`: None where a point has no such thing, as ddp has no stage."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def _require_bool(value: Any, text_of: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise _RuleError(f"`{text_of}` is {_format_value(value)}, neither true nor false", "compare it with something")
    return bool(value)


def _require_number(value: Any, text_of: str) -> int | float:
    if value is None:
        raise _RuleError(f"`{text_of}` is null at a point", f"put `{text_of} != null and` before it")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _RuleError(f"`{text_of}` is {_format_value(value)}, not a number", "compare it with ==, != or in")
    return value


def _is_equal(left: Any, text_of_left: str, right: Any, text_of_right: str) -> bool:
    kinds = _find_kind(left), _find_kind(right)
    if "null" not in kinds and kinds[0] != kinds[1]:
        what = f"`{text_of_left}` is {_format_value(left)} and `{text_of_right}` is {_format_value(right)}"
        raise _RuleError(f"{what}: they never are equal", "compare numbers with numbers and 'words' with 'words'")
    return bool(list(left) == list(right) if kinds == ("list", "list") else left == right)


def _is_in(value: Any, text_of: str, choices: Any, text_of_choices: str) -> bool:
    if _find_kind(choices) != "list":
        raise _RuleError(f"`{text_of_choices}` is {_format_value(choices)}, not a list", "write [one, or, several]")
    return any(_is_equal(value, text_of, choice, text_of_choices) for choice in choices)


def _find_kind(value: Any) -> str:
    """Return what a value is to a rule; only values of one kind compare."""
    return next((name for name, kind in _KINDS.items() if isinstance(value, kind)), "section")


def _format_value(value: Any) -> str:
    """Return a value as a rule would write it."""
    constants = {"null": "null", "truth": str(value).lower(), "section": "a section with keys of its own"}
    return constants.get(_find_kind(value)) or repr(value)
