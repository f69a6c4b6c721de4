"""Helpers that compare two sets of records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from records import run, save, steps

from analysis import results
from analysis.compare import ComparisonSetup, SetComparison, compare
from analysis.compare.fields import parse_across
from analysis.compare.judging import PairResult
from bench.core.record import RunRecord

NOISE = (0.99, 1.01, 1.0, 1.005, 0.995)  # of five runs: the standard error of their mean is 0.35 %


def against(
    folder: Path, a: Sequence[RunRecord], b: Sequence[RunRecord], across: str = "", **more: Any
) -> SetComparison:
    """Write the records `a` and `b` to two folders, and return the comparison of the folders, as `zeroscale compare`
    makes it. `across` names fields in which compared runs may differ."""
    place = folder / str(len(list(folder.iterdir())))
    sides = [results.read([save(place / name, *records)]) for name, records in (("a", a), ("b", b))]
    return compare(*sides, ComparisonSetup(("a", "b"), parse_across(across), **more))


def timed(step_s: float, scale: Sequence[float] = NOISE, jobs: Sequence[int] = (), **more: Any) -> list[RunRecord]:
    """Return one run for each factor in `scale`. The steps of a run take `step_s` times its factor.

    If `jobs` is given, it has the Slurm job id of each run.
    """
    around = [{"environment": {"slurm": {"SLURM_JOB_ID": str(job)}}} for job in jobs] or [{} for _ in scale]
    windows = [steps((step_s * by,) * 30) for by in scale]
    return [
        run(repeat=repeat, steps=window, **place, **more)
        for repeat, (window, place) in enumerate(zip(windows, around, strict=True))
    ]


def only(compared: SetComparison) -> PairResult:
    """Return the result of the only compared pair of configurations."""
    [(_, line)] = compared.lines
    return line
