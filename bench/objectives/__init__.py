"""Training objectives, one file each. An objective defines the kinds of tokens in a sample, and which of them are
inputs and labels of the model.

The members of such a file are those of `bench.core.plugins.ObjectivePlugin`. The file must not import torch.
"""

from bench.core import plugins
from bench.core.errors import UserError, suggest_nearest
from bench.core.plugins import ObjectivePlugin
from bench.core.spec import OBJECTIVE, RunSpec

CAUSAL = "causal_lm"
"""Name of the default objective of decoder-only models."""


def load(objective: str) -> ObjectivePlugin:
    """Return the objective with this name. Raise UserError if there is no such objective, or if its definition is
    invalid."""
    plugin = plugins.load(plugins.OBJECTIVE, objective)
    value = f"objective={objective}"
    if plugin.REDUCTION not in ("mean", "sum"):
        raise UserError(value, f"its REDUCTION is {plugin.REDUCTION!r}", 'set REDUCTION = "mean" or "sum"')
    for kind in plugin.KINDS:
        for argument, share in kind.hidden.items():
            if argument not in kind.arguments:
                rule = f"its kind {kind.name} hides {argument!r}, which is not one of its arguments"
                raise UserError(value, rule, suggest_nearest(argument, kind.arguments))
            if not 0 <= share < 1:
                rule = f"its kind {kind.name} hides a share of {share:g} of {argument}"
                raise UserError(value, rule, "give a share of at least 0 and less than 1")
    return plugin


def usual(kinds: tuple[str, ...]) -> str | None:
    """Return the name of the default objective for a model that has exactly these kinds of tokens (such as encoder and
    decoder). Return None if no objective has these kinds."""
    known = list_matching(kinds)
    return next((name for name in (OBJECTIVE, CAUSAL) if name in known), known[0] if known else None)


def list_matching(kinds: tuple[str, ...]) -> list[str]:
    """Return the names of the objectives whose samples have exactly these kinds of tokens."""
    usable = plugins.list_usable(plugins.OBJECTIVE)
    return [name for name, objective in usable if tuple(kind.name for kind in objective.KINDS) == kinds]


def weighs_targets(spec: RunSpec) -> bool:
    """Return True if the mean loss of a step must weight each micro-batch by its number of target tokens.

    No weights are needed if all samples have the same number of target tokens, because the mean over tokens then equals
    the mean over micro-batches.
    """
    if spec.loss_mean == "micro_batches" or load(spec.objective).REDUCTION != "mean":
        return False
    has_fixed_targets = getattr(plugins.load(plugins.DATA, spec.data.source), "has_fixed_targets", None)
    return has_fixed_targets is None or not has_fixed_targets(spec)


def list_kinds(objective: str) -> tuple[str, ...]:
    """Return the names of an objective's kinds of tokens, such as encoder and decoder, in order. Raise UserError if
    there is no such objective."""
    return tuple(kind.name for kind in load(objective).KINDS)
