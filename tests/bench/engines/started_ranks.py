"""Function that runs a script on several ranks, which communicate over gloo, and returns their observations."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

Seen = list[dict[str, Any]]


def start_ranks(script: str, jobs: dict[str, Any], ranks: int, folder: Path, pretended: int | None = None) -> Seen:
    """Run a script of this folder on `ranks` ranks, and return the observations of each rank. `jobs` maps labels to
    RunSpecs as plain data.

    If `pretended` is the index of a rank, only this rank runs, as a rehearsal in which the other ranks are simulated.
    """
    present = range(ranks) if pretended is None else [pretended]
    folder.mkdir(exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    meeting = {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    quiet |= {} if pretended is None else {"PRETENDED": "1"}
    words = [str(folder / "jobs.json"), str(folder / "seen"), *map(str, present)]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("forked_ranks.py")), script, *words],
        env=os.environ | meeting | quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=580)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in present]
