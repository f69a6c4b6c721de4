"""Where in an allocation a process is, from the environment that Slurm gave it."""

from collections.abc import Mapping
from typing import NamedTuple, Self


class Place(NamedTuple):
    """One of the processes that `srun` started, or the only one where no Slurm did."""

    number: int = 0  # among all; 0 conducts
    local: int = 0  # on this node
    job_id: str = ""
    task: int | None = None  # of a job array
    restart: int = 0
    ends_at: float | None = None  # seconds since the epoch; None where nobody said

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> Self:
        """Return the place that `environment` tells of."""
        task, ends_at = environment.get("SLURM_ARRAY_TASK_ID"), environment.get("SLURM_JOB_END_TIME")
        return cls(
            number=int(environment.get("SLURM_PROCID", 0)),
            local=int(environment.get("SLURM_LOCALID", 0)),
            job_id=environment.get("SLURM_JOB_ID", ""),
            task=None if task is None else int(task),
            restart=int(environment.get("SLURM_RESTART_COUNT", 0)),
            ends_at=float(ends_at) if ends_at else None,
        )

    @property
    def allocation(self) -> str:
        """The name of this stretch of time on these nodes: every task of an array has a number of its own, and a job
        that is put back into the queue counts its starts."""
        return f"{self.job_id or 'local'}.{self.restart}"

    def end(self, time_limit_min: float, began_at: float) -> float:
        """Return when the allocation ends, in seconds since the epoch; where Slurm did not say, by the job's limit."""
        return self.ends_at or began_at + 60 * time_limit_min
