"""Compute the costs of runs, with start-up and failed attempts: per run, per million tokens, and until a loss is
reached.

A row of the table combines the runs of one configuration on one machine, over all repeats and seeds. Rows are sorted by
name. Columns:

runs            number of attempts (tries at a run). Failed and lost attempts are included.
untimed         number of attempts of unknown duration. Their costs are unknown, so all sums are lower bounds.
finished        number of repeats that ended ok. A repeat is one measurement of the configuration with one seed; it may
                take several attempts, because a failed attempt is tried again.
device_hours    device-hours of all attempts of known duration, from the start of their processes to their last step. An
                attempt without recorded times counts from its start to the signal that interrupted it, or to its last
                heartbeat.
start_share     fraction of the device-hours before the first step. Only attempts with recorded times are included.
failed_share    fraction of the device-hours that failed attempts (with an outcome other than ok) took.
cost            cost of the device-hours.
cost_per_run    median cost of a finished repeat, failed attempts included.
cost_per_million_tokens
                cost of the timed steps alone, as in the run table. Missing if all runs had background load or a
                pause, or no timed steps.
reached         number of repeats whose held-out loss reached the given loss at an evaluation.
cost_to_loss    median cost of a repeat until that evaluation, with start-up and failed attempts. Missing if a finished
                repeat did not reach the loss, because the median of the other repeats would be too low.

Ends of intervals are in the columns `*_low` and `*_high`. For a single run, only cost_per_million_tokens has an
interval, which is computed from the steps of the run. For two to five repeats, the interval is their range. For six or
more, it is the 95 % interval of their median.
"""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis.columns import Kind, annotate
from analysis.formats import MISSING, format_significant, shorten_keys
from analysis.metrics.cost import compute_attempt_s, compute_seconds_to_loss, compute_startup_s, is_resumed
from analysis.questions import describe_differing_fields, describe_variants
from analysis.results import Results
from analysis.searches import find_study_folders
from analysis.stats.intervals import repeats_interval
from analysis.summary import Row, group_by_allocation, is_disturbed, select_answering
from analysis.table import build_typed_frame, group_by, list_rows
from bench.core import files, store
from bench.core.errors import UserError
from bench.core.formatting import format_interval
from bench.core.point_fields import flatten
from bench.core.record import RunRecord
from bench.core.spec import RunSpec, config_id
from bench.core.store import Unreadable
from bench.sweep import jobs

_HOUR_S = 3600
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)")
_INTEGERS = ("runs", "untimed", "finished", "reached")
_NUMBERS = ("device_hours", "start_share", "failed_share", "cost", "cost_per_run", "cost_to_loss")
_ENDS = ("cost_per_run", "cost_per_million_tokens", "cost_to_loss")
KINDS: dict[str, Kind] = {
    "variant": "text",
    **dict.fromkeys(_INTEGERS, "integer"),
    **dict.fromkeys(_NUMBERS, "number"),
    **{f"{name}_{end}": "number" for name in _ENDS for end in ("low", "high")},
}
"""Types of the columns that the run table does not have."""


class _Attempt(NamedTuple):
    row: Row
    record: RunRecord
    seconds: float | None  # None: unknown


def tabulate_costs(results: Results, price: float | None = None, loss: float | None = None) -> pd.DataFrame:
    """Return the costs of each configuration on each machine.

    `price` is the price per device and hour; by default it is the price in the records. Without any price, costs are
    missing. With `loss`, the table also has the cost of training until the held-out loss is at most this number.
    """
    attempts = []
    for place, row in enumerate(list_rows(results.table)):
        if row["evidence"] == "measured":
            record = results.record(place)
            seconds = compute_attempt_s(record) or _compute_interrupted_s(record, results.get_file(place).parent)
            attempts.append(_Attempt(row, record, seconds))
    # seeds of one configuration are repeats of it
    merged = {one.row["config_id"]: one.record.spec.model_copy(update={"seed": 0}) for one in attempts}
    specs = {config_id(spec): spec for spec in merged.values()}
    groups = group_by(attempts, lambda one: (config_id(merged[one.row["config_id"]]), one.row["machine"]))
    rows = _name_rows({key: _build_row(group, price, loss) for key, group in groups.items()}, specs)
    ends = [part for name in _ENDS for part in (name, f"{name}_low", f"{name}_high")]
    left = () if loss is not None else ("reached", *ends[-3:])
    left = left if "adapter" in results.table else (*left, "adapter")
    names = [name for name in (*_NAMES, *_INTEGERS, *_NUMBERS[:4], *ends) if name not in left]
    return annotate(build_typed_frame({name: [row[name] for row in rows] for name in names}, KINDS))


def _compute_interrupted_s(record: RunRecord, folder: Path) -> float | None:
    """Return the seconds from the start of an attempt to the signal that interrupted it or to its last heartbeat,
    whichever is later. None if neither time is known. Both times are looked up in the record, and in files of the
    attempt's folder (`folder`)."""
    evidence = record.outcome.evidence
    notes = [evidence.get(name) for name in ("interrupted", "last_heartbeat")]
    notes += [files.read_json(folder / name) for name in (store.INTERRUPTED, store.HEARTBEAT)]
    try:
        began = datetime.fromisoformat(record.circumstance.started_at)
        ends = [datetime.fromisoformat(one["at"]) for one in notes if isinstance(one, dict) and "at" in one]
        return max(((end - began).total_seconds() for end in ends), default=0.0) or None
    except (ValueError, TypeError):  # no time, or times with and without a time zone
        return None


def _name_rows(rows: Mapping[tuple[str, str], Row], specs: Mapping[str, RunSpec]) -> list[Row]:
    """Return the rows with the additional column `variant`, sorted by the columns `_NAMES`, which name a row. The sort
    compares numbers within texts by value, so that 2 comes before 10. The keys of `rows` are pairs of config_id and
    machine. `specs` holds the spec of each config_id.

    The column `variant` lists fields that distinguish configurations. If several rows would still have equal names,
    further fields are added in which their configurations differ.
    """
    variants = describe_variants(specs)
    named = {key: row | {"variant": variants[key[0]]} for key, row in rows.items()}
    for keys in group_by(named, lambda key: tuple(named[key][name] for name in _NAMES)).values():
        fields = {one: {name: str(value) for name, value in flatten(specs[one])} for one, _ in keys}
        added = describe_differing_fields(list(fields), fields)
        for key in keys:
            named[key]["variant"] = ", ".join(filter(None, (named[key]["variant"], added[key[0]])))
    return sorted(named.values(), key=lambda row: [_split_numbers(row[name]) for name in _NAMES])


def _split_numbers(value: str | int | None) -> list[str | float]:
    """Return a sort key that compares numbers within texts by value. The key is a list in which texts and numbers
    alternate."""
    parts: list[str | float] = [*_NUMBER.split("" if value is None else str(value))]
    return [float(part) if place % 2 else part for place, part in enumerate(parts)]


def _build_row(attempts: Sequence[_Attempt], price: float | None, loss: float | None) -> Row:
    first = attempts[0]
    price = price or first.record.circumstance.machine.price_per_device_hour
    ranks = first.record.spec.world_size
    known = [one for one in attempts if one.seconds is not None]
    total_s = sum(one.seconds or 0.0 for one in known)
    failed_s = sum(one.seconds or 0.0 for one in known if one.row["outcome"] != "ok")
    per_second = None if price is None else price * ranks / _HOUR_S
    repeats = group_by(attempts, lambda one: (one.row["study"], one.row["config_id"], one.row["repeat"]))
    recorded = [one for one in known if compute_startup_s(one.record)]
    recorded_s = sum(one.seconds or 0.0 for one in recorded)
    finished = [group for group in repeats.values() if any(one.row["outcome"] == "ok" for one in group)]
    to_loss = [_compute_to_loss(group, loss) for group in finished] if loss is not None else []
    reached = [seconds for seconds in to_loss if seconds is not None]
    return {
        **{name: first.row.get(name) for name in _NAMES if name != "variant"},
        "runs": len(attempts),
        "untimed": len(attempts) - len(known),
        "finished": len(finished),
        "reached": len(reached),
        "device_hours": ranks * total_s / _HOUR_S if known else None,
        "start_share": sum(compute_startup_s(one.record) or 0.0 for one in recorded) / recorded_s if recorded else None,
        "failed_share": failed_s / total_s if known else None,
        "cost": per_second * total_s if per_second and known else None,
        **_build_cells("cost_per_run", [sum(one.seconds or 0.0 for one in group) for group in finished], per_second),
        **_build_token_cells([one.row for one in attempts], per_second),
        **_build_cells("cost_to_loss", reached if len(reached) == len(finished) else [], per_second),
    }


def _compute_to_loss(attempts: Sequence[_Attempt], loss: float) -> float | None:
    """Return the seconds until one repeat of a training reached the held-out loss `loss`; None if the repeat did not
    reach this loss. `attempts` are all tries at this repeat, and the time of failed attempts is included.

    Exception: earlier attempts count only with their steps and evaluations if the loss was reached before the training
    was resumed, or if a resumed training has an earlier attempt of unknown duration.
    """
    ended = next(one for one in reversed(attempts) if one.row["outcome"] == "ok")
    earlier = [one.seconds for one in attempts if one is not ended]
    own = compute_seconds_to_loss(ended.record, loss, own=True)
    # None if the loss was reached before the training was resumed, or not at all
    if own is None or (None in earlier and is_resumed(ended.record)):
        return compute_seconds_to_loss(ended.record, loss)
    return own + sum(filter(None, earlier))


def _build_token_cells(rows: Sequence[Row], per_second: float | None) -> dict[str, float | None]:
    """Return the cost of a million tokens with its interval, as cells of the cost table. `rows` holds the attempts
    (tries at a run) of one configuration on one machine, as rows of the run table. `per_second` is the price of a
    second on all ranks. Runs on a busy machine or with a pause are excluded."""
    name, by_seed = "cost_per_million_tokens", group_by(rows, lambda row: row["config_id"]).values()
    good = [row for seed in by_seed for row in select_answering(seed) if row["tokens_per_s"] and not is_disturbed(row)]
    allocations = group_by_allocation(good)
    seconds = [statistics.median(1e6 / row["tokens_per_s"] for row in members) for members in allocations]
    cells = _build_cells(name, seconds, per_second)
    if len(good) == 1 and per_second and good[0]["tokens_per_s_low"]:
        ends = (good[0]["tokens_per_s_high"], good[0]["tokens_per_s_low"])
        cells |= {f"{name}_{end}": 1e6 / rate * per_second for end, rate in zip(("low", "high"), ends, strict=True)}
    return cells


def _build_cells(name: str, seconds: Sequence[float], per_second: float | None) -> dict[str, float | None]:
    """Return the median cost and the ends of its interval as cells of the columns `name`, `name_low` and `name_high`.

    `seconds` holds one duration per repeat, and `per_second` is the price of a second on all ranks. The cells are None
    without durations or without a price.
    """
    if per_second is None or not seconds:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    costs = [per_second * one for one in seconds]
    interval = repeats_interval(costs)
    ends = (interval.low, interval.high) if interval else (None, None)
    return {name: statistics.median(costs), f"{name}_low": ends[0], f"{name}_high": ends[1]}


class AllocatedTime(NamedTuple):
    """Time for which the scheduler jobs of some studies held devices. `periods` is the number of periods in which a job
    had nodes; a restart begins a new period."""

    device_hours: float
    periods: int
    open: int  # periods without a recorded end, which are not counted


def compute_allocated_time(files: Iterable[Path]) -> AllocatedTime | None:
    """Return the time for which scheduler jobs held devices; None if there were no jobs. All jobs of the studies that
    contain the records `files` are included.

    The time includes parts that are in no record: the start and end of jobs, gaps between runs, and lost attempts.
    """
    hours, periods, still_open = 0.0, 0, 0
    for study in find_study_folders(files):
        for job in jobs.list_submitted(study)[0]:
            devices = _count_devices_per_node(job.folder)
            for _, period in jobs.list_allocations(job.folder):
                periods += 1
                if period.ended_at is None or devices is None:
                    still_open += 1
                else:
                    hours += devices * period.nodes * (period.ended_at - period.began_at) / _HOUR_S
    return AllocatedTime(hours, periods, still_open) if periods else None


def _count_devices_per_node(folder: Path) -> int | None:
    """Return the number of devices that a job used on each node; None if the job's file cannot be read.

    If the configurations of the job use different numbers of devices per node, the largest of these numbers is
    returned.
    """
    try:
        return max(spec.devices_per_node for spec in jobs.read(folder).list_specs(None))
    except (OSError, Unreadable, ValueError):
        return None


def count_evaluated_once(results: Results) -> int:
    """Return the number of trained configurations that are evaluated after the last step, but not between the first
    step and the last."""
    learned = [spec.learning for spec in results.configurations.values() if spec.learning.tokens is not None]
    return sum((one.evaluate_every or one.tokens or 0) >= (one.tokens or 0) for one in learned)


def list_remarks(
    table: pd.DataFrame, allocated: AllocatedTime | None, price: float | None, evaluated_once: int = 0
) -> list[str]:
    """Return sentences on what the costs of a table include, and on what is unknown. If the table has the cost of
    reaching a loss, `evaluated_once` is the number of configurations that were evaluated only at the start and at the
    end. Otherwise `evaluated_once` is 0."""
    lines = ["An attempt counts from the start of its processes to its last step, with evaluations and checkpoints."]
    hours, untimed = table["device_hours"].sum(), int(table["untimed"].sum())
    if hours:
        shares = table["start_share"], table["failed_share"]
        start, failed = (100 * (share * table["device_hours"]).sum() / hours for share in shares)
        share = f"{'at least ' if untimed else ''}{failed:.2g} %"
        lines.append(f"Attempts that did not end ok took {share} of the device-hours.")
        lines.append(f"Start-up took {start:.2g} % of the device-hours of attempts with recorded times.")
    if untimed:
        lines.append(f"Attempts of unknown duration: {untimed}. Their cost is unknown, so sums are lower bounds.")
    if table["cost"][table["device_hours"].notna()].isna().any():
        lines.append("The price of a device is unknown. Add a price per device and hour, e.g. --price 2.5.")
    without = int((table["cost_per_run"].notna() & table["cost_per_million_tokens"].isna()).sum())
    if without:
        reason = "All runs of such a configuration had background load or a pause, or no timed steps."
        lines.append(f"Configurations without a cost per million tokens: {without} of {len(table)}. {reason}")
    if evaluated_once:
        reason = "evaluated only at their start and end, so their cost to the loss is an upper bound."
        lines.append(f"Configurations: {evaluated_once} of {len(table)} were {reason}")
    if allocated:
        paid = f", which cost {allocated.device_hours * price:.4g}" if price else ""
        held = f"The jobs held devices for {allocated.device_hours:.4g} device-hours{paid}, all attempts included."
        unknown = f"{allocated.open} of {allocated.periods} allocations are not counted, because their end is unknown."
        lines.append(f"{held} {unknown}" if allocated.open else held)
    return lines


def build_text_cells(frame: pd.DataFrame) -> tuple[list[str], list[list[str]], list[bool]]:
    """Return headings, rows and alignments of the table as text; the alignment of a column is True for right-aligned.

    Columns that name a row (`_NAMES`) are omitted if they are equal in all rows. Other columns are omitted if they have
    no value. An adapter's settings are omitted if all rows with this adapter have the same settings.
    """
    rows = list_rows(frame)
    settings = group_by(filter(None, {row.get("adapter") for row in rows}), lambda text: text.partition(" ")[0])
    short = {texts[0]: name for name, texts in settings.items() if len(texts) == 1}
    rows = [row | {"adapter": short.get(row["adapter"], row["adapter"])} if "adapter" in row else row for row in rows]
    shown = {name: _HEADINGS[name] for name in map(str, frame.columns) if name in _HEADINGS}
    for name in list(shown):
        values = [row[name] for row in rows]
        is_same = name in _NAMES and len(rows) > 1 and len(set(values)) == 1
        is_empty = all(value in (None, "") for value in values) and name != "cost_to_loss"
        if is_same or is_empty or (name == "untimed" and not any(values)):
            del shown[name]
    cells = [[_format_value(row, name) for name in shown] for row in rows]
    return list(shown.values()), cells, [name not in _NAMES[:5] for name in shown]


_NAMES = ("model", "engine", "adapter", "variant", "machine", "world_size", "micro")
"""Columns that name a row; the first five are texts."""
_HEADINGS = {
    "model": "model", "engine": "engine", "adapter": "adapter", "variant": "variant", "machine": "machine",
    "world_size": "ranks", "micro": "micro", "finished": "finished", "untimed": "untimed",
    "device_hours": "device-hours", "cost": "cost",
    "cost_per_run": "per run", "cost_per_million_tokens": "per 10^6 tokens", "cost_to_loss": "to the loss",
}  # fmt: skip
"""Headings of the table as text, by column."""
_SUMS = ("device_hours", "cost", "cost_per_run", "cost_to_loss")
"""Columns that are lower bounds if a row has attempts of unknown duration."""
_OMITTED_FIRST = (
    "device_hours", "untimed", "finished", "cost", "cost_per_million_tokens", "cost_per_run", "cost_to_loss",
)  # fmt: skip


def list_omitted_first(head: Sequence[str]) -> list[str]:
    """Return the headings that may be omitted from a table with the headings `head` to make it narrower, in the order
    in which they are omitted.

    A table with costs always keeps the first cost that it has in this list: to the loss, per run, per million tokens,
    in total. A table without costs always keeps the device-hours.
    """
    found = [_HEADINGS[name] for name in _OMITTED_FIRST if _HEADINGS[name] in head]
    kept = found[-1] if _HEADINGS["cost"] in found else _HEADINGS["device_hours"]
    return [name for name in found if name != kept]


def _format_value(row: Row, name: str) -> str:
    value, low, high = row[name], row.get(f"{name}_low"), row.get(f"{name}_high")
    least = "≥ " if row["untimed"] and name in _SUMS else ""
    if name == "finished":
        return f"{value} of {row['runs']}"
    if name == "cost_to_loss" and value is None:
        return f"reached by {row['reached']} of {row['finished']}"
    if value is None:
        return MISSING
    if name == "variant":
        return shorten_keys(value)
    if low is not None and high is not None:
        return least + format_interval(value, low, high)
    return least + (format_significant(value, 3) if isinstance(value, float) else str(value))


def check_held_out(loss: float | None, table: pd.DataFrame) -> None:
    """Raise UserError if a loss is given, but the run table has no training with a held-out loss."""
    if loss is not None and "validation_loss" not in table:
        raise UserError(f"--loss {loss:g}", "no run is a training with a held-out loss", "remove --loss")
