"""Tests of loading a plug-in by its name. It may be part of zeroscale, or of another installed package."""

import errno
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from installed_packages import Install, forget

from bench import data, engines, launchers, objectives
from bench.config import exclude_rules
from bench.core import installed_plugins, plugins
from bench.core.errors import UserError
from bench.core.installed_plugins import PluginError

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
    with pytest.raises(UserError, match=r"data.source=text: bench.data and package somebodys-package have a plug-in"):
        data.load("text")


def test_two_packages_with_a_plugin_of_one_name_are_refused_only_where_it_is_used(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("zeroscale.data", "theirs = their_data", SOURCE)
    other = tmp_path / "another_package-1.0.dist-info"
    shutil.copytree(tmp_path / "somebodys_package-1.0.dist-info", other)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: another-package\nVersion: 1.0\n")
    forget()
    rule = r"data.source=theirs: package .*-package and package .*-package have a plug-in of this name"
    with pytest.raises(UserError, match=rule) as refused:
        data.load("theirs")
    assert "another-package" in str(refused.value) and "somebodys-package" in str(refused.value)
    assert [name for name, _ in plugins.load_all(plugins.DATA)] == ["instructions", "mixture", "synthetic", "text"]
    (message,) = caplog.messages
    assert "skipped: data.source=theirs: package" in message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("check(options, spec): pass", "check(options, spec): {}['x']", "check failed: KeyError: 'x'"),
        ("check(options, spec)", "check(options)", "check failed: TypeError: check() takes 1 positional"),
        ("return {}", "return None", r"describe returned None, which is not of the type dict[str, Any]"),
        ("(BaseModel): pass", ": pass", "Options is <class 'their_data.Options'>, which is not of the type type[BaseM"),
    ],
)
def test_errors_of_an_installed_plugin_name_plugin_package_and_function(
    install: Install, old: str, new: str, message: str
) -> None:
    install("zeroscale.data", "theirs = their_data", SOURCE.replace(old, new))
    with pytest.raises(PluginError, match=re.escape(f"data theirs of package somebodys-package: {message}")):
        theirs = data.load("theirs")
        theirs.check(None, None)  # type: ignore[arg-type]
        theirs.describe(None)  # type: ignore[arg-type]


def test_text_in_place_of_a_tuple_is_refused(install: Install) -> None:
    assert installed_plugins.is_of_type(("a", "b"), tuple[str, ...])
    assert not installed_plugins.is_of_type("ab", tuple[str, ...])
    kinds = 'from bench.core.network import TokenKind\nKINDS = TokenKind("a", 1, {})\nREDUCTION = "mean"'
    install("zeroscale.objective", "theirs = their_objective", kinds)
    with pytest.raises(PluginError, match=r"KINDS is TokenKind.* not of the type tuple\[TokenKind, \.\.\.\]"):
        objectives.load("theirs")


def test_errors_for_users_and_a_full_disk_pass_unchanged() -> None:
    for error in (UserError("a", "b"), OSError(errno.ENOSPC, "full"), MemoryError()):

        def fail(raised: Exception = error) -> None:
            raise raised

        with pytest.raises(type(error)) as caught:
            installed_plugins.guard(fail, "data theirs of package ours", "fail")()
        assert caught.value is error


def test_member_that_a_plugin_fails_to_import_from_its_own_files_is_named(install: Install, tmp_path: Path) -> None:
    (tmp_path / "their_data").mkdir()
    (tmp_path / "their_data" / "source.py").write_text(SOURCE.replace("def check", "def checks"))
    install("zeroscale.data", "theirs = their_data", "")
    (tmp_path / "their_data.py").unlink()
    (tmp_path / "their_data" / "__init__.py").write_text("from their_data.source import Options, check, describe")
    with pytest.raises(UserError, match=r"^data.source=theirs: their_data.source does not define check; see"):
        data.load("theirs")


def test_broken_engine_of_a_package_is_reported_and_has_no_facts(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    text = "from pydantic import BaseModel\nclass Options(BaseModel): pass\ndef check(options, spec): pass\n"
    install("zeroscale.engine", "theirs = their_engine", f"{text}def facts(spec): return 1 / 0")
    spec: Any = SimpleNamespace(engine=SimpleNamespace(backend="theirs"))
    assert engines.find_facts(spec) is None
    (message,) = caplog.messages
    assert message.startswith("engine theirs of package somebodys-package skipped: facts failed: ZeroDivisionError")


def test_unused_broken_plugin_is_ignored(install: Install) -> None:
    install("zeroscale.data", "theirs = their_data", "import no_such_library_at_all")
    assert [name for name, _ in plugins.list_usable(plugins.DATA)] == ["instructions", "mixture", "synthetic", "text"]
    exclude_rules.list_field_names.cache_clear()
    assert "data.workers" in exclude_rules.list_field_names()


def test_files_of_an_installed_plugin_are_listed_without_its_import(install: Install, tmp_path: Path) -> None:
    assert installed_plugins.list_installed_files("metric") == []
    install("zeroscale.metric", "theirs = their_metric", "raise ImportError")
    assert installed_plugins.list_installed_files("metric") == [tmp_path / "their_metric.py"]
