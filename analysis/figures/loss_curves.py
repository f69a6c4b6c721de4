"""Held-out loss of training runs, against tokens seen and against the time of their steps."""

from collections.abc import Mapping, Sequence
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from analysis.drawing import Key, Look, Panel, Picture, groups, mark
from analysis.formats import shorten_keys
from analysis.questions import describe_variants
from analysis.results import Results
from bench.core.record import RunRecord
from bench.core.spec import RunSpec, config_id

TITLE = "Held-out loss against tokens and time"
ALT = (
    "Loss on held-out text against the tokens seen in training, and against the seconds of its steps: a curve per run, "
    "a mark per evaluation. The tables hold the loss at the end."
)
PLACE = 10

_NOTE = (
    "Runs that differ only in their seed look the same. Marks: evaluations, all on the same samples. Time: optimizer "
    "steps only."
)
_MOST = 12  # curves


def picture(results: Results) -> Picture:
    """Return the runs with the lowest losses, against tokens and against time; nothing if no run trained to its end.

    Runs that differ only in their seed share a look.
    """
    if "validation_loss" not in results.table:
        return Picture()
    shown, number = _select_best(results.table)
    records = [results.record(place) for place in shown]
    specs = [record.spec.model_copy(update={"seed": 0}) for record in records]
    keys = list(map(config_id, specs))
    labels = _describe(dict(zip(keys, specs, strict=True)))
    looks = {labels[key]: Look(place) for place, key in enumerate(dict.fromkeys(keys))}
    runs = [(labels[key], record) for key, record in zip(keys, records, strict=True)]
    panels = [
        Panel(title=[title], draw=partial(_draw_runs, runs=runs, looks=looks, over_time=over_time))
        for title, over_time in (("against tokens", False), ("against time", True))
    ]
    omitted = groups.describe_omitted(number, "runs", "highest loss at the end", _MOST)
    entries = [Key(label, look.style_marks() | {"linestyle": "-"}) for label, look in looks.items()]
    return Picture(panels, entries, " ".join(filter(None, [_NOTE, omitted])))


def _draw_runs(
    axes: Axes, runs: Sequence[tuple[str, RunRecord]], looks: Mapping[str, Look], *, over_time: bool
) -> None:
    unit = "s of steps" if over_time else "million tokens"
    for label, record in runs:
        known = [
            (one.trained_s if over_time else one.step * record.spec.tokens_per_step / 1e6, one.loss)
            for one in (record.observations and record.observations.evaluations) or ()
            if one.loss is not None and one.trained_s is not None
        ]
        style = looks[label].style_marks() | {"linestyle": "-", "linewidth": 0.8, "markersize": 3}
        (line,) = axes.plot([x or 0.0 for x, _ in known], [loss for _, loss in known], **style)
        mark(line, label, [f"{label}: {loss:.4g} after {x or 0:.3g} {unit}" for x, loss in known])
    axes.set(xlabel=unit, ylabel="nats per token, held out")


def _select_best(table: pd.DataFrame) -> tuple[list[int], int]:
    """Return the rows of the run table with the lowest losses, at most _MOST, and the number of rows with a loss."""
    losses = table["validation_loss"].reset_index(drop=True).dropna().sort_values(kind="stable")
    return [int(place) for place in losses.index[:_MOST]], len(losses)


def _describe(specs: Mapping[str, RunSpec]) -> dict[str, str]:
    """Return a name for each configuration by config_id: its engine and what tells it apart."""
    variants = {key: shorten_keys(text) for key, text in describe_variants(specs).items()}
    return {key: " · ".join(filter(None, (spec.engine.name, variants.get(key)))) for key, spec in specs.items()}
