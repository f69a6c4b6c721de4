"""The `zeroscale` command: a table of verbs, each loaded when it is called.

A verb's module has `arguments(parser)` and `run(args) -> int`; the docstring is its help. Exit code 0 only when what
was asked for happened.
"""

import argparse
import gc
import importlib
import importlib.metadata
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from bench.core.errors import UserError, suggest_nearest


class _Parser(argparse.ArgumentParser):
    """One whose complaints are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: --").split("=")[0].split()[0]
        from bench.config.reference.config import GROUPS  # which only a mistake pays for

        remedy = f"write {unknown}=NAME" if unknown in GROUPS else f"see `{self.prog} --help`"
        raise UserError(self.prog.split()[-1], message, remedy)


class Verb(NamedTuple):
    module: str  # text: loading it is the verb's own cost
    summary: str


VERBS = {
    "run": Verb("bench.cli.run", "measure one point here and now"),
    "init": Verb("bench.cli.init", "write a site file, a study and schemas to begin with"),
    "sweep": Verb("bench.cli.sweep", "measure a study, or every combination of comma lists"),
    "search": Verb("bench.cli.search", "find the best point of a study's space in the fewest node-hours"),
    "status": Verb("bench.cli.status", "where every point of a sweep stands, and why"),
    "resume": Verb("bench.cli.resume", "go on with a sweep: start what has no final answer yet"),
    "logs": Verb("bench.cli.logs", "what was logged of a point: its ranks, its jobs"),
    "cancel": Verb("bench.cli.cancel", "cancel the jobs of one sweep, and no others"),
    "prepare": Verb("bench.cli.prepare", "stage data and ops for nodes without a network, and check"),
    "doctor": Verb("bench.cli.doctor", "what this machine can do, and what it lacks"),
    "predict": Verb("bench.cli.predict", "what memory and time a point needs, and the largest micro-batch that fits"),
    "rehearse": Verb("bench.cli.rehearse", "run one rank of a job that is larger than this machine"),
    "calibrate": Verb("bench.cli.calibrate", "measure this machine, and write its file for predictions"),
    "advise": Verb("bench.cli.advise", "which stage, micro-batch and node count to take, why, and how sure"),
    "explain": Verb("bench.cli.explain", "what a column, flag, outcome, verb or config key means"),
    "completion": Verb("bench.cli.completion", "a script by which bash or zsh completes what is typed"),
    "table": Verb("analysis.cli.table", "one row per run, as text, Markdown, CSV or JSON"),
    "report": Verb("analysis.cli.report", "tables and figures as one page that opens offline"),
    "figures": Verb("analysis.cli.figures", "the report's figures as files for print: PDF, PNG or SVG"),
    "compare": Verb(
        "analysis.cli.compare", "which configurations are faster, slower or the same in another set; a gate"
    ),
    "history": Verb("analysis.cli.history", "where times changed over commits, versions or dates, as text and a page"),
    "ab": Verb("bench.cli.ab", "measure two git revisions or two environments in turn, and compare them"),
    "claims": Verb("analysis.cli.claims", "the study's claims beside what was measured, with verdicts"),
    "pack": Verb("analysis.cli.pack", "the records of a study in one archive that names nobody"),
    "export": Verb("analysis.cli.export", "one run per record for TensorBoard or MLflow"),
}
_USAGE_ERROR = 2
_GARBAGE = 50_000, 20, 50
"""A command makes millions of small values that live as long as they are used, and hardly a circle among them: half the
time of a large plan went into the search for garbage. A rank is a process of its own, and keeps Python's thresholds."""
_FORMER = {
    "ledger": "call `zeroscale claims`",
    "predictions": "call `python -m analysis.validation` in a checkout of the repository",
}
"""Verbs of earlier versions, and what has taken their place."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit code."""
    gc.set_threshold(*_GARBAGE)
    words = list(sys.argv[1:] if argv is None else argv)
    verbose = "-v" in words
    words = [word for word in words if word != "-v"]
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_format_help())
            return 0 if words else _USAGE_ERROR
        if words == ["--version"]:
            print(_format_version())
            return 0
        return _run_verb(words[0], words[1:])
    except UserError as error:
        return _print_refusal(str(error), verbose=verbose)
    except KeyboardInterrupt:
        print("zeroscale: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough, as in `zeroscale table | head`
        sys.stderr.close()
        return 0
    except OSError as error:  # of a file or folder that was given: full, read-only, none, a name too long
        if error.filename is None and not verbose:
            raise
        return _print_refusal(f"{error.filename}: {error.strerror}", verbose=verbose)


def _print_refusal(message: str, *, verbose: bool) -> int:
    """Print a message in one line, whatever it repeats of what was given; return the exit code."""
    if verbose:
        traceback.print_exc()
    line = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in message)
    print(f"zeroscale: {line}", file=sys.stderr)
    return _USAGE_ERROR


def _format_version() -> str:
    python = ".".join(map(str, sys.version_info[:3]))
    try:
        return f"zeroscale {importlib.metadata.version('zeroscale')}, Python {python}"
    except importlib.metadata.PackageNotFoundError:
        return f"zeroscale, not installed, Python {python}"


def _run_verb(name: str, words: list[str]) -> int:
    if name in _FORMER:
        raise UserError(name, "no such verb any more", _FORMER[name])
    if name not in VERBS:
        raise UserError(name, "no such verb", suggest_nearest(name, VERBS))
    _check_words(name, words)
    verb = importlib.import_module(VERBS[name].module)
    parser = _Parser(
        f"zeroscale {name}",
        description=verb.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.arguments(parser)
    code: int = verb.run(parser.parse_intermixed_args(words))  # options may stand between overrides
    return code


def _check_words(name: str, words: list[str]) -> None:
    """Raise UserError for an empty word, such as a variable of a shell script leaves that was never set."""
    for before, word in zip([name, *words], words, strict=False):
        option, equals, value = word.partition("=")
        if not word.strip():
            given = before if before.startswith("--") and "=" not in before else name
            raise UserError(given, "followed by an empty word", "give a value, or leave it out")
        if option.startswith("--") and equals and not value.strip():
            raise UserError(option, "has an empty value", "give one, or leave it out")


def _format_help() -> str:
    from bench.core import terminal  # which a verb need not pay for

    return "\n".join(
        [
            "usage: zeroscale VERB [KEY=VALUE …] [--help] [-v]",
            "       zeroscale --version",
            "",
            "Which ZeRO stage, micro-batch and node count for a T5-family model, and how sure can you be?",
            "",
            terminal.align([(name, verb.summary) for name, verb in VERBS.items()], indent=2),
            "",
            "KEY=VALUE is Hydra's grammar: a group by its file's name (model=mt5_base engine=zero3) or any key",
            "(batch.micro=8). `zeroscale VERB --help` tells more; -v shows the traceback of an error.",
        ]
    )
