"""Explain the name of a column, flag, note, outcome, figure, plug-in, command, option, config key,
config group, word of advise or of reports, file of conf/ or rented node type.

  zeroscale explain tokens_per_s
  zeroscale explain oom short batch.micro
  zeroscale explain max-queued deadline
  zeroscale explain engine
  zeroscale explain model=mt5_xl a3-highgpu-8g
  zeroscale explain machine=my_h100 --config-dir my

Without a name, the command lists all names. The last part of a key or file suffices, such as
`micro` for batch.micro. Options are written without their dashes.
"""

import argparse
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.cli import options
from bench.core import terminal
from bench.core.errors import UserError, suggest_nearest


class Explanation(NamedTuple):
    """Meaning of a name, with further details, as `zeroscale explain` prints it."""

    name: str
    kind: str  # such as "column"
    meaning: str
    details: tuple[tuple[str, str], ...] = ()  # further (label, text) pairs; empty texts are not shown


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="names to explain; default: list all names")
    options.add_json(parser)
    options.add_config_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Print the meaning of each name in `args.names`, or a list of all names, and return 0. Raise UserError if
    zeroscale has no such name."""
    known = list(list_explanations(args.config_dir))
    found = [one for name in args.names for one in _find(name, known)] if args.names else known
    if args.json:
        print(json.dumps([{**one._asdict(), "details": dict(one.details)} for one in found], indent=1))
    elif args.names:
        print("\n\n".join(map(_format, found)))
    else:
        by_kind = {one.kind: "  ".join(dict.fromkeys(other.name for other in found if other.kind == one.kind))
                   for one in found}  # fmt: skip
        print("\n\n".join(f"{kind}:\n{_fill(names)}" for kind, names in by_kind.items()))
    return 0


def _find(name: str, known: Sequence[Explanation]) -> list[Explanation]:
    """Return every meaning of a name. Exact names come first, then options, config keys and files whose last part is
    this name. If there is none, return the meanings of names that differ in case only, such as `mfu` for MFU. Raise
    UserError for an unknown name."""
    from analysis.columns import describe

    found = _match(name, known, str) or _match(name, known, str.casefold)
    if not found and (derived := describe(name)):  # such as `ratio_low`, the end of an interval
        found = [_explain(name, "column of derived tables", derived.meaning, unit=derived.unit)]
    if not found:
        names = {one.name for one in known} | {_get_last_part(one.name) for one in known}
        rule = "no column, flag, outcome, figure, plug-in, command, option, config key or file of conf/ has this name"
        raise UserError(name, rule, suggest_nearest(name, names, "`zeroscale explain` lists all names"))
    return found


def _match(name: str, known: Sequence[Explanation], fold: Callable[[str], str]) -> list[Explanation]:
    """Return every meaning of a name. Names are compared after `fold` was applied to them."""
    wanted = fold(name)
    # Full names come first: `micro` is a column as well as the last part of `batch.micro`.
    found = [one for one in known if fold(one.name) == wanted]
    word = wanted.replace("-", "_")  # a parameter of the Python interface has the underscores of its option
    last = (one for one in known if fold(one.name) != wanted)
    return [*found, *(one for one in last if fold(_get_last_part(one.name)).replace("-", "_") == word)]


def _get_last_part(name: str) -> str:
    """Return the last part of a name: `micro` for `batch.micro`, `mt5_xl` for `model=mt5_xl`, `out` for `--out`."""
    return re.split(r"[.=]", name)[-1].removeprefix("--")


def _format(one: Explanation) -> str:
    """Return a name with its kind, meaning and details as text."""
    texts = [one.meaning, *(f"{label}: {value}" for label, value in one.details)]
    return "\n".join([f"{one.name} ({one.kind})", *(_fill(inspect.cleandoc(text)) for text in texts if text)])


def _fill(text: str) -> str:
    return textwrap.fill(text, terminal.WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


# ---------------------------------------- all names, each from the module that defines it

_GROUPS = {
    "model": "the model to train: family and sizes; choose a file, such as model=mt5_base",
    "adapter": "the trained part of the model: all parameters, or adapters; choose a file, such as adapter=lora",
    "engine": "the training engine and its options: DDP, ZeRO, FSDP2, pipeline; choose a file, such as engine=zero3",
    "objective": "the training objective; choose a file, such as objective=causal_lm",
    "data": "the training data and their options; choose a file, such as data=text",
    "measure": "the measurement protocol: length of warm-up and window; choose a file, such as measure=quick",
    "machine": "the hardware with its peak rates, for MFU and predictions; choose a file, such as machine=h100",
    "launcher": "how and where processes start, and time limits of runs; choose a file, such as launcher=slurm",
    "study": "a set of configurations that answers one question; run one: zeroscale sweep study=smoke",
    "batch": "batch sizes: samples per forward pass and per optimizer step",
    "sequence": "tokens per sample by kind, such as sequence.encoder=512",
    "parallel": "how ranks share one copy of the model",
    "optimizer": "the optimizer and its settings: AdamW, AdamW in 8 bits or Adafactor",
    "learning": "training on a number of tokens, with evaluation; without learning.tokens, only steps are measured",
}
"""Descriptions of the groups of config keys, by group."""
_REPORT_WORDS = {
    "n": "number of independent repeats of a configuration whose times are used",
    "rival": "a configuration that is compared with the fastest configuration of the same question",
    "tie": "a rival that is equal to the fastest configuration within 3 %, or whose difference is not detectable",
    "speed-up": "samples per second, divided by those on the smallest measured number of nodes",
    "efficiency": "samples per second and node, divided by those on the smallest measured number of nodes",
    "serial fraction": "share of a step that more nodes do not shorten, computed from the speed-up (Karp and Flatt, "
    "1990); above 1 if steps take longer on more nodes",
    "goodput": "share of a training's time that is progress; the rest is lost to failures, restarts and checkpoints",
}
"""Meanings of words in reports and answers that are not columns."""
_STATES = {
    "answered": "the run has a final outcome",
    "running": "an attempt at the run is under way",
    "pending": "a job in the scheduler's queue has the run",
    "waiting": "no job has the run; `zeroscale resume` starts it, or the autopilot of the sweep",
    "given up": f"the allowed attempts at the run failed; {options.TRY_AGAIN}",
    "unknown": "a job has the run, but the scheduler was not asked or did not respond",
}
"""Meanings of the states of a sweep's runs."""


def list_explanations(config_dir: Path | None = None) -> Iterator[Explanation]:
    """Yield all explanations of `zeroscale explain`. The explanations cover commands (their names, options, words of
    `advise`), results (columns, flags, notes, outcomes, figures, words of reports) and configs (groups, keys, files,
    plug-ins). Config files are those of zeroscale and those in the user's folder `config_dir`."""
    from analysis.columns import DERIVED, list_all_columns
    from analysis.figures import list_figures
    from analysis.flags import FLAGS, NO_MEASUREMENT, NOTES, OUTCOMES, REMEDIES
    from bench.cli import COMMANDS
    from bench.config.reference import GROUPS, list_sections
    from bench.core.files import find_group_files
    from bench.core.record import FINAL
    from bench.sweep.advise.questions import list_words

    for name, summary in COMMANDS.items():
        yield _explain(name, "command", summary, see=f"zeroscale {name} --help")
    yield from _list_options()
    yield from (_explain(name, "word of advise", meaning) for name, meaning in list_words().items())
    yield from (_explain(name, "word of reports", meaning) for name, meaning in _REPORT_WORDS.items())
    yield from (_explain(name, "state of a run", meaning) for name, meaning in _STATES.items())
    sections = list(list_sections())
    for name, meaning in _GROUPS.items():
        files = ", ".join(find_group_files(name, config_dir)) if name in GROUPS else ""
        keys = [key.path for one in sections for key in one.keys if key.path.startswith(f"{name}.")]
        yield _explain(name, "group of config keys", meaning, files=files, keys=", ".join(dict.fromkeys(keys)))
    for column in list_all_columns().values():
        better = "" if column.better == "neither" else column.better
        yield _explain(column.name, "column", column.meaning, unit=column.unit, better_is=better)
    for name, derived in DERIVED.items():
        yield _explain(name, "column of derived tables", derived.meaning, unit=derived.unit)
    for kind, known in (("flag", FLAGS), ("note", NOTES)):
        for name, flag in known.items():
            counts = "excluded from all summaries" if name in NO_MEASUREMENT else ""
            yield _explain(name, kind, f"the run {flag.meaning}", what_to_do=REMEDIES[name], counts=counts)
    for outcome, meaning in OUTCOMES.items():
        yield _explain(outcome, "outcome", meaning, tried_again="no" if outcome in FINAL else "yes")
    yield from (_explain(one.name, "figure", one.title) for one in list_figures())
    yield from _list_plugins()
    for section in sections:
        kind = "key of a study file" if section.group == "study" else "config key"
        kind += f" of {section.group} {section.plugin}" if section.plugin else ""
        for key in section.keys:
            yield _explain(key.path, kind, key.meaning, type=key.type.replace("`", ""), default=key.default)
    for group in GROUPS:
        files_of_group = find_group_files(group, config_dir).values()
        yield from (_explain_file(group, file) for file in files_of_group)
    yield from _list_offers(config_dir)


def _list_plugins() -> Iterator[Explanation]:
    """Yield every engine, family, objective, data source and launcher, also those of installed packages. Broken
    plug-ins are skipped."""
    from bench.core import plugins

    kinds: tuple[plugins.Kind[Any], ...] = (
        plugins.ENGINE,
        plugins.FAMILY,
        plugins.OBJECTIVE,
        plugins.DATA,
        plugins.LAUNCHER,
    )
    for kind in kinds:
        for name, module in plugins.list_usable(kind):
            # The members of a family, for example, are in its module `shape`; its docstring is that of the package.
            package = sys.modules[module.__name__.removesuffix(f".{kind.part}")]
            first = inspect.cleandoc(package.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
            yield _explain(name, f"{kind.name} plug-in", first, module=package.__name__, select=f"{kind.key}={name}")


def _list_options() -> Iterator[Explanation]:
    """Yield every option of every command. Commands in which an option has the same meaning share one explanation."""
    from bench.cli import COMMANDS, build_parser

    commands: dict[tuple[str, str], list[str]] = {}
    for command in COMMANDS:
        for action in build_parser(command)._actions:
            if action.option_strings and not isinstance(action, argparse._HelpAction):
                commands.setdefault((action.option_strings[0], options.describe_argument(action)), []).append(command)
    for (name, meaning), names in sorted(commands.items()):
        yield _explain(name, "option", meaning, of=", ".join(names))


def _explain(name: str, kind: str, meaning: str, **details: str) -> Explanation:
    shown = tuple((label.replace("_", " "), text) for label, text in details.items() if text)
    return Explanation(name, kind, meaning, shown)


def _explain_file(group: str, file: Path) -> Explanation:
    """Return the description of a file of conf/: the comment at its top or, without such a comment, its `source`
    field."""
    text = file.read_text(encoding="utf-8", errors="replace")
    comments = re.match(r"(?:#[^\n]*\n)*", text)
    lines = [line.strip("# ") for line in comments[0].splitlines()] if comments else []
    source = re.search(r'^source: "?(.*?)"?$', text, flags=re.MULTILINE)
    meaning = " ".join(lines) or (f"by {source[1]}" if source and source[1] else "")
    return Explanation(f"{group}={file.stem}", f"file of conf/{group}", meaning)


def _list_offers(config_dir: Path | None) -> Iterator[Explanation]:
    """Yield every rented node type of the machine files, with its prices and their source."""
    from bench.core.formatting import format_count
    from bench.core.machine import list_offers

    for machine, offer in list_offers(config_dir):
        spot = offer.spot_price_per_hour
        yield _explain(
            offer.machine_type, "rented node type",
            f"a node of {offer.provider} with {format_count(offer.devices, 'device')} of {machine}",
            price_per_hour=f"{offer.price_per_hour:g} {offer.currency} in {offer.region}",
            spot=f"{spot:g} {offer.currency} an hour" if spot else "price unknown",
            source=f"{offer.source}; read {offer.date}",
        )  # fmt: skip
