"""How a comparison is told in words, for every form that people read."""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from analysis.compare import Compared
from analysis.compare.judging import Line, Status, percent
from analysis.compare.quantities import Change
from analysis.flags import UNSOUND
from analysis.formats.numbers import MISSING, significant, size
from analysis.stats.compare import LEAST_RUNS, TOO_FEW
from bench.statistics import LEVEL

HEAD = ("configuration", "B is", "A, s per sample", "B, s per sample", "time of B", "rests on", "peak of B", "and")
RIGHT = ("A, s per sample", "B, s per sample")


def headline(compared: Compared) -> str:
    """Return the outcome in a line or two: the gate, then how many configurations are what."""
    counts = Counter(line.status for _, line in compared.lines)
    told = ", ".join(f"{counts[status]} {status}" for status in get_args(Status) if counts[status])
    return " ".join(part for part in (_gate(compared), f"{told or 'nothing to compare'}.") if part)


def sides(compared: Compared) -> str:
    """Return what A and B are, and which differences are the question."""
    a, b = compared.question.called
    asked = dict.fromkeys(str(one) for _, line in compared.lines for one in line.asked)
    return f"A: {a}. B: {b}." + (f" The question: {_listed(list(asked), 5)}." if asked else "")


def cells(name: str, line: Line) -> tuple[str, ...]:
    """Return a row under HEAD."""
    held = {"broken": ": breaks the gate", "open": ": inconclusive"}.get(line.held or "", "")
    return (
        name, line.status + held, _time(line, "a"), _time(line, "b"), change(line), ground(line),
        _peak(line), "; ".join(also(line)) or MISSING,
    )  # fmt: skip


def change(line: Line) -> str:
    """Return by how much B's time per sample differs from A's, with its interval."""
    if line.comparison is None:
        return MISSING
    interval = line.comparison.interval
    told = f"{_signed(line.comparison.ratio)} %"
    return told + (f" ({_signed(interval.low)} to {_signed(interval.high)})" if interval else " (unbounded)")


def ground(line: Line) -> str:
    """Return what a comparison rests on: runs, or only the steps of so few."""
    if line.comparison is None or line.runs is None:
        return MISSING
    runs = f"{line.runs[0]} + {line.runs[1]} runs"
    return runs if line.comparison.unit == "run" else f"the steps of {runs}"


def also(line: Line) -> list[str]:
    """Return what else is to be said: why, what leaves the gate open or breaks it, what changed, flags."""
    flags = dict.fromkeys(flag for one in (line.a, line.b) if one for flag in one.row["flags"].split())
    told = [line.why, *(f"{line.held}: {doubt}" for doubt in line.doubts), *map(changed, line.changes)]
    return [part for part in (*told, " ".join(flags)) if part]


def changed(change: Change) -> str:
    """Return a quantity and its values in A and in B, with as many digits as tell them apart."""
    tell = size if change.name.endswith("_bytes") else significant
    a, b = (_range(*map(tell, side)) for side in (change.a, change.b))
    if a == b:
        a, b = (_range(*map("{:,}".format, side)) for side in (change.a, change.b))
    return f"{change.name} {a} → {b}"


def level(compared: Compared) -> str:
    """Return what the intervals are."""
    gate = compared.question.gate
    looks = (
        f" Looked at up to {gate.looks} times, together wrong in {percent(1 - LEVEL)}."
        if gate and gate.looks > 1
        else ""
    )
    told = gate.level if gate else LEVEL
    return (
        f"Time per sample of B against A, over the whole window, with its {percent(told)} interval.{looks} "
        f"From {LEAST_RUNS} runs a side on it holds for other runs too; the steps of fewer say nothing of them: "
        f"{TOO_FEW}, and a gate is inconclusive."
    )


def _gate(compared: Compared) -> str:
    gate = compared.question.gate
    if gate is None:
        return ""
    parts = [percent(gate.limit) if gate.limit is not None else "", "exact" if gate.exact else ""]
    what = f"{compared.verdict}: gate ({', '.join(part for part in parts if part)}) "
    left = f" {out}" if (out := left_out(compared)) else ""
    breaking = compared.breaking()
    if breaking:
        return f"{what}broken by {len(breaking)} of {len(compared.lines)}: {_listed(breaking, 3)}.{left}"
    if compared.broken:
        why = f", for they differ in {compared.note}" if compared.note else ""
        return f"{what}broken: A and B share nothing that could be compared{why}.{left}"
    opened = [line for _, line in compared.lines if line.held == "open"]
    if not opened:
        return f"{what}kept.{left}"
    return f"{what}open for {len(opened)} of {len(compared.lines)}{_most_doubtful(opened)}.{left}"


def _most_doubtful(opened: Sequence[Line]) -> str:
    """Say why the first of the lines that are open is."""
    doubts = next((line.doubts for line in opened if line.doubts), ())
    return f": {', '.join(doubts)}" if doubts else ""


def left_out(compared: Compared) -> str:
    """Say what of both sides took no part in the verdict."""
    sides = [one for _, line in compared.lines for one in (line.a, line.b) if one]
    counts = Counter(
        {
            "out of memory": sum("oom" in str(one.row["outcome"]) for one in sides),
            "failed otherwise": sum(not one.row["n"] and "oom" not in str(one.row["outcome"]) for one in sides),
            "with failed repeats": sum("mixed" in one.row["flags"].split() for one in sides),
            "with flagged runs": sum(not set(UNSOUND).isdisjoint(one.row["flags"].split()) for one in sides),
            "without a partner": sum(line.status in ("only in A", "only in B") for _, line in compared.lines),
        }
    )
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"Left out: {told}." if told else ""


def _listed(names: Sequence[str], most: int) -> str:
    return "; ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low}–{high}"


def _signed(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}".replace("-0.0", "+0.0")


def _time(line: Line, side: str) -> str:
    one = getattr(line, side)
    seconds = one.row["sample_s"] if one else None
    return MISSING if seconds is None else significant(seconds)


def _peak(line: Line) -> str:
    """Return by how much B's highest peak of memory differs from A's."""
    a, b = (one.row["peak_allocated_bytes"] if one else None for one in (line.a, line.b))
    return MISSING if not a or not b or line.comparison is None else f"{_signed(b / a)} %"
