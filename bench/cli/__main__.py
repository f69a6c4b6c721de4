"""`python -m bench.cli`: runs the `zeroscale` command if its console script is not on PATH."""

import sys

from bench.cli import main

sys.exit(main())
