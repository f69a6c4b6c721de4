"""Helpers for tests of the Slurm launcher. They build a job, the options of a site file, and the script of a job."""

from pathlib import Path
from typing import Any

from bench.config import compose
from bench.core.scheduling import Work
from bench.launchers.slurm import Options, plan

STUDY = Path("/shared/my_project/results/paper")
FOLDER = STUDY / "jobs/paper-1121-a1b2c3"


def work(**changes: Any) -> Work:
    """Return a job's `Work`: a job on two nodes with eight devices each. `changes` replace its fields."""
    job = Work(FOLDER.name, FOLDER, "bench.sweep.allocation", (str(FOLDER),), 2, 8, time_limit_min=90)
    return job._replace(**changes)


def options(site: str = "slurm", *overrides: str) -> Options:
    """Return the launcher options of the site file conf/launcher/<site>.yaml, with overrides."""
    found = compose.compose_request(
        compose.parse_single([f"launcher={site}", "devices_per_node=2", *overrides])
    ).launcher_options
    assert isinstance(found, Options)
    return found


def script(job: Work, chosen: Options) -> str:
    """Return the text of a job's script."""
    (text,) = plan(job, chosen).files.values()
    return text
