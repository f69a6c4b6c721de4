"""Submit to Slurm: one script per job from the template in slurm/, kept beside the results that it made."""

from bench.launchers.slurm.cluster import limits
from bench.launchers.slurm.options import Options, check, job_setup
from bench.launchers.slurm.programs import context, spread
from bench.launchers.slurm.queue import ask, cancel_all, submit
from bench.launchers.slurm.script import find_log, plan

__all__ = [
    "ARRAYS", "QUEUES", "Options", "ask", "cancel_all", "check", "context", "find_log", "job_setup", "limits", "plan",
    "spread", "submit",
]  # fmt: skip

QUEUES = True
ARRAYS = True
