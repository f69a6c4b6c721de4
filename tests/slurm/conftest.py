"""A real Slurm cluster for tests; they skip with the reason where it cannot be had, and fail where it must be had."""

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from slurm_testbed import Testbed

REQUIRE = "ZEROSCALE_REQUIRE_SLURM"


def _missing() -> str | None:
    """Return why there can be no testbed here."""
    if os.geteuid() != 0:
        return "not root"
    programs = [name for name in ("slurmctld", "slurmd", "munged", "ip", "tc") if not shutil.which(name)]
    if programs:
        return f"not installed: {', '.join(programs)} (Debian packages slurm-wlm munge iproute2)"
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode:
        return "this container may not make namespaces"
    return None


@pytest.fixture(scope="session")
def slurm_possible() -> None:
    if reason := _missing():
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but no testbed can be had: {reason}")
        pytest.skip(f"no Slurm testbed: {reason}")


@pytest.fixture(scope="session")
def testbed(slurm_possible: None) -> Iterator[Testbed]:
    """Three nodes, quick to notice a lost one."""
    bed = Testbed("a")
    try:
        quick = ["--slurmd-timeout-s", "4", "--kill-wait-s", "2", "--conf", "MessageTimeout=4"]
        bed.up("--nodes", "3", "--rate", "100mbit", *quick)
        yield bed
    finally:
        bed("down")


@pytest.fixture
def other_testbed(slurm_possible: None) -> Iterator[Testbed]:
    """One more, side by side with the first, for a test to bring up and down."""
    bed = Testbed("b")
    try:
        yield bed
    finally:
        bed("down")
