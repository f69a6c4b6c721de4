"""What the engine of a spec says of its costs; NoPrediction where it says nothing."""

import functools

from bench import engines
from bench.engine_costs import EngineMemory, EngineStep, ModelSizes
from bench.errors import NoPrediction
from bench.predict.workload import network_of
from bench.spec import Device, RunSpec
from bench.stacks import Stacks, modules, tensors
from bench.units import units


def engine_memory(spec: RunSpec, device: Device, room: int | None = None, *, rehearsed: bool = False) -> EngineMemory:
    """Return the engine's part of the memory of a rank of `spec`; UserError for what it cannot predict."""
    said = engines.facts(spec).memory
    if said is None:
        raise _unknown(spec, "what memory it needs")
    return said(spec, model_sizes(network_of(spec)), device, room, rehearsed)


def engine_step(spec: RunSpec, device: Device) -> EngineStep:
    """Return what the engine of `spec` adds to a step's passes; UserError for what it cannot predict."""
    said = engines.facts(spec).step
    if said is None:
        raise _unknown(spec, "what it adds to a step")
    return said(spec, model_sizes(network_of(spec)), device)


def _unknown(spec: RunSpec, what: str) -> NoPrediction:
    rule = f"no prediction: it does not say {what}"
    return NoPrediction(f"engine.backend={spec.engine.backend}", rule, "measure it")


@functools.lru_cache(maxsize=1024)  # an engine's own caches know a model by this value
def model_sizes(network: Stacks) -> ModelSizes:
    """Return a network as engines see it, the same value each time."""
    return ModelSizes(tuple(tensors(network)), functools.partial(modules, network), functools.partial(units, network))
