"""Tests that an installed wheel works without the Git checkout, because it includes configuration, templates and
sources as package data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([*pip, *build], check=True, timeout=250)
    wheel = next(folder.glob("zeroscale-*.whl"))
    target = ["install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)]
    subprocess.run([*pip, *target], check=True, timeout=250)
    return folder / "site"


def test_installed_wheel_plans_a_study_from_its_own_configuration(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import bench.cli, bench.core.files;"
        "print(bench.core.files.find_conf_folder()); sys.exit(bench.cli.main())"
    )
    command = [sys.executable, "-c", code, str(installed), "sweep", "study=smoke", "--dry-run"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines()[0] == str(installed / "bench" / "conf")
    assert "15 runs of 5 points, nothing started" in completed.stdout.splitlines()


def run_module(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the installed package in a folder outside the checkout."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=cwd, env=environment)


def test_wheel_excludes_the_validation_package(installed: Path, tmp_path: Path) -> None:
    assert not (installed / "analysis" / "validation").exists()
    completed = run_module(installed, tmp_path, "bench.cli", "predictions")
    remedy = "run `python -m analysis.validation` in a checkout of the repository"
    assert (completed.returncode, completed.stderr) == (
        2,
        f"zeroscale: predictions: this command was removed; {remedy}\n",
    )


def test_installed_wheel_writes_the_page_of_a_prediction(installed: Path, tmp_path: Path) -> None:
    words = ["model=tiny", "machine=h200", "devices_per_node=8", "--page", "prediction.html"]
    completed = run_module(installed, tmp_path, "bench.cli", "predict", *words)
    assert completed.returncode == 0, completed.stderr
    assert (tmp_path / "prediction.html").read_text().count("<figure") == 2


def test_wheel_contains_every_file_read_at_run_time(installed: Path) -> None:
    for source in (
        "bench/measure/cpu_allocator.cpp",
        "bench/core/record.schema.json",
        "bench/conf/config.yaml",
        "bench/slurm/job.sh.j2",
        "zeroscale/__init__.py",
        "analysis/published/claims.csv",
        "analysis/report/templates/report.html.j2",
        "analysis/notebooks/reading_results.ipynb",
    ):
        assert (installed / source).is_file(), source
