"""How sure the answers are: the doubts about a whole set of runs, one sentence each, worst first."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pandas as pd

from analysis.flags import FLAGS, NOTES
from analysis.formats import format_significant
from analysis.questions import describe_choice
from analysis.report.provenance import Provenance
from analysis.report.texts import format_outcomes
from analysis.results import Results
from analysis.scaling.best import Best
from analysis.stats.change_points import LEAST_CONTROLS, Drift, measure_drift
from analysis.stats.compare import LEAST_RUNS, TOO_FEW
from analysis.summary import Row
from analysis.table import list_rows
from analysis.verify import is_reference
from bench.core.formatting import format_count
from bench.engines import REFERENCE


class ControlPointDrift(NamedTuple):
    """A control point: what ran first and last in an allocation, and what changed in between."""

    allocation: str
    configuration: str
    drift: Drift


def find_drifts(results: Results) -> list[ControlPointDrift]:
    """Return the drift of every configuration in every allocation that it ran in at least twice, to a good end."""
    return list(_iterate_drifts(results))


def _iterate_drifts(results: Results) -> Iterable[ControlPointDrift]:
    for row in list_rows(results.summary):
        together: dict[str, list[int]] = {}
        for place in results.list_timed(row) if row["runs"] > row["n"] else ():
            allocation = results.table["allocation"].iloc[place]
            if not pd.isna(allocation):
                together.setdefault(str(allocation), []).append(place)
        for allocation, places in together.items():
            if found := measure_drift([steps for place in places if (steps := results.window(place))]):
                yield ControlPointDrift(allocation, describe_choice(row), found)


def list_caveats(
    results: Results, found: Sequence[Best], drifted: Sequence[ControlPointDrift], origin: Provenance
) -> list[str]:
    """Return what a reader must know before believing a number of the set."""
    runs, summary = list_rows(results.table), list_rows(results.summary)
    references = {one for one, spec in results.specs.items() if is_reference(spec)}
    return [
        *_list_repeat_caveats(summary),
        *_list_host_caveats(results),
        *_list_comparison_caveats(found),
        *_list_drift_caveats(drifted),
        *_list_failure_caveats(summary),
        *_list_loss_caveats([row for row in runs if row["config_id"] not in references]),
        *_list_flag_caveats(runs),
        *_list_environment_caveats(origin),
    ]


def _list_repeat_caveats(summary: Sequence[Row]) -> Iterable[str]:
    counts = [row["n"] for row in summary if row["n"]]
    if counts and max(counts) == 1:
        yield (
            "Every configuration ran once (n = 1): its interval says how steady that run was, not what another run "
            "would give."
        )
    elif counts and min(counts) < 6:
        yield (
            f"Configurations ran {min(counts)} to {max(counts)} times: below 6 repeats no 95 % interval between them "
            "exists, and their range is shown with its own level."
        )


def _list_host_caveats(results: Results) -> Iterable[str]:
    rows = [row for row in list_rows(results.summary) if row["n"] > 1 and row["evidence"] == "measured"]
    found = [list(results.find_hosts(row).values()) for row in rows]
    # an empty set of hosts is an unknown one
    alike = sum(len(hosts) > 1 and all(hosts) and all(one == hosts[0] for one in hosts) for hosts in found)
    if alike:
        yield (
            f"{format_count(alike, 'configuration')} had the same nodes in all allocations: intervals between these "
            "hold for those nodes, and not for others."
        )


def _list_comparison_caveats(found: Sequence[Best]) -> Iterable[str]:
    units = Counter(rival.comparison.unit for best in found for rival in best.rivals)
    if units["step"]:
        yield (
            f"{units['step']:,} of {units.total():,} comparisons with a fastest configuration have {TOO_FEW}, for want "
            f"of {LEAST_RUNS} allocations on both sides: effect and interval are of these runs, not of configurations."
        )


def _list_drift_caveats(drifted: Sequence[ControlPointDrift]) -> Iterable[str]:
    known = [one for one in drifted if one.drift.interval is not None]
    if moved := [one for one in known if one.drift.detected]:
        yield (
            f"In {len(moved)} of {len(known)} cases the same configuration, run again and again in one allocation, "
            f"drifted by more than two runs of it differ: at most {_worst(moved)} at the end. What was measured far "
            "apart in time is in doubt by that much."
        )
    elif known:
        yield (
            "No drift was detected: the same configuration, run again and again in one allocation, changed by no more "
            f"than two runs of it differ ({len(known)} cases)."
        )
    if few := [one for one in drifted if one.drift.interval is None]:
        yield (
            f"In {len(few)} cases the same configuration ran {LEAST_CONTROLS - 2} or {LEAST_CONTROLS - 1} times in one "
            f"allocation: too few to tell drift from what two runs differ anyhow, at most {_worst(few)} at the end."
        )


def _worst(drifted: Sequence[ControlPointDrift]) -> str:
    worst = max(drifted, key=lambda one: abs(one.drift.change))
    sign, change = "+" if worst.drift.change > 0 else "−", format_significant(100 * abs(worst.drift.change), 2)
    return f"{worst.configuration} in {worst.allocation}, {sign}{change} %"


def _list_failure_caveats(summary: Sequence[Row]) -> Iterable[str]:
    ended = Counter(row["outcome"] for row in summary if not row["n"])
    if ended:
        yield f"{ended.total():,} of {len(summary):,} configurations have no number: {format_outcomes(ended)}."


def _list_loss_caveats(runs: Sequence[Row]) -> Iterable[str]:
    others = [row for row in runs if row["outcome"] == "ok"]
    verified = sum("unverified" not in row["flags"].split() for row in others)
    if others:
        yield f"{verified:,} of {len(others):,} ok runs of other engines have losses verified beside {REFERENCE}."


def _list_flag_caveats(runs: Sequence[Row]) -> Iterable[str]:
    good = [row["flags"].split() for row in runs if row["outcome"] == "ok"]
    counts = Counter(flag for flags in good for flag in flags if flag != "unverified")
    for flag in FLAGS:
        if counts[flag]:
            yield f"{counts[flag]:,} of {len(good):,} ok runs carry the flag {flag}: such a run {FLAGS[flag].meaning}."
    noted = Counter(note for row in runs if row["outcome"] == "ok" for note in row["notes"].split())
    for note in NOTES:
        if noted[note]:
            yield f"{noted[note]:,} of {len(good):,} ok runs carry the note {note}: such a run {NOTES[note].meaning}."


def _list_environment_caveats(origin: Provenance) -> Iterable[str]:
    if len(origin.machines) > 1:
        differ = ", ".join(fact.name for fact in origin.unlike) or "their name only"
        yield f"{len(origin.machines)} machines, never pooled; they differ in {differ}."
    if len(origin.classes) > 1:
        differ = ", ".join(fact.name for fact in origin.differences)
        yield f"{len(origin.classes)} environment classes, never pooled; they differ in {differ}."
    if origin.unknown:
        yield f"{origin.unknown:,} runs ended before their environment was looked at."
