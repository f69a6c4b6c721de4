"""Tests of points that run in a real container, with the runtimes Apptainer and Charliecloud."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from sweeping import QUICK, Study

pytestmark = [pytest.mark.thorough, pytest.mark.processes]

REPOSITORY = Path(__file__).parents[2]
DIGEST = "sha256:image-of-this-environment"
PYTHON = "/opt/environment/bin/python"
"""Path of a Python interpreter that exists only inside the container."""
SEEN = {path: path for path in ("/usr", sys.base_prefix, str(REPOSITORY))} | {sys.prefix: "/opt/environment"}
"""Folders of this machine that are mounted into the container. A key is a path on this machine, and the value is the
path in the container. Copying the folders into an image would take minutes."""


def make_image(folder: Path) -> Path:
    """Create the root folder of a container image, and return its path. The folder has the usual mount points of a
    system and little else."""
    for inside in ("/proc", "/sys", "/dev", "/tmp", "/var/tmp", "/home", "/root", "/etc", *SEEN.values()):
        (folder / inside.removeprefix("/")).mkdir(parents=True, exist_ok=True)
    for file in ("passwd", "group", "hosts", "resolv.conf"):  # a runtime mounts the machine's files over them
        (folder / "etc" / file).touch()
    for link in ("bin", "lib", "lib64"):
        (folder / link).symlink_to(f"usr/{link}")
    return folder


def build_apptainer(image: Path) -> dict[str, Any]:
    """Build an Apptainer image, and return the container options that a site file would have for it.

    The image is a single file. The container runs in a user namespace, as for a user without privileges.
    """
    file = image.with_suffix(".sif")
    subprocess.run(["apptainer", "build", file, image], check=True, capture_output=True)
    mounts = [f"{outside}:{inside}:ro" for outside, inside in SEEN.items()]
    return {"runtime": "apptainer", "image": str(file), "mounts": mounts, "options": ["--userns", "--no-home"]}


def build_charliecloud(image: Path) -> dict[str, Any]:
    """Return the container options that a site file would have for Charliecloud. The image is a folder, and the options
    contain the command that enters the container."""
    binds = [f"--bind={outside}:{inside}" for outside, inside in SEEN.items()]
    enter = ["ch-run", *binds, "--bind={study}:{study}", "--cd=/tmp", "{image}", "--"]
    return {"runtime": "command", "image": str(image), "command": enter}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "build"),
    [("apptainer", build_apptainer), ("ch-run", build_charliecloud)],
    ids=["Apptainer", "Charliecloud"],
)
def test_point_runs_in_a_container_on_two_nodes_and_records_its_digest(
    study: Study, tmp_path: Path, program: str, build: Any
) -> None:
    if not shutil.which(program):
        pytest.skip(f"not installed: {program}")
    site = {
        "defaults": ["slurm_testbed", "_self_"],
        "container": build(make_image(tmp_path / "image")) | {"digest": DIGEST},
        "python": [PYTHON],
        "environment": {"PYTHONPATH": str(REPOSITORY), "USER": os.environ.get("USER", "root")},
    }
    (tmp_path / "my/launcher").mkdir(parents=True)
    (tmp_path / "my/launcher/contained.yaml").write_text(yaml.safe_dump(site, sort_keys=False))
    words = [word for word in QUICK if word != "launcher=slurm_testbed"]
    study(*study.asking(*words, "nodes=2", "batch.micro=1", "launcher=contained", "--config-dir", str(tmp_path / "my")))
    study.ended()
    (record,) = study.records()
    assert (record.outcome.kind, record.outcome.reason) == ("ok", ""), study.log()
    assert record.environment and record.environment.classification.container == DIGEST
    assert len(set(record.environment.hosts)) == 2
    assert not Path(PYTHON).exists() and PYTHON in next(study.folder.glob("jobs/*/job.sh")).read_text()
    assert study.check() == ["answered"]
