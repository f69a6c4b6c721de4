"""Tests of mistakes in a YAML file that a user adds to a folder of conf/, such as conf/engine/mine.yaml. For each
mistake, the error message has one line with the name of the file."""

import os
import re
from pathlib import Path

import pytest

from bench.config import compose
from bench.core.errors import UserError

_BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 64))

NO_FILE: dict[str, tuple[bytes, str]] = {
    "syntax": (b"name: [", r"while parsing a flow node: .* \(line 1\)"),
    "tab": (b"name: a\n\tb: c", r"found character '\\t' that cannot start any token \(line 2\)"),
    "key twice": (b"name: a\nname: b\n", r"found duplicate key name \(line 2\)"),
    "unknown tag": (b"name: !mine x\n", "could not determine a constructor for the tag '!mine'"),
    "code": (b"name: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    "two documents": (b"name: a\n---\nname: b\n", "expected a single document"),
    "Latin-1": ("name: café\n".encode("latin-1"), "not text in UTF-8"),
    "UTF-16": ("name: a\n".encode("utf-16"), "not text in UTF-8"),
    "binary": (b"\0\1\2", "special characters are not allowed"),
    "itself": (b"name: &a [*a]\n", "contains itself, or is nested too deeply"),
    "a map in itself": (b"a: &a {b: *a}\n", "contains itself, or is nested too deeply"),
    "aliases": (_BOMB.encode(), "has more than 100,000 values after expansion of aliases"),
    "deep": (b"name: " + b"[" * 1000, "contains itself, or is nested too deeply"),
    "number": (b"3\n", "must be a mapping, with lines such as `key: value`"),
    "list": (b"[1, 2]\n", "must be a mapping, with lines such as `key: value`"),
    "word": (b"name\n", "must be a mapping, with lines such as `key: value`"),
    "empty": (b"", "must be a mapping, with lines such as `key: value`"),
    "number as key": (b"3: 4\n", "must be a mapping, with lines such as `key: value`"),
    "list as key": (b"? [a]\n: b\n", "found unhashable key"),
    "5,000 digits": (b"name: " + 5000 * b"9", "Exceeds the limit"),
    "half an interpolation": (b"name: ${\n", "no viable alternative at input"),
}
"""File contents that are invalid in every config group, each with the expected message."""
NO_GROUP: dict[str, tuple[bytes, str]] = {
    "defaults: 3": (b"defaults: 3\nname: a\n", "defaults must be a list"),
    "defaults: [3]": (b"defaults: [3]\nname: a\n", "Unsupported type in defaults"),
    "defaults of nothing": (b"defaults: [nowhere]\nname: a\n", "Could not load '.*/nowhere'"),
    "defaults of itself": (b"defaults: [mine]\nname: a\n", "contains itself"),
    "package": (b"# @package _global_\nname: a\n", "leaves no keys for"),
    "unset": (b"name: ???\n", "Missing mandatory value: name"),
    "interpolation of nothing": (b"name: ${nowhere}\n", "Interpolation key 'nowhere' not found"),
    "interpolation of itself": (b"name: ${.name}\n", ""),
}
"""Valid YAML that cannot be composed with the other config files, each with the expected message."""


def message(group: str, body: bytes, folder: Path) -> str:
    """Write a YAML file with the content `body` for the group `group` (a folder of conf/ such as `engine`). Return the
    error message, of one line, of a command that uses this file."""
    (folder / group).mkdir(parents=True)
    (folder / group / "mine.yaml").write_bytes(body)
    with pytest.raises(UserError) as caught:
        compose.compose_request([(group, "mine"), ("devices_per_node", 2)], folder)
    assert str(caught.value).isprintable(), "one line"
    assert len(str(caught.value)) < 300 + len(str(folder))
    return str(caught.value)


@pytest.mark.parametrize("group", compose.GROUPS)
def test_invalid_group_file_is_named_with_its_fault(group: str, tmp_path: Path) -> None:
    for number, (body, expected) in enumerate(NO_FILE.values()):
        folder = tmp_path / str(number)
        error = message(group, body, folder)
        assert error.startswith(f"{group}=mine: {folder}/{group}/mine.yaml: ")
        assert re.search(expected, error), error


@pytest.mark.parametrize("group", compose.GROUPS)
def test_incompatible_group_files_are_refused_in_one_line(group: str, tmp_path: Path) -> None:
    for number, (body, expected) in enumerate(NO_GROUP.values()):
        folder = tmp_path / str(number)
        error = message(group, body, folder)
        assert error.startswith((f"{group}=mine: ", f"{group}.name: "))
        assert re.search(expected, error), error


@pytest.mark.parametrize("what", NO_FILE)
def test_invalid_study_file_is_named_with_its_fault(what: str, tmp_path: Path) -> None:
    body, expected = NO_FILE[what]
    (tmp_path / "mine.yaml").write_bytes(body)
    with pytest.raises(UserError) as caught:
        compose.read_study(str(tmp_path / "mine.yaml"))
    assert str(tmp_path / "mine.yaml") in str(caught.value) and str(caught.value).isprintable()
    assert re.search(expected, str(caught.value))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_group_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").touch(mode=0)
    with pytest.raises(UserError, match=r"model/mine.yaml: Permission denied"):
        compose.compose_request([("model", "mine")], tmp_path)
