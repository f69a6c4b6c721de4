"""The summary: one row per configuration, machine, environment class and kind of evidence; none is ever pooled.

Its columns are those of the run table that say what was measured, then
n                 repeats that ended ok, drills left out; the numbers come from them
runs              rows of the run table, all attempts
outcome           ok if n > 0, else how the last attempt ended; reason with it
step_s, rates     median over the repeats, with the interval of step_s and of tokens_per_s as *_low and *_high
*_bytes           maximum over the repeats: the worst one decides what fits
interval_kind     "within the run" for one repeat: what more steps of that run would give, not what another run would;
                  "between repeats" from six on; "range of repeats" for fewer, where no 95 % interval exists; or missing
interval_level    0.95, or the probability that a range of so few holds the median
interval_n        what the interval rests on: the steps of the one run, or the repeats
flags             of any of the runs behind the numbers, and `mixed` where other repeats ended otherwise; without `few`
                  where there are repeats, for it doubts an interval within a run
"""

import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.columns import Kind
from analysis.stats.interval import LEVEL, Interval
from analysis.stats.repeats import median_interval
from analysis.table import plain, typed

Row = dict[str, Any]

KEY = ("config_id", "environment_id", "machine", "evidence")
_WHAT = (
    "device", "model", "parameters", "engine", "precision", "activation_checkpointing", "data", "seed", "nodes",
    "devices_per_node", "world_size", "micro", "accumulation", "global_batch", "encoder_tokens", "decoder_tokens",
)  # fmt: skip
_MEDIANS = ("samples_per_s", "effective_tokens_per_s", "model_tflops_per_device", "mfu", "hfu", "data_wait_s")
_MAXIMA = ("peak_allocated_bytes", "peak_reserved_bytes", "init_peak_bytes", "peak_rss_bytes")
_KINDS: dict[str, Kind] = {
    "n": "integer", "runs": "integer", "interval_kind": "text", "interval_level": "number", "interval_n": "integer",
    "tokens_per_s_low": "number", "tokens_per_s_high": "number",
}  # fmt: skip
COLUMNS = (
    *KEY, *_WHAT, "n", "runs", "outcome", "step_s", "step_s_low", "step_s_high", "tokens_per_s", "tokens_per_s_low",
    "tokens_per_s_high", "interval_kind", "interval_level", "interval_n", *_MEDIANS, *_MAXIMA, "flags", "reason",
)  # fmt: skip


def summarise(table: pd.DataFrame) -> pd.DataFrame:
    """Return the summary of a run table, in the order in which its configurations appear."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in plain(table):
        groups.setdefault(tuple(row[name] for name in KEY), []).append(row)
    rows = [_summary(rows) for rows in groups.values()]
    return typed({name: [row[name] for row in rows] for name in COLUMNS}, _KINDS)


def _summary(rows: Sequence[Row]) -> Row:
    answers = _last_attempts(rows)
    good = [row for row in answers if row["outcome"] == "ok" and "drill" not in row["flags"].split()]
    told = (good or answers)[-1]
    return {
        **{name: rows[0][name] for name in (*KEY, *_WHAT)},
        "n": len(good),
        "runs": len(rows),
        "outcome": told["outcome"],
        **_timing(good),
        **{name: _median([row[name] for row in good]) for name in _MEDIANS},
        **{name: max((row[name] for row in good if row[name] is not None), default=None) for name in _MAXIMA},
        "flags": _flags(good, answers),
        "reason": told["reason"],
    }


def _last_attempts(rows: Sequence[Row]) -> list[Row]:
    """Return the answer to each repeat: attempts before the last one were tried again."""
    last: dict[tuple[Any, Any], Row] = {}
    for row in sorted(rows, key=lambda row: (row["study"], row["repeat"], row["attempt"])):
        last[row["study"], row["repeat"]] = row
    return list(last.values())


def _timing(good: Sequence[Row]) -> Row:
    steps, rates = ([row[name] for row in good if row[name] is not None] for name in ("step_s", "tokens_per_s"))
    if len(good) == 1:
        of_steps, of_rates = _within(good[0])
    else:
        of_steps, of_rates = median_interval(steps), median_interval(rates)
    return {
        "step_s": _median(steps), **_ends("step_s", of_steps),
        "tokens_per_s": _median(rates), **_ends("tokens_per_s", of_rates),
        **{f"interval_{part}": getattr(of_steps, part, None) for part in ("kind", "level", "n")},
    }  # fmt: skip


def _ends(name: str, interval: Interval | None) -> Row:
    return {f"{name}_low": interval and interval.low, f"{name}_high": interval and interval.high}


def _within(row: Row) -> tuple[Interval | None, Interval | None]:
    """Return the intervals of one run's step time and throughput. The run has one throughput; its doubt is, relative
    to it, that of the median step."""
    low, median, high, rate = row["step_s_low"], row["step_s"], row["step_s_high"], row["tokens_per_s"]
    if low is None or rate is None:
        return None, None
    of_steps = Interval(low, high, "within the run", LEVEL, row["n_steps"])
    return of_steps, of_steps._replace(low=rate * median / high, high=rate * median / low)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _flags(good: Sequence[Row], answers: Sequence[Row]) -> str:
    raised = [flag for row in (good or answers) for flag in row["flags"].split()]
    if len(good) > 1:
        raised = [flag for flag in raised if flag != "few"]
    if good and len(good) < len(answers):
        raised.append("mixed")
    return " ".join(dict.fromkeys(raised))
