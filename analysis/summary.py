"""The summary: one row per configuration, machine, environment class and kind of evidence; none is ever pooled.

Its columns are those of the run table that say what was measured, then
variant           what else sets configurations of an engine apart in this set (`analysis.variants`); empty for nothing
n                 allocations that the numbers rest on: of repeats that ended ok, without drills and without runs that a
                  cause outside of them disturbed (`analysis.flags.DISTURBED`). Runs that share an allocation share its
                  nodes and count once, with their median; outside of any each counts
times and rates   missing where all runs were disturbed; n is then of these runs, whose memory and losses are known
runs              rows of the run table, all attempts
outcome           ok if n > 0, else how the last attempt ended
reason            why it ended so; where n > 0, how many repeats failed or were disturbed and are not in the numbers
sample_s          geometric mean over the allocations of the time per sample over all windows in each: what
                  configurations are ranked by
step_s, rates     median over the repeats, with the interval of step_s and of tokens_per_s as *_low and *_high
step_s_p95, _p99  median over the repeats; step_s_max is the longest step of all
tokens_trained, trained_s, validation_loss
                  the same, where some run was trained to its end
*_bytes           maximum over the repeats: the worst one decides what fits
interval_kind     "within the run" for n = 1: what more steps there would give, not what another allocation would (of
                  several runs in it, from the lowest end to the highest); "between repeats" from six on; "range of
                  repeats" for fewer, where no 95 % interval exists; or missing
interval_level    0.95, or the probability that a range of so few holds the median
interval_n        what the interval rests on: the steps of the one run, or the repeats
flags             of any of the runs behind the numbers, and `mixed` where other repeats ended otherwise
notes             of any of these runs; without `few` from three allocations on, for it is of an interval within a run
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import pandas as pd

from analysis.columns import LATER, LEARNED, LEARNED_TIMES, Kind
from analysis.flags import DISTURBED, NO_MEASUREMENT
from analysis.stats.compare import enough
from analysis.stats.intervals import Interval, repeats_interval
from analysis.table import build_typed_frame, list_rows
from bench.core.statistics import LEVEL

Row = dict[str, Any]
Allocations = Sequence[Sequence[Row]]

ANSWERING = ("study", "repeat", "attempt", "outcome", "flags")
"""What decides which runs answer; see `select_answering`."""

KEY = ("config_id", "environment_id", "machine", "evidence")
_WHAT = (
    "device", "model", "parameters", "engine", "precision", "activation_checkpointing", "data", "seed", "nodes",
    "devices_per_node", "world_size", "micro", "accumulation", "global_batch", "encoder_tokens", "decoder_tokens",
)  # fmt: skip
_MEDIANS = (
    "step_s_p95", "step_s_p99", "samples_per_s", "effective_tokens_per_s", "model_tflops_per_device", "mfu", "hfu",
    "data_wait_s",
)  # fmt: skip
_MAXIMA = (
    "peak_allocated_bytes", "peak_reserved_bytes", "init_peak_bytes", "resident_bytes", "peak_rss_bytes",
)  # fmt: skip
_KINDS: dict[str, Kind] = {
    "variant": "text", "n": "integer", "runs": "integer", "interval_kind": "text", "interval_level": "number",
    "interval_n": "integer",
}  # fmt: skip
COLUMNS = (
    *KEY, *_WHAT, "variant", "n", "runs", "outcome", "sample_s", "step_s", "step_s_low", "step_s_high", "tokens_per_s",
    "tokens_per_s_low", "tokens_per_s_high", "interval_kind", "interval_level", "interval_n", *_MEDIANS, "step_s_max",
    *_MAXIMA, "flags", "notes", "reason",
)  # fmt: skip


def summarise(
    table: pd.DataFrame, variants: Mapping[str, str] | None = None, *, keep_disturbed: bool = False
) -> pd.DataFrame:
    """Return the summary of a run table, in the order in which its configurations appear; `variants` by config_id.

    With `keep_disturbed`, disturbed runs count like all others (`analysis.results.Results.with_disturbed`).
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in list_rows(table):
        groups.setdefault(tuple(row[name] for name in KEY), []).append(row)
    known, what = variants or {}, [*_WHAT, *(name for name in LATER if name in table)]
    rows = [
        _summarise_group(rows, what, keep_disturbed) | {"variant": known.get(rows[0]["config_id"], "")}
        for rows in groups.values()
    ]
    names = (*COLUMNS, *what[len(_WHAT) :], *(name for name in LEARNED if name in table))
    return build_typed_frame({name: [row[name] for row in rows] for name in names}, _KINDS)


def _summarise_group(rows: Sequence[Row], what: Sequence[str], keep_disturbed: bool) -> Row:
    answers, good = _select_last_attempts(rows), select_answering(rows, keep_disturbed=keep_disturbed)
    allocations = _group_by_allocation(good)
    timed = [] if any(map(is_disturbed, good)) and not keep_disturbed else allocations
    known = (good or answers)[-1]
    return {
        **{name: rows[0][name] for name in (*KEY, *what)},
        "n": len(allocations),
        "runs": len(rows),
        "outcome": known["outcome"],
        "sample_s": _compute_sample_s(timed),
        **_compute_timing(timed),
        **{name: _compute_median(timed, name) for name in _MEDIANS},
        **{
            name: _compute_median(timed if name in LEARNED_TIMES else allocations, name)
            for name in LEARNED
            if name in rows[0]
        },
        "step_s_max": _compute_maximum([row for rows in timed for row in rows], "step_s_max"),
        **{name: _compute_maximum(good, name) for name in _MAXIMA},
        "flags": _join_flags(good, answers),
        "notes": _join_notes(good, allocations),
        "reason": _describe_missing(answers, good) if good else known["reason"],
    }


def select_answering(rows: Sequence[Row], *, keep_disturbed: bool = False) -> list[Row]:
    """Return those rows of the run table that the numbers of one configuration come from: of every repeat the last
    attempt, if it ended ok and was a measurement at all. Disturbed runs are among them only where all are disturbed,
    or with `keep_disturbed`."""
    good = [row for row in _select_last_attempts(rows) if _is_answering(row)]
    return good if keep_disturbed else [row for row in good if not is_disturbed(row)] or good


def is_disturbed(row: Row) -> bool:
    """Whether a run, or a row of the summary whose runs all are, has times that count for nothing."""
    return not set(DISTURBED).isdisjoint(row["flags"].split())


def _describe_missing(answers: Sequence[Row], good: Sequence[Row]) -> str:
    """Say how many repeats are not in the numbers, and why: 7 of 10 repeats oom."""
    counts = Counter(_name_exclusion(row) for row in answers if all(row is not one for one in good))
    return ", ".join(f"{count} of {len(answers)} repeats {why}" for why, count in counts.items())


def _name_exclusion(row: Row) -> str:
    """Return the outcome of a repeat, or the flag that excludes it."""
    flags = row["flags"].split()
    return next((flag for flag in (*NO_MEASUREMENT, *DISTURBED) if flag in flags), str(row["outcome"]))


def _is_answering(row: Row) -> bool:
    return row["outcome"] == "ok" and set(NO_MEASUREMENT).isdisjoint(row["flags"].split())


def _select_last_attempts(rows: Sequence[Row]) -> list[Row]:
    """Return the answer to each repeat: attempts before the last one were tried again."""
    last: dict[tuple[Any, Any], Row] = {}
    for row in sorted(rows, key=itemgetter("study", "repeat", "attempt")):
        last[row["study"], row["repeat"]] = row
    return list(last.values())


def _group_by_allocation(good: Sequence[Row]) -> Allocations:
    """Return runs by what they shared; one outside of any job stands by itself."""
    groups: dict[Any, list[Row]] = {}
    for place, row in enumerate(good):
        groups.setdefault(row["allocation"] or place, []).append(row)
    return list(groups.values())


def _compute_timing(allocations: Allocations) -> Row:
    of_steps, of_rates = _compute_interval(allocations, "step_s"), _compute_interval(allocations, "tokens_per_s")
    return {
        "step_s": _compute_median(allocations, "step_s"), **_build_interval_cells("step_s", of_steps),
        "tokens_per_s": _compute_median(allocations, "tokens_per_s"), **_build_interval_cells("tokens_per_s", of_rates),
        **{f"interval_{part}": getattr(of_steps, part, None) for part in ("kind", "level", "n")},
    }  # fmt: skip


def _build_interval_cells(name: str, interval: Interval | None) -> Row:
    return {f"{name}_low": interval and interval.low, f"{name}_high": interval and interval.high}


def _compute_interval(allocations: Allocations, name: str) -> Interval | None:
    if len(allocations) != 1:
        return repeats_interval(_compute_medians(allocations, name))
    (good,) = allocations
    ends = [(row[f"{name}_low"], row[f"{name}_high"]) for row in good]
    if any(low is None for low, _ in ends):
        return None
    steps = sum(row["n_steps"] for row in good)
    return Interval(min(low for low, _ in ends), max(high for _, high in ends), "within the run", LEVEL, steps)


def _compute_sample_s(allocations: Allocations) -> float | None:
    """Return the geometric mean over allocations of the time per sample over all windows in each."""
    known = [[row for row in rows if row["sample_s"] is not None] for rows in allocations]
    means = [
        _compute_weighted_mean([row["sample_s"] for row in rows], [row["n_steps"] for row in rows])
        for rows in known
        if rows
    ]
    return statistics.geometric_mean(means) if means else None


def _compute_weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _compute_median(allocations: Allocations, name: str) -> float | None:
    """Return the median over allocations of the median over the runs in each; None where no run tells it."""
    medians = _compute_medians(allocations, name)
    return statistics.median(medians) if medians else None


def _compute_maximum(rows: Sequence[Row], name: str) -> Any:
    return max((row[name] for row in rows if row[name] is not None), default=None)


def _compute_medians(allocations: Allocations, name: str) -> list[float]:
    known = [[row[name] for row in rows if row[name] is not None] for rows in allocations]
    return [statistics.median(values) for values in known if values]


def _join_flags(good: Sequence[Row], answers: Sequence[Row]) -> str:
    raised = [flag for row in (good or answers) for flag in row["flags"].split()]
    if good and any(row["outcome"] != "ok" for row in answers):
        raised.append("mixed")
    return " ".join(dict.fromkeys(raised))


def _join_notes(good: Sequence[Row], allocations: Allocations) -> str:
    notes = [note for row in good for note in row["notes"].split()]
    return " ".join(dict.fromkeys(note for note in notes if note != "few" or not enough(allocations)))
