"""Tests of studies into which random faults are injected. A program on this machine replaces Vertex AI. After all
faults, every point has exactly one result."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from vertex_server import LOST, STOCKOUT, Fault, VertexServer
from vertex_study import QUICK, Study

from tests.bench.storage_emulator import emulated_bucket

pytestmark = [pytest.mark.processes, pytest.mark.cold, pytest.mark.thorough, pytest.mark.timeout(1200)]

POINTS = (*QUICK, "nodes=2", "batch.micro=2,4", "measure.window_s=5", "launcher.mode=point")
_ROUNDS = 8
_FAULTS = 3


@pytest.mark.parametrize("seed", range(3))
def test_every_point_is_answered_once_after_random_faults(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    with emulated_bucket() as (bucket, emulator):
        server = VertexServer(tmp_path / "machines", environment={"OMP_NUM_THREADS": "1"})
        study = Study(server, bucket, tmp_path / "results")

        def lose(message: str, *, warns: bool) -> None:
            if running := server.find("RUNNING"):
                server.lose_machine(chance.choice(running).name, chance.randrange(2), message, warns=warns)

        def take_bucket_away() -> None:
            emulator.set_away(away=True)
            threading.Timer(chance.uniform(2, 12), emulator.set_away, kwargs={"away": False}).start()

        faults: dict[str, Callable[[], None]] = {
            "machine lost": lambda: lose(LOST, warns=False),
            "spot machine withdrawn": lambda: lose(STOCKOUT, warns=True),
            "bucket away": take_bucket_away,
            "service away": lambda: server.faults["List"].extend([Fault()] * 2),
            "answer lost": lambda: server.faults["Create"].append(Fault(acts=True)),
            "cancelled": lambda: study.start("cancel", str(study.folder)).communicate() and None,
        }
        chosen = chance.sample(sorted(faults), _FAULTS)
        try:
            study("sweep", *study.words(*POINTS))
            for name in chosen:
                study.wait(lambda: bool(server.find("RUNNING")) or all("end_time" in job for job in server.find()))
                time.sleep(chance.uniform(0, 12))
                faults[name]()
                study.start("resume", str(study.folder)).communicate()
            for _ in range(_ROUNDS):
                study.wait_for_jobs()
                output, errors = study.start("resume", str(study.folder)).communicate()
                assert "Traceback" not in errors, errors
                if "nothing to submit" in output:
                    break
            study.check(points=2)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {', '.join(chosen)}: {error}") from error
        finally:
            server.close()
