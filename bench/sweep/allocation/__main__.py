"""`python -m bench.sweep.allocation JOB`, once per node (or per device) of an allocation; JOB is the folder of a job.

The exit code is 0 if the job has processed all of its points, even if some of them failed.
"""

import os
import socket
import sys
from pathlib import Path

from bench.core.errors import UserError
from bench.core.files import is_disk_full
from bench.core.job_environment import read_job
from bench.core.scheduling import JobContext
from bench.sweep import jobs
from bench.sweep.allocation.agents import JobAgent
from bench.sweep.allocation.leader import JobLeader


def main(folder: Path) -> int:
    """Run this process's part of a job and return its exit code. An error before the first point is printed as one
    line."""
    try:
        context = read_job(os.environ) or JobContext()
        return (JobAgent(folder, context) if context.number else JobLeader(folder, context)).run()
    except (OSError, UserError) as error:
        shared = "" if folder.is_dir() else f"; {folder} does not exist on this node: use a folder that all nodes share"
        print(f"{socket.gethostname()} cannot begin: {error}{shared}", file=sys.stderr, flush=True)
        return jobs.EXIT_LATER if is_disk_full(error) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
