"""Summary of a run table: one row per configuration, machine, environment class and kind of evidence.

The kind of evidence is measured, rehearsed (one rank ran alone) or predicted. Trainings (runs with `learning.tokens`)
that differ only in their seed are repeats of one configuration. Rows of different environments are never pooled. The
columns are those of the run table that identify what was measured, and the columns below.

Repeats and outcome:

variant           other fields in which configurations of an engine differ in this set (`analysis.questions`).
n                 number of allocations with repeats that ended ok. Drills and runs disturbed by an external cause
                  (`analysis.flags.DISTURBED`) are excluded. Runs in the same allocation share its nodes, so they count
                  once, with their median. A run outside of any job counts by itself.
runs              number of rows of the run table, all attempts (tries at a run) included.
outcome           ok if n > 0, otherwise the outcome of the last attempt.
reason            cause of that outcome; if n > 0, the number of excluded repeats and why they are excluded.
seed              missing if the runs have several seeds.
flags             flags of the combined runs. If some repeats ended ok and others did not, the flag `mixed` is added.
notes             notes of the combined runs. The note `few` (too few steps for a reliable interval of a run) is omitted
                  if n is large enough for a verdict, because a verdict compares runs and not steps.

Times and memory. If all runs were disturbed, times and rates are missing. In this case n counts the disturbed runs,
because their memory and losses are valid.

sample_s          seconds per sample: the mean over all windows of an allocation, then the geometric mean over the
                  allocations. Configurations are ranked by it.
step_s, rates     median over the repeats; step_s and tokens_per_s have intervals in *_low and *_high.
step_s_p95, _p99  median over the repeats.
step_s_max        longest step of all repeats.
*_bytes           maximum over the repeats, because the worst repeat decides whether a configuration fits.

Intervals of step_s:

interval_kind     "within the run" for n = 1: the interval predicts further steps in that allocation, not other
                  allocations. If the allocation has several runs, the interval spans the intervals of all of them. For
                  n of six or more: "between repeats". For n of two to five, which have no 95 % interval: "range of
                  repeats". Missing if the row has no interval.
interval_level    0.95, or the probability that the range of two to five repeats contains the median.
interval_n        number of steps (within the run) or repeats that the interval is computed from.

Trainings:

learning_rate, tokens_trained, validation_loss, exact_match, token_f1 (and *_before)
                  mean over the seeds, if any run was trained to its end. Repeats with the same seed are not
                  independent, so they count once, with their mean. Disturbed runs are included, because their losses
                  are valid.
                  validation_loss has the 95 % interval of this mean by Student's t, for three seeds or more. Its lower
                  end is at least 0 if no loss is negative.
trained_s         median over the repeats.
seeds             number of seeds with a validation_loss.
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
from analysis.stats.intervals import Interval, mean_interval, repeats_interval
from analysis.table import build_typed_frame, group_by, list_rows
from bench.core.statistics import LEVEL

Row = dict[str, Any]
Allocations = Sequence[Sequence[Row]]
"""Rows of the run table, grouped by allocation."""

ANSWERING = ("study", "seed", "repeat", "attempt", "outcome", "flags")
"""Columns of the run table that `select_answering` reads."""

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
    "interval_n": "integer", "validation_loss_low": "number", "validation_loss_high": "number", "seeds": "integer",
}  # fmt: skip
COLUMNS = (
    *KEY, *_WHAT, "variant", "n", "runs", "outcome", "sample_s", "step_s", "step_s_low", "step_s_high", "tokens_per_s",
    "tokens_per_s_low", "tokens_per_s_high", "interval_kind", "interval_level", "interval_n", *_MEDIANS, "step_s_max",
    *_MAXIMA, "flags", "notes", "reason",
)  # fmt: skip


def summarise(
    table: pd.DataFrame, variants: Mapping[str, str] | None = None, *, keep_disturbed: bool = False
) -> pd.DataFrame:
    """Return the summary of a run table. Its rows are in the order in which the configurations first appear.

    `variants` holds the texts of the column `variant`, by config_id. With `keep_disturbed`, disturbed runs count like
    all others (`analysis.results.Results.with_disturbed`).
    """
    known, what = variants or {}, [*_WHAT, *(name for name in LATER if name in table)]
    rows = [
        _summarise_group(rows, what, keep_disturbed) | {"variant": known.get(rows[0]["config_id"], "")}
        for rows in group_by(list_rows(table), itemgetter(*KEY)).values()
    ]
    ends = ("validation_loss_low", "validation_loss_high", "seeds") if "validation_loss" in table else ()
    names = (*COLUMNS, *what[len(_WHAT) :], *(name for name in LEARNED if name in table), *ends)
    return build_typed_frame({name: [row[name] for row in rows] for name in names}, _KINDS)


def _summarise_group(rows: Sequence[Row], what: Sequence[str], keep_disturbed: bool) -> Row:
    answers, good = _select_last_attempts(rows), select_answering(rows, keep_disturbed=keep_disturbed)
    allocations = group_by_allocation(good)
    # `good` has disturbed runs only if all are disturbed; then memory is used, but times are not
    timed = [] if any(map(is_disturbed, good)) and not keep_disturbed else allocations
    known = (good or answers)[-1]
    return {
        **{name: rows[0][name] for name in (*KEY, *what)},
        "seed": rows[0]["seed"] if len({row["seed"] for row in rows}) == 1 else None,
        "n": len(allocations),
        "runs": len(rows),
        "outcome": known["outcome"],
        "sample_s": _compute_sample_s(timed),
        **_compute_timing(timed),
        **{name: _compute_median(timed, name) for name in _MEDIANS},
        **_compute_learned(select_answering(rows, keep_disturbed=True), timed),
        "step_s_max": _compute_maximum(itertools.chain(*timed), "step_s_max"),
        **{name: _compute_maximum(good, name) for name in _MAXIMA},
        "flags": _join_flags(good, answers),
        "notes": _join_notes(good, allocations),
        "reason": _describe_missing(answers, good) if good else known["reason"],
    }


def select_answering(rows: Sequence[Row], *, keep_disturbed: bool = False) -> list[Row]:
    """Return the rows of the run table from which the values of a configuration's summary row are computed.

    These are the runs that ended ok and are measurements. Of each repeat, only the last attempt (try at the run)
    counts. Disturbed runs are included only if all runs are disturbed, or with `keep_disturbed`.
    """
    good = [
        row
        for row in _select_last_attempts(rows)
        if row["outcome"] == "ok" and set(NO_MEASUREMENT).isdisjoint(row["flags"].split())
    ]
    return good if keep_disturbed else [row for row in good if not is_disturbed(row)] or good


def is_disturbed(row: Row) -> bool:
    """Return True if the times of a run are excluded because of background load or a pause. For a summary row, return
    True if the times of all its runs are excluded."""
    return not set(DISTURBED).isdisjoint(row["flags"].split())


def list_last_outcomes(rows: Sequence[Row]) -> list[str]:
    """Return the outcome of the last attempt (try at a run) of each repeat. It is `drill` for a run that is no
    measurement, for example because a fault was injected."""
    return [
        str(row["outcome"]) if set(NO_MEASUREMENT).isdisjoint(row["flags"].split()) else "drill"
        for row in _select_last_attempts(rows)
    ]


def _describe_missing(answers: Sequence[Row], good: Sequence[Row]) -> str:
    """Return a text with the number of excluded repeats for each reason, such as "7 of 10 repeats oom". A reason is a
    flag or an outcome."""
    counts: Counter[str] = Counter()
    for row in answers:
        if all(row is not one for one in good):
            flags = row["flags"].split()
            counts[next((flag for flag in (*NO_MEASUREMENT, *DISTURBED) if flag in flags), str(row["outcome"]))] += 1
    return ", ".join(f"{count} of {len(answers)} repeats {why}" for why, count in counts.items())


def _select_last_attempts(rows: Sequence[Row]) -> list[Row]:
    """Return the last attempt (try at a run) of each repeat with each seed. The last attempt supersedes the earlier
    ones."""
    ordered = sorted(rows, key=itemgetter("study", "seed", "repeat", "attempt"))
    return list({(row["study"], row["seed"], row["repeat"]): row for row in ordered}.values())


def group_by_allocation(good: Sequence[Row]) -> Allocations:
    """Return the runs grouped by allocation. A run outside of any job forms its own group."""
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
    # with one allocation, the difference between allocations is unknown; the interval spans the intervals of its runs
    (good,) = allocations
    ends = [(row[f"{name}_low"], row[f"{name}_high"]) for row in good]
    if any(low is None for low, _ in ends):
        return None
    steps = sum(row["n_steps"] for row in good)
    return Interval(min(low for low, _ in ends), max(high for _, high in ends), "within the run", LEVEL, steps)


def _compute_learned(good: Sequence[Row], timed: Allocations) -> Row:
    """Return the cells of the columns that describe trainings, such as the held-out loss, as far as the run table has
    them. `good` has all runs that ended ok, and `timed` has the runs whose times count."""
    names = [name for name in LEARNED if good and name in good[0]]
    cells: Row = dict.fromkeys(LEARNED)
    for name in names:
        if name in LEARNED_TIMES:
            cells[name] = _compute_median(timed, name)
        elif means := compute_seed_means(good, name):
            cells[name] = statistics.mean(means.values())
    losses = compute_seed_means(good, "validation_loss") if "validation_loss" in names else {}
    interval = loss_interval(list(losses.values()))
    ends = {f"validation_loss_{end}": getattr(interval, end, None) for end in ("low", "high")}
    return cells | ends | {"seeds": len(losses)}


def loss_interval(losses: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of a mean held-out loss by Student's t; None for fewer than three losses. If no loss is
    negative, neither is the lower end."""
    interval = mean_interval(losses)
    return interval._replace(low=max(interval.low, 0.0)) if interval and min(losses) >= 0 else interval


def compute_seed_means(rows: Iterable[Row], name: str) -> dict[int, float]:
    """Return, for each seed, the mean of the column `name` over the runs with this seed. Runs without a value are
    ignored."""
    by_seed = group_by((row for row in rows if row[name] is not None), itemgetter("seed"))
    return {seed: statistics.mean(row[name] for row in members) for seed, members in by_seed.items()}


def _compute_sample_s(allocations: Allocations) -> float | None:
    """Return the geometric mean over allocations of the mean seconds per sample in each allocation."""
    means = []
    for rows in allocations:
        # samples are proportional to steps, with the same factor for all runs, so steps can be the weights
        windows = [(row["sample_s"] * row["n_steps"], row["n_steps"]) for row in rows if row["sample_s"] is not None]
        if windows:
            means.append(sum(seconds for seconds, _ in windows) / sum(steps for _, steps in windows))
    return statistics.geometric_mean(means) if means else None


def _compute_median(allocations: Allocations, name: str) -> float | None:
    """Return the median over allocations of the median over the runs in each allocation; None if no run has a value."""
    medians = _compute_medians(allocations, name)
    return statistics.median(medians) if medians else None


def _compute_maximum(rows: Iterable[Row], name: str) -> Any:
    return max((row[name] for row in rows if row[name] is not None), default=None)


def _compute_medians(allocations: Allocations, name: str) -> list[float]:
    known = [[row[name] for row in rows if row[name] is not None] for rows in allocations]
    return [statistics.median(values) for values in known if values]


def _join_flags(good: Sequence[Row], answers: Sequence[Row]) -> str:
    raised = [flag for row in (good or answers) for flag in row["flags"].split()]
    # slow repeats may be those that failed, so the remaining ones may look too fast
    if good and any(row["outcome"] != "ok" for row in answers):
        raised.append("mixed")
    return " ".join(dict.fromkeys(raised))


def _join_notes(good: Sequence[Row], allocations: Allocations) -> str:
    notes = [note for row in good for note in row["notes"].split()]
    return " ".join(dict.fromkeys(note for note in notes if note != "few" or not enough(allocations)))
