"""Engine for DeepSpeed's ZeRO, stages 0 to 3: options, checks and facts, without importing torch. The module `engine`
builds it."""

from bench.engines.deepspeed.facts import facts
from bench.engines.deepspeed.options import FITTED_TO_MODEL, Options, check

__all__ = ["FITTED_TO_MODEL", "Options", "check", "facts"]
