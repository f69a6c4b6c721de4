"""What becomes of claims in a set of runs. Pure, from results to findings.

Two configurations are compared that differ in one thing only, of one machine, one environment class and measured
evidence; a finding says of a claim what its comparisons say together, by machine and model.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import pandas as pd

from analysis import questions
from analysis.claims import Claim, ClaimComparison, ClaimFinding, ClaimSide, Effect, Start, Starts
from analysis.claims.sources import CLAIMS, SMALL
from analysis.questions import drop_retried, may_be_same
from analysis.results import Results, Runs
from analysis.scaling.time_per_sample import Pace, compare_paces
from analysis.stats import compare as stats
from analysis.summary import Row
from analysis.table import list_rows
from bench.core.spec import Batch, RunSpec, canonical

_OF_AMOUNTS: dict[Effect, Effect] = {"faster": "less", "slower": "more"}
_OUT_OF_MEMORY = ("oom", "host_oom")


def find_findings(results: Results) -> list[ClaimFinding]:
    """Return what becomes of every claim on each machine with each model; nothing of a source for which nothing was
    compared between two node counts or on several nodes."""
    find_start = functools.cache(functools.partial(_find_start, results))  # reads a record
    places: dict[tuple[str, str], list[ClaimSide]] = {}
    for row in drop_retried([row for row in list_rows(results.summary) if row["evidence"] == "measured"]):
        places.setdefault((row["machine"], row["model"]), []).append(ClaimSide(row, results.specs[row["config_id"]]))
    found = [
        _findings(machine, model, sides, claims, results, find_start)
        for (machine, model), sides in places.items()
        for claims in CLAIMS.values()
    ]
    found = _mark_slow_networks(found, results)
    return [finding for of_source in found if _spans_nodes(of_source) for finding in of_source]


def as_table(found: Sequence[ClaimFinding]) -> pd.DataFrame:
    """Return every comparison as a row: what was compared, both medians with their intervals, the ratio of the mean
    step times (or of another quantity) with its own, and the effect."""
    rows = [_plain(finding, comparison) for finding in found for comparison in finding.comparisons]
    return pd.DataFrame(rows)


def _findings(
    machine: str,
    model: str,
    sides: Sequence[ClaimSide],
    claims: Sequence[Claim],
    results: Results,
    find_start: Callable[[int], Start],
) -> list[ClaimFinding]:
    return [
        ClaimFinding(claim, machine, model, tuple(_add_effects(claim, _comparisons(claim, sides, results, find_start))))
        for claim in claims
    ]


def _find_start(results: Results, place: int) -> Start:
    return Start(results.record(place).circumstance.started_at, results.allocation(place))


def _find_rate(row: Row, results: Results) -> float | None:
    """Return the bytes per second between nodes that the machine of a row is said to have; None where unknown."""
    places = results.behind(row)
    return results.record(places[0]).circumstance.machine.inter_node_bytes_per_s if places else None


def _mark_slow_networks(found: Sequence[Sequence[ClaimFinding]], results: Results) -> list[list[ClaimFinding]]:
    """Mark the comparisons of claims about a slow network whose two sides were compared on a faster network too."""
    pairs = [
        one
        for of in found
        for finding in of
        if finding.claim.of_slow_network
        for one in finding.comparisons
        if one.tested
    ]
    rates = {id(one): rate for one in pairs if (rate := _find_rate(one.before, results))}
    fastest: dict[tuple[str, str], float] = {}
    for one in pairs:
        fastest[_name_pair(one)] = max(fastest.get(_name_pair(one), 0.0), rates.get(id(one), 0.0))
    slow = {id(one) for one in pairs if id(one) in rates and rates[id(one)] < fastest[_name_pair(one)]}
    return [
        [
            finding._replace(
                comparisons=tuple(one._replace(is_slow_network=id(one) in slow) for one in finding.comparisons)
            )
            for finding in of_source
        ]
        for of_source in found
    ]


def _name_pair(comparison: ClaimComparison) -> tuple[str, str]:
    return comparison.before["config_id"], comparison.after["config_id"]


def _add_effects(claim: Claim, comparisons: Iterable[ClaimComparison]) -> Iterable[ClaimComparison]:
    """Add to comparisons of one claim what their runs tell, all of them taken together."""
    pending = list(comparisons)
    effects = iter(name_effects(claim, [one.tested for one in pending if one.tested]))
    return [one._replace(effect=next(effects)) if one.tested else one for one in pending]


def name_effects(claim: Claim, tested: Sequence[stats.Comparison]) -> list[Effect]:
    """Return what comparisons of a claim tell, all of them taken together, in words for its quantity. What is detected
    is said although it is shown to be below 3 %."""
    detected: list[Effect] = [*stats.verdicts(tested)]
    if claim.quantity != "sample_s":
        detected = [_OF_AMOUNTS.get(effect, effect) for effect in detected]
    small = stats.are_equal(tested)
    return [SMALL.get(effect, effect) if below else effect for effect, below in zip(detected, small, strict=True)]


def _tested(claim: Claim, before: Row, after: Row, results: Results) -> stats.Comparison | None:
    """Return how the second configuration compares with the first; None where one has no number."""
    if claim.quantity == "sample_s":
        ours, theirs = results.runs(before), results.runs(after)
    else:
        ours, theirs = (_list_values(row, claim.quantity, results) for row in (before, after))
    if not (ours and theirs):
        return None
    return compare_paces(Pace(theirs), Pace(ours))


def _list_values(row: Row, column: str, results: Results) -> Runs:
    """Return what a column of the run table says of the runs behind a row of the summary, by allocation. Background
    load changes how long ranks are idle, and not how many bytes they move."""
    found: Runs = {}
    for place in results.with_disturbed.behind(row) if column == "moved_bytes" else results.list_timed(row):
        value = results.table[column].iloc[place]
        if not pd.isna(value) and value > 0:
            found.setdefault(results.allocation(place), []).append(float(value))
    return found


def _spans_nodes(found: Sequence[ClaimFinding]) -> bool:
    """Whether node counts are compared, or stages on several nodes."""
    rows = [(comparison.before, comparison.after) for finding in found for comparison in finding.comparisons]
    return any(before["nodes"] > 1 or before["nodes"] != after["nodes"] for before, after in rows)


def _comparisons(
    claim: Claim, sides: Sequence[ClaimSide], results: Results, find_start: Callable[[int], Start]
) -> Iterable[ClaimComparison]:
    groups: dict[str, list[ClaimSide]] = {}
    for side in sides:
        groups.setdefault(claim.shared(side.spec), []).append(side)
    for members in groups.values():
        for one, other in itertools.permutations(members, 2):
            if claim.compared(one.spec, other.spec) and may_be_same(
                one.row["environment_id"], other.row["environment_id"]
            ):
                yield _comparison(claim, one, other, sides, results, find_start)


def _comparison(
    claim: Claim,
    one: ClaimSide,
    other: ClaimSide,
    sides: Sequence[ClaimSide],
    results: Results,
    find_start: Callable[[int], Start],
) -> ClaimComparison:
    """Compare two sides. If one ran out of memory, its fastest other micro-batch is compared: what the rival gains by
    the memory that it saves counts."""
    differ = (claim.differ(one.spec, other.spec), claim.differ(other.spec, one.spec))
    if claim.quantity == "sample_s" and has_run_out(one.row) != has_run_out(other.row):
        if has_run_out(one.row):
            one = _find_fastest_fit(one, sides)
            differ = (f"{differ[0]}, micro {one.spec.batch.micro}", differ[1])
        else:
            other = _find_fastest_fit(other, sides)
            differ = (differ[0], f"{differ[1]}, micro {other.spec.batch.micro}")
    ours, theirs = one.spec, other.spec
    as_preset = ours.engine == theirs.engine or not (
        questions.list_own_options(ours, theirs) or questions.list_own_options(theirs, ours)
    )
    tested, effect = _tested(claim, one.row, other.row, results), _name_failure(claim, one.row, other.row)
    starts = functools.partial(_find_starts, (one.row, other.row), results, find_start)
    return ClaimComparison(one.row, other.row, differ, _describe_shared(one, other), tested, as_preset, effect, starts)


def has_run_out(row: Row) -> bool:
    """Whether a configuration ran out of memory and has no number."""
    return not row["n"] and row["outcome"] in _OUT_OF_MEMORY


def _name_failure(claim: Claim, before: Row, after: Row) -> Effect:
    """Return the effect of a comparison without a test: which of the two ran out of memory and never ended a run."""
    if claim.quantity == "sample_s" and has_run_out(before) and after["n"]:
        return "first out of memory"
    return "second out of memory" if claim.quantity == "sample_s" and has_run_out(after) and before["n"] else "unknown"


def _find_fastest_fit(side: ClaimSide, sides: Sequence[ClaimSide]) -> ClaimSide:
    """Return the side of the same work, in the fastest micro-batch that has a number; the same one where none has."""
    work = _describe_work(side.spec)
    fits = [one for one in sides if one.row["sample_s"] is not None and _describe_work(one.spec) == work]
    same = [one for one in fits if may_be_same(one.row["environment_id"], side.row["environment_id"])]
    return min(same, key=lambda one: float(one.row["sample_s"]), default=side)


def _describe_work(spec: RunSpec) -> tuple[str, int]:
    """Return all of a spec but its micro-batch, and the samples of a step."""
    return canonical(spec.model_copy(update={"batch": Batch(micro=1)})), spec.global_batch


def _find_starts(rows: tuple[Row, Row], results: Results, find_start: Callable[[int], Start]) -> tuple[Starts, Starts]:
    before, after = (tuple(find_start(place) for place in results.list_timed(row)) for row in rows)
    return before, after


def _describe_shared(one: ClaimSide, other: ClaimSide) -> str:
    """Say what two configurations share that others of their machine and model may not."""
    spec = one.spec
    micro = f"micro {spec.batch.micro}"
    if spec.nodes == other.spec.nodes:
        return f"{spec.nodes} × {spec.devices_per_node} ranks, {micro}, {spec.precision}"
    if spec.global_batch == other.spec.global_batch:
        work = f"{spec.global_batch} samples per step"
    else:
        work = f"{spec.batch.micro * spec.accumulation} samples per step and device"
    return f"{spec.engine.name}, {micro}, {work}, {spec.precision}"


def _plain(finding: ClaimFinding, comparison: ClaimComparison) -> Row:
    numbers = (
        "config_id",
        "n",
        "sample_s",
        "step_s",
        "step_s_low",
        "step_s_high",
        "interval_kind",
        "interval_level",
        "flags",
    )
    sides = {"before": comparison.before, "after": comparison.after}
    return {
        "claim": finding.claim.id,
        "quantity": finding.claim.quantity,
        "model": finding.model,
        "machine": finding.machine,
        "environment_id": comparison.before["environment_id"] or comparison.after["environment_id"],
        "held": comparison.shared_text,
        "before": comparison.differ[0],
        "after": comparison.differ[1],
        **{f"{side}_{name}": row[name] for side, row in sides.items() for name in numbers},
        **_ratio(comparison.tested),
        "effect": comparison.effect,
    }


def _ratio(tested: stats.Comparison | None) -> Row:
    interval = tested.interval if tested else None
    ends = {f"ratio_{end}": getattr(interval, end, None) for end in ("low", "high", "kind")}
    return {"ratio": tested.ratio if tested else None, **ends}
