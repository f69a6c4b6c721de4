"""Write a folder of config files to start from: a site file, a study, and JSON schemas for your
editor.

  zeroscale init my
  zeroscale init my --schema

Every key in the files has a comment. Existing files are not overwritten. With the schemas, an
editor with a YAML language server completes and checks study, launcher and machine files.
`--schema` renews only the schemas; use it after the package or its plug-ins have changed.
"""

import argparse
import json
import re
from pathlib import Path

from bench.cli import options
from bench.config import reference
from bench.core import store
from bench.core.errors import UserError
from bench.core.files import find_conf_folder

_SITE, _STUDY = "launcher/my_site.yaml", "study/my_study.yaml"
_GPUS = "launcher.gpus=--gres=gpu:{devices}"
_EDITED = ("study", "launcher", "machine")  # groups that users write files of
_POINTER = "# yaml-language-server: $schema=../schema/{}.json\n"
"""Comment line with which an editor finds the JSON schema of a YAML file."""
_SITE_HEAD = """\
# Settings of your cluster. Each line shows a key with its default. To change a key, remove the # at the beginning of
# its line and change the value. `zeroscale sweep … launcher=my_site --dry-run` prints the jobs that would be submitted.
defaults: [slurm, _self_]
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    help_text = "folder for the files, later given as --config-dir; it is created if missing"
    parser.add_argument("folder", type=Path, metavar="DIR", help=help_text)
    help_text = "write only the JSON schemas, and overwrite older schemas"
    parser.add_argument("--schema", action="store_true", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Write a launcher file, a study file and JSON schemas into a folder, and return 0. With `--schema`, write only the
    schemas. Raise UserError if a launcher or study file exists, or if a file cannot be written."""
    folder: Path = args.folder
    files = {f"schema/{group}.json": json.dumps(built, indent=1, ensure_ascii=False) + "\n"
             for group, built in reference.build_schemas().items() if group in _EDITED}  # fmt: skip
    if not args.schema:
        starter = Path(reference.__file__).with_name("my_study.yaml")
        study = _POINTER.format("study") + starter.read_text(encoding="utf-8")
        files = {_SITE: _write_site(), _STUDY: study} | files
        for name in files:
            if (folder / name).exists():
                remedy = "choose another folder, or write only the schemas with --schema"
                raise UserError(str(folder / name), "already exists, and is not overwritten", remedy)
    try:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            store.write_atomically(folder / name, text.encode())
    except OSError as error:
        raise UserError(str(folder), f"cannot be written ({error.strerror})", "choose another folder") from error
    print("\n".join(str(folder / name) for name in files))
    if not args.schema:
        sweep, end = ["zeroscale", "sweep", "study=my_study"], ["--config-dir", str(folder), "--dry-run"]
        site = ["launcher=my_site", "machine=h100", "devices_per_node=8", _GPUS]
        print(options.format_next("to list the runs on this machine", [*sweep, *end]))
        print(options.format_next("to list the jobs that would be submitted", [*sweep, *site, *end]))
    return 0


def _write_site() -> str:
    """Return the text of a site file: a copy of conf/launcher/slurm.yaml with its comments, in which every key is
    commented out."""
    text = (find_conf_folder() / "launcher" / "slurm.yaml").read_text(encoding="utf-8")
    # Comment lines are not changed: a second # would make them look like commented-out keys.
    hidden = re.sub(r"^(?=[^#\n])", "#", text.partition("name: slurm\n")[2], flags=re.MULTILINE)
    return _POINTER.format("launcher") + _SITE_HEAD + hidden
