"""The allocation that the ranks of a run were started in: one, or the run measures nodes that it was not given."""

from collections.abc import Sequence
from typing import NamedTuple

from bench.measure.failures import Refused
from bench.nodelist import find_foreign
from bench.scheduling import JobContext


class RankPlace(NamedTuple):
    """Where a rank was started: its host, and the job and the start of it that it is part of there."""

    host: str
    job_id: str  # empty: of no job
    restart: int = 0

    @classmethod
    def of(cls, host: str, context: JobContext) -> "RankPlace":
        return cls(host, context.job_id, context.restart)


def check(places: Sequence[RankPlace], nodelist: str) -> None:
    """Raise Refused where a rank is of another job, or another start of it, than rank 0, or on a host that is not on
    the list of nodes of rank 0's job."""
    first, *others = places
    for place in others:
        if place[1:] != first[1:]:
            reason = f"{place.host} is of job {_format_place(place)}, and the first node {first.host} of "
            raise Refused(reason + _format_place(first))
    if strangers := find_foreign(tuple(dict.fromkeys(place.host for place in places)), nodelist):
        raise Refused(f"{', '.join(strangers)} is not of this job's allocation, which has {nodelist}")


def _format_place(place: RankPlace) -> str:
    return f"{place.job_id or None}" + (f", restart {place.restart}" if place.restart else "")
