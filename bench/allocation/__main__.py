"""`python -m bench.allocation JOB`, once per node (or per device) of an allocation; JOB is the folder of a job.

The exit code is 0 if the job did what it could, however its points ended: a failure is a result.
"""

import os
import sys
from pathlib import Path

from bench import job_context
from bench.allocation.agent import JobAgent
from bench.allocation.leader import JobLeader
from bench.sweep import jobs

folder = Path(sys.argv[1])
context = job_context.find_context(jobs.read_launcher_name(folder), os.environ)
sys.exit((JobAgent(folder, context) if context.number else JobLeader(folder, context)).run())
