"""The held-out loss of trainings: against the tokens that they have seen, and against the time of their steps."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from analysis import plotting
from analysis.charts import groups
from analysis.results import Results
from analysis.variants import describe_variants
from bench.record import Evaluation, RunRecord
from bench.spec import RunSpec, config_id

TITLE = "Held-out loss against tokens and time"
ALT = (
    "Loss on held-out text against the tokens that a training has seen, and against the seconds of its steps: a curve "
    "per run, a mark per evaluation. The tables hold the loss at the end."
)
PLACE = 10

_NOTE = (
    "Runs that differ in their seed alone look the same. Marks: evaluations, each on the same samples. Time is of "
    "optimizer steps alone."
)
_MOST = 12  # curves
_SIZE_IN = (7.2, 3.4)


def applies(results: Results) -> bool:
    """Whether any run was trained to its end."""
    return "validation_loss" in results.table


@plotting.styled
def figure(results: Results) -> Figure:
    """Draw the runs that came furthest; those that differ in their seed alone look the same."""
    shown, number = _select_best(results.table)
    records = [results.record(place) for place in shown]
    drawn = Figure(figsize=_SIZE_IN, layout="constrained")
    left, right = drawn.subplots(1, 2, sharey=True)
    specs = [record.spec.model_copy(update={"seed": 0}) for record in records]
    keys = list(dict.fromkeys(map(config_id, specs)))
    for record, spec in zip(records, specs, strict=True):
        look = plotting.choose_marker_style(keys.index(config_id(spec)))
        style = look | {"linestyle": "-", "linewidth": 0.8, "markersize": 3}
        known = [one for one in _list_evaluations(record) if one.loss is not None and one.trained_s is not None]
        losses = [one.loss or 0.0 for one in known]
        left.plot([one.step * spec.tokens_per_step / 1e6 for one in known], losses, **style)
        right.plot([one.trained_s or 0.0 for one in known], losses, **style)
    left.set_ylabel("nats per token, held out")
    left.set_xlabel("million tokens")
    right.set_xlabel("s of steps")
    labels = _describe(dict(zip(map(config_id, specs), specs, strict=True)))
    entries = [plotting.build_legend_entry(labels[key], index) for index, key in enumerate(keys)]
    omitted = groups.describe_omitted(number, "runs", "highest loss at the end", _MOST)
    plotting.draw_legend(drawn, entries, _NOTE, omitted)
    return drawn


def _select_best(table: pd.DataFrame) -> tuple[list[int], int]:
    """Return the rows of the run table with the lowest losses, at most _MOST, and how many have one."""
    losses = table["validation_loss"].reset_index(drop=True).dropna().sort_values(kind="stable")
    return [int(place) for place in losses.index[:_MOST]], len(losses)


def _list_evaluations(record: RunRecord) -> tuple[Evaluation, ...]:
    return (record.observations.evaluations if record.observations else None) or ()


def _describe(specs: Mapping[str, RunSpec]) -> dict[str, str]:
    """Return what tells configurations apart, by config_id."""
    variants = describe_variants(specs)
    return {key: " · ".join(filter(None, (spec.engine.name, variants.get(key)))) for key, spec in specs.items()}
