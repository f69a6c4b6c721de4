"""Sweeps on a testbed (a small Slurm cluster on this machine), started as a user starts them, and the rules that must
be true after every injected fault."""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node_processes import ours
from slurm_testbed import PATIENCE_S, Testbed, wait_for

from bench import cli
from bench.core import store
from bench.core.record import Circumstance, RunRecord
from bench.sweep.definition import RunKey

_SMALL = (  # a tiny model: even a slow link transfers its gradients quickly
    "model=gpt2_tiny", "model.name=minute", "model.parameters=null", "model.shape.width=32", "model.shape.layers=2",
    "model.shape.inner=64", "model.shape.heads=2", "sequence.tokens=32", "engine=ddp", "machine=cpu", "precision=fp32",
    "devices_per_node=1",
    "measure.block_steps=3", "measure.warmup_steps=6",
    "launcher=slurm_testbed", "launcher.warning_s=0", "launcher.silence_s=10", "launcher.agent_silence_s=20",
)  # fmt: skip
QUICK = (*_SMALL, "launcher.time_limit_min=3", "measure.min_steps=6", "measure.window_s=0")
"""Overrides for points that take a few seconds."""
ENDLESS = (*_SMALL, "measure.min_steps=1000000", "measure.max_s=600")
"""Overrides for points that run until a fault or a command ends them."""

_MAY_STAY = {
    True: {"answered", "waiting", "given up", "running", "pending"},
    False: {"answered", "waiting", "given up"},
}
"""Allowed states of a point after a fault. The key is True if the study has jobs in the queue. A point is `answered` if
it has a final outcome."""


class Study:
    """Study whose jobs run on a testbed, with its own results folder."""

    def __init__(self, bed: Testbed, results: Path) -> None:
        self.bed, self.results, self.folder = bed, results, results / "adhoc"
        self._seen: set[Path] = set()

    def start(self, verb: str, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start a `zeroscale` command as a separate process. `words` are its arguments, and `environment` has
        additional environment variables."""
        command = [sys.executable, "-m", "bench.cli", verb, *words]
        own = os.environ | {"OMP_NUM_THREADS": "1"} | environment  # sbatch exports these variables to the ranks
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own)

    def __call__(self, verb: str, *words: str, code: int = 0, **environment: str) -> str:
        """Run a `zeroscale` command, assert its exit code, and return its output."""
        process = self.start(verb, *words, **environment)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code, output + errors
        return output or errors

    def asking(self, *words: str) -> tuple[str, ...]:
        return ("sweep", *words, "--results", str(self.results), "--json")

    def sweep(self, *words: str, **environment: str) -> dict[str, Any]:
        """Submit points with `zeroscale sweep`, and return the command's JSON output."""
        submission: dict[str, Any] = json.loads(self(*self.asking(*words), code=0, **environment))
        return submission

    def resume(self) -> dict[str, Any]:
        submission: dict[str, Any] = json.loads(self("resume", str(self.folder), "--json"))
        return submission

    def status(self) -> dict[str, Any]:
        """Return the JSON output of `zeroscale status`. It runs in this process, because tests call it often."""
        with contextlib.redirect_stdout(io.StringIO()) as output:
            cli.main(["status", str(self.folder), "--json"])
        status: dict[str, Any] = json.loads(output.getvalue())
        return status

    def until(self, what: Callable[[dict[str, Any]], bool], patience_s: float = PATIENCE_S) -> None:
        """Wait until the function `what` returns True when called with the JSON output of `zeroscale status`. Fail
        after `patience_s` seconds."""
        until = time.monotonic() + patience_s
        while not what(status := self.status()):
            assert time.monotonic() < until, f"{json.dumps(status, indent=1)}\n{self.log()}"
            time.sleep(0.5)

    def reasons(self) -> set[str]:
        """Return the reasons that `zeroscale status` gives for the states of the points."""
        return {point["why"] for point in self.status()["points"]}

    def ended(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until no job of this study is in the queue."""
        self.until(lambda status: status["jobs"] == [], patience_s)

    def next_record(self) -> RunRecord:
        """Wait until there is a record that did not exist at the last call of this method. Assert that there is only
        one such record, and return it."""
        self.until(lambda _: bool(self.new()))
        (path,) = self.new()
        self._seen.add(path)
        return store.read_record(path)

    def new(self) -> set[Path]:
        return set(self._paths()) - self._seen

    def records(self) -> list[RunRecord]:
        return [store.read_record(path) for path in self._paths()]

    def attempts(self) -> set[Path]:
        return set(self.folder.glob("*/[0-9]*.[0-9]*"))

    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("jobs/*/slurm-*.log"))

    def check(self) -> list[str]:
        """Assert the rules that must be true after any fault, and return the sorted states of the points.

        Each point with the state `answered` has exactly one final result. Points with other states have none. Every
        attempt (try at a point) has a record, or its job still runs. If no job of the study is left, no process of the
        study is left either.
        """
        status, finals, attempts = self.status(), Counter[RunKey](), Counter[RunKey]()
        points = {RunKey(point["config_id"], point["machine"], point["repeat"]): point for point in status["points"]}
        for folder in self.attempts():
            circumstance = Circumstance.model_validate_json((folder / store.CIRCUMSTANCE).read_bytes())
            key = RunKey(folder.parent.name, circumstance.machine.name, circumstance.repeat)
            if not (folder / store.RECORD).exists():
                handle = self.folder / "jobs" / circumstance.launcher["job"] / "handle"
                assert handle.read_text() in status["jobs"], f"{folder} is forgotten"
            elif not circumstance.launcher.get("control"):
                attempts[key] += 1
                record = store.read_record(folder / store.RECORD)
                finals[key] += record.outcome.final and not (record.observations and record.observations.drill)
        for key, point in points.items():
            assert point["state"] in _MAY_STAY[bool(status["jobs"])], point
            assert (finals[key], attempts[key]) == (point["state"] == "answered", point["attempts"]), point
        assert set(attempts) <= set(points), "every attempt belongs to a requested point"
        if not status["jobs"]:
            wait_for(lambda: not ours(self.bed.name, self.folder))
        return sorted(point["state"] for point in status["points"])

    def _paths(self) -> list[Path]:
        return list(self.folder.glob("*/*.*/record.json"))
