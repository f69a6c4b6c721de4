"""Facts about the DDP engine: every rank holds all weights, gradients and optimizer state, and its losses are the
reference for other engines."""

from typing import TYPE_CHECKING

from bench.core.engine_facts import FROZEN_FORMS, Division, EngineFacts, FrozenWeights, Rehearsal
from bench.core.spec import Device, RunSpec

if TYPE_CHECKING:
    from bench.core.engine_costs import EngineMemory, EngineStep, ModelSizes


def facts(spec: RunSpec) -> EngineFacts:
    """Return the facts about this engine for a spec: what it supports, and functions that predict its costs."""
    return EngineFacts(
        label="DDP",
        division=Division(),
        is_reference=True,
        rehearsal=Rehearsal("any"),
        sums_norms=True,
        divides_by_tokens=True,
        frozen=FrozenWeights(FROZEN_FORMS),
        members=frozenset({"evaluate", "predict_tokens", "set_learning_rate", "save", "load", "list_weights"}),
        memory=_predict_memory,
        step=_predict_step,
    )


def _predict_memory(
    spec: RunSpec, model: "ModelSizes", device: Device, room: int | None, rehearsed: bool
) -> "EngineMemory":
    # imported here because it imports numpy, which other users of facts do not need
    from bench.engines.ddp import costs

    return costs.DdpMemory(spec, model, device)


def _predict_step(spec: RunSpec, model: "ModelSizes", device: Device) -> "EngineStep":
    from bench.engines.ddp import costs

    return costs.predict_step(spec, model)
