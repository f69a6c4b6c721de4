"""A pipeline, which divides the layers among ranks, as planning and reading see it: no torch. `engine` builds it."""

from bench.engines.pipeline.facts import facts
from bench.engines.pipeline.options import Options, check

__all__ = ["Options", "check", "facts"]
