"""What the engine of a spec says of its costs; NoPrediction where it says nothing."""

import functools

from bench import engines, objectives
from bench.engine_costs import EngineMemory, EngineStep, ModelSizes, PipelineCosts, Transfer
from bench.errors import NoPrediction
from bench.predict.workload import get_network
from bench.spec import Device, RunSpec
from bench.stacks import Stacks, list_modules, list_tensors
from bench.units import units


def predict_engine_memory(
    spec: RunSpec, device: Device, room: int | None = None, *, rehearsed: bool = False
) -> EngineMemory:
    """Return the engine's part of the memory of a rank of `spec`; UserError for what it cannot predict."""
    said = engines.facts(spec).memory
    if said is None:
        raise _build_error(spec, "what memory it needs")
    return said(spec, get_model_sizes(get_network(spec)), device, room, rehearsed)


def predict_engine_step(spec: RunSpec, device: Device) -> EngineStep:
    """Return what the engine of `spec` adds to a step's passes; UserError for what it cannot predict."""
    said = engines.facts(spec).step
    if said is None:
        raise _build_error(spec, "what it adds to a step")
    return _add_target_count(said(spec, get_model_sizes(get_network(spec)), device), spec)


def predict_pipeline(spec: RunSpec, device: Device, *, rehearsed: bool = False) -> PipelineCosts | None:
    """Return the engine's part of the costs by place, of a model that is cut into stages; None where none is. UserError
    for what the engine cannot predict."""
    said = engines.facts(spec).pipeline
    if said is None:
        return None
    costs = said(spec, get_network(spec), device, rehearsed)
    places = (place._replace(step=_add_target_count(place.step, spec)) for place in costs.places)
    return costs._replace(places=tuple(places))


def _add_target_count(step: EngineStep, spec: RunSpec) -> EngineStep:
    """Add the sum of target tokens over all ranks, one fp64 number before the passes, where a step needs it."""
    if spec.world_size == 1 or not objectives.weighs_targets(spec):
        return step
    counted = Transfer("all_reduce", "forward", 8, 1, 1, False, spec.world_size)
    return step._replace(transfers=[*step.transfers, counted])


def _build_error(spec: RunSpec, what: str) -> NoPrediction:
    rule = f"no prediction: it does not say {what}"
    return NoPrediction(f"engine.backend={spec.engine.backend}", rule, "measure it")


@functools.lru_cache(maxsize=1024)  # an engine's own caches know a model by this value
def get_model_sizes(network: Stacks) -> ModelSizes:
    """Return a network as engines see it, the same value each time."""
    return ModelSizes(
        tuple(list_tensors(network)), functools.partial(list_modules, network), functools.partial(units, network)
    )
