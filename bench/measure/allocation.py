"""The allocation that the ranks of a run were started in: one, or the run measures nodes that it was not given."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.measure.failures import Refused
from bench.nodelist import foreign


class Seat(NamedTuple):
    """Where a rank was started: its host, and the job and start of it that Slurm's variables name there."""

    host: str
    job: str | None
    restart: str | None

    @classmethod
    def here(cls, host: str, environment: Mapping[str, str]) -> "Seat":
        return cls(host, environment.get("SLURM_JOB_ID"), environment.get("SLURM_RESTART_COUNT"))


def check(seats: Sequence[Seat], nodelist: str | None) -> None:
    """Raise Refused where a rank is of another job, or another start of it, than rank 0, or on a host that is not on
    the list of nodes of rank 0's job."""
    first, *others = seats
    for seat in others:
        if seat[1:] != first[1:]:
            raise Refused(f"{seat.host} is of job {_named(seat)}, and the first node {first.host} of {_named(first)}")
    if strangers := foreign(tuple(dict.fromkeys(seat.host for seat in seats)), nodelist or ""):
        raise Refused(f"{', '.join(strangers)} is not of this job's allocation, which has {nodelist}")


def _named(seat: Seat) -> str:
    return f"{seat.job}" + (f", restart {seat.restart}" if seat.restart else "")
