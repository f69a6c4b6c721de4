"""Caveats of a set of runs. Each is one sentence, and the most important comes first."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from analysis.flags import FLAGS, NOTES, REMEDIES
from analysis.formats import MISSING, format_significant
from analysis.report.findings import ControlPointDrift, Provenance, ReportFindings
from analysis.results import Results
from analysis.scaling.best import Best
from analysis.stats.change_points import LEAST_CONTROLS
from analysis.stats.compare import LEAST_RUNS
from analysis.summary import Row
from analysis.table import list_rows
from analysis.verify import is_reference
from bench.core.errors import UserError
from bench.core.formatting import format_count
from bench.core.record import FINAL
from bench.engines import REFERENCE
from bench.sweep import definition
from bench.sweep.definition import RunKey

_STUDY_DEPTH = 2  # folders between an attempt and its study: <study>/<configuration>/<attempt>


def list_caveats(found: ReportFindings) -> list[str]:
    """Return the caveats that a reader must know before relying on numbers of these runs."""
    references = {one for one, spec in found.results.specs.items() if is_reference(spec)}
    return [
        *_list_repeat_caveats(found.best),
        *_list_host_caveats(found.results),
        *_list_comparison_caveats(found.best),
        *_list_drift_caveats(found.drifts),
        *_list_verification_caveats([row for row in found.rows if row["config_id"] not in references]),
        *_list_flag_caveats(found.rows),
        *_list_environment_caveats(found.origin),
    ]


def list_unfinished_sweeps(results: Results) -> list[str]:
    """Return one sentence per study in which some runs have no final result yet. Studies in archives, and results
    without the definition of a sweep, are skipped."""
    answered: dict[Path, set[RunKey]] = {}
    table = results.table
    keys = zip(table["config_id"], table["machine"], table["repeat"], strict=True)
    for place, (key, outcome) in enumerate(zip(keys, table["outcome"], strict=True)):
        attempt = results.get_file(place).absolute().parent
        if len(attempt.parts) > _STUDY_DEPTH:
            found = answered.setdefault(attempt.parents[_STUDY_DEPTH - 1], set())
            found.update([RunKey(*key)] if outcome in FINAL else [])
    lines = []
    for folder, done in answered.items():
        with contextlib.suppress(UserError, OSError):
            wanted = definition.merge_sweeps(definition.read(folder) if folder.is_dir() else []).keys()
            if left := len(wanted - done):
                runs = f"{left} of {format_count(len(wanted), 'run')} of {folder.name}"
                lines.append(f"The sweep has not ended: {runs} {'have' if left > 1 else 'has'} no final result.")
    return lines


def _list_repeat_caveats(found: Sequence[Best]) -> Iterable[str]:
    counts = [row["n"] for best in found for row in best.compared]
    if counts and max(counts) == 1:
        yield (
            f"Each compared configuration has one independent run; at least {LEAST_RUNS} are needed to compare them. "
            "The interval of a single run describes the variation of its steps, not the variation between runs."
        )
    elif counts and min(counts) < 6:
        span = f"{min(counts)}" + (f" to {max(counts)}" if max(counts) > min(counts) else "")
        yield (
            f"Each compared configuration has {span} independent runs: runs that ended ok on a quiet machine. Runs in "
            "the same allocation count as one. Fewer than 6 runs give no 95 % interval of the median. Their range is "
            "shown instead, with its own confidence level."
        )


def _list_host_caveats(results: Results) -> Iterable[str]:
    rows = [row for row in list_rows(results.summary) if row["n"] > 1 and row["evidence"] == "measured"]
    found = [list(results.find_hosts(row).values()) for row in rows]
    # An empty set of hosts means that the hosts are unknown.
    alike = sum(len(hosts) > 1 and all(hosts) and all(one == hosts[0] for one in hosts) for hosts in found)
    if alike:
        yield (
            f"{format_count(alike, 'configuration')} ran on the same nodes in all allocations. Intervals of such "
            "configurations hold for these nodes only."
        )


def _list_comparison_caveats(found: Sequence[Best]) -> Iterable[str]:
    # Single steps are compared only if a side has too few runs.
    units = Counter(rival.comparison.unit for best in found for rival in best.rivals)
    if units["step"]:
        yield (
            f"{units['step']:,} of {units.total():,} comparisons with a fastest configuration are indicative only, "
            f"because one of the two configurations has fewer than {LEAST_RUNS} runs."
        )


def _list_drift_caveats(drifted: Sequence[ControlPointDrift]) -> Iterable[str]:
    known = [one for one in drifted if one.drift.interval is not None]
    if moved := [one for one in known if one.drift.detected]:
        yield (
            f"In {len(moved)} of {len(known)} cases, the step time of a configuration that ran repeatedly in one "
            "allocation drifted by more than the variation between its runs. The largest drift was "
            f"{_worst(moved)}. Comparisons of runs far apart in time have an additional uncertainty of this size."
        )
    elif known:
        yield (
            f"No drift was detected. In {format_count(len(known), 'case')}, a configuration ran repeatedly in one "
            "allocation, and its step time changed by no more than the variation between its runs."
        )
    if few := [one for one in drifted if one.drift.interval is None]:
        yield (
            f"In {format_count(len(few), 'case')}, a configuration ran {LEAST_CONTROLS - 2} or {LEAST_CONTROLS - 1} "
            "times in one allocation, which is too few to distinguish drift from variation between runs. The largest "
            f"change was {_worst(few)}."
        )


def _worst(drifted: Sequence[ControlPointDrift]) -> str:
    worst = max(drifted, key=lambda one: abs(one.drift.change))
    sign, change = "+" if worst.drift.change > 0 else "−", format_significant(100 * abs(worst.drift.change), 2)
    return f"{sign}{change} % ({worst.configuration}, allocation {worst.allocation})"


def _list_verification_caveats(runs: Sequence[Row]) -> Iterable[str]:
    """Yield a sentence on the number of runs whose losses were verified against the reference engine, with a remedy if
    some were not. `runs` are all runs except those of the reference engine."""
    others = [row for row in runs if row["outcome"] == "ok"]
    verified = sum("unverified" not in row["flags"].split() for row in others)
    remedy = f" To verify more runs, {REMEDIES['unverified']}." if verified < len(others) else ""
    if others:
        yield (
            f"The losses of {verified:,} of {len(others):,} ok runs of other engines were verified against those of "
            f"{REFERENCE}.{remedy}"
        )


def _list_flag_caveats(runs: Sequence[Row]) -> Iterable[str]:
    good = [row for row in runs if row["outcome"] == "ok"]
    for column, known in (("flags", FLAGS), ("notes", NOTES)):
        counts = Counter(name for row in good for name in row[column].split() if name != "unverified")
        for name, one in known.items():
            if counts[name]:
                label = column.removesuffix("s")
                yield f"{counts[name]:,} of {len(good):,} ok runs have the {label} {name}. Such a run {one.meaning}."


def _list_environment_caveats(origin: Provenance) -> Iterable[str]:
    if len(origin.machines) > 1:
        names = [fact.name for fact in origin.unlike]
        # A remark and a source usually explain the other differences. The page has a table of all of them.
        differ = ", ".join([name for name in names if name not in ("note", "source")] or names) or "their names only"
        yield f"Runs of {len(origin.machines)} machines are never pooled. The machines differ in {differ}."
    if len(origin.classes) > 1:
        differ = ", ".join(fact.name for fact in origin.differences)
        yield f"Runs of {len(origin.classes)} environment classes are never pooled. The classes differ in {differ}."
    for fact in origin.facts:
        versions = {version for value in fact.values for version in value.split("; ")} - {MISSING}
        if fact.name == "commit" and any("; " in value for value in fact.values):
            yield (
                "Runs of several commits of zeroscale are pooled (see Environments). To separate them, use `zeroscale "
                "history`, or `zeroscale compare` with a folder for each commit."
            )
        # `bench.measure.environment.read_plugin_versions` gives such names to packages with plug-ins.
        if fact.name.startswith("plug-in ") and len(versions) > 1:
            yield (
                f"Runs were made with {len(versions)} versions of the {fact.name}: {', '.join(sorted(versions))}. Runs "
                "of a configuration are pooled nevertheless, so they may be runs of different code."
            )
    if origin.unknown:
        yield f"{origin.unknown:,} runs ended before their environment was recorded."
