"""`python -m bench.calibrate FOLDER`, once per node of a job, as its launcher spreads it."""

import os
import sys
from pathlib import Path

from bench import job_context
from bench.calibrate import node
from bench.runtime.process import install_handlers

install_handlers(sys.exit)  # as an exception, so that the ranks are ended
sys.exit(0 if node.run(Path(sys.argv[1]), job_context.find_job(os.environ).context.number) else 1)
