"""What two answers must have in common to be pooled, and that all ranks of a run have it."""

import os
import subprocess
import sys

import pytest

from bench.measure.environment import check_alike, classify, compute_environment_id
from bench.measure.failures import Refused
from bench.record import EnvironmentClass

TELL = """
import os, sys
from bench.measure.environment import classify, compute_environment_id
os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
print(compute_environment_id(classify("cpu", 2)))
"""
HERE = sorted(os.sched_getaffinity(0))


def told(cores: list[int], **variables: str) -> str:
    words = [sys.executable, "-c", TELL, ",".join(map(str, cores))]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_cores_and_threads_are_part_of_what_an_answer_depends_on() -> None:
    """By processes that really are bound to fewer cores."""
    if len(HERE) < 2:
        pytest.skip("one core has no fewer")
    one, two = told(HERE[:1]), told(HERE[:2])
    assert one != two
    assert told(HERE[:2], OMP_NUM_THREADS="7") != two
    assert told(HERE[:2], OMP_NUM_THREADS="1") == two, "its part of two cores, whoever chose it"


def test_older_classes_keep_their_names() -> None:
    known = EnvironmentClass(device="CPU", devices_per_node=2)
    assert compute_environment_id(known) != compute_environment_id(known.model_copy(update={"cores": 2}))
    assert compute_environment_id(known) == compute_environment_id(
        EnvironmentClass(device="CPU", devices_per_node=2, cores=None)
    )


def test_ranks_of_different_environments_are_refused_whatever_cores_they_are_bound_to() -> None:
    first = classify("cpu", 2)
    check_alike([first, first.model_copy(update={"cores": 99, "threads": 99})])
    with pytest.raises(Refused, match="ranks 2 and 0 are of different environments: device GPU B and "):
        check_alike([first, first, first.model_copy(update={"device": "GPU B"})])
    with pytest.raises(Refused, match=r"ranks 1 and 0 .* quota_cores 1\.5 and"):
        check_alike([first, first.model_copy(update={"quota_cores": 1.5})])
