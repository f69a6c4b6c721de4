"""Engine for a pipeline, which divides the layers of a model among ranks: options, checks and facts, without importing
torch. The module `engine` builds it."""

from bench.engines.pipeline.facts import facts
from bench.engines.pipeline.options import Options, check

__all__ = ["Options", "check", "facts"]
