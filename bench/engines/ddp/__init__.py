"""torch's DistributedDataParallel: what is said of it without torch. `engine` builds it."""

from bench.engines.ddp.facts import facts
from bench.engines.ddp.options import Options, check

__all__ = ["Options", "check", "facts"]
