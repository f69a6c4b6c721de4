"""The allocation that the ranks of a run were started in: one, or the run measures nodes that it was not given."""

from collections.abc import Sequence
from typing import NamedTuple

from bench.measure.failures import Refused
from bench.nodelist import foreign
from bench.scheduling import JobContext


class Seat(NamedTuple):
    """Where a rank was started: its host, and the job and the start of it that it is part of there."""

    host: str
    job_id: str  # empty: of no job
    restart: int = 0

    @classmethod
    def of(cls, host: str, context: JobContext) -> "Seat":
        return cls(host, context.job_id, context.restart)


def check(seats: Sequence[Seat], nodelist: str) -> None:
    """Raise Refused where a rank is of another job, or another start of it, than rank 0, or on a host that is not on
    the list of nodes of rank 0's job."""
    first, *others = seats
    for seat in others:
        if seat[1:] != first[1:]:
            raise Refused(f"{seat.host} is of job {_named(seat)}, and the first node {first.host} of {_named(first)}")
    if strangers := foreign(tuple(dict.fromkeys(seat.host for seat in seats)), nodelist):
        raise Refused(f"{', '.join(strangers)} is not of this job's allocation, which has {nodelist}")


def _named(seat: Seat) -> str:
    return f"{seat.job_id or None}" + (f", restart {seat.restart}" if seat.restart else "")
