"""Comparisons of measured configurations that support or contradict published claims. No side effects.

Two measured configurations are compared if they differ in one respect only. Their machine and their environment class
(device and software versions) must be equal. A finding holds all comparisons for a claim on one machine with one model.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import pandas as pd

from analysis.claims import Claim, ClaimComparison, ClaimFinding, ClaimSide, Effect, Start, Starts
from analysis.claims.sources import CLAIMS, SMALL
from analysis.questions import drop_retried, list_own_options, may_be_same
from analysis.results import Results, Runs
from analysis.scaling import Pace, compare_paces
from analysis.stats import compare as stats
from analysis.summary import Row
from analysis.table import group_by, list_rows
from bench.core.formatting import format_count
from bench.core.spec import Batch, RunSpec, canonical

_OF_AMOUNTS: dict[Effect, Effect] = {"faster": "less", "slower": "more"}
_OUT_OF_MEMORY = ("oom", "host_oom")
_NUMBERS = (
    "config_id", "n", "sample_s", "step_s", "step_s_low", "step_s_high", "interval_kind", "interval_level", "flags",
)  # fmt: skip


def find_findings(results: Results) -> list[ClaimFinding]:
    """Return the findings: for every claim, machine and model, all comparisons of measured configurations that concern
    the claim.

    The findings of one publication with one machine and model are returned only if at least one of their comparisons
    involves several nodes.
    """

    @functools.cache
    def find_start(place: int) -> Start:
        return Start(results.get_start(place), results.allocation(place))

    def find_starts(row: Row) -> Starts:
        return tuple(map(find_start, results.list_timed(row)))

    measured = drop_retried([row for row in list_rows(results.summary) if row["evidence"] == "measured"])
    sides = [ClaimSide(row, results.specs[row["config_id"]]) for row in measured]
    places = group_by(sides, lambda side: (str(side.row["machine"]), str(side.row["model"])))
    found = [
        ClaimFinding(claim, machine, model, _compare_sides(claim, members, results, find_starts))
        for (machine, model), members in places.items()
        for claims in CLAIMS.values()
        for claim in claims
    ]
    spanning = {
        (finding.claim.source, finding.machine, finding.model)
        for finding in found
        for one in finding.comparisons
        if one.before["nodes"] > 1 or one.before["nodes"] != one.after["nodes"]
    }
    marked = _mark_slow_networks(found, results)
    return [one for one in marked if (one.claim.source, one.machine, one.model) in spanning]


def as_table(found: Sequence[ClaimFinding]) -> pd.DataFrame:
    """Return a table with a row per comparison: both configurations, their median step times with intervals, a ratio
    with its interval, and the effect as a word, such as "faster".

    The ratio is the second configuration's mean step time, divided by that of the first. If the claim is not about
    time, the ratio is that of the quantity of the claim, such as bytes moved.
    """
    return pd.DataFrame([_build_cells(finding, one) for finding in found for one in finding.comparisons])


def _mark_slow_networks(found: Sequence[ClaimFinding], results: Results) -> list[ClaimFinding]:
    """Return the findings, with `is_slow_network` set for some comparisons of claims about a slow network. A comparison
    is marked if the same two configurations were also compared on a faster network."""

    def name_pair(one: ClaimComparison) -> tuple[str, str]:
        return one.before["config_id"], one.after["config_id"]

    claims = [finding for finding in found if finding.claim.of_slow_network]
    pairs = [one for finding in claims for one in finding.comparisons if one.tested]
    rates: dict[int, float] = {}  # bytes per second between nodes
    fastest: dict[tuple[str, str], float] = {}
    for one in pairs:
        places = results.behind(one.before)
        rate = results.record(places[0]).circumstance.machine.inter_node_bytes_per_s if places else None
        if rate:
            rates[id(one)] = rate
            fastest[name_pair(one)] = max(fastest.get(name_pair(one), 0.0), rate)
    slow = {id(one) for one in pairs if id(one) in rates and rates[id(one)] < fastest[name_pair(one)]}
    marked = []
    for finding in found:
        comparisons = tuple(one._replace(is_slow_network=id(one) in slow) for one in finding.comparisons)
        marked.append(finding._replace(comparisons=comparisons))
    return marked


def name_effects(claim: Claim, tested: Sequence[stats.Comparison]) -> list[Effect]:
    """Return the effect of each comparison for a claim, corrected for the number of comparisons.

    Effects are worded for the quantity of the claim, such as "less" in place of "faster" for bytes. An effect that is
    detected but shown to be below 3 % is named so, for example "faster by less than 3 %".
    """
    detected: list[Effect] = [*stats.verdicts(tested)]
    if claim.quantity != "mean_step_s":
        detected = [_OF_AMOUNTS.get(effect, effect) for effect in detected]
    small = stats.are_equal(tested)
    return [SMALL.get(effect, effect) if below else effect for effect, below in zip(detected, small, strict=True)]


def _compare_sides(
    claim: Claim, sides: Sequence[ClaimSide], results: Results, find_starts: Callable[[Row], Starts]
) -> tuple[ClaimComparison, ...]:
    """Return all comparisons for a claim. Their effects (such as "faster") are corrected for the number of comparisons.
    `find_starts` returns the starts of the runs that a row of the summary combines."""
    found = [
        _compare(claim, one, other, sides, results, find_starts)
        for members in group_by(sides, lambda side: claim.shared(side.spec)).values()
        for one, other in itertools.permutations(members, 2)
        if may_be_same(one.row["environment_id"], other.row["environment_id"]) and claim.compared(one.spec, other.spec)
    ]
    effects = iter(name_effects(claim, [one.tested for one in found if one.tested]))
    return tuple(one._replace(effect=next(effects)) if one.tested else one for one in found)


def _compare(
    claim: Claim,
    one: ClaimSide,
    other: ClaimSide,
    sides: Sequence[ClaimSide],
    results: Results,
    find_starts: Callable[[Row], Starts],
) -> ClaimComparison:
    """Return the comparison of two configurations. `find_starts` returns the starts of the runs that a row of the
    summary combines.

    Exception: if times are compared and exactly one configuration ran out of memory, this configuration is replaced by
    the fastest configuration that does the same work with another micro-batch. The configuration that fits into memory
    keeps its micro-batch. So its advantage of needing less memory shows in the comparison.
    """
    differ = [claim.differ(one.spec, other.spec), claim.differ(other.spec, one.spec)]
    # bytes and idle shares depend on the micro-batch, so only times are compared between different micro-batches
    if claim.quantity == "mean_step_s" and has_run_out(one.row) != has_run_out(other.row):
        if has_run_out(one.row):
            one = _find_fastest_fit(one, sides)
            differ[0] += f", micro {one.spec.batch.micro}"
        else:
            other = _find_fastest_fit(other, sides)
            differ[1] += f", micro {other.spec.batch.micro}"
    ours, theirs = one.spec, other.spec
    as_preset = ours.engine == theirs.engine or not (list_own_options(ours, theirs) or list_own_options(theirs, ours))
    effect: Effect = "unknown"
    if claim.quantity == "mean_step_s" and has_run_out(one.row) and other.row["n"]:
        effect = "first out of memory"
    elif claim.quantity == "mean_step_s" and has_run_out(other.row) and one.row["n"]:
        effect = "second out of memory"

    def find_both() -> tuple[Starts, Starts]:
        return find_starts(one.row), find_starts(other.row)

    shared, tested = _describe_shared(one, other), _test(claim, one.row, other.row, results)
    return ClaimComparison(one.row, other.row, (differ[0], differ[1]), shared, tested, as_preset, effect, find_both)


def _test(claim: Claim, before: Row, after: Row, results: Results) -> stats.Comparison | None:
    """Return the statistical comparison of the second configuration with the first; None if either has no measured
    value."""
    if claim.quantity == "mean_step_s":
        ours, theirs = results.runs(before), results.runs(after)
    else:
        ours, theirs = (_list_values(row, claim.quantity, results) for row in (before, after))
    return compare_paces(Pace(theirs), Pace(ours)) if ours and theirs else None


def _list_values(row: Row, column: str, results: Results) -> Runs:
    """Return the values of a run-table column for the runs that a summary row combines, grouped by allocation (one
    start of a scheduler job)."""
    # background load changes how long ranks are idle, but not how many bytes they move
    places = results.with_disturbed.behind(row) if column == "moved_bytes" else results.list_timed(row)
    found: Runs = {}
    for place in places:
        value = results.table[column].iloc[place]
        if not pd.isna(value) and value > 0:
            found.setdefault(results.allocation(place), []).append(float(value))
    return found


def has_run_out(row: Row) -> bool:
    """Return True if a configuration ran out of memory and no run of it ended ok."""
    return not row["n"] and row["outcome"] in _OUT_OF_MEMORY


def _find_fastest_fit(side: ClaimSide, sides: Sequence[ClaimSide]) -> ClaimSide:
    """Return the fastest configuration with a measured time that does the same work as `side`, at any micro-batch. If
    there is no such configuration, return `side`."""

    def dump_work(spec: RunSpec) -> tuple[str, int]:
        return canonical(spec.model_copy(update={"batch": Batch(micro=1)})), spec.global_batch

    work = dump_work(side.spec)
    fits = [one for one in sides if one.row["sample_s"] is not None and dump_work(one.spec) == work]
    same = [one for one in fits if may_be_same(one.row["environment_id"], side.row["environment_id"])]
    return min(same, key=lambda one: float(one.row["sample_s"]), default=side)


def _describe_shared(one: ClaimSide, other: ClaimSide) -> str:
    """Describe what two configurations share beyond machine and model, such as ranks and micro-batch."""
    spec = one.spec
    micro = f"micro {spec.batch.micro}"
    if spec.nodes == other.spec.nodes:
        return f"{spec.nodes} × {spec.devices_per_node} ranks, {micro}, {spec.precision}"
    if spec.global_batch == other.spec.global_batch:
        work = f"{format_count(spec.global_batch, 'sample')} per step"
    else:
        work = f"{format_count(spec.batch.micro * spec.accumulation, 'sample')} per step and device"
    return f"{spec.engine.name}, {micro}, {work}, {spec.precision}"


def _build_cells(finding: ClaimFinding, comparison: ClaimComparison) -> Row:
    sides, tested = {"before": comparison.before, "after": comparison.after}, comparison.tested
    interval = tested.interval if tested else None
    return {
        "claim": finding.claim.id,
        "quantity": finding.claim.quantity,
        "model": finding.model,
        "machine": finding.machine,
        "environment_id": comparison.before["environment_id"] or comparison.after["environment_id"],
        "held": comparison.shared_text,
        "before": comparison.differ[0],
        "after": comparison.differ[1],
        **{f"{side}_{name}": row[name] for side, row in sides.items() for name in _NUMBERS},
        "ratio": tested.ratio if tested else None,
        **{f"ratio_{end}": getattr(interval, end, None) for end in ("low", "high", "kind")},
        "effect": comparison.effect,
    }
