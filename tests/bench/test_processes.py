"""Tests that zeroscale's processes never import modules from the current folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from started_runs import PATIENCE_S, QUICK

from bench.core import store
from bench.core.processes import build_module_command, identify_process

HOSTILE = 'open({!r}, "a").write(__name__ + "\\n")\n'


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Folder with modules that have the same names as modules of zeroscale and of the standard library.

    When such a module is imported, it writes its name to a file.
    """
    folder, ran = tmp_path / "here", tmp_path / "ran"
    (folder / "bench").mkdir(parents=True)
    for name in ("bench/__init__.py", "difflib.py", "statistics.py", "torch.py", "deepspeed.py", "sitecustomize.py"):
        (folder / name).write_text(HOSTILE.format(str(ran)))
    return folder


@pytest.mark.processes
def test_a_run_executes_no_code_of_the_current_folder(hostile: Path, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("zeroscale")), "run", *QUICK, "machine=cpu", "devices_per_node=1"]
    ended = subprocess.run(
        [*command, "--results", str(tmp_path / "runs")],
        cwd=hostile, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    [record] = store.find_records([tmp_path / "runs"])
    assert store.read_record(record).outcome.kind == "ok"
    assert not (tmp_path / "ran").exists()


@pytest.mark.processes
def test_process_identity_excludes_reused_ids_and_zombies() -> None:
    own = identify_process(os.getpid())
    assert own and own == identify_process(os.getpid())
    with subprocess.Popen(["sleep", "60"]) as child:
        other = identify_process(child.pid)
        assert other and other.boot_id == own.boot_id and other.started > own.started
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert identify_process(child.pid) is None, "it has ended, and no process has waited for it"


@pytest.mark.processes
def test_modules_are_found_in_pythonpath_but_not_in_the_current_folder(tmp_path: Path) -> None:
    for name in ("elsewhere", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which.py").write_text(f"import sys; print({name!r}, *sys.argv[1:])")
    path = os.pathsep.join([str(tmp_path / "elsewhere"), os.environ.get("PYTHONPATH", "")])
    command = build_module_command("which", "a b")
    found = subprocess.run(
        command, cwd=tmp_path / "here", env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert found.stdout == "elsewhere a b\n", found.stderr
    without = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True)
    assert without.returncode == 1 and "No module named which" in without.stderr


def test_every_own_module_is_started_by_build_module_command() -> None:
    """`build_module_command` uses Python's option -P, which keeps the current folder out of the module search path.
    Only `zeroscale ab` does not use the option: it starts other versions of the code, which may need an older Python
    without -P. Instead it sets PYTHONSAFEPATH, which has the same effect where it is supported."""
    code = Path(__file__).parents[2] / "bench"
    starting = {str(path.relative_to(code)) for path in code.rglob("*.py") if '"-m"' in path.read_text()}
    assert starting == {"core/processes.py", "sweep/ab.py"}
