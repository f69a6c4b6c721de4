"""Summary of a run table: one row per configuration, machine, environment class and kind of evidence.

Rows of different environments are never pooled. The columns are those of the run table that identify what was measured,
and these:
variant           other fields in which configurations of an engine differ in this set (`analysis.questions`).
n                 allocations behind the numbers, from repeats that ended ok, without drills and without runs that a
                  cause outside of them disturbed (`analysis.flags.DISTURBED`). Runs that share an allocation share its
                  nodes and count once, with their median; a run outside of any job counts by itself.
times and rates   missing if all runs were disturbed; n then counts these runs, whose memory and losses are known.
runs              rows of the run table, all attempts.
outcome           ok if n > 0, else the outcome of the last attempt.
reason            cause of that outcome; if n > 0, how many repeats failed or were disturbed and are excluded.
sample_s          geometric mean over the allocations of the time per sample over all windows in each; configurations
                  are ranked by it.
step_s, rates     median over the repeats; step_s and tokens_per_s have intervals as *_low and *_high.
step_s_p95, _p99  median over the repeats; step_s_max is the longest step of all.
tokens_trained, trained_s, validation_loss
                  median over the repeats, if any run was trained to its end.
*_bytes           maximum over the repeats: the worst decides what fits.
interval_kind     "within the run" for n = 1, which predicts more steps there, not another allocation (for several runs
                  in it, from the lowest end to the highest); "between repeats" from six on; "range of repeats" for
                  fewer, which have no 95 % interval; or missing.
interval_level    0.95, or the probability that a range of so few repeats holds the median.
interval_n        steps of the one run, or repeats, behind the interval.
flags             flags of any of the runs behind the numbers, and `mixed` if other repeats ended otherwise.
notes             notes of any of these runs; without `few`, which concerns an interval within a run, if n is enough.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import pandas as pd

from analysis.columns import LATER, LEARNED, LEARNED_TIMES, Kind
from analysis.flags import DISTURBED, NO_MEASUREMENT
from analysis.stats.compare import enough
from analysis.stats.intervals import Interval, repeats_interval
from analysis.table import build_typed_frame, group_by, list_rows
from bench.core.statistics import LEVEL

Row = dict[str, Any]
Allocations = Sequence[Sequence[Row]]
"""Rows of the run table, grouped by the allocation that they share."""

ANSWERING = ("study", "repeat", "attempt", "outcome", "flags")
"""Columns that `select_answering` needs."""

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
    """Return the summary of a run table, in the order in which its configurations appear.

    `variants` are texts by config_id. With `keep_disturbed`, disturbed runs count like all others
    (`analysis.results.Results.with_disturbed`).
    """
    known, what = variants or {}, [*_WHAT, *(name for name in LATER if name in table)]
    rows = [
        _summarise_group(rows, what, keep_disturbed) | {"variant": known.get(rows[0]["config_id"], "")}
        for rows in group_by(list_rows(table), itemgetter(*KEY)).values()
    ]
    names = (*COLUMNS, *what[len(_WHAT) :], *(name for name in LEARNED if name in table))
    return build_typed_frame({name: [row[name] for row in rows] for name in names}, _KINDS)


def _summarise_group(rows: Sequence[Row], what: Sequence[str], keep_disturbed: bool) -> Row:
    answers, good = _select_last_attempts(rows), select_answering(rows, keep_disturbed=keep_disturbed)
    allocations = _group_by_allocation(good)
    # `good` has disturbed runs only if all are disturbed: their memory counts, their times do not
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
        "step_s_max": _compute_maximum(itertools.chain(*timed), "step_s_max"),
        **{name: _compute_maximum(good, name) for name in _MAXIMA},
        "flags": _join_flags(good, answers),
        "notes": _join_notes(good, allocations),
        "reason": _describe_missing(answers, good) if good else known["reason"],
    }


def select_answering(rows: Sequence[Row], *, keep_disturbed: bool = False) -> list[Row]:
    """Return the rows of the run table behind the numbers of one configuration.

    These are the last attempts of every repeat that ended ok and were measurements. Disturbed runs are included only if
    all are disturbed, or with `keep_disturbed`.
    """
    good = [
        row
        for row in _select_last_attempts(rows)
        if row["outcome"] == "ok" and set(NO_MEASUREMENT).isdisjoint(row["flags"].split())
    ]
    return good if keep_disturbed else [row for row in good if not is_disturbed(row)] or good


def is_disturbed(row: Row) -> bool:
    """Return whether the times of a run are excluded, or those of all runs behind a row of the summary."""
    return not set(DISTURBED).isdisjoint(row["flags"].split())


def _describe_missing(answers: Sequence[Row], good: Sequence[Row]) -> str:
    """Return how many repeats are excluded, and why: "7 of 10 repeats oom". The cause is a flag or the outcome."""
    counts: Counter[str] = Counter()
    for row in answers:
        if all(row is not one for one in good):
            flags = row["flags"].split()
            counts[next((flag for flag in (*NO_MEASUREMENT, *DISTURBED) if flag in flags), str(row["outcome"]))] += 1
    return ", ".join(f"{count} of {len(answers)} repeats {why}" for why, count in counts.items())


def _select_last_attempts(rows: Sequence[Row]) -> list[Row]:
    """Return the last attempt of each repeat, which supersedes those before it."""
    last: dict[tuple[Any, Any], Row] = {}
    for row in sorted(rows, key=itemgetter("study", "repeat", "attempt")):
        last[row["study"], row["repeat"]] = row
    return list(last.values())


def _group_by_allocation(good: Sequence[Row]) -> Allocations:
    """Group runs by allocation; a run outside of any job is a group by itself."""
    groups = group_by(enumerate(good), lambda item: item[1]["allocation"] or item[0])
    return [[row for _, row in group] for group in groups.values()]


def _compute_timing(allocations: Allocations) -> Row:
    cells: Row = {}
    for name in ("step_s", "tokens_per_s"):
        interval = _compute_interval(allocations, name)
        cells |= {name: _compute_median(allocations, name)}
        cells |= {f"{name}_{end}": getattr(interval, end, None) for end in ("low", "high")}
        if name == "step_s":
            cells |= {f"interval_{part}": getattr(interval, part, None) for part in ("kind", "level", "n")}
    return cells


def _compute_interval(allocations: Allocations, name: str) -> Interval | None:
    if len(allocations) != 1:
        return repeats_interval(_compute_medians(allocations, name))
    (good,) = allocations  # nothing shows how much allocations differ: the ends of all runs in it
    ends = [(row[f"{name}_low"], row[f"{name}_high"]) for row in good]
    if any(low is None for low, _ in ends):
        return None
    steps = sum(row["n_steps"] for row in good)
    return Interval(min(low for low, _ in ends), max(high for _, high in ends), "within the run", LEVEL, steps)


def _compute_sample_s(allocations: Allocations) -> float | None:
    """Return the geometric mean over allocations of the time per sample over all windows in each."""
    means = []
    for rows in allocations:
        # a window has as many samples as steps, up to a factor that is the same for all runs of a configuration
        windows = [(row["sample_s"] * row["n_steps"], row["n_steps"]) for row in rows if row["sample_s"] is not None]
        if windows:
            means.append(sum(seconds for seconds, _ in windows) / sum(steps for _, steps in windows))
    return statistics.geometric_mean(means) if means else None


def _compute_median(allocations: Allocations, name: str) -> float | None:
    """Return the median over allocations of the median over the runs in each; None if no run has a value."""
    medians = _compute_medians(allocations, name)
    return statistics.median(medians) if medians else None


def _compute_maximum(rows: Iterable[Row], name: str) -> Any:
    return max((row[name] for row in rows if row[name] is not None), default=None)


def _compute_medians(allocations: Allocations, name: str) -> list[float]:
    known = [[row[name] for row in rows if row[name] is not None] for rows in allocations]
    return [statistics.median(values) for values in known if values]


def _join_flags(good: Sequence[Row], answers: Sequence[Row]) -> str:
    raised = [flag for row in (good or answers) for flag in row["flags"].split()]
    # numbers of the repeats that ended ok may be too good, if slow repeats hit the time limit
    if good and any(row["outcome"] != "ok" for row in answers):
        raised.append("mixed")
    return " ".join(dict.fromkeys(raised))


def _join_notes(good: Sequence[Row], allocations: Allocations) -> str:
    notes = [note for row in good for note in row["notes"].split()]
    return " ".join(dict.fromkeys(note for note in notes if note != "few" or not enough(allocations)))
