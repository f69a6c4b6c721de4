"""Sweeps with launcher=vertex, started as a user starts them, and the rules that must be true at the end of a study,
whatever faults were injected."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vertex_server import VertexServer

from bench.core import store
from bench.core.object_store import ObjectStore
from bench.core.record import RunRecord

PATIENCE_S = 200.0
_SMALL = (  # a tiny model: most of the time of a run is the start of processes
    "model=gpt2_tiny", "model.name=minute", "model.parameters=null", "model.shape.width=32", "model.shape.layers=2",
    "model.shape.inner=64", "model.shape.heads=2", "sequence.tokens=32", "engine=ddp", "machine=cpu", "precision=fp32",
    "devices_per_node=1", "measure.block_steps=3", "measure.warmup_steps=6", "launcher=vertex", "launcher.warning_s=0",
    "launcher.project=my-project", "launcher.region=us-central1", "launcher.machine_type=n1-standard-4",
    "launcher.image=registry.example.com/my-project/r/zeroscale:1",
)  # fmt: skip
QUICK = (*_SMALL, "measure.min_steps=6", "measure.window_s=0", "launcher.time_limit_min=5")
"""Overrides of points that take seconds."""
LONG = (*_SMALL, "measure.min_steps=1000000", "measure.max_s=600")
"""Overrides of points that run until a fault ends them."""


class Study:
    """A study whose jobs run on a stand-in for Vertex AI on this machine. It has its own results folder."""

    def __init__(self, server: VertexServer, bucket: str, results: Path) -> None:
        self.server, self.bucket, self.results, self.folder = server, bucket, results, results / "adhoc"

    def start(self, verb: str, *words: str) -> "subprocess.Popen[str]":
        """Start a `zeroscale` command in a process of its own."""
        command = [sys.executable, "-m", "bench.cli", verb, *words]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def __call__(self, verb: str, *words: str, code: int = 0) -> str:
        """Run a `zeroscale` command, check its exit code, and return its output."""
        output, errors = (process := self.start(verb, *words)).communicate(timeout=PATIENCE_S)
        assert process.returncode == code and "Traceback" not in errors, output + errors
        return output or errors

    def words(self, *overrides: str) -> tuple[str, ...]:
        """Return the arguments of `zeroscale sweep`: the overrides, the address of the service, the bucket, and the
        results folder."""
        place = (f"launcher.endpoint={self.server.endpoint}", f"launcher.staging_bucket={self.bucket}")
        return (*overrides, *place, "--results", str(self.results))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("status", str(self.folder), "--json"))
        return found

    def list_outcomes(self) -> list[str]:
        """Return the outcomes of all attempts, oldest first."""
        records = sorted(self.records(), key=lambda record: record.circumstance.attempt)
        return [record.outcome.kind for record in records]

    def records(self) -> list[RunRecord]:
        return [store.read_record(path) for path in store.find_records([self.folder])]

    def wait(self, is_reached: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_reached():
            assert time.monotonic() < until, self.describe()
            time.sleep(0.2)

    def wait_for_jobs(self) -> None:
        """Wait until every job of the service has ended."""
        self.wait(lambda: all("end_time" in job for job in self.server.find()))

    def wait_for_steps(self) -> str:
        """Wait until a run is making steps, and return the resource name of a running job."""
        self.wait(lambda: any('"phase": "step' in text for text in self._read_heartbeats()))
        return str(self.server.find("RUNNING")[0].name)

    def _read_heartbeats(self) -> Iterator[str]:
        """Yield the texts of the heartbeat files of running jobs. Files of lost machines remain in the bucket, so files
        of all other jobs are skipped."""
        for job in self.server.find("RUNNING"):
            machines = self.server.folder / job.name.rpartition("/")[2]
            yield from (path.read_text() for path in machines.glob("*/work/adhoc/*/*/heartbeat.json"))

    def describe(self) -> str:
        """Return a text with the states of all jobs and the output of their machines. It is the message of a failed
        assertion."""
        jobs = [f"{job.display_name} {job.state.name} {job.error.message}" for job in self.server.find()]
        outputs = [path.read_text()[-2000:] for path in self.server.folder.glob("*/*/output.txt")]
        return "\n".join([*jobs, *outputs])

    def check(self, points: int) -> None:
        """Assert the rules at the end of a study. Each of its `points` points has exactly one `ok` record. The bucket
        and the study's folder have the same records, and every attempt (try at a run) has a record."""
        status = self.status()
        assert [point["state"] for point in status["points"]] == ["answered"] * points, self.describe()
        assert status["jobs"] == []
        answers = Counter(
            (record.config_id, record.circumstance.repeat) for record in self.records() if record.outcome.kind == "ok"
        )
        assert len(answers) == points and set(answers.values()) == {1}
        stored = [name for name in ObjectStore(f"{self.bucket}/adhoc").list() if name.endswith("/record.json")]
        here = [path.relative_to(self.folder).as_posix() for path in store.find_records([self.folder])]
        assert sorted(stored) == sorted(here), "every record is in the bucket and in the study's folder"
        claims = {path.parent for path in self.folder.glob("*/*/claim.json")}
        assert claims == {path.parent for path in store.find_records([self.folder])}, "every attempt has a record"
        assert [path for path in self.folder.rglob(".*") if path.is_file()] == []
