"""Launcher that submits jobs to Slurm. The script of each job is made from a template in slurm/. It is stored in the
job's folder."""

from bench.launchers.slurm.cluster import limits
from bench.launchers.slurm.options import Options, check, job_setup
from bench.launchers.slurm.queue import ask, cancel_all, submit
from bench.launchers.slurm.script import find_log, plan, spread

__all__ = [
    "ARRAYS", "QUEUES", "Options", "ask", "cancel_all", "check", "find_log", "job_setup", "limits", "plan",
    "spread", "submit",
]  # fmt: skip

QUEUES = True
ARRAYS = True
