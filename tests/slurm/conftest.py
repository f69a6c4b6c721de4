"""Fixtures for tests on a real Slurm cluster on this machine (a testbed).

If no testbed is possible, the tests are skipped with a reason. If an environment variable requires a testbed, they fail
instead.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_processes import ours
from slurm_testbed import Testbed, wait_for
from sweeping import Study

REQUIRE = "ZEROSCALE_REQUIRE_SLURM"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as `processes` and `cold`. With the mark `cold`, a test starts its processes in
    new interpreters instead of forking them.

    Tests recognise leftover processes by environment variables that are set at their start. Forked processes would not
    have these variables.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.cold)


def _missing() -> str | None:
    """Return the reason why a testbed is impossible on this machine; None if it is possible."""
    if os.geteuid() != 0:
        return "not root"
    programs = [name for name in ("slurmctld", "slurmd", "munged", "ip", "tc") if not shutil.which(name)]
    if programs:
        return f"not installed: {', '.join(programs)} (Debian packages slurm-wlm munge iproute2)"
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode:
        return "this container may not make namespaces"
    return None


@pytest.fixture(scope="module", autouse=True)
def _empty_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set HOME to an empty folder, but keep the cache folder.

    Job scripts are login shells, so they run the profile in HOME. If a test kills a job at that time, a version manager
    in the profile, such as pyenv, may leave a lock file that delays all later jobs by a minute.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def slurm_possible() -> None:
    if reason := _missing():
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but no testbed can be had: {reason}")
        pytest.skip(f"no Slurm testbed: {reason}")


@pytest.fixture(scope="session")
def shared_testbed(slurm_possible: None) -> Iterator[Testbed]:
    bed = Testbed("a")
    try:
        quick = ["--slurmd-timeout-s", "4", "--kill-wait-s", "2", "--conf", "MessageTimeout=4"]
        bed.up("--nodes", "3", "--rate", "100mbit", *quick)
        yield bed
    finally:
        bed("down")


@pytest.fixture
def testbed(shared_testbed: Testbed) -> Testbed:
    """Testbed with three nodes, on which Slurm notices a lost node quickly. It is shared by several tests, and its
    nodes are free at the start of each."""
    shared_testbed.wait_until_free()
    return shared_testbed


@pytest.fixture
def other_testbed(slurm_possible: None) -> Iterator[Testbed]:
    """Second testbed, which may exist at the same time as the first, for tests that start and remove a testbed
    themselves."""
    bed = Testbed("b")
    try:
        yield bed
    finally:
        bed("down")


@pytest.fixture(scope="session")
def small_disk(slurm_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder on a disk of only 8 MB, so that tests can fill the disk. The disk is mounted before the nodes start,
    because later mounts are not visible on the nodes."""
    folder = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="session")
def drilled(small_disk: Path) -> Iterator[Testbed]:
    """Testbed with three nodes for fault injection.

    Slurm schedules and requeues jobs quickly, and its queue is short. By default, Slurm declares a silent node down
    only after 60 s. Therefore zeroscale's supervisors notice a lost node before Slurm does.
    """
    bed = Testbed("c")
    try:
        quick = "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1"
        again = f"AuthInfo=socket={bed.folder}/munge/socket,cred_expire=5"
        urgent = "PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP"
        main = "PartitionName=main Nodes=ALL Default=YES State=UP"
        preemption = ("PreemptType=preempt/partition_prio", "PreemptMode=CANCEL", urgent, main)
        lines = (quick, again, *preemption, "MessageTimeout=4")
        limits = ("--max-array-size", "2", "--max-jobs", "30", "--slurmd-timeout-s", "60", "--kill-wait-s", "5")
        bed.up("--nodes", "3", "--rate", "1gbit", *limits, *(word for line in lines for word in ("--conf", line)))
        yield bed
    finally:
        bed("down")


@pytest.fixture
def study(drilled: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Study]:
    """Study on the testbed `drilled`. Leftover jobs and processes are removed after the test."""
    monkeypatch.setenv("SLURM_CONF", str(drilled.folder / "slurm.conf"))
    drilled.wait_until_free()
    made = Study(drilled, tmp_path)
    try:
        yield made
    finally:
        drilled("controller", "start")
        drilled("link", "all", "--rate", "1gbit", "--up")
        drilled.slurm("scancel", "--user=root")
        wait_for(lambda: not ours(drilled.name, made.folder))
