"""`python -m bench.cli`: the command where its console script is not on the path."""

import sys

from bench.cli import main

sys.exit(main())
