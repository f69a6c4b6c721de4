"""A point that really runs in a container: what bubblewrap makes of a few folders, entered as a site's file says."""

import shutil
import sys
from pathlib import Path

import pytest
import yaml
from sweeping import QUICK, Study

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).parents[2]
DIGEST = "sha256:folder-of-this-environment"


def write_site(config: Path) -> None:
    """Write a site's file whose container has this Python's environment as /image, and little else."""
    folders = ("/usr", "/etc", sys.base_prefix, str(REPOSITORY))
    seen = [word for folder in folders for word in ("--ro-bind", folder, folder)]
    links = [word for name in ("lib", "lib64", "bin") for word in ("--symlink", f"usr/{name}", f"/{name}")]
    made = ["--proc", "/proc", "--dev-bind", "/dev", "/dev", "--tmpfs", "/tmp", "--die-with-parent"]
    inside = ["--ro-bind", "{image}", "/image", "--bind", "{study}", "{study}", "--chdir", "/tmp"]
    site = {
        "defaults": ["slurm_testbed", "_self_"],
        "container": {
            "runtime": "command",
            "image": sys.prefix,
            "digest": DIGEST,
            "command": ["bwrap", *made, *seen, *links, *inside],
        },
        "python": ["/image/bin/python"],
        "environment": {"PYTHONPATH": str(REPOSITORY)},
    }
    (config / "launcher").mkdir(parents=True)
    (config / "launcher/contained.yaml").write_text(yaml.safe_dump(site, sort_keys=False))


@pytest.mark.timeout(300)
def test_a_point_runs_in_a_container_on_two_nodes_and_its_record_says_so(study: Study, tmp_path: Path) -> None:
    if not shutil.which("bwrap"):
        pytest.skip("not installed: bwrap (Debian package bubblewrap)")
    write_site(tmp_path / "my")
    words = [word for word in QUICK if word != "launcher=slurm_testbed"]
    points = ("nodes=2", "batch.micro=1", "launcher=contained", "--config-dir", str(tmp_path / "my"))
    study(*study.asking(*words, *points))
    study.ended()
    (record,) = study.records()
    assert (record.outcome.kind, record.outcome.reason) == ("ok", ""), study.log()
    assert record.environment and record.environment.container == DIGEST
    assert "/image/bin/python" in next(study.folder.glob("jobs/*/job.sh")).read_text(), "a path that only it has"
    assert study.check() == ["answered"]
