"""Results of a set of runs in a few sentences, printed after a sweep, in a report, or in a notebook.

For trainings, the first sentence compares held-out losses. A ratio is the seconds per sample of a configuration,
divided by those of the fastest configuration. A number after ± is half the width of a 95 % interval.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from analysis.flags import DISTURBED, UNTRUSTED
from analysis.formats import BriefNames, format_interval_of, format_outcomes, join_words
from analysis.questions import describe_differences, format_ranks
from analysis.results import Results
from analysis.scaling.best import MOST_NATS, Best, LossRanking, Rival, best, rank_losses
from analysis.searches import MeasuredSearch
from analysis.stats.compare import EQUAL, INTEREST, LEAST_RUNS, NOT_DETECTED, TIES, TOO_FEW
from analysis.summary import Row, loss_interval
from bench.core.formatting import QUIET_SEARCH_REMEDY, describe_quiet_remedy, format_count

_NAMED = 3
"""Maximum number of configurations with the same verdict that a sentence names. Of the remaining configurations, the
sentence gives only the number."""
_FEW_QUESTIONS = 3
"""Maximum number of questions without a summary. If there are more, a sentence counts how often each engine is the
fastest. A question is a group of configurations that do the same work on equal hardware."""
_QUESTIONS = 8
"""Maximum number of questions that get a sentence each. A page with more sentences would hide the summary."""
_LOSSES = 3
"""Maximum number of comparisons of losses that get a sentence each."""

_DISTURBED_TEXTS = {"busy": "made on a busy machine", "paused": "paused"}


def describe_answer(results: Results) -> tuple[str, ...]:
    """Return the results as sentences, the most important first; empty if nothing was found."""
    found = best(results)
    answered = [one for one in found if one.fastest]
    losses = rank_losses(results)
    lines = [*map(_describe_search, results.searches), *map(_describe_losses, losses[:_LOSSES])]
    lines.append(_count_unnamed_losses(losses))
    if len(answered) > _FEW_QUESTIONS:
        lines.append(_count_leading(answered))
    if len(answered) <= _QUESTIONS:
        lines += [_describe_question(one, answered) for one in answered]
    disturbed = _describe_disturbed(results)
    # One remedy is enough: more seeds are also more repeats, and so are the quiet repeats that replace disturbed runs.
    again = ": confirm the best points by a sweep with --repeats 5" if results.searches else ": add --repeats 5"
    few = _describe_few_seeds(losses) or _describe_few(answered, remedy="" if disturbed else again)
    lines += [few, disturbed, _describe_failed(found), _describe_skipped(results)]
    return tuple(line for line in lines if line)


def _describe_search(search: MeasuredSearch) -> str:
    """Return a sentence with the best trial of a search, by its objective and within its constraints."""
    bounds = f" with {join_words(search.constraints)}" if search.constraints else ""
    trials = format_count(len(search.trials), "trial")
    if search.best is None or search.best.value is None:
        return f"Search {search.study}: none of {trials} has a value of {search.objective}{bounds}."
    interval = search.best.interval
    value = format_interval_of(search.best.value, *interval) if interval else f"{search.best.value:.4g}"
    point = ", ".join(f"{key} {chosen}" for key, chosen in search.best.values.items())
    extreme = "lowest" if search.least else "highest"
    return (
        f"Search {search.study}: of {trials}, trial {search.best.number} ({point}) has the {extreme} "
        f"{search.objective}{bounds}: {value}."
    )


def describe_untrusted(results: Results) -> str:
    """Return a sentence for results in which no run is trusted. It counts the flags for which runs are excluded, and
    names a remedy."""
    counts = Counter(flag for flags in results.table["flags"].fillna("") for flag in flags.split())
    reasons = ", ".join(f"{count:,} {flag}" for flag, count in counts.most_common() if flag in UNTRUSTED)
    runs = f"None of {format_count(len(results.table), 'run')} is trusted ({reasons})"
    return f"{runs}; {_choose_quiet_remedy(results)}."


def _choose_quiet_remedy(results: Results) -> str:
    """Return a remedy for runs on a busy machine. Trials of a search are not repeated, so their remedy is different."""
    return QUIET_SEARCH_REMEDY if results.searches else describe_quiet_remedy(int(results.table["repeat"].max()) + 1)


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
    return f"{runs}: times of such runs decide nothing; {_choose_quiet_remedy(results)}."


def _describe_skipped(results: Results) -> str:
    """Return a sentence with the number of files that could not be read as records; empty if there are none."""
    count = len(results.skipped)
    files = format_count(len(results.table) + count, "file")
    verb = "was" if count == 1 else "were"
    return f"{count:,} of {files} {verb} skipped, because they are no readable records." if count else ""


class _Wording(NamedTuple):
    """Phrases for a sentence that compares configurations. There is one instance for comparisons of times, and one for
    comparisons of losses."""

    subject: str  # subject and verb of a sentence about the best configuration, with {} for its name
    margin: Callable[[Rival], str]  # by how much a rival is worse
    equal: str  # largest difference of configurations that are called equal
    undecided: Callable[[str, str, Sequence[Rival]], str]  # sentence, from the names of the best and of the rivals


def _describe_question(one: Best, answered: Sequence[Best]) -> str:
    """Return a sentence that compares the fastest configuration of a question with the other configurations of the
    question. A question is a group of configurations that do the same work on equal hardware."""
    fastest = one.fastest
    assert fastest is not None
    names = BriefNames(one.compared)
    apart = [one.question["model"]] if len({other.question["model"] for other in answered}) > 1 else []
    apart += describe_differences(one.question, [other.question for other in answered])
    where = f"On {_format_place(one, answered)}" + (f" ({', '.join(apart)})" if apart else "")
    if not one.rivals:
        return f"{where}, {names.of(fastest)} is the only configuration with a time."
    return f"{where}, {'; '.join(_list_verdicts(names, fastest, one.rivals, _TIMES))}."


def _format_place(one: Best, answered: Sequence[Best]) -> str:
    """Return the nodes of a question as text, such as "2 nodes", if all questions have one device per node and at least
    one question has several nodes. Otherwise return the ranks, such as "8 ranks"."""
    alone = all(other.question["devices_per_node"] == 1 for other in answered)
    if alone and any(other.question["nodes"] > 1 for other in answered):
        return format_count(one.question["nodes"], "node")
    return format_ranks(one.question)


def _list_verdicts(names: BriefNames, lead: Row, rivals: Sequence[Rival], words: _Wording) -> list[str]:
    """Return a text for each verdict that occurs, such as "slower", with the rivals of the best configuration (`lead`)
    that have this verdict."""
    equal, tied, worse, undecided = (
        [rival for rival in rivals if rival.verdict == verdict] for verdict in (EQUAL, NOT_DETECTED, "slower", TOO_FEW)
    )
    parts = []
    if worse:
        nearest, last = worse[0], worse[-1]
        subject = words.subject.format(names.of(lead))
        parts.append(f"{subject} {words.margin(nearest)} {names.of(nearest.row)}")
        if last is not nearest:
            parts[0] += f" and {words.margin(last)} {names.of(last.row)}"
            between = len(worse) - 2
            parts[0] += f" ({format_count(between, 'configuration')} between them)" if between else ""
    if equal:
        parts.append(f"{_join(names, [lead, *(rival.row for rival in equal)])} are equal within {words.equal}")
    if tied:
        parts.append(f"{_join(names, [lead, *(rival.row for rival in tied)])} cannot be distinguished yet")
    if undecided:
        parts.append(words.undecided(names.of(lead), _join(names, [rival.row for rival in undecided]), undecided))
    return parts


def _describe_undecided_times(lead: str, others: str, rivals: Sequence[Rival]) -> str:
    ratios = " to ".join(dict.fromkeys(f"{one.comparison.ratio:.2f}" for one in (rivals[0], rivals[-1])))
    return f"{lead} was the fastest measured; {others} took {ratios} times as long, which is indicative only"


def _describe_undecided_losses(_: str, others: str, rivals: Sequence[Rival]) -> str:
    gaps = dict.fromkeys(f"{math.log(rival.comparison.ratio):.2f}" for rival in (rivals[0], rivals[-1]))
    return f"the loss of {others} is {' to '.join(gaps)} higher, which is indicative only"


def _describe_losses(one: LossRanking) -> str:
    """Return a sentence on trainings: how the held-out losses of all configurations compare with the lowest one."""
    lead, rivals = one.ranking.fastest, one.ranking.rivals
    names, losses = BriefNames(one.ranking.rows), one.list_losses(lead)
    mean, interval = statistics.fmean(losses), loss_interval(losses)
    if interval is None:
        value = f"{mean:.4g}"
    elif interval.low > 0:
        value = _format_margin(mean, interval.high - mean)
    else:
        value = format_interval_of(mean, interval.low, interval.high)
    seeds = f" as the mean of {len(losses)} seeds" if len(losses) > 1 else " with one seed"
    where = f"Held-out loss after {one.tokens:,} tokens" + (f" ({one.name})" if one.name else "")
    parts = [f"{where}: {names.of(lead)} reached {'the lowest, ' if rivals else ''}{value} nats per token{seeds}"]
    words = _Wording(
        "its loss is",
        lambda rival: f"{_format_gap(one, rival)} below that of",
        f"{math.log1p(INTEREST):.2f} nats",
        _describe_undecided_losses,
    )
    parts += _list_verdicts(names, lead, rivals, words)
    if one.stopped:
        parts.append(f"{format_count(one.stopped, 'configuration')} stopped earlier, which is not compared")
    if one.mixed:
        runs = f"the runs of {format_count(one.mixed, 'configuration')} read different data"
        parts.append(f"{runs} from equally named files, so do not rely on these losses")
    return f"{'; '.join(parts)}."


def _count_unnamed_losses(found: Sequence[LossRanking]) -> str:
    """Return a sentence with the number of comparisons of losses that are not described, because only the first
    `_LOSSES` of them get a sentence each."""
    more = len(found) - _LOSSES
    if more <= 0:
        return ""
    return f"Losses of {more:,} other combinations of model, data and tokens are only in the table of configurations."


def _join(names: BriefNames, rows: Sequence[Row]) -> str:
    """Return the names of the rows' configurations as text. Of many rows, only the first are named and the others
    counted, as in "a, b and 3 more"."""
    named = [names.of(row) for row in rows[:_NAMED]]
    if more := len(rows) - len(named):
        named.append(f"{more:,} more")
    return join_words(named)


def _format_ratio(rival: Rival) -> str:
    """Format the ratio of a rival's time to the fastest time, ± half the width of the interval of this ratio."""
    ratio, known = rival.comparison.ratio, rival.comparison.interval
    return _format_margin(ratio, (known.high - known.low) / 2 if known else 0.0, least=1, most=4)


def _format_gap(one: LossRanking, rival: Rival) -> str:
    """Format the difference between a rival's mean loss and the lowest mean loss, ± half the width of the interval of
    this difference."""
    gap, known = math.log(rival.comparison.ratio), rival.comparison.interval
    if max(one.list_losses(rival.row)) > MOST_NATS:
        return f"more than {gap:.0f}"
    return _format_margin(gap, math.log(known.high / known.low) / 2 if known else 0.0)


def _format_margin(value: float, margin: float, least: int = 0, most: int = 8) -> str:
    """Format a value ± its margin of error. Both numbers get as many decimals as twice the margin needs for two
    significant digits, but at least `least` and at most `most` decimals."""
    if not margin:
        return f"{value:.2f}"
    decimals = min(max(1 - math.floor(math.log10(2 * margin)), least), most)
    return f"{value:.{decimals}f} ± {margin:.{decimals}f}"


_TIMES = _Wording("{} is", lambda rival: f"{_format_ratio(rival)} times faster than", "3 %", _describe_undecided_times)


def _count_leading(answered: Sequence[Best]) -> str:
    """Return two sentences about questions (groups of configurations that do the same work on equal hardware). The
    first counts the questions in which each engine has the shortest measured time. The second counts the questions by
    the verdict on all other engines, such as "slower"."""
    leading = Counter(one.fastest["engine"] for one in answered if one.fastest)
    (first, most), *others = sorted(leading.items(), key=lambda item: (-item[1], item[0]))
    rest = ", ".join(f"{engine} in {count:,}" for engine, count in others)
    share = "all" if most == len(answered) else f"{most:,} of the"
    verdicts = Counter(map(_judge_others, answered))
    (text, count), *more = [(text, verdicts[text]) for text in _OTHERS if verdicts[text]]
    counts = [f"In {format_count(count, 'question')} {text}", *(f"in {count:,} {text}" for text, count in more)]
    counted = f"{first} was fastest as measured in {share} {len(answered):,} answered questions"
    return f"{counted}{f' ({rest})' if rest else ''}. {', '.join(counts)}."


_SLOWER, _TIES, _UNDECIDED, _ALONE = _OTHERS = (
    "every other engine with a time is slower",
    "another engine cannot be distinguished from the fastest",
    "another engine has too few runs for a verdict",
    "no other engine has a time",
)
"""Texts for the verdict on all engines of a question except the fastest engine. The most certain verdict is first."""


def _judge_others(one: Best) -> str:
    """Return a text on whether the other engines of a question are slower than the fastest engine. If configurations of
    other engines have different verdicts, the text states the least certain verdict."""
    engine = one.fastest and one.fastest["engine"]
    verdicts = {rival.verdict for rival in one.rivals if rival.row["engine"] != engine}
    if not verdicts:
        return _ALONE
    return _UNDECIDED if TOO_FEW in verdicts else _TIES if verdicts & {*TIES} else _SLOWER


def _describe_few(answered: Sequence[Best], remedy: str) -> str:
    """Return a sentence on compared configurations with too few independent runs for a verdict, with a remedy; empty if
    there are none."""
    if not any(one.undecided for one in answered):
        return ""
    runs = [row["n"] for one in answered if one.rivals for row in one.compared]
    few = sum(n < LEAST_RUNS for n in runs)
    had = "one independent run" if max(runs) == 1 else f"at most {max(runs)} independent runs"
    subject, them = f"Each compared configuration has {had}", "them"
    if few < len(runs):
        verb, them = ("has", "it") if few == 1 else ("have", "them")
        subject = f"{few:,} of {len(runs):,} compared configurations {verb} fewer than {LEAST_RUNS} independent runs"
    return f"{subject}; at least {LEAST_RUNS} are needed to compare {them}{remedy}."


def _describe_few_seeds(found: Sequence[LossRanking]) -> str:
    """Return a sentence on configurations with too few seeds for a comparison of losses; empty if there are none."""
    if not any(rival.verdict == TOO_FEW for one in found for rival in one.ranking.rivals):
        return ""
    seeds = max(len(losses) for one in found for losses in one.losses.values())
    had = "has one seed" if seeds == 1 else f"has at most {seeds} seeds" if seeds < LEAST_RUNS else ""
    subject = f"Each configuration {had}" if had else f"Some configurations have fewer than {LEAST_RUNS} seeds"
    return f"{subject}; at least {LEAST_RUNS} are needed to compare losses: add seed=0,1,2."


def _describe_failed(found: Sequence[Best]) -> str:
    """Return a sentence on configurations of which no run ended ok, with their number for each outcome, such as out of
    memory."""
    failed = Counter(row["outcome"] for one in found for row in one.failed)
    if not failed:
        return ""
    return f"No run of {format_count(failed.total(), 'configuration')} ended ok: {format_outcomes(failed)}."
