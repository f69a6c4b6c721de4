"""Tests of `zeroscale init`, which writes example files for a new project. The files must work unchanged, and existing
files must not be overwritten."""

import json
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from bench import cli
from bench.core.files import find_conf_folder, read_yaml


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begin") / "my"
    assert cli.main(["init", str(folder)]) == 0
    return folder


def test_next_commands_run_as_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", str(tmp_path / "my studies")]) == 0
    commands = re.findall(r"zeroscale (sweep .*?--dry-run)", capsys.readouterr().out.replace("\\\n", ""), re.DOTALL)
    assert len(commands) == 2
    for command in commands:
        here = [] if "machine=" in command else ["machine=cpu"]  # the test must not depend on this machine's devices
        assert cli.main([*shlex.split(command), *here, "--results", str(tmp_path)]) == 0
        points = [line for line in capsys.readouterr().out.splitlines() if re.match(r"[0-9a-f]{10}  ", line)]
        assert len(points) == 4


def test_created_files_match_the_schema_they_name(written: Path) -> None:
    for path in (written / "study" / "my_study.yaml", written / "launcher" / "my_site.yaml"):
        pointed = re.match(r"# yaml-language-server: \$schema=(\S+)\n", path.read_text())
        assert pointed
        schema = json.loads((path.parent / pointed[1]).read_text())
        jsonschema.Draft202012Validator(schema).validate(read_yaml(path, path.name))


def test_site_file_has_no_effect_until_a_line_is_uncommented(written: Path) -> None:
    text = (written / "launcher" / "my_site.yaml").read_text()
    assert yaml.safe_load(text) == {"defaults": ["slurm", "_self_"]}
    let_in = re.sub(r"^#(?! )|^#(?=  )", "", text, flags=re.MULTILINE)
    shipped = yaml.safe_load((find_conf_folder() / "launcher" / "slurm.yaml").read_text())
    assert yaml.safe_load(let_in) == {"defaults": ["slurm", "_self_"]} | {
        key: value for key, value in shipped.items() if key != "name"
    }


def test_init_overwrites_nothing(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, site = written / "study" / "my_study.yaml", written / "launcher" / "my_site.yaml"
    before = study.read_text()
    site.rename(other := site.with_name("other.yaml"))
    assert cli.main(["init", str(written)]) == 2
    assert capsys.readouterr().err.startswith(f"zeroscale: {study}: already exists")
    assert not site.exists() and study.read_text() == before
    other.rename(site)


def test_repeated_init_renews_only_the_schemas(written: Path) -> None:
    (written / "schema" / "study.json").write_text("{}")
    assert cli.main(["init", str(written), "--schema"]) == 0
    assert "properties" in json.loads((written / "schema" / "study.json").read_text())


def test_folder_that_cannot_be_created_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["init", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
