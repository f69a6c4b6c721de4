"""Engine for torch's DistributedDataParallel: options, checks and facts, without importing torch. The module `engine`
builds it."""

from bench.engines.ddp.facts import facts
from bench.engines.ddp.options import Options, check

__all__ = ["Options", "check", "facts"]
