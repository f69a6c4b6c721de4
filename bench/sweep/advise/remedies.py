"""What would make points fit that do not: changes of the question, each tried by what memory is predicted with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import launchers
from bench.config import compose
from bench.core.errors import UserError
from bench.core.formatting import describe_choice
from bench.core.spec import RunSpec
from bench.predict.advice.candidates import DeviceLimits, Shortage
from bench.predict.memory import predict_host_memory, predict_memory
from bench.sweep.advise.questions import AdviceQuery

Change = tuple[tuple[str, Any], ...]
FUSED: Change = (("optimizer.implementation", "fused"),)
_OPTIMIZER: Change = (("engine.offload_optimizer.device", "cpu"), ("optimizer.implementation", "native"))
OFFLOAD: tuple[Change, ...] = (_OPTIMIZER, (*_OPTIMIZER, ("engine.offload_param.device", "cpu")))
"""The time of a step with these is not predicted."""


def find_remedy(
    query: AdviceQuery,
    config_dir: Path | None,
    room: DeviceLimits,
    short: Sequence[Shortage],
    changes: Sequence[Change],
) -> str:
    """Return in words the first of `changes` with which one of `short` fits or may fit, "it" being the one that lacks
    least; empty where none does. What the question itself says is not changed."""
    given = {key for key, _ in query.overrides}
    lacking = sorted((one for one in short if one.bytes > 0), key=lambda one: one.bytes)
    for change in changes:
        if given & {key for key, _ in change}:
            continue
        for shortage in lacking:
            fits = _may_fit(query, config_dir, room, shortage.spec, change)
            if fits is not False:
                words = " ".join(f"{key}={value}" for key, value in change)
                what = (
                    f"{shortage.spec.engine.name}, {describe_choice(shortage.spec)},"
                    if shortage is not lacking[0]
                    else "it"
                )
                untimed = " (its time is not predicted)" if change in OFFLOAD else ""
                return f"{words}, with which {what} {'fits' if fits else 'may fit'}{untimed}"
    return ""


def _may_fit(
    query: AdviceQuery, config_dir: Path | None, room: DeviceLimits, short: RunSpec, change: Change
) -> bool | None:
    """Whether a point fits with a change, into devices and hosts; None: perhaps, also where the host is unknown."""
    cluster = [("launcher", launchers.find_cluster()), ("batch.micro", 1)]
    pairs = [*cluster, *query.overrides, ("engine", short.engine.name), *change]
    try:
        made = compose.compose_request(pairs, config_dir)
        made = made._replace(spec=made.spec.model_copy(update={name: getattr(short, name) for name in _SEARCHED}))
        compose.check(made, room.device)
    except UserError:  # an engine that does not know it
        return False
    needed = [predict_memory(made.spec, room.device, room.bytes).fits(room.bytes)]
    on_host, there = predict_host_memory(made.spec, room.device, room.bytes), made.machine.host_memory_bytes
    if change in OFFLOAD:
        needed.append(on_host.fits(there) if on_host and there else None)
    return False if False in needed else None if None in needed else True


_SEARCHED = ("nodes", "parallel", "batch", "activation_checkpointing")
