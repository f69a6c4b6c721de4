"""Fields of a point: a spec as a flat list of dotted names, and a table of the purposes for which each field matters.

Fields have the names of the command line, such as `batch.micro` and `engine.options.stage`. There are three purposes:
the config_id, comparisons of losses, and comparisons of measured with predicted step times. Two points (configurations)
are equal for a purpose if all fields that matter for this purpose are equal.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel


class FieldRole(NamedTuple):
    """Role of a field of a spec: the properties of a run that depend on it, and whether the summary has a column for
    it."""

    identity: bool = True  # the config_id depends on it
    losses: bool = True  # the losses for a given seed depend on it, with any engine
    step_time: bool = True
    shown: bool = False  # a column of the summary shows it, so other texts omit it


_KERNEL = FieldRole(losses=False)  # another implementation of the same computation

FIELDS: Mapping[str, FieldRole] = {
    "model.name": FieldRole(step_time=False, shown=True),
    "model.parameters": FieldRole(step_time=False),  # the published number, which follows from the shape
    "model.source": FieldRole(identity=False, losses=False, step_time=False),
    "model.checkpoint": FieldRole(step_time=False),
    "model.attention": _KERNEL,
    "model.compile": _KERNEL,
    "model.loss_chunk_tokens": _KERNEL,
    "engine": FieldRole(losses=False),
    "engine.name": FieldRole(losses=False, shown=True),
    "engine.backend": FieldRole(losses=False, shown=True),
    "data": FieldRole(step_time=False),
    "data.name": FieldRole(step_time=False, shown=True),
    "batch.micro": FieldRole(shown=True),
    "batch.accumulation": FieldRole(losses=False, shown=True),  # losses follow from the micro-batches of all ranks
    "batch.global": FieldRole(identity=False, shown=True),  # follows from the other fields and `parallel`
    "nodes": FieldRole(shown=True),
    "devices_per_node": FieldRole(shown=True),
    "objective": FieldRole(shown=True),
    "sequence": FieldRole(shown=True),
    "parallel": FieldRole(losses=False),
    "precision": FieldRole(shown=True),
    "activation_checkpointing": FieldRole(shown=True),
    "adapter": FieldRole(shown=True),
    "optimizer.implementation": _KERNEL,
    "learning": FieldRole(step_time=False),
    "learning.evaluate_every": FieldRole(losses=False, step_time=False),
    "learning.evaluation_samples": FieldRole(losses=False, step_time=False),
    "learning.quality": FieldRole(losses=False, step_time=False),
    "learning.answer_tokens": FieldRole(losses=False, step_time=False),
    "learning.checkpoint_every": FieldRole(identity=False, losses=False, step_time=False),
    "learning.save_model": FieldRole(identity=False, losses=False, step_time=False),
    "loss_mean": FieldRole(step_time=False),
    "seed": FieldRole(step_time=False),
    "measure": FieldRole(losses=False, step_time=False),
}
"""Fields whose role differs from the default role. The role of a group, such as `data`, applies to all of its fields
that have no entry of their own. In this table, a group precedes its fields."""

MODEL_KERNELS = tuple(
    name.removeprefix("model.") for name, role in FIELDS.items() if role is _KERNEL and name.startswith("model.")
)
"""Fields of a model that select an implementation without changing the computed function."""

_METADATA_FIELDS = {name for name, role in FIELDS.items() if not (role.identity or role.losses or role.step_time)}

Question = Literal["identity", "losses", "step_time"]


def flatten(spec: BaseModel | Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and plain value of every field of a spec; None for an unset field. Fields on which no
    property of a run depends, such as `model.source`, are excluded."""
    plain = spec.model_dump(mode="json", by_alias=True) if isinstance(spec, BaseModel) else spec
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{path}{name}.")
        elif f"{path}{name}" not in _METADATA_FIELDS:
            yield f"{path}{name}", value


def select(plain: Mapping[str, Any], question: Question) -> dict[str, Any]:
    """Return the fields of a spec on which one property of a run depends. `plain` is the spec as a nested dict.
    `question` names the property: the identity (config_id), the losses or the step time. Keys are the names in YAML,
    such as `global` instead of `global_`."""
    chosen = dict(plain)
    for field in (field for field, role in FIELDS.items() if not getattr(role, question)):
        group, _, name = field.partition(".")
        if not name:
            chosen.pop(group, None)
        elif group in chosen:  # copied, because the nested mapping belongs to the caller
            chosen[group] = {other: value for other, value in chosen[group].items() if other != name}
    return chosen


def is_shown(name: str) -> bool:
    """Return True if a column of the summary shows a field."""
    role = FIELDS.get(name) or FIELDS.get(name.partition(".")[0])
    return role is not None and role.shown
