"""Cost of a study's jobs, and the check of its budget. There are no side effects."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from bench.core.errors import UserError
from bench.launchers.vertex.planning import PRICE_LABEL
from bench.launchers.vertex.states import count_nodes, read_use

_DEFAULT_TIMEOUT_S = 7 * 24 * 3600.0
"""The service's time limit for a job whose request has no timeout."""


class Cost(NamedTuple):
    """Cost of jobs in the currency of the price. The start of a machine and its disk are not included."""

    spent: float  # cost of ended jobs, and of running jobs until now
    reserved: float  # largest further cost of the jobs that have not ended

    @property
    def total(self) -> float:
        return self.spent + self.reserved


def compute_cost(jobs: Iterable[Any], price_per_node_hour: float, now: float) -> Cost:
    """Return the cost of `CustomJob`s. `now` is in seconds since the epoch.

    The price of a job is the price at its submission, which is stored in a label of the job. The price of a job without
    this label is `price_per_node_hour`.
    """
    spent = reserved = 0.0
    for job in jobs:
        label, use = job.labels.get(PRICE_LABEL, ""), read_use(job)
        per_s = (int(label) / 1000 if label.isdigit() else price_per_node_hour * count_nodes(job)) / 3600
        until = now if use.is_live else use.ended_at
        used_s = max(0.0, until - use.began_at) if until and use.began_at else 0.0
        spent += per_s * used_s
        if use.is_live:
            reserved += per_s * max(0.0, (use.timeout_s or _DEFAULT_TIMEOUT_S) - used_s)
    return Cost(spent, reserved)


def check_budget(budget: float, others: Cost, job: Cost) -> None:
    """Raise UserError if a job could exceed the budget of its study. `job` is the cost of this job, and `others` the
    cost of the study's other jobs that count before it."""
    if others.total + job.total > budget:
        parts = f"{others.spent:.2f} is spent, other jobs may cost {others.reserved:.2f} more"
        rule = f"{parts}, and this job may cost {job.total:.2f} until its time limit"
        remedy = "wait for the end of other jobs, set a shorter launcher.job_max_min, or raise the budget"
        raise UserError(f"launcher.budget={budget:g}", rule, remedy)
