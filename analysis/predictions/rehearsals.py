"""Rehearsals of one rank of many beside what is predicted of them, and beside runs all of whose ranks were real."""

from collections.abc import Iterator

from analysis.predictions import PredictionComparison, PredictionPoint, build_point
from analysis.predictions.live_bytes import BUILDING, RESIDENT, STEADY, MemoryQuantity, build_points, get_stage
from analysis.predictions.recorded import MemoryRun, RecordedRuns, format_label

PREDICTED_LIMIT = 3.0
REHEARSED = {"init_peak": 3.0, "resident": 1.0, "peak": 3.0}
"""Percent of every point; bounds set before any of these runs was made."""
TEXT = (
    "DeepSpeed itself runs whole training steps as one rank of 1, 2, 8, 64, 512 and 1,024, with collectives that torch "
    "only pretends (`zeroscale rehearse`); the formulas are compared with its live tensor bytes. At stages 1 and 2 the "
    "first and the last rank were rehearsed, and the one with more is shown. Stages 0–3 × two shapes × bf16 and fp32, "
    "with one sample or four, some with checkpointing (`bench/prediction_inputs/rehearsals.py`); and the runs of two "
    "to four ranks in `results/measured/two_cores.zip/peaks` and `inputs/peaks.csv` again, of whose ranks that with "
    "most is shown (`bench/prediction_inputs/beside_real.py`)."
)
SAME = "The same rehearsals."
BOUNDED = "all that a checkpointed block would keep is taken to live in its forward, with the most that is gathered"
WHY_PEAK = (
    "Outside are two checkpointed jobs of stage 3 with four samples, whose peak is in forward: there the formula is an "
    "upper bound, since it knows what a sub-layer holds and what is gathered for it, but not when."
)
WITH_REAL = (
    "Those runs of two to four ranks twice: all ranks real over gloo, and rehearsed one by one, at stage 3 rank 0 "
    "alone; of both the rank that has most. Here the rehearsal is the prediction."
)
GATHERED = "gloo copies what it gathers, mostly on threads of its own; collectives that are only pretended never do"
THREADS = "gloo's threads let go of a reduced bucket at another time on every rank, in every run"
REASONS = {"peak": {1: THREADS, 2: THREADS, 3: GATHERED}, "init_peak": {3: GATHERED}}
WHY = {
    "peak": (
        "Most agree to some hundred bytes. Those that miss it peak at 20 to 34 MB, one at 106 MB; all but one have "
        "four ranks on two processors: there a copy of gloo's lives long enough to meet what comes next. With an "
        "allocator that leaves out what gloo's own threads allocate, three such jobs of stage 3 took what was "
        "rehearsed, to 0.01 % (once, by hand). A GPU's allocator knows nothing of such copies."
    ),
    "init_peak": (
        f"Only stage 3 is off, which makes every tensor whole once more at its end: {GATHERED}. The formulas know of "
        "that copy."
    ),
}


def compare(recorded: RecordedRuns) -> list[PredictionComparison]:
    """Return what was predicted of rehearsals, and what rehearsals predicted."""
    return [
        _compare_predicted(recorded, "rehearsed_peak", STEADY, TEXT, WHY_PEAK),
        _compare_predicted(recorded, "rehearsed_resident", RESIDENT, SAME),
        _compare_predicted(recorded, "rehearsed_building", BUILDING, SAME),
        _compare_with_real(recorded, "resident", RESIDENT),
        _compare_with_real(recorded, "peak", STEADY),
        _compare_with_real(recorded, "init_peak", BUILDING),
    ]


def _compare_predicted(
    recorded: RecordedRuns, name: str, quantity: MemoryQuantity, text: str, why: str = ""
) -> PredictionComparison:
    found = build_points(_list_rehearsed_runs(recorded), quantity, PREDICTED_LIMIT, {3: BOUNDED}, rehearsed=True)
    return PredictionComparison(
        name, f"Rehearsals of up to 1,024 ranks: {quantity.title}", text, found, "bytes", each=PREDICTED_LIMIT,
        rival="DeepSpeed's estimator", why=why,
    )  # fmt: skip


def _list_rehearsed_runs(recorded: RecordedRuns) -> Iterator[MemoryRun]:
    yield from recorded.tabled("rehearsed")
    for row in recorded.table("rehearsed_beside_real"):
        if row["repeat"] == "0":
            yield MemoryRun.of({**row, **{f"{part}_bytes": row[f"rehearsed_{part}_bytes"] for part in REHEARSED}})


def _compare_with_real(recorded: RecordedRuns, part: str, quantity: MemoryQuantity) -> PredictionComparison:
    rows, each = recorded.table("rehearsed_beside_real"), REHEARSED[part]
    found = tuple(_build_pair_point(row, part, each) for row in rows)
    title = f"Rehearsed beside really run: {quantity.title}"
    return PredictionComparison(
        f"rehearsed_beside_real_{part}", title, WITH_REAL, found, "bytes", each=each, why=WHY.get(part, "")
    )


def _build_pair_point(row: dict[str, str], part: str, each: float) -> PredictionPoint:
    rehearsed, real = (int(row[f"{kind}_{part}_bytes"]) for kind in ("rehearsed", "real"))
    run = MemoryRun.of(row)
    return build_point(format_label(run), rehearsed, real, each, reason=REASONS.get(part, {}).get(get_stage(run), ""))
