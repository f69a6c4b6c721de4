"""`python -m bench.runtime FOLDER [NODE]`, once per node; NODE is 0 by default. Or `python -m bench.runtime --series`.

The exit code of node 0 is 0 if the attempt in FOLDER ended `ok`, that of another node if its ranks did.
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
    """Supervise one attempt after the other on this machine, with ranks forked from one process.

    Reads JSON from standard input, an order per line: first the device and the specs to import for, then the folder of
    an attempt per line. Writes an empty line when it is done with an order. SIGTERM ends the attempt under way with a
    record, and this process between two attempts.
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
    """Supervise one node of one attempt; return whether it ended well."""
    if number:
        return NodeAgent(folder, number).run()
    record = RunCoordinator(folder).run()
    return record is not None and record.outcome.kind == "ok"


if sys.argv[1] == "--series":
    run_series()
else:
    sys.exit(0 if run_one(Path(sys.argv[1]), *map(int, sys.argv[2:3])) else 1)
