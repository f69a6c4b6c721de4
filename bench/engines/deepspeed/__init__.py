"""DeepSpeed's ZeRO, stages 0 to 3: what is said of it without torch. `engine` builds it."""

from bench.engines.deepspeed.facts import facts
from bench.engines.deepspeed.options import Options
from bench.engines.deepspeed.rules import check

__all__ = ["Options", "check", "facts"]
