"""Entry point of a supervisor.

`python -m bench.runtime FOLDER [NODE]` is started once per node. FOLDER is the folder of an attempt, which is one try
at a run. NODE is the node number, 0 by default. `python -m bench.runtime --series` runs several attempts on one
machine.

The exit code on node 0 is 0 if the attempt ended with the outcome `ok`, and otherwise 1. On another node it is 0 if the
ranks of that node ended without an error, and otherwise 1.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from bench.core.spec import RunSpec
from bench.runtime.coordinator import RunCoordinator
from bench.runtime.node import NodeAgent
from bench.runtime.process import ForkServer


def run_series() -> None:
    """Supervise several attempts on this machine, one after another. An attempt is one try at a run. All ranks are
    forked from one process.

    The function reads JSON from standard input. The first line contains the device and the specs of all runs. The specs
    determine which modules are imported. Each later line is the folder of an attempt. When the function has processed a
    line of input, it writes an empty line to standard output. SIGTERM during an attempt ends the attempt with a record.
    SIGTERM between two attempts ends this process.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print while they are imported
    setup = json.loads(sys.stdin.readline())
    specs = [RunSpec.model_validate(plain) for plain in setup["specs"]]
    with contextlib.closing(ForkServer(setup["device"], specs)) as server:
        server.wait_until_ready()
        print(file=answers)
        for line in sys.stdin:
            if server.has_ended:
                server.restart()
            RunCoordinator(Path(json.loads(line)), start=server.start).run()
            server.reap()
            # `RunCoordinator` has installed its own handler, which would ignore a signal between two attempts.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            print(file=answers)


def run_one(folder: Path, number: int = 0) -> bool:
    """Supervise the node `number` of an attempt (one try at a run). On node 0, return True if the attempt ended with
    the outcome `ok`. On another node, return True if the ranks of that node ended without an error."""
    if number:
        return NodeAgent(folder, number).run()
    record = RunCoordinator(folder).run()
    return record is not None and record.outcome.kind == "ok"


if sys.argv[1] == "--series":
    run_series()
else:
    sys.exit(0 if run_one(Path(sys.argv[1]), *map(int, sys.argv[2:3])) else 1)
