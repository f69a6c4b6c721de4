"""A pipeline: the layers are divided among ranks. What is said of it without torch; `engine` builds it."""

from bench.engines.pipeline.facts import facts
from bench.engines.pipeline.options import Options, check

__all__ = ["Options", "check", "facts"]
