"""torch's DistributedDataParallel as planning and reading see it: no torch. `engine` builds it."""

from bench.engines.ddp.facts import facts
from bench.engines.ddp.options import Options, check

__all__ = ["Options", "check", "facts"]
