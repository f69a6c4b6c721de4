"""An installed wheel works without the checkout: configuration, templates and sources travel as package data."""

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


def test_a_wheel_plans_a_study_from_its_own_configuration(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import bench.cli, bench.presets;"
        "print(bench.presets.find_conf_folder()); sys.exit(bench.cli.main())"
    )
    command = [sys.executable, "-c", code, str(installed), "sweep", "study=smoke", "--dry-run"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[0] == str(installed / "bench" / "conf")
    assert told.stdout.splitlines()[-1] == "20 points, nothing started"


def called(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the installed package, far from the checkout."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=cwd, env=environment)


def test_a_wheel_puts_predictions_beside_what_came_true_in_a_folder_of_results(installed: Path, tmp_path: Path) -> None:
    told = called(installed, tmp_path, "bench.cli", "predictions", str(ROOT / "results"), "--out", "new")
    assert told.returncode == 0, told.stderr
    committed = ROOT / "results" / "predictions"
    written = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert written == {path.name: path.read_bytes() for path in committed.iterdir() if path.is_file()}


def test_a_wheel_without_a_folder_of_results_says_what_is_missing(installed: Path, tmp_path: Path) -> None:
    told = called(installed, tmp_path, "bench.cli", "predictions")
    assert told.returncode == 2
    assert told.stderr == (
        "zeroscale: results: holds no measured/two_cores, with which predictions are compared; "
        "give the folder `results` of a checkout of the repository\n"
    )


def test_a_wheel_runs_the_study_on_one_gpu(installed: Path, tmp_path: Path) -> None:
    told = called(installed, tmp_path, "bench.gpu_study", "check", "--trial")
    assert told.returncode == 1
    assert "check: needs tests/bench/test_cuda.py, which an installed package does not hold" in told.stdout
    told = called(installed, tmp_path, "bench.gpu_study", "xxl", "--trial")
    assert told.returncode == 0, told.stderr
    assert "nothing submitted" in told.stdout


def test_a_wheel_writes_the_page_of_a_prediction(installed: Path, tmp_path: Path) -> None:
    words = ["model=tiny", "machine=h200", "devices_per_node=8", "--page", "prediction.html"]
    told = called(installed, tmp_path, "bench.cli", "predict", *words)
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "prediction.html").read_text().count("<figure") == 2


def test_a_wheel_holds_every_file_that_is_read_at_run_time(installed: Path) -> None:
    for source in (
        "bench/measure/cpu_allocator.cpp",
        "bench/record.schema.json",
        "bench/conf/config.yaml",
        "bench/slurm/job.sh.j2",
        "bench/training_export/files/train.py",
        "bench/launchers/slurm/standalone.sh.j2",
        "zeroscale/__init__.py",
        "analysis/published/claims.csv",
        "analysis/report/templates/report.html.j2",
        "analysis/notebooks/reading_results.ipynb",
    ):
        assert (installed / source).is_file(), source
