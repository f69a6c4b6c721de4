"""`zeroscale completion`: what bash offers for what has been typed."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.cli.completion import build_script
from bench.cli import VERBS

Complete = Callable[..., list[str]]

_ASK = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _zeroscale; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Complete:
    """Ask bash what it offers for words, the last of which is not finished."""
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


def test_verbs(complete: Complete) -> None:
    assert complete("") == list(VERBS)
    assert complete("re") == [verb for verb in VERBS if verb.startswith("re")]


def test_options_of_a_verb_and_their_choices(complete: Complete) -> None:
    assert "--dry-run" in complete("run", "--")
    assert complete("table", "--form") == ["--format"]
    assert complete("table", "--format", "") == ["text", "md", "csv", "json"]
    assert complete("completion", "") == ["bash", "zsh"]


def test_groups_with_their_files_as_bash_takes_words_apart(complete: Complete) -> None:
    assert complete("run", "mod")[:1] == ["model.attention="] and "model=" in complete("run", "mod")
    assert complete("run", "engine", "=") == sorted(path.stem for path in Path("conf/engine").glob("*.yaml"))
    assert complete("run", "engine", "=", "zero1,zero3,d") == ["zero1,zero3,ddp"]


def test_groups_with_their_files_as_zsh_has_words(complete: Complete) -> None:
    assert complete("sweep", "study=smo") == ["study=smoke"]
    assert complete("sweep", "engine=zero0,dd") == ["engine=zero0,ddp"]


def test_keys_of_verbs_that_take_them(complete: Complete) -> None:
    assert complete("predict", "batch.mi") == ["batch.micro="]
    assert complete("report", "batch.mi") == []


def test_names_to_explain(complete: Complete) -> None:
    assert complete("explain", "tokens_per_s_") == ["tokens_per_s_high", "tokens_per_s_low"]


def test_the_script_for_zsh_uses_what_zsh_has_for_bash() -> None:
    assert "bashcompinit" in build_script("zsh") and "bashcompinit" not in build_script("bash")
