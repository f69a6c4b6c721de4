"""Launcher that runs jobs on rented machines of Google's Vertex AI (its "custom jobs"). Jobs exchange files with the
submitting machine through a bucket (`bench.core.study_store`)."""

from bench.launchers.vertex.options import Options, check, job_setup
from bench.launchers.vertex.planning import find_log, plan
from bench.launchers.vertex.queue import ask, cancel_all, limits, spread, submit, sync

__all__ = [
    "ARRAYS", "QUEUES", "Options", "ask", "cancel_all", "check", "find_log", "job_setup", "limits", "plan", "spread",
    "submit", "sync",
]  # fmt: skip

QUEUES = True
ARRAYS = False
