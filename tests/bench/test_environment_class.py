"""Tests of environment classes. An environment class consists of the properties of machine and software that must be
equal on all ranks of a run. Only results of the same class are pooled."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from installed_packages import Install

from bench.config import compose
from bench.core.record import EnvironmentClass
from bench.measure.environment import (
    check_alike,
    choose_openmp_variables,
    classify,
    compute_environment_id,
    read_plugin_versions,
)
from bench.measure.failures import Refused

PROGRAM = """
import os, sys
from bench.measure.environment import classify, compute_environment_id
os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
print(compute_environment_id(classify("cpu", int(sys.argv[2]))))
"""
HERE = sorted(os.sched_getaffinity(0))


def environment_id(cores: list[int], ranks: int = 2, **variables: str) -> str:
    words = [sys.executable, "-c", PROGRAM, ",".join(map(str, cores)), str(ranks)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))} | variables
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_environment_class_contains_cores_and_threads() -> None:
    """The test simulates a machine with one core and a machine with two cores. For this, processes are bound to one
    core and to two cores."""
    if len(HERE) < 2:
        pytest.skip("one core has no fewer")
    one, two = environment_id(HERE[:1]), environment_id(HERE[:2])
    assert one != two
    assert environment_id(HERE[:2], OMP_NUM_THREADS="7") != two
    assert environment_id(HERE[:2], OMP_NUM_THREADS="1") == two, "its part of two cores, user-set or default"


def test_environment_class_contains_the_wait_policy_of_several_threads() -> None:
    if len(HERE) < 2:
        pytest.skip("one core has one thread")
    chosen = choose_openmp_variables("cpu", 1).items() - {("OMP_NUM_THREADS", str(len(HERE)))}
    assert environment_id(HERE[:2], 1) == environment_id(HERE[:2], 1, **dict(chosen)), "an explicit default is equal"
    assert environment_id(HERE[:2], 1) != environment_id(HERE[:2], 1, OMP_WAIT_POLICY="active")
    assert environment_id(HERE[:1]) == environment_id(HERE[:1], OMP_WAIT_POLICY="active"), (
        "one thread waits for no other"
    )


@pytest.fixture
def no_choice(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_threads_of_a_cpu_rank_do_not_spin_by_default(no_choice: pytest.MonkeyPatch) -> None:
    assert choose_openmp_variables("cpu", 1) == {"OMP_NUM_THREADS": str(len(HERE)), "GOMP_SPINCOUNT": "1000"}
    assert choose_openmp_variables("cuda", 1) == {"OMP_NUM_THREADS": str(len(HERE))}
    for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
        with no_choice.context() as chosen:
            chosen.setenv(name, "0")
            assert choose_openmp_variables("cpu", 1).keys() == {"OMP_NUM_THREADS"}, name


def test_rank_has_its_share_of_the_jobs_cores_not_of_the_node(no_choice: pytest.MonkeyPatch) -> None:
    no_choice.setattr("os.sched_getaffinity", lambda pid: set(range(16)))

    def threads(**variables: str) -> str:
        with no_choice.context() as job:
            for name, value in ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"} | variables).items():
                job.setenv(name, value)
            return choose_openmp_variables("cpu", 2)["OMP_NUM_THREADS"]

    assert threads() == "8"
    assert threads(SLURM_CPUS_PER_TASK="8", SLURM_STEP_NUM_TASKS="2") == "4", "one task per node"
    assert threads(SLURM_CPUS_PER_TASK="8", SLURM_STEP_NUM_TASKS="4") == "8", "one task per device"
    assert threads(SLURM_CPUS_PER_TASK="64", SLURM_STEP_NUM_TASKS="4") == "16", "bound to fewer"


def test_older_environment_classes_keep_their_ids() -> None:
    known = EnvironmentClass(device="CPU", devices_per_node=2)
    assert compute_environment_id(known) != compute_environment_id(known.model_copy(update={"cores": 2}))
    assert compute_environment_id(known) == compute_environment_id(
        EnvironmentClass(device="CPU", devices_per_node=2, cores=None)
    )


def test_version_of_a_plugin_package_changes_with_its_code(install: Install, tmp_path: Path) -> None:
    """Runs that use only plug-ins of zeroscale have no such version."""
    spec = compose.compose_request([("model", "tiny")]).spec
    install("zeroscale.objective", "summed_lm = summed", "REDUCTION = 'sum'")
    assert read_plugin_versions(spec) == {}
    own = spec.model_copy(update={"objective": "summed_lm"})
    ((package, before),) = read_plugin_versions(own).items()
    assert package == "plug-in somebodys-package" and re.fullmatch(r"1\.0 \(files [0-9a-f]{8}\)", before or "")
    assert read_plugin_versions(own) == {package: before}
    (tmp_path / "summed.py").write_text("REDUCTION = 'mean'")
    assert read_plugin_versions(own) != {package: before}


def test_ranks_of_different_environments_are_refused() -> None:
    first = classify("cpu", 2)
    check_alike([first, first.model_copy(update={"cores": 99, "threads": 99})])
    with pytest.raises(Refused, match="ranks 2 and 0 are of different environments: device GPU B and "):
        check_alike([first, first, first.model_copy(update={"device": "GPU B"})])
    with pytest.raises(Refused, match=r"ranks 1 and 0 .* quota_cores 1\.5 and"):
        check_alike([first, first.model_copy(update={"quota_cores": 1.5})])
