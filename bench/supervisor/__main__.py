"""`python -m bench.supervisor FOLDER`: exit code 0 if the attempt in FOLDER ended `ok`."""

import sys
from pathlib import Path

from bench.supervisor.node import Node

record = Node(Path(sys.argv[1])).run()
sys.exit(0 if record.outcome.kind == "ok" else 1)
