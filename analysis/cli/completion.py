"""Print a script by which bash or zsh completes verbs, options, config groups with their files, keys and names.

  zeroscale completion bash > ~/.local/share/bash-completion/completions/zeroscale
  zeroscale completion zsh > ~/.zeroscale.zsh                # and `source ~/.zeroscale.zsh` in ~/.zshrc

Print it again after the package or its plug-ins have changed. Files of your own folders are not in it.
"""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path

from bench import reference

_TEMPLATE = Path(reference.__file__).parent / "shells" / "completion.bash.j2"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"))


def run(args: argparse.Namespace) -> int:
    """Return 0."""
    print(build_script(args.shell))
    return 0


def build_script(shell: str) -> str:
    """Return the script for a shell."""
    import jinja2

    from analysis.explanations import list_explanations
    from bench.cli import VERBS
    from bench.reference.config import GROUPS, list_group_files, list_sections

    parsers = {verb: _build_parser(VERBS[verb].module) for verb in VERBS}
    keys = [key.path for section in list_sections() if section.group != "study" for key in section.keys]
    values = {group: list_group_files(group) for group in GROUPS}
    for verb, parser in parsers.items():
        values |= dict(_list_choices(verb, parser))
    template = jinja2.Environment(autoescape=False).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        shell=shell,
        verbs=list(VERBS),
        values=values,
        options={verb: _list_options(parser) for verb, parser in parsers.items()},
        keys=sorted({f"{key}=" for key in (*keys, *GROUPS)}),
        configured=[verb for verb, parser in parsers.items() if _takes_overrides(parser)],
        names=sorted({one.name for one in list_explanations()} | set(VERBS)),
    )


def _build_parser(module: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    importlib.import_module(module).arguments(parser)
    return parser


def _list_options(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings if name.startswith("--")]


def _list_choices(verb: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """Yield the values of options that have few, by verb and option."""
    for action in parser._actions:
        if action.choices:
            names = action.option_strings or [""]  # of a positional one: of the word after the verb
            yield from ((f"{verb}{name or verb}", list(map(str, action.choices))) for name in names)


def _takes_overrides(parser: argparse.ArgumentParser) -> bool:
    return any(action.dest == "overrides" for action in parser._actions)
