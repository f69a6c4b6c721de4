"""Rehearsals of one rank of many beside what is foretold of them, and beside runs all of whose ranks were real."""

from analysis.predictions import Comparison, Point, within
from analysis.predictions.live_bytes import BUILDING, RESIDENT, STEADY, Quantity, points
from analysis.predictions.recorded import MemoryRun, label, table, tabled

FORETOLD = 3.0
REHEARSED = {"resident": 1.0, "peak": 3.0, "init_peak": 3.0}
"""Percent of every point; bounds set before any of these runs was made."""
TEXT = (
    "DeepSpeed itself runs whole training steps as one rank of 1, 2, 8, 64, 512 and 1,024, with collectives that torch "
    "only pretends (`zeroscale rehearse`); the formulas are compared with its live tensor bytes. At stages 1 and 2 the "
    "first and the last rank were rehearsed, and the one with more is shown. Stages 0–3 × two shapes × bf16 and fp32, "
    "with one sample or four, some with checkpointing (`tests/bench/predict/rehearsals.py`)."
)
SAME = "The same rehearsals."
BESIDE = (
    "The same runs of two and more ranks twice: all ranks real over gloo, and rehearsed one by one, at stage 3 rank 0 "
    "alone; of both the rank that has most. Here the rehearsal is the prediction (`tests/bench/predict/rehearsals.py "
    "--real`)."
)
GATHERED = "gloo holds copies of a tensor that it gathers, which collectives that are only pretended never make"
REASONS = {"resident": "", "peak": "", "init_peak": GATHERED}
WHY = {"init_peak": f"Only stage 3 is off, which makes every tensor whole once more at its end: {GATHERED}."}


def compare() -> list[Comparison]:
    """Return what was foretold of rehearsals, and what rehearsals foretold."""
    return [
        _foretold("rehearsed_peak", STEADY, TEXT),
        _foretold("rehearsed_resident", RESIDENT, SAME),
        _foretold("rehearsed_building", BUILDING, SAME),
        _beside_real("resident", RESIDENT),
        _beside_real("peak", STEADY),
        _beside_real("init_peak", BUILDING),
    ]


def _foretold(name: str, quantity: Quantity, text: str) -> Comparison:
    found = points(tabled("rehearsed"), quantity, FORETOLD, {}, rehearsed=True)
    return Comparison(
        name, f"Rehearsals of up to 1,024 ranks: {quantity.words}", text, found, "bytes", each=FORETOLD,
        rival="DeepSpeed's estimator",
    )  # fmt: skip


def _beside_real(part: str, quantity: Quantity) -> Comparison:
    rows, each = table("rehearsed_beside_real"), REHEARSED[part]
    found = tuple(_pair(row, part, each) for row in rows)
    title = f"Rehearsed beside really run: {quantity.words}"
    return Comparison(f"rehearsed_beside_real_{part}", title, BESIDE, found, "bytes", each=each, why=WHY.get(part, ""))


def _pair(row: dict[str, str], part: str, each: float) -> Point:
    rehearsed, real = (int(row[f"{kind}_{part}_bytes"]) for kind in ("rehearsed", "real"))
    return within(label(MemoryRun.of(row)), rehearsed, real, each, reason=REASONS[part])
