"""`python -m bench.runtime FOLDER [NODE]`, once per node; NODE is 0 by default.

The exit code of node 0 is 0 if the attempt in FOLDER ended `ok`, that of another node if its ranks did.
"""

import sys
from pathlib import Path

from bench.runtime.coordinator import RunCoordinator
from bench.runtime.node import NodeAgent

folder, number = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
if number:
    good = NodeAgent(folder, number).run()
else:
    record = RunCoordinator(folder).run()
    good = record is not None and record.outcome.kind == "ok"
sys.exit(0 if good else 1)
