"""Whether two specs differ in their engines as such: what both engines know must be equal, what one knows its preset's.

A stage with offload beside one without, or with other buckets, is a comparison of those and not of the stages.
"""

from collections.abc import Mapping
from typing import Any

from bench.core.files import read_engine_preset
from bench.core.spec import EngineSpec, RunSpec, canonical
from bench.engines import find_facts


def differ_in_engine(one: RunSpec, other: RunSpec) -> bool:
    """Whether two specs differ in the engine and nothing else, and may be compared as two engines."""
    return dump_without_engine(one) == dump_without_engine(other) and may_be_compared(one, other)


def may_be_compared(one: RunSpec, other: RunSpec) -> bool:
    """Whether every option that both engines know is equal, and what only one knows is one that its preset writes out.

    Both know an option that both have. One that only one has is known to it alone if its preset writes it out, for
    such options have no default and must be given wherever they act; any other could have been given to both.
    """
    ours, theirs = _list_options(one), _list_options(other)
    unequal = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    own_names = {name for name in read_engine_preset(one.engine.name) if name not in theirs}
    own_names |= {name for name in read_engine_preset(other.engine.name) if name not in ours}
    return unequal <= own_names


def dump_without_engine(spec: RunSpec) -> str:
    """Return all of a spec but its engine, as text."""
    return canonical(spec.model_copy(update={"engine": EngineSpec(name="any", backend="any")}))


def list_own_options(spec: RunSpec, other: RunSpec) -> dict[str, Any]:
    """Return the options of a spec's engine that the other does not know and that its preset has otherwise."""
    preset, theirs = read_engine_preset(spec.engine.name), _list_options(other)
    return {
        name: value
        for name, value in _list_options(spec).items()
        if name not in theirs and not (name in preset and preset[name] == value)
    }


def describe_engine(spec: RunSpec, other: RunSpec) -> str:
    """Name an engine that is compared with another, with its own options where its preset has them otherwise."""
    options_text = ", ".join(f"{name}={value}" for name, value in list_own_options(spec, other).items())
    return f"{spec.engine.name} ({options_text})" if options_text else spec.engine.name


def _list_options(spec: RunSpec) -> Mapping[str, Any]:
    """Return the options of a spec's engine without those that say which engine it is."""
    facts = find_facts(spec)
    distinguishing = facts.distinguishing if facts else frozenset()
    return {name: value for name, value in spec.engine.options.items() if name not in distinguishing}
