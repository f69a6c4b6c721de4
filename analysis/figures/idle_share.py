"""Figure of a pipeline's idle share (bubble): measured, and predicted from its schedule."""

import statistics

from analysis.drawing import Picture
from analysis.drawing.curves import PlottedQuantity, build_picture
from analysis.drawing.groups import QuestionGroup, join_equal
from analysis.questions import group_by_question
from analysis.results import Results
from analysis.summary import Row
from bench.core.errors import UserError
from bench.core.spec import RunSpec
from bench.predict.step_time.pipeline import predict_idle_share

TITLE = "Idle share of pipelines"
ALT = (
    "Fraction of a step in which a rank waits for other stages, against micro-batches per step, measured and predicted."
)
NEEDS = "runs of pipelines with a recorded idle share"
PLACE = 7

QUANTITY = PlottedQuantity(
    "idle_share", "idle fraction of a step", interval=False, across="micro_batches",
    across_label="micro-batches per step", predicted=True,
)  # fmt: skip
_NOTE = (
    "Measured: mean idle time of the ranks in untimed steps, divided by the median step time. Hollow, dashed: "
    "prediction by a simulation of the engine's schedule. It assumes that the time of a stage is proportional to its "
    "FLOPs, and that transfers and the optimizer update take no time."
)


def picture(results: Results) -> Picture:
    """Return the figure of the idle share of every pipeline. It has one panel for each micro-batch and pipeline degree
    (`parallel.pipeline`) of each question (configurations that do the same work on equal hardware)."""
    return build_picture(results, group_rows(results), QUANTITY, _NOTE)


def group_rows(results: Results) -> list[QuestionGroup]:
    """Return the rows of each panel, with measured and predicted idle share."""
    pairs = []
    for question, rows in group_by_question(results.summary):
        for row in rows:
            spec = results.specs[row["config_id"]]
            known = results.table["idle_share"].iloc[results.behind(row)].dropna() if row["n"] else ()
            if spec.parallel.pipeline > 1 and len(known):
                held = f"micro {spec.batch.micro} · pipeline degree {spec.parallel.pipeline}"
                shared = {**question, "micro": spec.batch.micro, "held": held}
                pairs.append((shared, _build_row(row, spec, statistics.median(known))))
    return [QuestionGroup(*one) for one in join_equal(pairs)]


def _build_row(row: Row, spec: RunSpec, measured: float) -> Row:
    """Return a row with measured and predicted idle share.

    The name of the row omits the pipeline degree, because it is in the title, and the accumulation, because it is the x
    axis.
    """
    # A record of another version of zeroscale may have engines or options that this version cannot simulate.
    try:
        predicted = predict_idle_share(spec)
    except (UserError, ValueError):
        predicted = None
    named = [part for part in row["variant"].split(", ") if not part.startswith("parallel.pipeline=")]
    return row | {
        "micro_batches": spec.accumulation,
        "accumulation": 1,
        "variant": ", ".join(named),
        "idle_share": measured,
        "predicted_idle_share": predicted,
    }
