"""`python -m bench.sweep.allocation JOB`, once per node (or per device) of an allocation; JOB is the folder of a job.

With `--store URL --work FOLDER`, JOB is the name of a job in an object store. The nodes then need no shared folder:
each has its own copy of the study below FOLDER. The exit code is 0 if the job has processed all of its points, even if
some of them failed.
"""

import argparse
import os
import socket
import sys
from pathlib import Path

from bench.core.errors import UserError
from bench.core.files import is_disk_full
from bench.core.job_environment import read_job
from bench.core.object_store import ObjectStore
from bench.core.scheduling import JobContext
from bench.core.study_store import StudyStore, build_log_path
from bench.sweep import jobs
from bench.sweep.allocation.agents import JobAgent
from bench.sweep.allocation.leader import JobLeader
from bench.sweep.allocation.uploads import JobUploads


def main(words: list[str]) -> int:
    """Run this process's part of a job and return its exit code. An error before the first point is printed as one
    line."""
    parser = argparse.ArgumentParser("bench.sweep.allocation")
    parser.add_argument("job")
    parser.add_argument("--store", help="URL of the study in an object store")
    parser.add_argument("--work", type=Path, default=Path(), help="folder of this node for its copy of the study")
    args = parser.parse_args(words)
    remedy = f"; {args.job} does not exist on this node: use a folder that all nodes share"
    try:
        context = read_job(os.environ) or JobContext()
        if args.store:
            return _run_stored(args.job, args.store, args.work.absolute(), context)
        folder = Path(args.job)
        return (JobAgent(folder, context) if context.number else JobLeader(folder, context)).run()
    except (OSError, UserError) as error:
        shared = "" if args.store or Path(args.job).is_dir() else remedy
        print(f"{socket.gethostname()} cannot begin: {error}{shared}", file=sys.stderr, flush=True)
        return jobs.EXIT_LATER if is_disk_full(error) else 1


def _run_stored(name: str, url: str, work: Path, context: JobContext) -> int:
    """Run this process's part of a job in an object store."""
    study = StudyStore(ObjectStore(url), work / url.rstrip("/").rpartition("/")[2])
    folder = study.folder / jobs.FOLDER / name
    study.pull_job(folder)
    if not folder.is_dir():
        raise UserError(url, f"has no job {name}", "submit the study again")
    with JobUploads(study, build_log_path(folder, context.task, context.number)) as uploads:
        if context.number:
            return JobAgent(folder, context, study).run()
        return JobLeader(folder, context, study, uploads).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
