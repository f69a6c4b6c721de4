"""Idle share, the bubble of a pipeline: what its ranks wait for each other, measured, beside what its schedule says."""

import statistics

from analysis.drawing import Picture
from analysis.drawing.curves import PlottedQuantity, build_picture
from analysis.drawing.groups import QuestionGroup
from analysis.questions import group_by_question
from analysis.results import Results
from analysis.summary import Row
from bench.core.errors import UserError
from bench.core.spec import RunSpec
from bench.predict.step_time.pipeline import predict_idle_share

TITLE = "Idle share by micro-batches"
ALT = (
    "The part of a step in which a rank of a pipeline waits for others, against the micro-batches of a step: a curve "
    "per engine as measured, and a dashed one as its schedule says. The tables hold the numbers."
)
PLACE = 7

QUANTITY = PlottedQuantity(
    "idle_share", "idle, part of a step", interval=False, across="micro_batches",
    across_label="micro-batches of a step", predicted=True,
)  # fmt: skip
_NOTE = (
    "Measured: mean over ranks, of untimed steps, over the median step. Hollow, dashed: the engine's own schedule "
    "played through, where stages take as long as their FLOPs and transfers no time; of the passes alone, without "
    "the update."
)


def picture(results: Results) -> Picture:
    """Return the idle share of every configuration whose layers are on several ranks, a panel per question, micro-batch
    and degree of the pipeline; nothing where no run tells how long its ranks waited."""
    return build_picture(results, group_rows(results), QUANTITY, _NOTE)


def group_rows(results: Results) -> list[QuestionGroup]:
    """Return the rows of each panel, with their measured and predicted share."""
    groups: dict[tuple[object, ...], QuestionGroup] = {}
    for question, rows in group_by_question(results.summary):
        for row in rows:
            spec = results.specs[row["config_id"]]
            if spec.parallel.pipeline > 1 and (measured := _measure_idle_share(results, row)) is not None:
                held = f"micro {spec.batch.micro} · pipeline of {spec.parallel.pipeline}"
                shared = {**question, "micro": spec.batch.micro, "held": held}
                group = groups.setdefault(tuple(shared.values()), QuestionGroup(shared, []))
                own = _build_row(row, spec, measured)
                groups[tuple(shared.values())] = group._replace(rows=[*group.rows, own])
    return list(groups.values())


def _measure_idle_share(results: Results, row: Row) -> float | None:
    """Return the median over the runs of a configuration; None where none tells it."""
    known = results.table["idle_share"].iloc[results.behind(row)].dropna() if row["n"] else ()
    return statistics.median(known) if len(known) else None


def _build_row(row: Row, spec: RunSpec, measured: float) -> Row:
    """Return a row whose name does not say again what is beside it: micro-batches and the pipeline's degree."""
    named = [part for part in row["variant"].split(", ") if not part.startswith("parallel.pipeline=")]
    return row | {
        "micro_batches": spec.accumulation,
        "accumulation": 1,
        "variant": ", ".join(named),
        "idle_share": measured,
        "predicted_idle_share": _predict(spec),
    }


def _predict(spec: RunSpec) -> float | None:
    try:
        return predict_idle_share(spec)
    except (UserError, ValueError):  # a family, a shape or an option that this version does not know
        return None
