"""Submit to Slurm: one script per job from the template in slurm/, kept beside the results that it made."""

from bench.launchers.slurm.cluster import ClusterLimits, limits
from bench.launchers.slurm.options import Options, check
from bench.launchers.slurm.queue import ask, poll
from bench.launchers.slurm.script import plan
from bench.launchers.slurm.states import JobState
from bench.launchers.slurm.submission import cancel, cancel_all, submit

__all__ = [
    "QUEUES", "ClusterLimits", "JobState", "Options", "ask", "cancel", "cancel_all", "check", "limits", "plan", "poll",
    "submit",
]  # fmt: skip

QUEUES = True
