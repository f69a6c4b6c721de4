"""Objectives, one file each: what is learned, as tokens of every kind in a sample and what a model does with them.

The contract of such a file is `bench.core.plugins.ObjectivePlugin`. It imports no torch.
"""

from bench.core import plugins
from bench.core.plugins import ObjectivePlugin
from bench.core.spec import OBJECTIVE, RunSpec

CAUSAL = "causal_lm"
"""What a decoder-only model learns where nobody says it."""


def load(objective: str) -> ObjectivePlugin:
    """Return the objective named `objective`; raise UserError if there is none."""
    return plugins.load(plugins.OBJECTIVE, objective)


def usual(kinds: tuple[str, ...]) -> str | None:
    """Return what a model that reads just these kinds of tokens learns where nobody says it; None: nothing can be."""
    known = list_matching(kinds)
    return next((name for name in (OBJECTIVE, CAUSAL) if name in known), known[0] if known else None)


def list_matching(kinds: tuple[str, ...]) -> list[str]:
    """Return the names of the objectives whose samples hold tokens of just these kinds."""
    return [name for name, _ in plugins.list_usable(plugins.OBJECTIVE) if list_kinds(name) == kinds]


def weighs_targets(spec: RunSpec) -> bool:
    """Whether the loss of a step depends on the number of target tokens of each micro-batch. It does not where a data
    source has the same number in every sample: the mean over tokens is then the mean over micro-batches."""
    if spec.loss_mean == "micro_batches" or load(spec.objective).REDUCTION != "mean":
        return False
    has_fixed_targets = getattr(plugins.load(plugins.DATA, spec.data.source), "has_fixed_targets", None)
    return has_fixed_targets is None or not has_fixed_targets(spec)


def list_kinds(objective: str) -> tuple[str, ...]:
    """Return the kinds of tokens of an objective by name, in order; raise UserError if there is no such objective."""
    return tuple(kind.name for kind in load(objective).KINDS)
