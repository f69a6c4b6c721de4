"""The `zeroscale` command: a table of verbs. The module of a verb is imported when the verb is called.

A verb's module has `arguments(parser)` and `run(args) -> int`; its docstring is the help. The exit code is 0 only if
the verb did what it was called for.
"""

import argparse
import gc
import importlib
import importlib.metadata
import sys
import textwrap
import traceback
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from bench.core.errors import UserError, suggest_nearest


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, like all other errors of the command."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: --").split("=")[0].split()[0]
        from bench.config.reference.config import GROUPS  # here: it takes long to import

        remedy = f"write {unknown}=NAME" if unknown in GROUPS else f"see `{self.prog} --help`"
        raise UserError(self.prog.split()[-1], message, remedy)


class Verb(NamedTuple):
    """A verb's module, by its name, and its line in the help."""

    module: str
    summary: str


VERBS = {
    "run": Verb("bench.cli.run", "measure one point on this machine"),
    "init": Verb("bench.cli.init", "write a site file, a study and schemas to start from"),
    "sweep": Verb("bench.cli.sweep", "measure a study, or every combination of comma lists"),
    "search": Verb("bench.cli.search", "find the best point of a study's space in the fewest node-hours"),
    "status": Verb("bench.cli.status", "state of every point of a sweep, with reasons"),
    "resume": Verb("bench.cli.resume", "continue a sweep: start the points without a final answer"),
    "logs": Verb("bench.cli.logs", "logs of a point: of its ranks and of its jobs"),
    "cancel": Verb("bench.cli.cancel", "cancel the jobs of one sweep"),
    "prepare": Verb("bench.cli.prepare", "stage data and ops for nodes without a network, and check them"),
    "doctor": Verb("bench.cli.doctor", "what this machine can run, and what it lacks"),
    "predict": Verb("bench.cli.predict", "memory and time of a point, and the largest micro-batch that fits"),
    "rehearse": Verb("bench.cli.rehearse", "run one rank of a job that is larger than this machine"),
    "calibrate": Verb("bench.cli.calibrate", "measure this machine, and write its file for predictions"),
    "advise": Verb("bench.cli.advise", "which stage, micro-batch and node count to choose, why, and how sure"),
    "explain": Verb("bench.cli.explain", "meaning of a column, flag, outcome, verb or config key"),
    "completion": Verb("bench.cli.completion", "completion script for bash or zsh"),
    "table": Verb("analysis.cli.table", "one row per run, as text, Markdown, CSV or JSON"),
    "report": Verb("analysis.cli.report", "tables and figures as one page that opens offline"),
    "figures": Verb("analysis.cli.figures", "the report's figures as files for print: PDF, PNG or SVG"),
    "compare": Verb("analysis.cli.compare", "faster, slower or equal configurations of two result sets; a gate"),
    "history": Verb("analysis.cli.history", "changes of times over commits, versions or dates, as text and a page"),
    "ab": Verb("bench.cli.ab", "measure two git revisions or two environments in turn, and compare them"),
    "claims": Verb("analysis.cli.claims", "claims of the study compared with measurements, with verdicts"),
    "pack": Verb("analysis.cli.pack", "records of a study in one archive without names of users or hosts"),
    "export": Verb("analysis.cli.export", "one run per record for TensorBoard or MLflow"),
}
_USAGE_ERROR = 2
_WIDTH = 100
"""Columns of the prose in help."""
_GARBAGE = 50_000, 20, 50
"""Thresholds of Python's garbage collector. A large plan makes millions of small values with hardly a reference cycle
among them, and spent half its time in the collector. Ranks are processes of their own, with Python's thresholds."""
_FORMER = {
    "ledger": "call `zeroscale claims`",
    "predictions": "call `python -m analysis.validation` in a checkout of the repository",
}
"""Removed verbs, and what replaces them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit code."""
    gc.set_threshold(*_GARBAGE)
    words = list(sys.argv[1:] if argv is None else argv)
    # Before argparse: -v holds for errors of the parser as well, and stands before or after the verb.
    verbose = "-v" in words
    words = [word for word in words if word != "-v"]
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_format_help())
            return 0 if words else _USAGE_ERROR
        if words == ["--version"]:
            # Without an installation, as in a checkout on the path, the package has no version.
            found = [one.version for one in importlib.metadata.distributions(name="zeroscale")]
            python = ".".join(map(str, sys.version_info[:3]))
            print(f"zeroscale {found[0] if found else '(not installed)'}, Python {python}")
            return 0
        return _run_verb(words[0], words[1:])
    except UserError as error:
        return _print_refusal(str(error), verbose=verbose)
    except KeyboardInterrupt:
        print("zeroscale: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader ended, as in `zeroscale table | head`
        sys.stderr.close()  # else the interpreter reports the pipe once more at its end
        return 0
    except OSError as error:  # a file or folder of the user: full, read-only, missing, or with a name too long
        if error.filename is None and not verbose:
            raise  # a defect of the program, and not of a path
        return _print_refusal(f"{error.filename}: {error.strerror}", verbose=verbose)


def _print_refusal(message: str, *, verbose: bool) -> int:
    """Print a message in one line, without control characters of the user's input; return the exit code."""
    if verbose:
        traceback.print_exc()
    line = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in message)
    print(f"zeroscale: {line}", file=sys.stderr)
    return _USAGE_ERROR


def _run_verb(name: str, words: list[str]) -> int:
    if name in _FORMER:
        raise UserError(name, "this verb was removed", _FORMER[name])
    if name not in VERBS:
        raise UserError(name, "no such verb", suggest_nearest(name, VERBS))
    _check_words(name, words)
    verb = importlib.import_module(VERBS[name].module)
    # Prose is wrapped here; examples, which are indented, are not broken, so that they can be copied.
    texts = (verb.__doc__ or "").split("\n\n")
    paragraphs = [text if text.startswith(" ") else textwrap.fill(text, _WIDTH) for text in texts]
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(f"zeroscale {name}", description="\n\n".join(paragraphs), formatter_class=raw, allow_abbrev=False)
    verb.arguments(parser)
    # Intermixed: options may stand between overrides.
    code: int = verb.run(parser.parse_intermixed_args(words))
    return code


def _check_words(name: str, words: list[str]) -> None:
    """Raise UserError for an empty word, such as an unset variable of a shell script leaves."""
    for before, word in zip([name, *words], words, strict=False):
        option, equals, value = word.partition("=")
        if not word.strip():
            given = before if before.startswith("--") and "=" not in before else name
            raise UserError(given, "followed by an empty word", "give a value, or leave it out")
        if option.startswith("--") and equals and not value.strip():
            raise UserError(option, "has an empty value", "give one, or leave it out")


def _format_help() -> str:
    from bench.core import terminal  # here: verbs need not import it

    return "\n".join(
        [
            "usage: zeroscale VERB [KEY=VALUE …] [--help] [-v]",
            "       zeroscale --version",
            "",
            "Which ZeRO stage, micro-batch and node count for a T5, GPT-2 or Llama model, and how sure?",
            "",
            terminal.align([(name, verb.summary) for name, verb in VERBS.items()], indent=2),
            "",
            "KEY=VALUE is Hydra's grammar: the file of a group (model=mt5_base engine=zero3) or any key",
            "(batch.micro=8). `zeroscale VERB --help` shows more; -v shows the traceback of an error.",
        ]
    )
