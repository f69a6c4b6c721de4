"""Write a folder to begin with: a site file and a study, every key explained, and schemas for your editor.

  zeroscale init my
  zeroscale init my --schema

Nothing that is there is overwritten. The schemas let an editor with a YAML language server complete and check files in
study, launcher and machine; `--schema` renews them alone, after the package or its plug-ins have changed.
"""

import argparse
import re
import shlex
from pathlib import Path

from bench.config.reference import schema
from bench.core import store, terminal
from bench.core.errors import UserError
from bench.core.files import find_conf_folder

_SITE, _STUDY = "my_site", "my_study"
_GPUS = "launcher.gpus=--gres=gpu:{devices}"
_STARTER = Path(schema.__file__).parent / "starter"
_EDITED = ("study", "launcher", "machine")  # groups that users write files of
_SITE_HEAD = """\
# What your cluster wants beyond its own defaults: remove the first # of a line where yours differs. What stands beside
# a key is its default. `zeroscale sweep … launcher={site} --dry-run` shows what would be submitted.
defaults: [slurm, _self_]
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder for --config-dir; it is made where there is none"
    )
    parser.add_argument("--schema", action="store_true", help="renew the schemas alone")


def run(args: argparse.Namespace) -> int:
    """Return 0 when every file is written."""
    folder: Path = args.folder
    built = schema.build_schemas()
    schemas = {f"schema/{group}.json": schema.to_json(built[group]) for group in built if group in _EDITED}
    files = {} if args.schema else {f"launcher/{_SITE}.yaml": _write_site(), f"study/{_STUDY}.yaml": _write_study()}
    if not args.schema:
        _check_absent(folder, [*files, *schemas])
    try:
        for name, text in (files | schemas).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            store.write_atomically(folder / name, text.encode())
    except OSError as error:
        raise UserError(str(folder), f"cannot be written ({error.strerror})", "choose another folder") from error
    print(_format_written(folder, [*files, *schemas]))
    return 0


def _check_absent(folder: Path, names: list[str]) -> None:
    """Raise UserError where one of these files is there already."""
    for name in names:
        if (folder / name).exists():
            rule = "is there already, and nothing is overwritten"
            raise UserError(str(folder / name), rule, "choose another folder, or renew the schemas alone by --schema")


def _write_site() -> str:
    """Return a site file: the one that ships, with its meanings, every key behind a #."""
    text = (find_conf_folder() / "launcher" / "slurm.yaml").read_text(encoding="utf-8")
    body = text.partition("name: slurm\n")[2]
    hidden = re.sub(r"^(?=[^#\n])", "#", body, flags=re.MULTILINE)
    return _point_to_schema("launcher") + _SITE_HEAD.format(site=_SITE) + hidden


def _write_study() -> str:
    return _point_to_schema("study") + (_STARTER / f"{_STUDY}.yaml").read_text(encoding="utf-8")


def _point_to_schema(group: str) -> str:
    """Return the line by which an editor finds the schema of a group's files."""
    return f"# yaml-language-server: $schema=../schema/{group}.json\n"


def _format_written(folder: Path, names: list[str]) -> str:
    """Return what was written, and what can be done with it."""
    written = "\n".join(str(folder / name) for name in names)
    if not any(name.endswith(".yaml") for name in names):
        return written
    called = "zeroscale sweep study={study}{more} --config-dir {folder} --dry-run".format
    quoted, cluster = shlex.quote(str(folder)), f" launcher={_SITE} machine=h100 devices_per_node=8 {_GPUS}"
    here, there = (called(study=_STUDY, more=more, folder=quoted) for more in ("", cluster))
    rows = [("next:", here, "# what would run here"), ("", there, "# what would be submitted")]
    return f"{written}\n{terminal.align(rows, gap=1)}"
