"""Whether two specs differ in their engines as such: what both engines know must be equal, what one knows its preset's.

A stage with offload beside one without, or with other buckets, is a comparison of those and not of the stages.
"""

from collections.abc import Mapping
from typing import Any

from bench.presets import engine_preset
from bench.spec import EngineSpec, RunSpec, canonical

_CHOSEN = "stage"  # what tells the engines of one backend apart


def differ_in_engine(one: RunSpec, other: RunSpec) -> bool:
    """Whether two specs differ in the engine and nothing else, and may be compared as two engines."""
    return but_engine(one) == but_engine(other) and comparable(one.engine, other.engine)


def comparable(one: EngineSpec, other: EngineSpec) -> bool:
    """Whether every option that both engines know is equal, and what only one knows is one that its preset writes out.

    Both know an option that both have. One that only one has is known to it alone if its preset writes it out, for
    such options have no default and must be given wherever they act; any other could have been given to both.
    """
    ours, theirs = _options(one), _options(other)
    unequal = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    alone = {name for name in engine_preset(one.name) if name not in theirs}
    alone |= {name for name in engine_preset(other.name) if name not in ours}
    return unequal <= alone


def but_engine(spec: RunSpec) -> str:
    """Return all of a spec but its engine, as text."""
    return canonical(spec.model_copy(update={"engine": EngineSpec(name="any", backend="any")}))


def own(engine: EngineSpec, beside: EngineSpec) -> dict[str, Any]:
    """Return the options of an engine that the other does not know and that its preset has otherwise."""
    preset, theirs = engine_preset(engine.name), _options(beside)
    return {
        name: value
        for name, value in _options(engine).items()
        if name not in theirs and not (name in preset and preset[name] == value)
    }


def told(engine: EngineSpec, beside: EngineSpec) -> str:
    """Name an engine that is compared with another, with its own options where its preset has them otherwise."""
    words = ", ".join(f"{name}={value}" for name, value in own(engine, beside).items())
    return f"{engine.name} ({words})" if words else engine.name


def _options(engine: EngineSpec) -> Mapping[str, Any]:
    return {name: value for name, value in engine.options.items() if name != _CHOSEN}
