"""Figure of the held-out loss of trainings, against tokens seen and against the time of their steps."""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from analysis.drawing import Key, Look, Panel, Picture, groups, mark
from analysis.formats import BriefNames
from analysis.questions import describe_variants
from analysis.results import Results
from analysis.table import group_by, list_rows
from bench.core.record import RunRecord

TITLE = "Held-out loss against training tokens and time"
ALT = "Held-out loss of each training run against trained tokens, and against the time of its optimizer steps."
NEEDS = "finished trainings with a held-out loss"
PLACE = 10

_NOTE = (
    "Runs that differ only in their seed have the same colour and marker. Marks: evaluations, all on the same samples. "
    "Time: optimizer steps only, without evaluations and checkpoints."
)
_MOST = 12
"""Most configurations that are drawn. More could not be told apart by colour and marker."""


def picture(results: Results) -> Picture:
    """Return the figure of held-out losses against tokens and against time, for the configurations with the lowest
    final losses. The figure is empty if no training reached its end.

    Trainings that differ only in their seed are one configuration and are drawn alike.
    """
    if "validation_loss" not in results.table:
        return Picture()
    table = results.pooled_table.reset_index(drop=True)
    losses = table["validation_loss"].dropna()
    places = group_by(map(int, losses.index), lambda place: str(table["config_id"][place]))
    kept = sorted(places, key=lambda one: statistics.fmean(losses[place] for place in places[one]))[:_MOST]
    labels = _name_configurations(results, kept)
    looks = {labels[one]: Look(number) for number, one in enumerate(kept)}
    drawn = {place: (labels[one], results.record(place)) for one in kept for place in places[one]}
    timed = {place: run for place, run in drawn.items() if not results.is_disturbed(place)}
    panels = [
        Panel(title=[title], draw=partial(_draw_runs, runs=list(runs.values()), looks=looks, over_time=over_time))
        for title, over_time, runs in (("against tokens", False, drawn), ("against time", True, timed))
        if runs
    ]
    entries = [Key(label, look.style_marks() | {"linestyle": "-"}) for label, look in looks.items()]
    disturbed = _count_disturbed(len(drawn) - len(timed), len(drawn))
    omitted = groups.describe_omitted(len(places), "configurations", "highest final loss", _MOST)
    notes = [_NOTE, disturbed, omitted, _count_without_loss(table)]
    return Picture(panels, entries, " ".join(filter(None, notes)))


def _name_configurations(results: Results, kept: Sequence[str]) -> dict[str, str]:
    """Return the name of each of the configurations `kept`, by config_id."""
    variants = describe_variants({one: results.configurations[one] for one in kept})
    rows = {row["config_id"]: row for row in list_rows(results.summary) if row["config_id"] in variants}
    named = [row | {"variant": variants[one]} for one, row in rows.items()]
    names = BriefNames(named)
    return {row["config_id"]: names.of(row) for row in named}


def _count_disturbed(disturbed: int, drawn: int) -> str:
    """Return a sentence that counts the drawn runs whose times are excluded."""
    rule = "their times are excluded, because of background load or a pause"
    return f"Not drawn against time: {disturbed:,} of {drawn:,} runs; {rule}." if disturbed else ""


def _count_without_loss(table: pd.DataFrame) -> str:
    """Return a sentence that counts, for each outcome, the trainings that are not drawn because they have no loss at
    their end."""
    without = table[table["learning_rate"].notna() & table["validation_loss"].isna()]
    counts = ", ".join(f"{number:,} {outcome}" for outcome, number in without["outcome"].value_counts().items())
    return f"Omitted, because they have no final loss: {counts}." if counts else ""


def _draw_runs(
    axes: Axes, runs: Sequence[tuple[str, RunRecord]], looks: Mapping[str, Look], *, over_time: bool
) -> None:
    unit = "s of optimizer steps" if over_time else "million training tokens"
    for label, record in runs:
        known = [
            (one.trained_s if over_time else one.step * record.spec.tokens_per_step / 1e6, one.loss)
            for one in (record.observations and record.observations.evaluations) or ()
            if one.loss is not None and one.trained_s is not None
        ]
        style = looks[label].style_marks() | {"linestyle": "-", "linewidth": 0.8, "markersize": 3}
        (line,) = axes.plot([x or 0.0 for x, _ in known], [loss for _, loss in known], **style)
        mark(line, label, [f"{label}: {loss:.4g} after {x or 0:.3g} {unit}" for x, loss in known])
    axes.set(xlabel=unit, ylabel="held-out loss, nats per token")
