"""Figure of the held-out loss of trainings, against tokens seen and against the time of their steps."""

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes

from analysis.drawing import Key, Look, Panel, Picture, groups, mark
from analysis.formats import shorten_keys
from analysis.questions import describe_variants
from analysis.results import Results
from bench.core.record import RunRecord
from bench.core.spec import config_id

TITLE = "Held-out loss against training tokens and time"
ALT = "Held-out loss of each training run against trained tokens, and against the time of its optimizer steps."
PLACE = 10

_NOTE = (
    "Runs that differ only in their seed have the same colour and marker. Marks: evaluations, all on the same samples. "
    "Time: optimizer steps only, without evaluations and checkpoints."
)
_MOST = 12  # curves


def picture(results: Results) -> Picture:
    """Return the trainings with the lowest final losses, against tokens and against time. Empty if no training reached
    its end.

    Trainings that differ only in their seed are drawn alike.
    """
    if "validation_loss" not in results.table:
        return Picture()
    losses = results.table["validation_loss"].reset_index(drop=True).dropna().sort_values(kind="stable")
    records = [results.record(int(place)) for place in losses.index[:_MOST]]
    # The seed is removed from the spec, so that repeats with other seeds have the same key and are drawn alike.
    specs = [record.spec.model_copy(update={"seed": 0}) for record in records]
    keys = list(map(config_id, specs))
    by_key = dict(zip(keys, specs, strict=True))
    variants = {key: shorten_keys(text) for key, text in describe_variants(by_key).items()}
    labels = {key: " · ".join(filter(None, (spec.engine.name, variants.get(key)))) for key, spec in by_key.items()}
    looks = {labels[key]: Look(place) for place, key in enumerate(dict.fromkeys(keys))}
    runs = [(labels[key], record) for key, record in zip(keys, records, strict=True)]
    panels = [
        Panel(title=[title], draw=partial(_draw_runs, runs=runs, looks=looks, over_time=over_time))
        for title, over_time in (("against tokens", False), ("against time", True))
    ]
    omitted = groups.describe_omitted(len(losses), "runs", "highest final loss", _MOST)
    entries = [Key(label, look.style_marks() | {"linestyle": "-"}) for label, look in looks.items()]
    return Picture(panels, entries, " ".join(filter(None, [_NOTE, omitted])))


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
