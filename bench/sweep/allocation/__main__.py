"""`python -m bench.sweep.allocation JOB`, started once per node (or per device) of an allocation. JOB is the folder of
a job.

With `--store URL --work FOLDER`, JOB is the name of a job in an object store. The nodes then need no shared folder:
each keeps its own copy of the study below FOLDER. The exit code is 0 if the job has processed all of its points
(configurations), even if some of them failed.
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
    """Run the points (configurations) of a job: as leader on the first node, as agent on other nodes. Return the exit
    code. An error before the first point is printed as one line."""
    parser = argparse.ArgumentParser("bench.sweep.allocation")
    parser.add_argument("job")
    parser.add_argument("--store", help="URL of the study in an object store")
    parser.add_argument("--work", type=Path, default=Path(), help="folder of this node for its copy of the study")
    args = parser.parse_args(words)
    try:
        context = read_job(os.environ) or JobContext()
        if args.store:
            return _run_stored(args.job, args.store, args.work.absolute(), context)
        folder = Path(args.job)
        return (JobAgent(folder, context) if context.number else JobLeader(folder, context)).run()
    except (OSError, UserError) as error:
        is_found = args.store or Path(args.job).is_dir()
        remedy = f"; {args.job} does not exist on this node: put --results into a folder that all nodes share"
        return _report_failure(error, "" if is_found else remedy)


def _run_stored(name: str, url: str, work: Path, context: JobContext) -> int:
    """Run the points of a job, as in `main`, with the job's files in an object store."""
    study = StudyStore(ObjectStore(url), work / url.rstrip("/").rpartition("/")[2])
    folder = study.folder / jobs.FOLDER / name
    study.pull_job(folder)
    if not folder.is_dir():
        raise UserError(url, f"the study has no job {name}", "submit the study again")
    with JobUploads(study, build_log_path(folder, context.task, context.number)) as uploads:
        try:
            if context.number:
                return JobAgent(folder, context, study).run()
            return JobLeader(folder, context, study, uploads).run()
        except (OSError, UserError) as error:  # here, so that the job's log has the line
            return _report_failure(error)


def _report_failure(error: Exception, remedy: str = "") -> int:
    """Print the error that prevents this process from starting. Return its exit code: `EXIT_LATER` if a disk is full,
    else 1."""
    print(f"{socket.gethostname()} cannot start the job: {error}{remedy}", file=sys.stderr, flush=True)
    return jobs.EXIT_LATER if is_disk_full(error) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
