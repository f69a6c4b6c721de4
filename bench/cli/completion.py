"""Print a completion script for bash or zsh. It completes commands, options, config keys and files of
conf/.

  zeroscale completion bash > ~/.local/share/bash-completion/completions/zeroscale
  zeroscale completion zsh > ~/.zfunc/_zeroscale             # a folder of fpath

Generate the script again after the package or its plug-ins have changed.
The command needs the package shtab: `pip install shtab`.
"""

import argparse

from bench.core.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"))


def run(args: argparse.Namespace) -> int:
    """Print the completion script; return 0."""
    print(build_script(args.shell))
    return 0


_BASH = """
_zeroscale_{name}() {{  # bash takes KEY=VALUE apart
    local key="" word="$1"
    [ "$word" = "=" ] && {{ key="${{COMP_WORDS[COMP_CWORD-1]}}="; word=""; }}
    [ "${{COMP_WORDS[COMP_CWORD-1]}}" = "=" ] && key="${{COMP_WORDS[COMP_CWORD-2]}}="
    compgen -W "{words}" -- "$key$word" | while read -r found; do echo "${{found#"$key"}}"; done
}}
"""
_BASH_END = """
_zeroscale() {  # no space follows KEY=
    _shtab_zeroscale "$@"
    [[ "${COMPREPLY[0]}" != *= ]] || compopt -o nospace
}
complete -o bashdefault -F _zeroscale zeroscale"""
_ZSH = "_zeroscale_{name}() {{ compadd -S '' -- {words} }}\n"


def build_script(shell: str) -> str:
    """Return the completion script for a shell. Raise UserError if the package shtab is not installed."""
    from bench.cli import COMMANDS, import_command
    from bench.cli.explain import list_explanations
    from bench.config.reference import GROUPS, list_sections
    from bench.core.files import find_group_files

    try:
        import shtab
    except ImportError as error:
        raise UserError("completion", "needs the package shtab", "install it: pip install shtab") from error
    keys = {f"{key.path}=" for section in list_sections() if section.group != "study" for key in section.keys}
    files = {f"{group}={file}" for group in GROUPS for file in find_group_files(group)}
    words = {
        "overrides": sorted({*keys, *(f"{group}=" for group in GROUPS), *files}),
        "names": sorted({one.name.removeprefix("--") for one in list_explanations()}),
    }
    parser = argparse.ArgumentParser("zeroscale")
    commands = parser.add_subparsers()
    for name, summary in COMMANDS.items():
        command_parser = commands.add_parser(name, help=summary)
        import_command(name).arguments(command_parser)
        for action in command_parser._actions:
            # shtab reads this attribute, although argparse does not declare it.
            if action.dest in words and action.choices is None:
                vars(action)["complete"] = dict.fromkeys(("bash", "zsh"), f"_zeroscale_{action.dest}")
    preamble = {
        language: "".join(form.format(name=name, words=" ".join(known)) for name, known in words.items())
        for language, form in (("bash", _BASH), ("zsh", _ZSH))
    }
    script: str = shtab.complete(parser, shell, preamble=preamble)
    return script + _BASH_END * (shell == "bash")
