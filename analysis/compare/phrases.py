"""How a comparison is told in words, for every form that people read."""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from analysis.compare import SetComparison
from analysis.compare.fields import name_across
from analysis.compare.judging import PairResult, QuantityChange, Status, percent
from analysis.compare.pairing import ComparedConfiguration
from analysis.formats import MISSING, format_ratio_change, format_significant, format_size
from analysis.stats.compare import LEAST_RUNS, TOO_FEW
from analysis.summary import is_disturbed
from bench.core.statistics import LEVEL

HEAD = ("configuration", "B is", "A, s per sample", "B, s per sample", "time of B", "rests on", "peak of B", "and")
RIGHT = ("A, s per sample", "B, s per sample")


def format_headline(compared: SetComparison) -> str:
    """Return the outcome in a line or two: the gate, then how many configurations are what."""
    counts = Counter(line.status for _, line in compared.lines)
    texts = ", ".join(f"{counts[status]} {status}" for status in get_args(Status) if counts[status])
    parts = (_describe_gate(compared), f"{texts or 'nothing to compare'}.", _suggest_across(compared))
    return " ".join(part for part in parts if part)


def _suggest_across(compared: SetComparison) -> str:
    """Say which option would compare what was not compared because it differs; nothing where all was."""
    differ = [one for _, line in compared.lines if line.status == "not comparable" for one in line.differ]
    if not differ:
        return ""
    already = tuple(part.name for part in compared.question.across)
    return f"--across {','.join((*already, name_across(differ)))} would compare what is not comparable."


def describe_sides(compared: SetComparison) -> str:
    """Return what A and B are, and which differences are the question."""
    a, b = compared.question.called
    intended = dict.fromkeys(str(one) for _, line in compared.lines for one in line.intended)
    return f"A: {a}. B: {b}." + (f" The question: {_join_names(list(intended), 5)}." if intended else "")


def build_cells(name: str, line: PairResult) -> tuple[str, ...]:
    """Return a row under HEAD."""
    held = {"broken": ": breaks the gate", "open": ": inconclusive"}.get(line.held or "", "")
    return (
        name,
        line.status + held,
        _format_time(line, "a"),
        _format_time(line, "b"),
        format_time_change(line),
        describe_ground(line),
        _format_peak_change(line),
        "; ".join(list_remarks(line)) or MISSING,
    )


def format_time_change(line: PairResult) -> str:
    """Return by how much B's time per sample differs from A's, with its interval."""
    if line.comparison is None:
        return MISSING
    interval = line.comparison.interval
    if interval is None:
        return f"{format_ratio_change(line.comparison.ratio)} (unbounded)"
    return format_ratio_change(line.comparison.ratio, interval.low, interval.high)


def describe_ground(line: PairResult) -> str:
    """Return what a comparison rests on: runs, or only the steps of so few."""
    if line.comparison is None or line.runs is None:
        return MISSING
    runs = f"{line.runs[0]} + {line.runs[1]} runs"
    return runs if line.comparison.unit == "run" else f"the steps of {runs}"


def list_remarks(line: PairResult) -> list[str]:
    """Return what else is to be said: why, what leaves the gate open or breaks it, what changed, flags."""
    flags = dict.fromkeys(flag for one in (line.a, line.b) if one for flag in one.row["flags"].split())
    missing = (f"{side}: {one.row['reason']}" for side, one in (("A", line.a), ("B", line.b)) if one and one.row["n"])
    texts = [
        line.why,
        *(text for text in missing if text[3:]),
        *(f"{line.held}: {doubt}" for doubt in line.gate_reasons),
        *map(format_quantity_change, line.changes),
    ]
    return [part for part in (*texts, " ".join(flags)) if part]


def format_quantity_change(change: QuantityChange) -> str:
    """Return a quantity and its values in A and in B, with as many digits as tell them apart."""
    tell = format_size if change.name.endswith("_bytes") else format_significant
    a, b = (_format_range(*map(tell, side)) for side in (change.a, change.b))
    if a == b:
        a, b = (_format_range(*map("{:,}".format, side)) for side in (change.a, change.b))
    return f"{change.name} {a} → {b}"


def describe_intervals(compared: SetComparison) -> str:
    """Return what the intervals are."""
    gate = compared.question.gate
    looks = (
        f" Looked at up to {gate.looks} times, together wrong in {percent(1 - LEVEL)}."
        if gate and gate.looks > 1
        else ""
    )
    level = gate.level if gate else LEVEL
    return (
        f"Time per sample of B against A, over the whole window, with its {percent(level)} interval.{looks} "
        f"From {LEAST_RUNS} runs a side on it holds for other runs too; the steps of fewer say nothing of them: "
        f"{TOO_FEW}, and a gate is inconclusive."
    )


def _describe_gate(compared: SetComparison) -> str:
    gate = compared.question.gate
    if gate is None:
        return ""
    parts = [percent(gate.limit) if gate.limit is not None else "", "exact" if gate.exact else ""]
    what = f"{compared.verdict}: gate ({', '.join(part for part in parts if part)}) "
    left = f" {out}" if (out := left_out(compared)) else ""
    breaking = compared.breaking()
    if breaking:
        return f"{what}broken by {len(breaking)} of {len(compared.lines)}: {_join_names(breaking, 3)}.{left}"
    if compared.broken:
        why = f", for they differ in {compared.note}" if compared.note else ""
        return f"{what}broken: A and B share nothing that could be compared{why}.{left}"
    opened = [line for _, line in compared.lines if line.held == "open"]
    if not opened:
        return f"{what}kept.{left}"
    return f"{what}open for {len(opened)} of {len(compared.lines)}{_most_doubtful(opened)}.{left}"


def _most_doubtful(opened: Sequence[PairResult]) -> str:
    """Say why the first of the lines that are open is."""
    gate_reasons = next((line.gate_reasons for line in opened if line.gate_reasons), ())
    return f": {', '.join(gate_reasons)}" if gate_reasons else ""


def left_out(compared: SetComparison) -> str:
    """Say what of both sides took no part in the verdict."""
    sides = [one for _, one in _list_sides(compared)]
    counts = Counter(
        {
            "out of memory": sum("oom" in str(one.row["outcome"]) for one in sides),
            "failed otherwise": sum(not one.row["n"] and "oom" not in str(one.row["outcome"]) for one in sides),
            "with busy runs only": sum(one.row["step_s"] is None and is_disturbed(one.row) for one in sides),
            "without a partner": sum(line.status in ("only in A", "only in B") for _, line in compared.lines),
        }
    )
    reasons = [f"{side}: {one.row['reason']}" for side, one in _list_sides(compared) if one.row["n"]]
    texts = [*(f"{count} {what}" for what, count in counts.items() if count), *(text for text in reasons if text[3:])]
    return f"Left out: {', '.join(texts)}." if texts else ""


def _list_sides(compared: SetComparison) -> list[tuple[str, ComparedConfiguration]]:
    """Return all configurations with the side that they are of."""
    return [(side, one) for _, line in compared.lines for side, one in (("A", line.a), ("B", line.b)) if one]


def _join_names(names: Sequence[str], most: int) -> str:
    return "; ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _format_range(low: str, high: str) -> str:
    return low if low == high else f"{low}–{high}"


def _format_percent_change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+z.1f}"


def _format_time(line: PairResult, side: str) -> str:
    one = getattr(line, side)
    seconds = one.row["sample_s"] if one else None
    return MISSING if seconds is None else format_significant(seconds)


def _format_peak_change(line: PairResult) -> str:
    """Return by how much B's highest peak of memory differs from A's."""
    a, b = (one.row["peak_allocated_bytes"] if one else None for one in (line.a, line.b))
    return MISSING if not a or not b or line.comparison is None else f"{_format_percent_change(b / a)} %"
