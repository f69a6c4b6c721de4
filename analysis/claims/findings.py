"""What becomes of claims in a set of runs. Pure, from results to findings.

Two configurations are compared that differ in one thing only, of one machine, one environment class and measured
evidence; a finding says of a claim what its comparisons say together, by machine and model.
"""

import itertools
from collections.abc import Iterable, Sequence

import pandas as pd

from analysis import engines
from analysis.claims import Claim, ClaimComparison, ClaimFinding, ClaimSide, Effect
from analysis.claims.sources import CLAIMS
from analysis.early_failures import drop_retried, may_be_same
from analysis.results import Results, Runs
from analysis.scaling.time_per_sample import Pace, compare_paces
from analysis.stats import compare as stats
from analysis.summary import Row
from analysis.table import list_rows

_OF_AMOUNTS: dict[Effect, Effect] = {"faster": "less", "slower": "more"}


def find_findings(results: Results) -> list[ClaimFinding]:
    """Return what becomes of every claim on each machine with each model; nothing of a source for which nothing was
    compared between two node counts or on several nodes."""
    places: dict[tuple[str, str], list[ClaimSide]] = {}
    for row in _measured(list_rows(results.summary)):
        places.setdefault((row["machine"], row["model"]), []).append(ClaimSide(row, results.specs[row["config_id"]]))
    found = [
        _findings(machine, model, sides, claims, results)
        for (machine, model), sides in places.items()
        for claims in CLAIMS.values()
    ]
    return [finding for of_source in found if _spans_nodes(of_source) for finding in of_source]


def as_table(found: Sequence[ClaimFinding]) -> pd.DataFrame:
    """Return every comparison as a row: what was compared, both medians with their intervals, the ratio of the mean
    step times (or of another quantity) with its own, and the effect."""
    rows = [_plain(finding, comparison) for finding in found for comparison in finding.comparisons]
    return pd.DataFrame(rows)


def _measured(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that can be compared: a rehearsal communicates nothing, and early failures of what was tried
    again say nothing."""
    return drop_retried([row for row in rows if row["evidence"] == "measured"])


def _findings(
    machine: str, model: str, sides: Sequence[ClaimSide], claims: Sequence[Claim], results: Results
) -> list[ClaimFinding]:
    return [
        ClaimFinding(claim, machine, model, tuple(_add_effects(claim, _comparisons(claim, sides, results))))
        for claim in claims
    ]


def _add_effects(claim: Claim, comparisons: Iterable[ClaimComparison]) -> Iterable[ClaimComparison]:
    """Add to comparisons of one claim what their runs tell, all of them taken together."""
    pending = list(comparisons)
    effects = iter(name_effects(claim, [one.tested for one in pending if one.tested]))
    return [one._replace(effect=next(effects)) if one.tested else one for one in pending]


def name_effects(claim: Claim, tested: Sequence[stats.Comparison]) -> list[Effect]:
    """Return what comparisons of a claim tell, all of them taken together, in words for its quantity."""
    found = stats.relevant_verdicts(tested)
    return [*found] if claim.quantity == "sample_s" else [_OF_AMOUNTS.get(effect, effect) for effect in found]


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
    for place in results.behind(row) if column == "moved_bytes" else results.list_timed(row):
        value = results.table[column].iloc[place]
        if not pd.isna(value) and value > 0:
            found.setdefault(results.allocation(place), []).append(float(value))
    return found


def _spans_nodes(found: Sequence[ClaimFinding]) -> bool:
    """Whether node counts are compared, or stages on several nodes."""
    rows = [(comparison.before, comparison.after) for finding in found for comparison in finding.comparisons]
    return any(before["nodes"] > 1 or before["nodes"] != after["nodes"] for before, after in rows)


def _comparisons(claim: Claim, sides: Sequence[ClaimSide], results: Results) -> Iterable[ClaimComparison]:
    groups: dict[str, list[ClaimSide]] = {}
    for side in sides:
        groups.setdefault(claim.shared(side.spec), []).append(side)
    for members in groups.values():
        for one, other in itertools.permutations(members, 2):
            if claim.compared(one.spec, other.spec) and may_be_same(
                one.row["environment_id"], other.row["environment_id"]
            ):
                yield _comparison(claim, one, other, results)


def _comparison(claim: Claim, one: ClaimSide, other: ClaimSide, results: Results) -> ClaimComparison:
    differ = (claim.differ(one.spec, other.spec), claim.differ(other.spec, one.spec))
    ours, theirs = one.spec, other.spec
    as_preset = ours.engine == theirs.engine or not (
        engines.list_own_options(ours, theirs) or engines.list_own_options(theirs, ours)
    )
    return ClaimComparison(
        one.row, other.row, differ, _describe_shared(one, other), _tested(claim, one.row, other.row, results), as_preset
    )


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
