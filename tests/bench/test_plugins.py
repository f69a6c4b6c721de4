"""Tests of loading a plug-in by name, from the package of its kind or from another installed package."""

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
def test_every_file_of_a_kinds_folder_is_a_plug_in(kind: plugins.Kind[object], folder: str, shared: set[str]) -> None:
    files = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")} - shared
    assert plugins.list_names(kind) == sorted(files | folders)


@pytest.mark.parametrize(
    "kind", [k for k in vars(plugins).values() if isinstance(k, plugins.Kind)], ids=lambda kind: kind.protocol.__name__
)
def test_every_plug_in_that_ships_defines_all_that_its_kind_does(kind: plugins.Kind[object]) -> None:
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


def test_a_launcher_starts_work_at_once_or_queues_it() -> None:
    assert plugins.load_queueing("slurm") and plugins.load(plugins.STARTING, "local")
    assert plugins.load_queueing("local") is None


def test_what_is_said_of_a_cluster_where_no_launcher_is_named_comes_from_those_that_there_are() -> None:
    assert launchers.format_queueing() == "launcher=slurm"
    assert launchers.find_cluster() == "slurm"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"engine.backend=deepsped: no such file in bench/engines; .*deepspeed"):
        engines.load("deepsped")


def test_an_installed_package_brings_a_plug_in_by_an_entry_point(install: Install) -> None:
    install("zeroscale.data", "theirs = their_data", SOURCE)
    assert "theirs" in plugins.list_names(plugins.DATA)
    assert list(data.load("theirs").micro_batches(None, 0)) == []  # type: ignore[arg-type]


def test_a_plug_in_that_lacks_something_is_refused_with_what_it_lacks(install: Install) -> None:
    install("zeroscale.data", "theirs = their_data", SOURCE.replace("def check", "def checks"))
    with pytest.raises(
        UserError,
        match=r"data.source=theirs: their_data does not define check; see DataPlugin in bench/core/plugins.py",
    ):
        data.load("theirs")


def test_a_plug_in_that_cannot_be_imported_is_refused_with_its_package(install: Install) -> None:
    install("zeroscale.data", "theirs = their_data", "import no_such_library_at_all")
    rule = r"their_data cannot be imported \(ModuleNotFoundError: No module named 'no_such_library_at_all'\)"
    with pytest.raises(UserError, match=rf"data.source=theirs: {rule}; .*somebodys-package"):
        data.load("theirs")


def test_two_plug_ins_of_one_name_are_refused(install: Install) -> None:
    install("zeroscale.data", "text = their_text", SOURCE)
    with pytest.raises(UserError, match=r"data.source=text: both bench.data and their_text have this name"):
        data.load("text")


def test_a_broken_plug_in_that_nobody_asks_for_stops_nobody(install: Install) -> None:
    install("zeroscale.data", "theirs = their_data", "import no_such_library_at_all")
    assert [name for name, _ in plugins.list_usable(plugins.DATA)] == ["instructions", "mixture", "synthetic", "text"]
    exclude_rules.list_field_names.cache_clear()
    assert "data.workers" in exclude_rules.list_field_names()


def test_the_files_of_an_installed_plug_in_are_known_before_it_is_imported(install: Install, tmp_path: Path) -> None:
    assert plugins.list_installed_files(plugins.METRIC) == []
    install("zeroscale.metric", "theirs = their_metric", "raise ImportError")
    assert plugins.list_installed_files(plugins.METRIC) == [tmp_path / "their_metric.py"]
