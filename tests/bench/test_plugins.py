"""Tests of loading a plug-in by its name. It may be part of zeroscale, or of another installed package."""

from pathlib import Path

import pytest
from installed_packages import Install

from bench import data, engines, launchers
from bench.config import exclude_rules
from bench.core import plugins
from bench.core.errors import UserError

ROOT = Path(plugins.__file__).parents[2]
SOURCE = """
from pydantic import BaseModel
class Options(BaseModel): pass
def check(options, spec): pass
def micro_batches(spec, rank): return iter(())
def describe(spec): return {}
"""


@pytest.mark.parametrize(
    ("kind", "folder", "shared"),
    [
        (plugins.DATA, "bench/data", {"pipeline"}),
        (plugins.METRIC, "analysis/metrics", set()),
        (plugins.FIGURE, "analysis/figures", set()),
    ],
)
def test_every_file_in_the_folder_of_a_kind_is_a_plugin(
    kind: plugins.Kind[object], folder: str, shared: set[str]
) -> None:
    files = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")} - shared
    assert plugins.list_names(kind) == sorted(files | folders)


@pytest.mark.parametrize(
    "kind", [k for k in vars(plugins).values() if isinstance(k, plugins.Kind)], ids=lambda kind: kind.protocol.__name__
)
def test_every_shipped_plugin_defines_all_members_of_its_kind(kind: plugins.Kind[object]) -> None:
    some_do = (
        plugins.STARTING,
        plugins.QUEUEING,
        plugins.DIVIDED_FAMILY_BUILDER,
        plugins.HELD_OUT_DATA,
        plugins.PROMPT_DATA,
    )
    for name in plugins.list_names(kind):
        if kind not in some_do:
            plugins.load(kind, name)


def test_every_launcher_is_either_starting_or_queueing() -> None:
    assert plugins.load_queueing("slurm") and plugins.load(plugins.STARTING, "local")
    assert plugins.load_queueing("local") is None


def test_messages_list_the_installed_queueing_launchers() -> None:
    assert launchers.format_queueing() == "launcher=slurm or launcher=vertex"
    assert launchers.find_cluster() == "slurm"


def test_unknown_plugin_name_suggests_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"engine.backend=deepsped: no such file in bench/engines; .*deepspeed"):
        engines.load("deepsped")


def test_installed_package_adds_a_plugin_by_an_entry_point(install: Install) -> None:
    install("zeroscale.data", "theirs = their_data", SOURCE)
    assert "theirs" in plugins.list_names(plugins.DATA)
    assert list(data.load("theirs").micro_batches(None, 0)) == []  # type: ignore[arg-type]


def test_incomplete_plugin_is_refused_with_its_missing_members(install: Install) -> None:
    install("zeroscale.data", "theirs = their_data", SOURCE.replace("def check", "def checks"))
    with pytest.raises(
        UserError,
        match=r"data.source=theirs: their_data does not define check; see DataPlugin in bench/core/plugins.py",
    ):
        data.load("theirs")


def test_plugin_that_fails_to_import_is_refused_with_its_package(install: Install) -> None:
    install("zeroscale.data", "theirs = their_data", "import no_such_library_at_all")
    rule = r"their_data cannot be imported \(ModuleNotFoundError: No module named 'no_such_library_at_all'\)"
    with pytest.raises(UserError, match=rf"data.source=theirs: {rule}; .*somebodys-package"):
        data.load("theirs")


def test_two_plugins_with_one_name_are_refused(install: Install) -> None:
    install("zeroscale.data", "text = their_text", SOURCE)
    with pytest.raises(UserError, match=r"data.source=text: both bench.data and the installed plug-in their_text"):
        data.load("text")


def test_unused_broken_plugin_is_ignored(install: Install) -> None:
    install("zeroscale.data", "theirs = their_data", "import no_such_library_at_all")
    assert [name for name, _ in plugins.list_usable(plugins.DATA)] == ["instructions", "mixture", "synthetic", "text"]
    exclude_rules.list_field_names.cache_clear()
    assert "data.workers" in exclude_rules.list_field_names()


def test_files_of_an_installed_plugin_are_listed_without_its_import(install: Install, tmp_path: Path) -> None:
    assert plugins.list_installed_files(plugins.METRIC) == []
    install("zeroscale.metric", "theirs = their_metric", "raise ImportError")
    assert plugins.list_installed_files(plugins.METRIC) == [tmp_path / "their_metric.py"]
