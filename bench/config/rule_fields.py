"""What an exclude rule may ask about a point: every field of its spec and machine, by the key that sets it."""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from bench import data, engines, models
from bench.config.decode import Request, complete_lengths, decode_cached, list_models, load_file
from bench.core import plugins
from bench.core.errors import UserError
from bench.core.machine import Machine
from bench.core.spec import RunSpec


def collect_fields(composed: Request) -> dict[str, Any]:
    """Return a point's values as it will run, nested as their names are dotted: options of engine and data beside the
    fields they share, defaults included, and the parameters counted also where none are published."""
    spec = composed.spec
    family, engine = load_file(models, spec.model.family), load_file(engines, spec.engine.backend)
    source = load_file(data, spec.data.source)
    shape = decode_cached(family.Shape, spec.model.shape)
    return {
        **vars(spec),
        "model": {**vars(spec.model), "shape": shape, "parameters": models.count_expected_parameters(spec.model)},
        "engine": {**vars(spec.engine), **vars(decode_cached(engine.Options, spec.engine.options))},
        "data": {**vars(spec.data), **vars(decode_cached(source.Options, spec.data.options))},
        "batch": {"micro": spec.batch.micro, "accumulation": spec.accumulation, "global": spec.global_batch},
        "world_size": spec.world_size,
        "data_parallel": spec.data_parallel,
        "machine": composed.machine,
    }


def collect_fields_of_tree(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same for a point that cannot be decoded, as far as what it asks for tells."""
    nodes, devices = plain.get("nodes"), plain.get("devices_per_node")
    world_size = nodes * devices if isinstance(nodes, int) and isinstance(devices, int) else None
    objective = plain["objective"].get("name")
    parallel = plain.get("parallel") or {}
    copy = parallel.get("tensor", 1), parallel.get("pipeline", 1)
    whole = world_size is not None and all(isinstance(ranks, int) and ranks > 0 for ranks in copy)
    data_parallel = world_size // math.prod(copy) if world_size is not None and whole else None
    known = {**plain, "objective": objective, "world_size": world_size, "data_parallel": data_parallel}
    with contextlib.suppress(UserError):
        known["sequence"] = complete_lengths(objective, plain.get("sequence"))
    return known


@functools.cache
def list_field_names() -> dict[str, tuple[str, ...]]:
    """Return every dotted name of `facts`, whichever the engine, each with its way through them; a group's own name
    stands for what was chosen from it."""
    kinds: list[tuple[str, type[BaseModel]]] = [("", RunSpec), ("machine.", Machine)]
    kinds += [("engine.", engine.Options) for _, engine in plugins.list_usable(plugins.ENGINE)]
    kinds += [("data.", source.Options) for _, source in plugins.list_usable(plugins.DATA)]
    kinds += [("model.shape.", family.Shape) for _, family in plugins.list_usable(plugins.FAMILY)]
    tokens = {
        f"sequence.{kind.name}" for _, objective in plugins.list_usable(plugins.OBJECTIVE) for kind in objective.KINDS
    }
    fields = itertools.chain.from_iterable(_list_names_below(prefix, kind) for prefix, kind in kinds)
    known = ["world_size", "data_parallel", *tokens, *fields]
    groups = {group: (group, "name") for group in ("model", "engine", "data", "machine")}
    return {name: tuple(name.split(".")) for name in known} | groups


def _list_names_below(prefix: str, kind: type[BaseModel]) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path
        for inner in list_models(field.annotation):
            yield from _list_names_below(f"{path}.", inner)
