"""A point that really runs in a container: a folder that Charliecloud, a runtime for clusters, takes for its image."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from sweeping import QUICK, Study

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).parents[2]
DIGEST = "sha256:folder-of-this-environment"
PYTHON = "/opt/environment/bin/python"
"""A path that nothing but the container has."""


def make_image(folder: Path) -> dict[str, str]:
    """Make an image that has the places of a system and little else; return what a container is to see there, by its
    path on this machine."""
    seen = {path: path for path in ("/usr", sys.base_prefix, str(REPOSITORY))} | {sys.prefix: "/opt/environment"}
    for inside in ("/proc", "/sys", "/dev", "/tmp", "/home", "/etc", *seen.values()):
        (folder / inside.removeprefix("/")).mkdir(parents=True, exist_ok=True)
    for file in ("passwd", "group", "hosts", "resolv.conf"):  # a runtime puts the machine's over them
        (folder / "etc" / file).touch()
    for link in ("bin", "lib", "lib64"):
        (folder / link).symlink_to(f"usr/{link}")
    return seen


def write_site(config: Path, image: Path, seen: dict[str, str]) -> None:
    """Write a site's file whose points run in the image, by Charliecloud's own words."""
    binds = [f"--bind={outside}:{inside}" for outside, inside in seen.items()]
    enter = ["ch-run", *binds, "--bind={study}:{study}", "--cd=/tmp", "{image}", "--"]
    site = {
        "defaults": ["slurm_testbed", "_self_"],
        "container": {"runtime": "command", "image": str(image), "digest": DIGEST, "command": enter},
        "python": [PYTHON],
        "environment": {"PYTHONPATH": str(REPOSITORY), "USER": os.environ.get("USER", "root")},
    }
    (config / "launcher").mkdir(parents=True)
    (config / "launcher/contained.yaml").write_text(yaml.safe_dump(site, sort_keys=False))


@pytest.mark.timeout(300)
def test_a_point_runs_in_a_container_on_two_nodes_and_its_record_says_so(study: Study, tmp_path: Path) -> None:
    if not shutil.which("ch-run"):
        pytest.skip("not installed: ch-run (Debian package charliecloud-runtime)")
    write_site(tmp_path / "my", tmp_path / "image", make_image(tmp_path / "image"))
    words = [word for word in QUICK if word != "launcher=slurm_testbed"]
    study(*study.asking(*words, "nodes=2", "batch.micro=1", "launcher=contained", "--config-dir", str(tmp_path / "my")))
    study.ended()
    (record,) = study.records()
    assert (record.outcome.kind, record.outcome.reason) == ("ok", ""), study.log()
    assert record.environment and record.environment.classification.container == DIGEST
    assert len(set(record.environment.hosts)) == 2
    assert not Path(PYTHON).exists() and PYTHON in next(study.folder.glob("jobs/*/job.sh")).read_text()
    assert study.check() == ["answered"]
