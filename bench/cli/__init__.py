"""The program `zeroscale`: a table of its commands. The module of a command is imported when the command is called.

Each module has `arguments(parser)`, which declares the options of its command, and `run(args) -> int`, which returns
the exit code. The module's docstring is the text of `--help`. The exit code is 0 only if the command succeeded.
"""

import argparse
import difflib
import gc
import importlib
import importlib.metadata
import itertools
import logging
import re
import sys
import textwrap
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from bench.core import installed_plugins
from bench.core.errors import Interrupted, UserError, suggest_nearest

_WRONG_TYPE = re.compile(r"argument (?P<option>\S+): invalid (?P<type>int|float) value: '(?P<value>.*)'", re.DOTALL)
_WRONG_CHOICE = re.compile(
    r"argument (?P<option>\S+): invalid choice: '(?P<value>.*)' \(choose from (?P<choices>.*)\)", re.DOTALL
)
_UNKNOWN_OPTION = re.compile(r"unrecognized arguments: --(?P<name>[^\s=]+)(=(?P<value>\S*))?")
"""Patterns of argparse's error messages. Their wording is that of Python's standard library."""


class _Parser(argparse.ArgumentParser):
    """Argparse parser that reports an error in one line, like all other errors of the command."""

    words: Sequence[str] = ()  # the arguments of the user

    def error(self, message: str) -> NoReturn:
        if found := _WRONG_TYPE.fullmatch(message):
            rule = "must be an integer" if found["type"] == "int" else "must be a number"
            raise UserError(f"{found['option']} {found['value']}", rule, f"see `{self.prog} --help`")
        if found := _WRONG_CHOICE.fullmatch(message):
            choices = re.findall(r"[^', ]+", found["choices"])
            remedy = suggest_nearest(found["value"], choices)
            raise UserError(f"{found['option']} {found['value']}", "is not one of the choices", remedy)
        remedy = f"see `{self.prog} --help`"
        if unknown := _UNKNOWN_OPTION.match(message):
            remedy = self._suggest_option(unknown["name"], unknown["value"])
        raise UserError(self.prog.split()[-1], message, remedy)

    def _suggest_option(self, name: str, value: str | None) -> str:
        """Return a remedy for an option that this command does not have: the config group of this name, or the most
        similar option."""
        from bench.config.reference import GROUPS  # here: it takes long to import
        from bench.core.files import find_group_files

        if self.prog.endswith(" explain"):
            return f"write the name without dashes: {self.prog} {name}"
        if name not in GROUPS:
            known = {option.lstrip("-") for option in self._option_string_actions}
            near = next(iter(difflib.get_close_matches(name, {*known, *GROUPS}, n=1, cutoff=0.65)), "")
            shown = f"--{near}" if near in known else f"{near}=NAME"
            return f"did you mean {shown}?" if near else f"see `{self.prog} --help`"
        value = value or dict(itertools.pairwise(self.words)).get(f"--{name}", "")
        files = find_group_files(name)
        if value in files or not value or value.startswith("-") or "--config-dir" in self.words:
            return f"write {name}={'NAME' if not value or value.startswith('-') else value}"
        near = suggest_nearest(value, files, f"`zeroscale explain {name}` lists them")
        folder = " (--results DIR names the folder of results)" if name == "study" else ""
        return f"{name}=NAME selects a file of conf/{name}, and {value} is none of them{folder}; {near}"


COMMANDS = {
    "run": "measure one configuration on this machine",
    "init": "write starter files of your own: launcher, study, JSON schemas for editors",
    "sweep": "measure every configuration of a study, or every combination of comma lists",
    "search": "search a study's space for the best configuration, with few node-hours",
    "status": "show the state of every configuration of a sweep, with reasons",
    "resume": "continue a sweep: run the configurations that have no final result yet",
    "logs": "print the logs of a configuration: of its ranks and of its jobs",
    "cancel": "cancel the jobs of one sweep",
    "prepare": "fetch data and build DeepSpeed ops for nodes without a network, and check both",
    "doctor": "check what this machine can run, and what is missing",
    "predict": "predict memory and step time of a configuration, and its largest micro-batch",
    "rehearse": "run one rank of a job that is larger than this machine; simulate the other ranks",
    "calibrate": "measure this machine, and write a machine file for predictions",
    "advise": "choose stage, micro-batch and node count, with reasons and certainty",
    "explain": "explain a column, flag, outcome, command, option or config key",
    "completion": "print a completion script for bash or zsh",
    "table": "print a table with one row per run, as text, Markdown, CSV or JSON",
    "report": "write tables and figures as one HTML page that opens offline",
    "figures": "write the report's figures as files for print: PDF, PNG or SVG",
    "compare": "compare two result sets: faster, slower and equal configurations; gate for CI",
    "history": "find changes of step times over commits, versions or dates",
    "ab": "measure two git revisions or two environments in turn, and compare them",
    "claims": "compare the claims of the ZeRO scaling study with measurements",
    "pack": "pack the records of a study into one archive without names of users or hosts",
    "export": "write records for TensorBoard or MLflow, or the trials of a search for Optuna's dashboard",
}
"""One-line summary of each command in `zeroscale --help`."""
_OF_ANALYSIS = {"table", "report", "figures", "compare", "history", "claims", "pack", "export"}
"""Commands whose modules are in the package `analysis.cli`. Those of the other commands are in `bench.cli`."""
_USAGE_ERROR = 2
_WIDTH = 100
"""Width of the paragraphs in `--help`, in columns."""
_GARBAGE = 50_000, 20, 50
"""Thresholds of Python's garbage collector for the command. A large plan creates millions of small objects with hardly
any reference cycles, and Python's default thresholds spent half of its time in the collector. Ranks are separate
processes and keep Python's default thresholds."""
_FORMER = {
    "ledger": "use `zeroscale claims`",
    "predictions": "run `python -m analysis.validation` in a checkout of the repository",
}
"""Names of removed commands, each with the command that replaces it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the command line names; return its exit code."""
    gc.set_threshold(*_GARBAGE)
    words = list(sys.argv[1:] if argv is None else argv)
    # Remove -v before argparse runs: it also applies to parser errors, and may stand before or after the command.
    verbose = "-v" in words
    words = [word for word in words if word != "-v"]
    if verbose:
        logging.getLogger(installed_plugins.__name__).setLevel(logging.DEBUG)
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_format_help())
            return 0 if words else _USAGE_ERROR
        if words == ["--version"]:
            # A checkout on the path that is not installed has no version.
            found = [one.version for one in importlib.metadata.distributions(name="zeroscale")]
            python = ".".join(map(str, sys.version_info[:3]))
            print(f"zeroscale {found[0] if found else '(not installed)'}, Python {python}")
            return 0
        return _run_command(words[0], words[1:])
    except UserError as error:
        _print_refusal(str(error), verbose=verbose)
        return error.exit_code
    except KeyboardInterrupt as error:
        if not isinstance(error, Interrupted):
            print("zeroscale: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reading program ended first, as in `zeroscale table | head`
        sys.stderr.close()  # otherwise the interpreter reports the broken pipe again at exit
        return 0
    except OSError as error:  # the user's file system: full, read-only, missing file, name too long
        if error.filename is None and not verbose:
            raise  # a defect of the program: the error concerns no path
        return _print_refusal(f"{error.filename}: {error.strerror}", verbose=verbose)


def _print_refusal(message: str, *, verbose: bool) -> int:
    """Print an error message in one line with control characters escaped; return the exit code for a usage error."""
    if verbose:
        traceback.print_exc()
    line = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in message)
    print(f"zeroscale: {line}", file=sys.stderr)
    return _USAGE_ERROR


def _run_command(name: str, words: list[str]) -> int:
    if name in _FORMER:
        raise UserError(name, "this command was removed", _FORMER[name])
    if name not in COMMANDS:
        raise UserError(name, "no such command", suggest_nearest(name, COMMANDS))
    _check_words(name, words)
    words = _join_negative_values(words)
    # Intermixed parsing lets options stand between overrides.
    parser = build_parser(name)
    parser.words = words
    args = parser.parse_intermixed_args(words)
    code: int = import_command(name).run(args)
    return code


def import_command(name: str) -> ModuleType:
    """Return the module of a command."""
    return importlib.import_module(f"{'analysis' if name in _OF_ANALYSIS else 'bench'}.cli.{name}")


def build_parser(name: str) -> _Parser:
    """Return the parser of a command. The command's module is imported."""
    command = import_command(name)
    # Wrap only prose. Examples are indented and are not broken, so that they can be copied.
    texts = (command.__doc__ or "").split("\n\n")
    paragraphs = [text if text.startswith(" ") else textwrap.fill(text, _WIDTH) for text in texts]
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(f"zeroscale {name}", description="\n\n".join(paragraphs), formatter_class=raw, allow_abbrev=False)
    command.arguments(parser)
    return parser


def _join_negative_values(words: list[str]) -> list[str]:
    """Return the arguments with each negative value joined to its option, as in `--gate=-3%`. argparse would take a
    value such as `-3%` for an unknown option."""
    joined: list[str] = []
    for word in words:
        if joined and re.fullmatch(r"--[\w-]+", joined[-1]) and re.match(r"-\.?\d", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _check_words(name: str, words: list[str]) -> None:
    """Raise UserError for an empty argument. A shell script passes an empty argument if one of its variables is
    unset."""
    for before, word in zip([name, *words], words, strict=False):
        option, equals, value = word.partition("=")
        if not word.strip():
            given = before if before.startswith("--") and "=" not in before else name
            raise UserError(given, "is followed by an empty argument", "add a value, or remove the empty argument")
        if option.startswith("--") and equals and not value.strip():
            raise UserError(option, "has an empty value", "add a value, or remove the option")


def _format_help() -> str:
    from bench.core import terminal  # here: commands need not import it

    return "\n".join(
        [
            "usage: zeroscale COMMAND [KEY=VALUE …] [--help] [-v]",
            "       zeroscale --version",
            "",
            "Which ZeRO stage, micro-batch and node count for a T5, GPT-2 or Llama model, and how sure?",
            "",
            terminal.align(list(COMMANDS.items()), indent=2),
            "",
            "KEY=VALUE follows Hydra's grammar. It selects the file of a config group (model=mt5_base engine=zero3)",
            "or sets a key (batch.micro=8). `zeroscale COMMAND --help` shows more. -v prints an error's traceback.",
        ]
    )
