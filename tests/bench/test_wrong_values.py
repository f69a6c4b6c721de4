"""Tests that a wrong value of any key is reported in one line, with the value, the rule and a remedy. The line must not
contain a message of pydantic."""

import functools
import re
from collections.abc import Iterator

import pytest
import yaml
from pydantic_core._pydantic_core import list_all_errors

from bench.cli.explain import list_explanations
from bench.config import compose
from bench.config.decode import PLUGIN_GROUPS
from bench.config.reference import KeySection, list_sections
from bench.core.errors import UserError
from bench.core.files import find_group_files
from bench.core.study import Pair

WRONG = ("@@", -1.5e300, 7, True, None, [[]], {"a b": [1]}, float("nan"))
"""Values of every kind. No key accepts all of them."""
PYDANTIC = re.compile(
    "|".join(
        {
            re.escape(words)
            for error in list_all_errors()
            if len(words := error["message_template_python"].partition("{")[0].strip()) > 10
        }
    ),
    re.IGNORECASE,
)
"""Beginnings of all messages that pydantic has."""


def list_choices(section: KeySection) -> list[Pair]:
    """Return the override that makes the keys of a section valid, if the section belongs to a plug-in. The override
    selects this plug-in. It is returned as a list with one pair, such as ("engine", "zero1"): a group, and the name of
    a file in this group's folder of conf/. Return an empty list for any other section."""
    if not section.plugin:
        return []
    group = section.group
    for name, path in find_group_files(group).items():
        plain = yaml.safe_load(path.read_text())
        if plain.get(PLUGIN_GROUPS[group].names) == section.plugin:
            return [(group, name)]
    return [(group, "hugging_face")] if group == "model" else []


def list_cases() -> Iterator[tuple[list[Pair], str]]:
    for section in list_sections():
        for key in section.keys if section.group != "study" else ():
            yield list_choices(section), key.path


def list_refusals(choices: list[Pair], key: str) -> Iterator[UserError]:
    common = [*choices, ("machine.device", "cpu"), ("devices_per_node", 1)]
    for value in WRONG:
        try:
            compose.compose_request([*(pair for pair in common if pair[0] != key), (key, value)])
        except UserError as error:
            yield error


@functools.cache
def list_names() -> set[str]:
    return {one.name for one in list_explanations()}


@pytest.mark.parametrize(("choices", "key"), [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in list_cases()])
def test_wrong_value_is_reported_with_rule_and_remedy(choices: list[Pair], key: str) -> None:
    refusals = list(list_refusals(choices, key))
    assert refusals, "some of these values must be wrong"
    for error in refusals:
        text = str(error)
        assert text.isprintable() and not PYDANTIC.search(text), text
        assert (
            re.match(r".+(: | not | with | without | divides | needs ).+; .+", text) and key.partition(".")[0] in text
        ), text
        for name in re.findall(r"`zeroscale explain ([^`]*)`", text):
            assert name in list_names(), text
