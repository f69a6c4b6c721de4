"""The fields of a point: a spec flat, by dotted name, and one table of what each field decides.

A field is named as on the command line (`batch.micro`, `engine.options.stage`). Whoever asks whether two points are the
same, for a purpose, asks here: the config_id, the comparison of losses, measured times beside predicted ones.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel


class Decides(NamedTuple):
    """What another value of a field changes, and where a field is shown."""

    identity: bool = True  # which point it is: the config_id
    losses: bool = True  # the losses of a seed, whatever the engine
    step_time: bool = True  # how long a step takes
    shown: bool = False  # by a column of the summary, so that no other text has to


_KERNEL = Decides(losses=False)  # the same numbers by another way

FIELDS: Mapping[str, Decides] = {
    "model.name": Decides(step_time=False, shown=True),
    "model.parameters": Decides(step_time=False),  # published: the shape says them again
    "model.source": Decides(identity=False, losses=False, step_time=False),
    "model.attention": _KERNEL,
    "model.compile": _KERNEL,
    "model.loss_chunk_tokens": _KERNEL,
    "engine": Decides(losses=False),
    "engine.name": Decides(losses=False, shown=True),
    "engine.backend": Decides(losses=False, shown=True),
    "data": Decides(step_time=False),
    "data.name": Decides(step_time=False, shown=True),
    "batch.micro": Decides(shown=True),
    "batch.accumulation": Decides(losses=False, shown=True),  # they follow from the micro-batches of all ranks
    "batch.global": Decides(identity=False, shown=True),  # follows from the others, but not without `parallel`
    "nodes": Decides(shown=True),
    "devices_per_node": Decides(shown=True),
    "objective": Decides(shown=True),
    "sequence": Decides(shown=True),
    "parallel": Decides(losses=False),
    "precision": Decides(shown=True),
    "activation_checkpointing": Decides(shown=True),
    "optimizer.implementation": _KERNEL,
    "learning": Decides(step_time=False),
    "learning.evaluate_every": Decides(losses=False, step_time=False),
    "learning.evaluation_samples": Decides(losses=False, step_time=False),
    "learning.checkpoint_every": Decides(identity=False, losses=False, step_time=False),
    "loss_mean": Decides(step_time=False),
    "seed": Decides(step_time=False),
    "measure": Decides(losses=False, step_time=False),
}
"""Of every field that does not decide everything, or that a column shows; a row holds for all below its field that have
none of their own, and a group stands before what is below it."""

MODEL_KERNELS = tuple(
    name.removeprefix("model.") for name, decides in FIELDS.items() if decides is _KERNEL and name.startswith("model.")
)
"""Fields of a model by which the same numbers are computed in another way."""

_REMARKS = {name for name, one in FIELDS.items() if not (one.identity or one.losses or one.step_time)}

Question = Literal["identity", "losses", "step_time"]


def flatten(spec: BaseModel | Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every field of a spec, or of its plain form, that decides anything: its dotted name and its plain value,
    None where it is unset."""
    plain = spec.model_dump(mode="json", by_alias=True) if isinstance(spec, BaseModel) else spec
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{path}{name}.")
        elif f"{path}{name}" not in _REMARKS:
            yield f"{path}{name}", value


def select(plain: Mapping[str, Any], question: Question) -> dict[str, Any]:
    """Return of a plain spec, its keys by alias, the fields that decide a question."""
    chosen = dict(plain)
    for group, names in _indifferent(question).items():
        if group not in chosen:
            continue
        if names is None:
            del chosen[group]
        else:
            chosen[group] = {name: value for name, value in chosen[group].items() if name not in names}
    return chosen


def is_shown(name: str) -> bool:
    """Whether a column of the summary shows a field."""
    decides = FIELDS.get(name) or FIELDS.get(name.partition(".")[0])
    return decides is not None and decides.shown


@functools.cache
def _indifferent(question: Question) -> Mapping[str, set[str] | None]:
    """Return what does not decide a question: top-level fields, with the names below them, or None for all of them."""
    found: dict[str, set[str] | None] = {}
    for field, decides in FIELDS.items():
        group, _, name = field.partition(".")
        if getattr(decides, question):
            continue
        below = found.setdefault(group, set() if name else None)
        if below is not None:
            below.add(name)
    return found
