"""Tests of `zeroscale completion`, which completes commands in bash and zsh."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.cli import COMMANDS
from bench.cli.completion import build_script
from bench.core.errors import UserError

Complete = Callable[..., list[str]]

_ASK = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _zeroscale 2>/dev/null; echo "${COMPREPLY[@]}"'


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Complete:
    """Function that returns the completions that bash offers for a command line. The command line is given as a
    sequence of words, of which the last is unfinished."""
    if not shutil.which("bash"):
        pytest.skip("no bash here")
    script = tmp_path_factory.mktemp("shell") / "zeroscale.bash"
    script.write_text(build_script("bash"))

    def ask(*words: str) -> list[str]:
        command = ["bash", "-c", _ASK, "ask", str(script), "zeroscale", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    return ask


def test_completion_of_verbs(complete: Complete) -> None:
    assert complete("") == list(COMMANDS)
    assert complete("re") == [name for name in COMMANDS if name.startswith("re")]


def test_completion_of_options_and_their_choices(complete: Complete) -> None:
    assert "--dry-run" in complete("run", "--")
    assert complete("table", "--form") == ["--format"]
    assert complete("table", "--format", "") == ["text", "md", "csv", "json"]
    assert complete("completion", "") == ["bash", "zsh"]


def test_completion_of_config_groups_as_bash_splits_words(complete: Complete) -> None:
    assert complete("run", "mod")[:1] == ["model.attention="] and "model=" in complete("run", "mod")
    files = sorted(path.stem for path in Path("conf/engine").glob("*.yaml"))
    assert [word for word in complete("run", "engine", "=") if word] == files
    assert complete("sweep", "seed=1", "study", "=", "smo") == ["smoke"]


def test_completion_of_config_keys(complete: Complete) -> None:
    assert complete("predict", "batch.mi") == ["batch.micro="]
    assert complete("report", "batch.mi") == []


def test_completion_of_names_to_explain(complete: Complete) -> None:
    assert complete("explain", "tokens_per_s_") == ["tokens_per_s_high", "tokens_per_s_low"]


def test_missing_shtab_is_reported_in_one_line_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(UserError, match="needs the package shtab; install it: pip install shtab"):
        build_script("bash")


_TYPE = """
zmodload zsh/zpty
zpty -b shell 'env PS1= TERM=dumb zsh -f -i'
zpty -w shell 'autoload -U compinit; compinit -D -u; source '"$1"'; setopt nolistbeep noautomenu'
zpty -w shell 'zeroscale() { print -r -- "<${(j:|:)@}>" }; echo REA""DY'
zpty -r shell seen '*READY*'
zpty -w shell "$2"$'\\t'"$3"
zpty -r shell seen '*<*>*'
print -r -- "${${seen##*<}%%>*}"
"""
"""Script for zsh. It starts a shell that has sourced `$1`, types `$2`, the key TAB and `$3`, and prints the words that
the command receives."""


@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh here")
def test_zsh_adds_a_space_after_a_complete_word(tmp_path: Path) -> None:
    script = tmp_path / "zeroscale.zsh"
    script.write_text(build_script("zsh"))

    def type_words(words: str, then: str) -> list[str]:
        command = ["zsh", "-f", "-c", _TYPE, "type", str(script), f"zeroscale {words}", then]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip().split("|")

    assert type_words("stat", "X") == ["status", "X"]
    assert type_words("predict batch.mi", "4") == ["predict", "batch.micro=4"]
    assert type_words("run engine=fsdp_hy", " X") == ["run", "engine=fsdp_hybrid", "X"]
    assert type_words("table --form", "csv") == ["table", "--format", "csv"]
    assert type_words("completion z", "") == ["completion", "zsh"]
