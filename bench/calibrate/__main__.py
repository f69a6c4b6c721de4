"""`python -m bench.calibrate FOLDER`, once per node of an allocation, as `srun` starts it."""

import os
import sys
from pathlib import Path

from bench.allocation.place import Place
from bench.calibrate import node
from bench.supervisor import signals

signals.heed(sys.exit)  # as an exception, so that the ranks are ended
sys.exit(0 if node.run(Path(sys.argv[1]), Place.here(os.environ).number) else 1)
