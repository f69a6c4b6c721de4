"""Engine for torch's FSDP2 (torch.distributed.fsdp.fully_shard): options, checks and facts, without importing torch.
The module `engine` builds it."""

from bench.engines.fsdp.facts import facts
from bench.engines.fsdp.options import Options, check

__all__ = ["Options", "check", "facts"]
