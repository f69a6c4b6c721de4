"""Tests of the timeouts after which a rank stops waiting for other ranks, in torch's store and in its process
groups."""

import os
import subprocess
import sys

import pytest

from bench.core.record import Limits
from bench.measure.peers import compute_timeout

_JOIN = """
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bench.measure.peers import compute_timeout, join
from bench.core.record import Limits

cpu = torch.device("cpu")
join(0, 1, cpu, compute_timeout(Limits(startup_s=3600)))
groups = [dist.group.WORLD, dist.new_group([0])]
waits = [c10d._get_default_store().timeout, *(group._get_backend(cpu).options._timeout for group in groups)]
print(*(wait.total_seconds() for wait in waits))
"""


@pytest.mark.processes
def test_time_outs_of_store_and_process_groups_exceed_the_supervisors_limits() -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, "-c", _JOIN], env=os.environ | meeting, capture_output=True, text=True)
    assert done.stdout.split() == ["3660.0"] * 3, done.stderr


def test_process_group_time_out_exceeds_startup_and_hang_limits() -> None:
    assert compute_timeout(Limits(startup_s=1800, hang_s=300)).total_seconds() > 1800
    assert compute_timeout(Limits(startup_s=60, hang_s=7200)).total_seconds() > 7200
    assert compute_timeout(Limits(startup_s=1e300)).days == 30
