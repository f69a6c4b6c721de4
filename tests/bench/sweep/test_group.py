"""Tests of the division of a sweep's points into jobs."""

from collections.abc import Sequence
from typing import Any

import pytest
from sweeps import point, spec, sweep

from bench.core.errors import UserError
from bench.core.scheduling import Mode, SchedulingOptions
from bench.sweep.definition import RunKey, SweepDefinition
from bench.sweep.status import PointStatus
from bench.sweep.submitting import JobBatcher


def options(mode: Mode, longest_min: int = 1000) -> SchedulingOptions:
    return SchedulingOptions(mode=mode, job_max_min=longest_min, warning_s=60)


def waiting(made: SweepDefinition) -> list[PointStatus]:
    return [PointStatus(key, p, made, "waiting", "", "", 0, "") for key, _, p in made.wanted()]


def keys(jobs: Sequence[Any]) -> list[RunKey]:
    return [requested.key for job in jobs for requested in job.points]


MIXED = sweep([point(spec(nodes=nodes, batch__micro=micro)) for nodes in (1, 2, 4) for micro in (1, 2)])


def test_job_of_one_point_requests_the_resources_of_that_point() -> None:
    made = JobBatcher(options("point"), None, None).jobs(waiting(MIXED))
    assert [job.nodes for job in made] == [1, 1, 2, 2, 4, 4]
    assert all(len(job.points) == 1 and job.time_limit_min == 13 for job in made)
    assert len({job.name for job in made}) == 6


def test_array_holds_points_of_equal_resources_up_to_the_clusters_array_size() -> None:
    many = sweep([point(spec(batch__micro=micro)) for micro in range(1, 24)])
    made = JobBatcher(options("array"), 10, None).jobs(waiting(many))
    assert [len(job.points) for job in made] == [10, 10, 3]
    assert keys(made) == [key for key, _, _ in many.wanted()]
    limits = sweep([point(spec(batch__micro=1), 10), point(spec(batch__micro=2), 30)])
    assert [job.time_limit_min for job in JobBatcher(options("array"), 10, None).jobs(waiting(limits))] == [13, 33]


def test_packed_job_holds_points_of_equal_resources_in_order_within_its_time_limit() -> None:
    made = JobBatcher(options("packed"), None, None).jobs(waiting(MIXED))
    assert [(job.nodes, len(job.points), job.time_limit_min) for job in made] == [(1, 2, 23), (2, 2, 23), (4, 2, 23)]
    long = sweep([point(spec(batch__micro=micro)) for micro in range(1, 10)])
    made = JobBatcher(options("packed", 60), None, None).jobs(waiting(long))
    assert [(len(job.points), job.time_limit_min) for job in made] == [(5, 53), (4, 43)]
    made = JobBatcher(options("packed", 60), None, 35).jobs(waiting(long))
    assert [len(job.points) for job in made] == [3, 3, 3], "the partition's longest time counts too"


def test_point_longer_than_the_partitions_time_limit_is_refused() -> None:
    with pytest.raises(UserError, match="may need a job of 13 min, but the partition allows 12"):
        JobBatcher(options("packed"), None, 12).jobs(waiting(MIXED))


def test_control_point_runs_twice_in_every_packed_job() -> None:
    control = point(spec(batch__micro=3), 7)
    made = sweep([point(spec(batch__micro=1))], control=control)
    [job] = JobBatcher(options("packed"), None, None).jobs(waiting(made))
    assert job.control and job.control.config_id == control.config_id
    assert job.time_limit_min == 10 + 2 * 7 + 3
    assert JobBatcher(options("point"), None, None).jobs(waiting(made))[0].control is None


def test_repeats_of_a_point_never_share_an_allocation() -> None:
    """Two repeats in one allocation (the nodes that a job gets) would run on the same nodes, and so would not be
    independent measurements."""
    thrice = sweep([point(spec(batch__micro=micro)) for micro in (1, 2)], repeats=3)
    made = JobBatcher(options("packed"), None, None).jobs(waiting(thrice))
    assert [[requested.key.repeat for requested in job.points] for job in made] == [[0, 0], [1, 1], [2, 2]]
