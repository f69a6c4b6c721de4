"""Results of a set of runs in one to five sentences, printed after a sweep, in a report, or in a notebook.

A ratio is the seconds per sample of a configuration, divided by those of the fastest configuration. The number after ±
is half the width of the ratio's 95 % interval.
"""

import math
from collections import Counter
from collections.abc import Sequence

from analysis.flags import DISTURBED, UNTRUSTED
from analysis.formats import format_outcomes, name_briefly
from analysis.questions import describe_differences, format_ranks
from analysis.results import Results
from analysis.scaling.best import Best, Rival, best
from analysis.stats.compare import EQUAL, LEAST_RUNS, NOT_DETECTED, TOO_FEW
from analysis.summary import Row
from bench.core.formatting import describe_quiet_remedy, format_count

_NAMED = 3
"""Maximum number of configurations with the same verdict that a sentence names. Of the remaining configurations, the
sentence gives only the number."""
_QUESTIONS = 3
"""Maximum number of questions that get a sentence each. If there are more, one sentence instead counts how often each
engine is the fastest. A question is a group of configurations that do the same work on equal hardware."""

_DISTURBED_TEXTS = {"busy": "made on a busy machine", "paused": "paused"}


def describe_answer(results: Results) -> tuple[str, ...]:
    """Return the results as sentences, the most important first; empty if nothing was measured."""
    found = best(results)
    answered = [one for one in found if one.fastest]
    lines = [_describe_disturbed(results)]
    if len(answered) <= _QUESTIONS:
        lines += [_describe_question(one, answered) for one in answered]
    else:
        lines.append(_count_leading(answered))
    lines += [_describe_few(answered), _describe_failed(found)]
    return tuple(line for line in lines if line)


def describe_untrusted(results: Results) -> str:
    """Return the sentence for results without a trusted run: which flags exclude the runs, and what to do about it."""
    counts = Counter(flag for flags in results.table["flags"].fillna("") for flag in flags.split())
    reasons = ", ".join(f"{count:,} {flag}" for flag, count in counts.most_common() if flag in UNTRUSTED)
    runs = f"None of {format_count(len(results.table), 'run')} is trusted ({reasons})"
    return f"{runs}; {describe_quiet_remedy(int(results.table['repeat'].max()) + 1)}."


def _describe_disturbed(results: Results) -> str:
    """Return a sentence with the number of ok runs whose times are excluded because of background load or a pause."""
    table = results.table
    flags = table["flags"][table["outcome"] == "ok"].fillna("").str.split()
    raised = [set(one) & {*DISTURBED} for one in flags]
    count = sum(map(bool, raised))
    if not count:
        return ""
    causes = " or ".join(_DISTURBED_TEXTS[flag] for flag in DISTURBED if flag in set.union(*raised))
    runs = f"{count:,} of {format_count(len(flags), 'ok run')} {'was' if count == 1 else 'were'} {causes}"
    remedy = describe_quiet_remedy(int(table["repeat"].max()) + 1)
    return f"{runs}: times of such runs decide nothing; {remedy}."


def _describe_question(one: Best, answered: Sequence[Best]) -> str:
    """Return a sentence that compares the fastest configuration of a question with the other configurations of the
    question."""
    fastest = one.fastest
    assert fastest is not None
    # Names contain the micro-batch only if it varies.
    equal, tied, slower, undecided = (
        [rival for rival in one.rivals if rival.verdict == verdict]
        for verdict in (EQUAL, NOT_DETECTED, "slower", TOO_FEW)
    )
    names = _Names(one.compared)
    apart = [one.question["model"]] if len({other.question["model"] for other in answered}) > 1 else []
    apart += describe_differences(one.question, [other.question for other in answered])
    where = f"On {format_ranks(one.question)}" + (f" ({', '.join(apart)})" if apart else "")
    if not one.rivals:
        return f"{where}, {names.of(fastest)} is the only configuration with a time."
    parts = []
    if slower:
        nearest, last = slower[0], slower[-1]
        parts.append(f"{names.of(fastest)} is {_format_times(nearest)} times faster than {names.of(nearest.row)}")
        if last is not nearest:
            parts[0] += f" and {_format_times(last)} times faster than {names.of(last.row)}"
            between = len(slower) - 2
            parts[0] += f" ({format_count(between, 'configuration')} between them)" if between else ""
    if equal:
        parts.append(f"{names.join([fastest, *(rival.row for rival in equal)])} are equal within 3 %")
    if tied:
        parts.append(f"{names.join([fastest, *(rival.row for rival in tied)])} cannot be distinguished yet")
    if undecided:
        ratios = " to ".join(dict.fromkeys(f"{one.comparison.ratio:.2f}" for one in (undecided[0], undecided[-1])))
        parts.append(
            f"{names.of(fastest)} was the fastest measured; {names.join([rival.row for rival in undecided])} took "
            f"{ratios} times as long, which is indicative only"
        )
    return f"{where}, {'; '.join(parts)}."


class _Names:
    """Names of the configurations of one question. They contain the micro-batch only if it varies."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._with_micro = len({row["micro"] for row in rows}) > 1

    def of(self, row: Row) -> str:
        name = name_briefly(row)
        return f"{name} (micro {row['micro']})" if self._with_micro else name

    def join(self, rows: Sequence[Row]) -> str:
        named = [self.of(row) for row in rows[:_NAMED]]
        if more := len(rows) - len(named):
            named.append(f"{more:,} more")
        return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


def _format_times(rival: Rival) -> str:
    """Format the ratio of a rival's time ± half the width of its interval. Both numbers are rounded to the first
    significant digit of this half width."""
    ratio, known = rival.comparison.ratio, rival.comparison.interval
    margin = (known.high - known.low) / 2 if known else 0.0
    if not margin:
        return f"{ratio:.2f}"
    decimals = min(max(-math.floor(math.log10(margin)), 1), 4)
    return f"{ratio:.{decimals}f} ± {margin:.{decimals}f}"


def _count_leading(answered: Sequence[Best]) -> str:
    """Return a sentence that counts the questions in which each engine is the fastest or ties with the fastest."""
    leading = Counter(
        engine for one in answered for engine in {row["engine"] for row in (one.fastest, *one.ties) if row}
    )
    (first, most), *others = sorted(leading.items(), key=lambda item: (-item[1], item[0]))
    rest = ", ".join(f"{engine} in {count:,}" for engine, count in others)
    share = "all" if most == len(answered) else f"{most:,} of the"
    verb = (
        "was fastest as measured" if any(one.undecided for one in answered) else "is fastest, or ties with the fastest,"
    )
    return f"{first} {verb} in {share} {len(answered):,} answered questions{f' ({rest})' if rest else ''}."


def _describe_few(answered: Sequence[Best]) -> str:
    """Return a sentence on compared configurations with too few independent runs; empty if there are none."""
    if not any(one.undecided for one in answered):
        return ""
    runs = max(row["n"] for one in answered for row in one.compared)
    few = "one independent run" if runs == 1 else f"at most {runs} independent runs"
    subject = f"Each compared configuration has {few}"
    if runs >= LEAST_RUNS:
        subject = f"Some compared configurations have fewer than {LEAST_RUNS} independent runs"
    return f"{subject}; at least {LEAST_RUNS} are needed to compare them: add --repeats 5."


def _describe_failed(found: Sequence[Best]) -> str:
    """Return a sentence that counts the configurations without a run that ended ok, by outcome."""
    failed = Counter(row["outcome"] for one in found for row in one.failed)
    if not failed:
        return ""
    return f"No run of {format_count(failed.total(), 'configuration')} ended ok: {format_outcomes(failed)}."
