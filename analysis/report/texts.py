"""The report's texts: what was asked, the answers in sentences, and what stands behind a point of a figure."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from analysis.columns import list_columns
from analysis.drawing import format_reason
from analysis.formats import MISSING, format_cell, format_effect, format_significant, format_size, format_within
from analysis.questions import describe_choice, format_ranks, name_question
from analysis.scaling.best import Best, Rival
from analysis.stats.compare import EQUAL, NOT_DETECTED, TOO_FEW
from analysis.summary import Row
from bench.core.formatting import format_count
from bench.core.statistics import LEVEL

_LUCK_WORTH_SAYING = 0.002
_REASON_LETTERS = 120
_PARTS = {
    "model": "model", "engine": "engine", "nodes": "nodes", "devices_per_node": "devices per node",
    "micro": "micro-batch", "accumulation": "accumulation", "precision": "precision",
    "activation_checkpointing": "activation checkpointing", "data": "data", "machine": "machine", "seed": "seed",
    "evidence": "evidence",
}  # fmt: skip


class RunSetup(NamedTuple):
    """The parts of the configurations by whether they vary, each with its values; and the runs by outcome."""

    varied: tuple[tuple[str, str], ...]
    constant: tuple[tuple[str, str], ...]
    ran: str


def describe_setup(rows: Sequence[Row]) -> RunSetup:
    """Return what the rows of a run table were made to find out."""
    known = list_columns()
    values = {label: (known[name], sorted({row[name] for row in rows})) for name, label in _PARTS.items()}
    texts = {
        label: ", ".join(format_cell(column, value) for value in found) for label, (column, found) in values.items()
    }
    several = {label for label, (_, found) in values.items() if len(found) > 1}
    return RunSetup(
        tuple((label, text) for label, text in texts.items() if label in several),
        tuple((label, text) for label, text in texts.items() if label not in several),
        _describe_runs(rows),
    )


def format_outcomes(ended: Counter[str]) -> str:
    """Write how often what ended how, the most frequent first."""
    return ", ".join(f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in ended.most_common())


def _describe_runs(rows: Sequence[Row]) -> str:
    configurations = len({row["config_id"] for row in rows})
    runs, several = (format_count(*one) for one in ((len(rows), "run"), (configurations, "configuration")))
    return f"{runs} of {several}: {format_outcomes(Counter(row['outcome'] for row in rows))}"


class AnswerText(NamedTuple):
    """One answer in words; what is empty is not known, or none."""

    name: str
    fastest: str
    tokens_per_s: float | None
    rate: str
    sample: str  # seconds per sample, by which all are ranked
    interval: str
    flags: str
    equal: tuple[str, ...]  # within 3 %, with the change of the time per sample, and its interval
    tied: tuple[str, ...]  # neither slower nor equal, likewise
    slower: str
    undecided: str  # behind the fastest as measured, with too few repeats to tell
    leanest: str
    peak: str
    failed: str
    luck: str = ""  # by how much the fastest's own number flatters it


def describe_answers(found: Sequence[Best]) -> list[AnswerText]:
    """Return every answer in words, named by what sets its question apart from the others."""
    all_questions = [best.question for best in found]
    return [_describe_answer(best, name_question(best.question, all_questions)) for best in found]


def describe_winners(found: Sequence[Best]) -> str:
    """Say of each engine in how many questions it is the fastest as measured, equal to it or not told apart from it,
    and in how many of these no other configuration has a number. All measured questions count, for an engine that runs
    where others run out of memory wins there; empty for fewer than two of them."""
    asked = [best for best in found if best.question["evidence"] == "measured"]
    if len(asked) < 2:
        return ""
    leading = Counter(engine for best in asked for engine in _find_leading_engines(best))
    alone = Counter(best.fastest["engine"] for best in asked if best.fastest and not best.rivals)
    ordered = sorted(leading.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{engine} in {_format_wins(count, len(asked), alone[engine])}" for engine, count in ordered)


def _format_wins(count: int, asked: int, alone: int) -> str:
    return f"{count} of {asked}{f' (alone in {alone})' if alone else ''}"


def format_interval(row: Row, column: str = "tokens_per_s") -> str:
    """Write the interval of a row of the summary with its level, kind and n."""
    n = f"n\u00a0=\u00a0{row['n']}"
    if row[f"{column}_low"] is None:
        return f"no interval, {n}"
    return f"{format_ends(row, column)} ({format_interval_kind(row)}, {n})"


def format_interval_kind(row: Row) -> str:
    """Write level and kind of the intervals of a row of the summary, which names those of its step time. A run of few
    steps may tell its rate and not its median: that interval is within the run as well."""
    level, kind_text = row["interval_level"] or LEVEL, row["interval_kind"] or "within the run"
    return f"{100 * level:.0f}\u00a0%, {kind_text}"


def format_ends(row: Row, column: str) -> str:
    """Write the ends of an interval of a row of the summary; empty where it has none."""
    value, low, high = (row[f"{column}{end}"] for end in ("", "_low", "_high"))
    return "" if low is None or value is None else " to ".join(format_within(value, low, high)[1:])


def format_value(row: Row, column: str) -> str:
    """Write a number of a row of the summary, with as many digits as its interval tells."""
    value, low, high = (row[f"{column}{end}"] for end in ("", "_low", "_high"))
    if value is None:
        return MISSING
    return format_significant(value) if low is None else format_within(value, low, high)[0]


def _describe_answer(best: Best, name: str) -> AnswerText:
    fastest, leanest = best.fastest, best.front[0] if best.front else None
    equal, tied, slower, undecided = (
        [rival for rival in best.rivals if rival.verdict == verdict]
        for verdict in (EQUAL, NOT_DETECTED, "slower", TOO_FEW)
    )
    return AnswerText(
        name=name,
        fastest=_name_choice(fastest) if fastest else "",
        tokens_per_s=fastest["tokens_per_s"] if fastest else None,
        rate=format_value(fastest, "tokens_per_s") if fastest else MISSING,
        sample=_format_sample(fastest) if fastest else MISSING,
        interval=format_interval(fastest) if fastest else MISSING,
        flags=fastest["flags"] if fastest else "",
        equal=_list_rivals(equal),
        tied=_list_rivals(tied),
        slower=_describe_rivals(slower, "is detectably slower", "are detectably slower"),
        undecided=_describe_rivals(
            undecided, f"took longer in these runs, {TOO_FEW}", f"took longer in these runs, {TOO_FEW}"
        ),
        leanest=describe_choice(leanest) if leanest else "",
        peak=format_size(leanest["peak_allocated_bytes"]) if leanest else MISSING,
        failed=format_outcomes(Counter([*(row["outcome"] for row in best.failed), *("busy" for _ in best.busy)])),
        luck=_luck(best),
    )


def _name_choice(row: Row) -> str:
    """Name a configuration, and the repeats of it that its numbers do not rest on: the others are survivors."""
    return f"{describe_choice(row)}{f' ({reason})' if (reason := row['reason']) else ''}"


def _format_sample(row: Row) -> str:
    """Write the time per sample to as many digits as the interval of the rate tells, and four where it has none."""
    value, rate, low, high = row["sample_s"], *(row[f"tokens_per_s{end}"] for end in ("", "_low", "_high"))
    if not rate or low is None or not low > 0:
        return format_significant(value)
    return format_within(value, value * rate / high, value * rate / low)[0]


def _luck(best: Best) -> str:
    """Say by how much the fastest of several was probably lucky, where that is worth a word."""
    if best.selection_bias < _LUCK_WORTH_SAYING or len(best.ties) == 0:
        return ""
    share = format_significant(100 * best.selection_bias, 1)
    return f"Chosen as the fastest of {len(best.rivals) + 1}, its number is probably {share}\u00a0% too good"


def _find_leading_engines(best: Best) -> set[str]:
    return {row["engine"] for row in (best.fastest, *best.ties) if row}


def _list_rivals(rivals: Sequence[Rival]) -> tuple[str, ...]:
    return tuple(f"{_name_choice(one.row)} ({format_effect(one.comparison)})" for one in rivals)


def _describe_rivals(rivals: Sequence[Rival], one_is: str, several_are: str) -> str:
    """Say of how many rivals that is so, and by how much the first of them is behind."""
    if not rivals:
        return ""
    first = rivals[0]
    if len(rivals) == 1:
        return f"{_name_choice(first.row)} {one_is}: {format_effect(first.comparison)}"
    nearest = f"{_name_choice(first.row)}: {format_effect(first.comparison)}"
    return f"{len(rivals):,} others {several_are}, the next of them {nearest}"


def format_hover(row: Row) -> str:
    """Return what a row of the summary says, line by line."""
    around = f"{format_ranks(row)}, {row['precision']}, {row['machine']}"
    lines = [
        f"{row['model']}: {describe_choice(row)}",
        around,
        *(_list_numbers(row) if row["n"] else [_format_failure(row)]),
    ]
    lines += [f"flags: {row['flags']}"] if row["flags"] else []
    lines += [f"notes: {row['notes']}"] if row.get("notes") else []
    return "\n".join([*lines, f"configuration {row['config_id']}"])


def _list_numbers(row: Row) -> list[str]:
    rate, step, peak = row["tokens_per_s"], row["step_s"], row["peak_allocated_bytes"]
    lines = []
    if row.get("efficiency") is not None:
        ends = format_ends(row, "efficiency") or "no interval"
        lines.append(f"efficiency {format_value(row, 'efficiency')}, {ends}")
    if row.get("idle_share") is not None:
        expected = row["predicted_idle_share"]
        schedule = "" if expected is None else f"; {100 * expected:.0f} % by its schedule"
        lines.append(f"idle {100 * row['idle_share']:.0f} % of a step{schedule}")
    if rate is not None:
        lines.append(f"{format_value(row, 'tokens_per_s')} tokens/s, {format_interval(row)}")
    if step is not None:
        lines.append(f"{format_value(row, 'step_s')} s per step, {format_ends(row, 'step_s') or 'no interval'}")
    return [*lines, f"peak {format_size(peak) if peak is not None else MISSING} per rank"]


def _format_failure(row: Row) -> str:
    why = str(row["reason"])
    shortened = why[:_REASON_LETTERS] + "…" * (len(why) > _REASON_LETTERS)
    return f"{format_reason(row)}: {shortened}" if shortened else format_reason(row)
