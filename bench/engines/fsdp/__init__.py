"""torch's FSDP2 (torch.distributed.fsdp.fully_shard) as planning and reading see it: no torch. `engine` builds it."""

from bench.engines.fsdp.facts import facts
from bench.engines.fsdp.options import Options, check

__all__ = ["Options", "check", "facts"]
