"""Say what a name means: a column, a flag, a note, an outcome, a figure, a verb, a config key, a file of conf/.

  zeroscale explain tokens_per_s
  zeroscale explain oom short batch.micro
  zeroscale explain
  zeroscale explain model=mt5_xl

Without a name it lists all of them. A key may be given by its last part, as in `micro`.
"""

import argparse
import inspect
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from bench.core.errors import UserError, suggest_nearest

if TYPE_CHECKING:
    from bench.cli.explanations import Explanation


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="what is to be explained; default: list all names")
    parser.add_argument("--json", action="store_true", help="print JSON for another program")


def run(args: argparse.Namespace) -> int:
    """Return 0 when every name is known."""
    known = [*_explain_verbs(), *_list_known()]
    found = [one for name in args.names for one in _find(name, known)] if args.names else known
    if args.json:
        print(json.dumps([{**one._asdict(), "details": dict(one.details)} for one in found], indent=1))
    elif args.names:
        print("\n\n".join(_format(one) for one in found))
    else:
        print(_format_names(found))
    return 0


def _list_known() -> "Iterator[Explanation]":
    from bench.cli.explanations import list_explanations

    return list_explanations()


def _explain_verbs() -> "Iterator[Explanation]":
    """Yield what each verb does; `zeroscale VERB --help` tells its options."""
    from bench.cli import VERBS
    from bench.cli.explanations import Explanation

    for name, verb in VERBS.items():
        yield Explanation(name, "verb", verb.summary, (("see", f"zeroscale {name} --help"),))


def _find(name: str, known: "Iterable[Explanation]") -> "list[Explanation]":
    """Return every meaning of a name, or of keys and files whose last part it is; UserError for one without any."""
    known = list(known)
    exact = [one for one in known if one.name == name]
    found = [*exact, *(one for one in known if one not in exact and _get_last_part(one.name) == name)]
    if not found:
        names = {one.name for one in known} | {_get_last_part(one.name) for one in known}
        rule = "no column, flag, outcome, figure, verb, config key or file of conf/"
        raise UserError(name, rule, suggest_nearest(name, names, "`zeroscale explain` lists all names"))
    return found


def _get_last_part(name: str) -> str:
    """Return `micro` of `batch.micro`, `mt5_xl` of `model=mt5_xl`."""
    return name.rpartition("=")[2].rpartition(".")[2]


def _format(one: "Explanation") -> str:
    """Return a name with its kind, its meaning and what else is known, as wide as the terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    lines = [f"{one.name} ({one.kind})"]
    texts = [one.meaning] if one.meaning else []
    for text in (*texts, *(f"{label}: {value}" for label, value in one.details)):
        lines.append(textwrap.fill(inspect.cleandoc(text), width, initial_indent="  ", subsequent_indent="  "))
    return "\n".join(lines)


def _format_names(found: "Iterable[Explanation]") -> str:
    """Return all names by their kind."""
    by_kind: dict[str, dict[str, None]] = {}
    for one in found:
        by_kind.setdefault(one.kind, {})[one.name] = None
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 120
    filled = (
        f"{kind}:\n"
        + textwrap.fill("  ".join(names), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        for kind, names in by_kind.items()
    )
    return "\n\n".join(filled)
