"""Tests of the rules by which a study excludes points. A rule is an expression with the syntax and the meaning of
Python. A rule that cannot be evaluated is an error, and does not count as false."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.config import exclude_rules
from bench.config.exclude_rules import list_field_names
from bench.core.errors import UserError

FACTS: dict[str, Any] = {
    "model": {"name": "mt5_xl", "parameters": 3_742_619_648},
    "engine": {"name": "ddp"},
    "batch": {"micro": 4, "global": 192},
    "optimizer": {"betas": (0.9, 0.999)},
    "nodes": 3,
    "workers": 0,
    "checkpointing": True,
}
NAMES = {
    "model": ("model", "name"),
    "engine": ("engine", "name"),
    "optimizer": ("optimizer",),
    **{name: tuple(name.split(".")) for name in (
        "model.parameters", "engine.stage", "batch.micro", "batch.global", "optimizer.betas", "nodes", "workers",
        "checkpointing",
    )},
}  # fmt: skip


def holds(text: str) -> bool:
    return exclude_rules.parse_rule(text, NAMES).holds(FACTS)


def refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        holds(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("engine == 'ddp' and model in ['mt5_xl', 'mt5_xxl']", True),
        ("engine != 'ddp' or model not in ('mt5_xl', 'mt5_xxl')", False),
        ("batch.global % (batch.micro * nodes) != 0", False),
        ("nodes * 8 * batch.micro > 64", True),
        ("not checkpointing and model.parameters > 3e9", False),
        ("1 < nodes <= 3 != 4", True),
        ("-nodes + 7 // 2 == 0 - 7 % 7", True),
        ("optimizer.betas == [0.9, 0.999]", True),
        ("checkpointing == true and checkpointing != False", True),
        ("engine.stage == null and not engine.stage", True),
        ("engine.stage in [2, 3]", False),
        ("engine.stage != null and engine.stage > 1", False),
        ("batch.micro\n  == 4", True),
    ],
)
def test_rules_have_their_expected_values(text: str, expected: bool) -> None:
    assert holds(text) is expected


numbers = st.sampled_from(["nodes", "workers", "micro", "3", "-2", "0.5"])
terms = st.recursive(numbers, lambda t: st.tuples(t, st.sampled_from("+-*"), t).map(lambda p: f"({' '.join(p)})"))
comparisons = st.lists(terms, min_size=2, max_size=3).flatmap(
    lambda sides: st.lists(
        st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), min_size=len(sides) - 1, max_size=len(sides) - 1
    ).map(lambda signs: sides[0] + "".join(f" {sign} {side}" for sign, side in zip(signs, sides[1:], strict=True)))
)
rules = st.recursive(
    comparisons,
    lambda r: st.tuples(r, st.sampled_from([" and ", " or "]), r).map("".join) | r.map(lambda text: f"not ({text})"),
)


@given(rules)
def test_rules_have_the_values_of_python_expressions(text: str) -> None:
    values = {"nodes": 3, "workers": 0, "micro": 4}
    names = {name: (name,) for name in values}
    assert exclude_rules.parse_rule(text, names).holds(values) is bool(eval(text, values.copy()))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "open('x')", "[n for n in [1]]", "(lambda: 1)()", "nodes if nodes else 1",
        "2 ** 64 > nodes", "nodes @ 2 == 1", "nodes << 3 == 1", "~nodes == 1", "+nodes == 1", "model[0] == 'm'",
        "f'{nodes}' == '3'", "nodes is 3", "b'x' == model", "1j == nodes", "... == nodes", "{1: 2} == nodes",
        "[*optimizer.betas] == []", "(nodes := 3) == 3", "'a'.upper == 'A'",
    ],
)  # fmt: skip
def test_unsupported_syntax_is_refused_with_the_supported_one(text: str) -> None:
    error = refusal(text)
    assert error.startswith(f"exclude: {text}: `")
    assert "is not allowed; write names, numbers, 'words' and [lists] with and, or, not, in" in error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "exclude: : not an expression"),
        ("nodes >", "not an expression"),
        ("nodes = 3", "not an expression"),
        ("a\0b", "not an expression"),
        ("not " * 5000 + "checkpointing", "too deeply nested; write several rules"),
        ("(" * 500 + "nodes" + ")" * 500, "not an expression"),
        ("bacth.micro == 4", "`bacth.micro` is no name of a point; did you mean batch.micro?"),
        ("nodes > 3 and batch.globl > 4", "`batch.globl` is no name of a point; did you mean batch.global?"),
        ("xyzzy == 4", "`xyzzy` is no name of a point; see conf/config.yaml and the files of its groups"),
        ("model > 3", "'mt5_xl' is not a number; compare it with ==, != or in"),
        ("model * 3 == 3", "'mt5_xl' is not a number"),
        ("checkpointing < 3", "true is not a number"),
        ("model == 3", "'mt5_xl' and 3 can never be equal"),
        ("nodes in [1, 'ddp']", "3 and 'ddp' can never be equal"),
        ("engine in 'ddp'", "'ddp' is not a list; write [one, or, several]"),
        ("batch.global - 4", "188 is neither true nor false; compare it with a value"),
        ("nodes and checkpointing", "3 is neither true nor false; compare it with a value"),
        ("optimizer == 3", "a section with keys of its own and 3 can never be equal"),
        ("engine.stage > 1", "null is not a number; put `NAME != null and` before it"),
        ("nodes % workers == 0", "integer modulo by zero; put `NAME != 0 and` before it"),
        ("batch.global / (batch.micro - 4) > 1", "division by zero; put `NAME != 0 and` before it"),
    ],
)  # fmt: skip
def test_meaningless_rule_is_refused_in_one_line(text: str, expected: str) -> None:
    assert expected in refusal(text)


def test_unknown_name_is_found_before_points_are_evaluated() -> None:
    with pytest.raises(UserError, match=r"`engine\.stag` is no name of a point; did you mean engine\.stage\?"):
        exclude_rules.parse_rule("nodes == 1 or engine.stag == 1", NAMES)


def test_rule_of_2000_terms_takes_a_second_and_a_longer_one_is_refused() -> None:
    begin = time.process_time()
    exclude_rules.parse_rule(" or ".join(f"batch.micro == {number}" for number in range(2000)), list_field_names())
    assert time.process_time() - begin < 1
    with pytest.raises(UserError, match="a rule of 53,996 characters; the maximum is 50,000"):
        exclude_rules.parse_rule(" or ".join(["batch.micro == 1"] * 2700), list_field_names())
