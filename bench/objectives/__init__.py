"""Objectives, one file each: the kinds of tokens in a sample, and their roles as inputs and labels of a model.

`bench.core.plugins.ObjectivePlugin` defines the members of such a file, which imports no torch.
"""

from bench.core import plugins
from bench.core.plugins import ObjectivePlugin
from bench.core.spec import OBJECTIVE, RunSpec

CAUSAL = "causal_lm"
"""The default objective of a decoder-only model."""


def load(objective: str) -> ObjectivePlugin:
    """Return the objective named `objective`; UserError if there is none."""
    return plugins.load(plugins.OBJECTIVE, objective)


def usual(kinds: tuple[str, ...]) -> str | None:
    """Return the default objective of a model with exactly these kinds of tokens; None if no objective has them."""
    known = list_matching(kinds)
    return next((name for name in (OBJECTIVE, CAUSAL) if name in known), known[0] if known else None)


def list_matching(kinds: tuple[str, ...]) -> list[str]:
    """Return the names of the objectives whose samples have exactly these kinds of tokens."""
    return [name for name, _ in plugins.list_usable(plugins.OBJECTIVE) if list_kinds(name) == kinds]


def weighs_targets(spec: RunSpec) -> bool:
    """Return True if the loss of a step depends on the number of target tokens in each micro-batch.

    It does not if a data source has the same number in every sample: the mean over tokens then equals that over
    micro-batches.
    """
    if spec.loss_mean == "micro_batches" or load(spec.objective).REDUCTION != "mean":
        return False
    has_fixed_targets = getattr(plugins.load(plugins.DATA, spec.data.source), "has_fixed_targets", None)
    return has_fixed_targets is None or not has_fixed_targets(spec)


def list_kinds(objective: str) -> tuple[str, ...]:
    """Return the names of an objective's kinds of tokens, in order; UserError if there is no such objective."""
    return tuple(kind.name for kind in load(objective).KINDS)
