"""Script that runs SCRIPT, another script of this folder, on several ranks: `python forked_ranks.py SCRIPT JOBS OUT
RANK...`.

It imports all modules once, and then forks a process for each RANK. torchrun's environment variables must be set,
except RANK and LOCAL_RANK. The exit code is 1 if a rank failed.
"""

import gc
import importlib
import json
import multiprocessing
import os
import sys
from pathlib import Path

from bench.core.spec import RunSpec
from bench.runtime import fork_server


def main() -> None:
    script, jobs, out, *ranks = sys.argv[1:]
    specs = [RunSpec.model_validate(plain) for plain in json.loads(Path(jobs).read_text()).values()]
    fork_server.preload("cpu", {spec.engine.backend for spec in specs}, {spec.model.family for spec in specs})
    importlib.import_module(Path(script).stem)
    gc.collect()
    gc.freeze()  # as in a packed job: DeepSpeed runs garbage collection several times for each engine that it builds
    forked = multiprocessing.get_context("fork")
    processes = [forked.Process(target=run_rank, args=(script, jobs, out, rank)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


def run_rank(script: str, jobs: str, out: str, rank: str) -> None:
    os.environ.update(RANK=rank, LOCAL_RANK=rank)
    sys.argv = [script, jobs, out]
    importlib.import_module(Path(script).stem).main()


if __name__ == "__main__":
    main()
