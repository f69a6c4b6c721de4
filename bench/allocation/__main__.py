"""`python -m bench.allocation JOB`, once per node (or per device) of an allocation; JOB is the folder of a job.

The exit code is 0 if the job did what it could, however its points ended: a failure is a result.
"""

import os
import sys
from pathlib import Path

from bench.allocation.conductor import Conductor
from bench.allocation.member import Member
from bench.allocation.place import Place

folder, place = Path(sys.argv[1]), Place.here(os.environ)
sys.exit((Member(folder, place) if place.number else Conductor(folder, place)).run())
