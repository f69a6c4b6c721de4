"""Reference page of the commands: the arguments of each, from its parser."""

import argparse
import inspect

from bench.cli import COMMANDS, import_command
from bench.cli.options import describe_argument
from docs.generate.markdown import code, plain, prose, table


def page() -> str:
    """Return the page of all commands of the command line."""
    listed = table(
        ("command", "does"), [(f"[`{name}`](#{name})", plain(summary)) for name, summary in COMMANDS.items()]
    )
    head = (
        "# Commands\n\n`zeroscale COMMAND --help` prints the same in a terminal. `KEY=VALUE` is a key of "
        "[the config](config.md). Before or after any command, `-v` prints the traceback of an error; "
        "`zeroscale --version` prints the versions.\n\n"
        "The exit code is 0 on success, 1 on failure, 2 for an invalid command, and 130 after Ctrl-C."
    )
    return "\n\n".join([head, listed, *(_command(name) for name in COMMANDS)])


def parser(name: str) -> argparse.ArgumentParser:
    """Return the argparse parser of a command."""
    module = import_command(name)
    built = argparse.ArgumentParser(f"zeroscale {name}", description=module.__doc__, add_help=False)
    module.arguments(built)
    return built


def _command(name: str) -> str:
    built = parser(name)
    rows = [(code(_format_syntax(action)), plain(describe_argument(action))) for action in built._actions]
    text = [f"## {name}", prose(inspect.cleandoc(built.description or ""))]
    return "\n\n".join([*text, *([table(("argument", "meaning"), rows)] if rows else [])])


def _format_syntax(action: argparse.Action) -> str:
    """Return an argument as a user writes it on the command line, such as `--out FILE`."""
    value = "" if action.nargs == 0 else _value(action)
    return " ".join(part for part in (action.option_strings[0] if action.option_strings else "", value) if part)


def _value(action: argparse.Action) -> str:
    if action.choices is not None and action.metavar is None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    names = action.metavar or action.dest.upper()
    value = " ".join(names) if isinstance(names, tuple) else names
    return {"*": f"[{value} …]", "+": f"{value} …", "?": f"[{value}]"}.get(str(action.nargs), value)
