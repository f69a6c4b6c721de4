"""The files that come with the project: where they are, which are engines, and what one of those says."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def find_conf_folder() -> Path:
    """Return the folder of the configuration files: beside the packages in a checkout, inside `bench` in a wheel."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "conf"


def list_engine_presets() -> tuple[str, ...]:
    """Return the names of the files in conf/engine, sorted."""
    return tuple(sorted(path.stem for path in (find_conf_folder() / "engine").glob("*.yaml")))


@functools.cache
def read_engine_preset(name: str) -> Mapping[str, Any]:
    """Return the options that conf/engine/<name>.yaml writes out; none where the project has no such file."""
    path = find_conf_folder() / "engine" / f"{name}.yaml"
    plain = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {option: value for option, value in plain.items() if option not in ("name", "backend")}


@functools.cache
def read_model_counts() -> Mapping[str, int | None]:
    """Return the published number of parameters of every file in conf/model, by its name."""
    files = (find_conf_folder() / "model").glob("*.yaml")
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")).get("parameters") for path in files}
