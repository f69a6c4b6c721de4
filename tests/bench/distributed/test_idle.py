"""Test that the idle time measured on real ranks equals the pipeline bubble of a simulation. The passes only sleep, so
that ranks do not compete for cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from idle_ranks import BACKWARD_S, FORWARD_S
from simulated_steps import simulate_schedule

from bench.engines.distributed.schedule import PipelineSize, ScheduleName, build_schedule

pytestmark = [pytest.mark.processes, pytest.mark.timed, pytest.mark.timeout(120)]


@pytest.mark.parametrize(("name", "size", "bubble"), [
    ("1f1b", PipelineSize(3, 1, 4), 2 / 6),
    ("gpipe", PipelineSize(3, 1, 4), 2 / 6),
    ("interleaved", PipelineSize(2, 2, 4), 1 / 9),
    ("breadth_first", PipelineSize(2, 2, 4), 1 / 9),
])  # fmt: skip
def test_measured_idle_time_equals_the_simulated_bubble(
    tmp_path: Path, name: ScheduleName, size: PipelineSize, bubble: float
) -> None:
    """The bubble is (p - 1) / (v m + p - 1) of a step, with p ranks, v stages per rank and m micro-batches. A rank's
    idle time has two parts: waiting for neighbouring ranks, and waiting after its last pass until all ranks have ended
    the step."""
    script = Path(__file__).with_name("idle_ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "seen"), name, *map(str, size)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    times = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(size.ranks)]
    step_s = max(own_s for own_s, _ in times)
    found = [(waited_s + step_s - own_s) / step_s for own_s, waited_s in times]
    simulated = simulate_schedule(
        build_schedule(name, size), size, [FORWARD_S] * size.stages, [BACKWARD_S] * size.stages
    )
    wanted = [idle_s / simulated.total_s for idle_s in simulated.idle_s]
    assert wanted == pytest.approx([bubble] * size.ranks)
    assert found == pytest.approx(wanted, abs=0.08)
