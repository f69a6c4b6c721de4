"""torch's FSDP2 (torch.distributed.fsdp.fully_shard): what is said of it without torch. `engine` builds it."""

from bench.engines.fsdp.facts import facts
from bench.engines.fsdp.options import Options, check

__all__ = ["Options", "check", "facts"]
