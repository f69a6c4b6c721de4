"""Tests of `zeroscale doctor`. It must report only checks that concern this machine: without a cluster, for example,
nothing about Slurm."""

import resource
from pathlib import Path

import pytest

from bench.cli import doctor
from bench.core.errors import Check

VERSION = "echo slurm-wlm 22.05.8"
NO_CLUSTER = """
echo 'sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host' >&2
echo 'sbatch: error: fetch_config: DNS SRV lookup failed' >&2
echo 'sbatch: fatal: Could not establish a configuration source' >&2
exit 1"""
"""Output of sbatch 22.05 on a machine without slurm.conf."""


@pytest.fixture
def found(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Check]:
    """Results of the checks of Slurm and of locked memory, by subject. The fixture's parameter has the text of the
    script that replaces sbatch (empty for a machine without sbatch), and the names of the machine's RDMA cards."""
    sbatch, cards = request.param
    (tmp_path / "cards").mkdir()
    for name in cards:
        (tmp_path / "cards" / name).touch()
    if sbatch:
        (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{sbatch}\n")
        (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_RDMA_CARDS", str(tmp_path / "cards"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**23, 2**23))
    return {check.subject: check for check in [*doctor._check_slurm(), *doctor._check_locked_memory()]}


@pytest.mark.parametrize("found", [("", []), (NO_CLUSTER, [])], indirect=True, ids=["no sbatch", "no slurm.conf"])
def test_doctor_omits_slurm_outside_a_cluster(found: dict[str, Check]) -> None:
    assert found == {}


@pytest.mark.parametrize("found", [("", ["mlx5_0"]), (NO_CLUSTER, ["mlx5_0"])], indirect=True)
def test_doctor_recommends_local_settings_for_an_rdma_card_without_slurm(found: dict[str, Check]) -> None:
    check = found.pop("locked memory")
    assert not found and check.remedy == "ulimit -l unlimited, or memlock in /etc/security/limits.conf"
    assert "jobs" not in check.found and "lurm" not in check.found


@pytest.mark.parametrize("found", [(VERSION, [])], indirect=True)
def test_doctor_reports_slurm_on_a_cluster(found: dict[str, Check]) -> None:
    assert found["Slurm"] == Check("Slurm", "ok", "slurm-wlm 22.05.8")
    assert "jobs submitted from here" in found["locked memory"].found
    assert "slurm.conf" in found["locked memory"].remedy


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (("echo slurm 20.11.9", []), "slurm 20.11.9 is older than 21.08: "),
        (("echo 'sbatch: error: no permission' >&2; exit 1", []), "unknown version: sbatch: error: no permission"),
    ],
    indirect=["found"],
)
def test_doctor_notes_an_old_or_unknown_version(found: dict[str, Check], expected: str) -> None:
    assert found["Slurm"].state == "note" and found["Slurm"].found.startswith(expected)
