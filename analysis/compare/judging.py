"""Result of comparing a configuration in result sets A and B: the faster side, changed counts and bytes, and whether
the limits of the regression gate are kept."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from analysis.compare.fields import FieldDifference
from analysis.compare.pairing import ComparedConfiguration, ConfigurationPair
from analysis.formats import format_significant
from analysis.observed import FlopsKind, compute_step_flops, find_worst_rank_value
from analysis.results import Results
from analysis.scaling import Pace, compare_paces
from analysis.stats import compare as stats
from analysis.stats.compare import MOST, count_missing_repeats, find_smallest_slowdown
from analysis.summary import is_disturbed
from bench.core.formatting import format_count
from bench.core.quantities import BUSY_SHARE, compute_background_load, may_cause_busy
from bench.core.record import Collective, RunRecord
from bench.core.statistics import LEVEL

PEAK = "peak_allocated_bytes"
_MEMORY = ("resident_bytes", PEAK)
_COUNTS = ("calls", "payload_bytes")
FIXED = ("parameters", "trainable_parameters", "model_flops", "hardware_flops", *_MEMORY)
"""Quantities that are compared for every run. Calls and bytes of each kind of collective are compared in addition."""
# Tolerance for memory on a CPU, where memory of the harness and of gloo counts as well. Resident bytes differed by up
# to 4 KiB between repeats of the same configuration, for 40 configurations. Their peaks differed by up to 3.7 %, so
# peaks are not exact on a CPU. Peaks during initialisation differed by up to 192 KiB at stage 3, so they are not
# compared.
_SLACK_BYTES = 64 * 1024


class QuantityChange(NamedTuple):
    """A quantity that changed: the range of its values over the runs of result set A does not overlap the range over
    the runs of set B. `a` is the range in A and `b` the range in B, each as (lowest, highest)."""

    name: str
    a: tuple[int, int]
    b: tuple[int, int]
    exact: bool = True  # always equal in repeated runs of the same code

    @property
    def growth(self) -> float:
        """Smallest growth from A to B that the ranges allow, as a factor: the lowest value over the runs of B, divided
        by the highest value over the runs of A. Infinite if all values of A are 0."""
        return self.b[0] / self.a[1] if self.a[1] else float("inf")


def find_changes(ours: Sequence[RunRecord], theirs: Sequence[RunRecord]) -> tuple[QuantityChange, ...]:
    """Return the changed quantities: those whose range of values in the runs of A does not overlap the range in B. Only
    quantities that are known for all runs are compared."""
    kinds = sorted({kind for record in (*ours, *theirs) for kind in _get_collectives(record)})
    a, b = ([list_quantities(record, kinds) for record in side] for side in (ours, theirs))
    known = [name for name in a[0] if all(name in one for one in (*a, *b))] if a and b else []
    on_host, found = any(map(_is_on_host, (*ours, *theirs))), []
    for name in known:
        sides = [[one[name] for one in side] for side in (a, b)]
        (low, high), (lower, higher) = ((min(values), max(values)) for values in sides)
        slack = _SLACK_BYTES if on_host and name in _MEMORY else 0
        if high + slack < lower or higher + slack < low:
            found.append(QuantityChange(name, (low, high), (lower, higher), not (on_host and name == PEAK)))
    return tuple(found)


def is_quantity(name: str) -> bool:
    """Return True if `name` can be the name of a quantity: a name in `FIXED`, or the name of any collective followed by
    `_calls` or `_payload_bytes`."""
    return name in FIXED or any(name.endswith(f"_{count}") for count in _COUNTS)


def list_quantities(record: RunRecord, kinds: Sequence[str]) -> dict[str, int]:
    """Return the known quantities of a run, by name.

    FLOPs are those of one step, summed over all ranks. Calls and payload bytes are those of one step, for each kind of
    collective in `kinds`. They are taken from the rank with the most payload bytes of this kind. Memory is the maximum
    over all ranks.
    """
    observed = record.observations
    if observed is None:
        return {}
    found: dict[str, int | None] = {name: getattr(observed, name) for name in ("parameters", "trainable_parameters")}
    found |= {f"{kind}_flops": compute_step_flops(record, kind) for kind in get_args(FlopsKind)}
    for kind in kinds if observed.collectives is not None else ():
        found |= {f"{kind}_{count}": getattr(_get_collectives(record).get(kind), count, 0) for count in _COUNTS}
    found |= {name: find_worst_rank_value(record, name) for name in _MEMORY}
    return {name: value for name, value in found.items() if value is not None}


def _is_on_host(record: RunRecord) -> bool:
    """Return True if tensors are in host memory, which the harness and gloo use as well. In this case the peak of
    allocated memory varies between runs, because the threads of gloo free buckets at no fixed time."""
    link = record.observations.link if record.observations else None
    return link is not None and link.backend == "gloo"


def _get_collectives(record: RunRecord) -> dict[str, Collective]:
    return (record.observations.collectives if record.observations else None) or {}


Status = Literal[
    "faster", "slower", "equal within 3 %", "no detectable difference", "too few repeats to tell", "not comparable",
    "only in A", "only in B", "failed in A", "failed in B", "failed in both",
]  # fmt: skip
"""Result of a pair, with B compared with A."""
NOT_COMPARED: tuple[Status, ...] = ("not comparable", "only in A", "only in B", "failed in A", "failed in both")
"""Results without a comparison. `failed in B` is not listed, because it is a finding about B."""
GateStatus = Literal["kept", "open", "broken"]
_ENDED_OUTSIDE = "all runs in B were ended from outside, or were drills"
_SOME_FAILED, _MORE_FAILED = "some runs failed in B", "more of the runs failed in B than in A"
_FROM_OUTSIDE = frozenset({"node_failure", "preempted", "cancelled", "drill"})
"""Outcomes that are no finding about a configuration, because the scheduler or a person ended the run, or because a
fault was injected."""


class Gate(NamedTuple):
    """Regression gate: limits on how much worse B may be than A. A `limit` of 0.03 allows 3 % more time per sample
    and 3 % more peak memory.

    Time breaks the gate if the ratio of B to A is shown to be above the limit, by tests that are corrected for the
    number of pairs. Time keeps the gate if the whole interval of the ratio lies below the limit. In all other cases,
    also with too few repeats, the gate is open (undecided).

    Memory breaks the gate if the peak of every run of B exceeds the peak of every run of A by more than the limit. A
    configuration that fails only in B breaks the gate as well. With `exact`, any other changed quantity also breaks it.

    The gate is open if the scheduler or a person ended all runs in B, or if a larger share of the runs fails in B than
    in A. It is also open if runs of B were excluded as busy for a cause that may be the runs themselves.
    """

    limit: float | None = None
    exact: bool = False
    strict: bool = False  # an open gate counts as broken
    looks: int = 1  # number of times that the growing set of runs is judged, including the last
    allowed: frozenset[str] = frozenset()  # quantities that are allowed to change

    @property
    def level(self) -> float:
        """Confidence level of one judgement of the gate. The gate is judged repeatedly while runs are added; the field
        `looks` is the number of judgements. The level is chosen so that the probability of at least one wrong judgement
        is at most 5 % (Bonferroni's inequality)."""
        return 1 - (1 - LEVEL) / self.looks


class PairResult(NamedTuple):
    """The result of one pair of configurations. `comparison` holds the ratio of B to A, if both have step times."""

    a: ComparedConfiguration | None
    b: ComparedConfiguration | None
    status: Status
    why: str = ""
    comparison: stats.Comparison | None = None
    changes: tuple[QuantityChange, ...] = ()
    intended: tuple[FieldDifference, ...] = ()  # differences that --across allows
    held: GateStatus | None = None  # None if there is no gate, or if it does not apply to this pair
    gate_reasons: tuple[str, ...] = ()  # why the gate is open or broken
    hidden: tuple[str, ...] = ()  # reasons why runs of B without a time may be its slow ones
    uneven: str = ""  # reason why times decide nothing: one side had more background load
    differ: tuple[FieldDifference, ...] = ()  # differences that prevent a comparison

    @property
    def is_paired(self) -> bool:
        """True if the configuration ended ok on both sides, even if none of its step times can be compared."""
        return bool(self.comparison) or (self.status == "not comparable" and not self.differ)

    @property
    def runs(self) -> tuple[int, int] | None:
        """Number of compared runs as (A, B); None without a comparison."""
        return self.comparison and self.comparison.runs[::-1]


def format_share(share: float) -> str:
    """Format a fraction as a percentage, such as `3 %` for 0.03."""
    return f"{100 * share:.4g} %"


def judge_pairs(
    a: Results, b: Results, pairs: Sequence[ConfigurationPair], gate: Gate | None, *, paired: bool
) -> list[PairResult]:
    """Return the result of every pair. Verdicts are corrected for the number of pairs, because without correction some
    of many equal pairs would be called different by chance.

    With `paired`, repeat n of A is compared with repeat n of B, because both ran one after the other, as in
    `zeroscale ab`.
    """
    level = gate.level if gate else LEVEL
    # Verdicts are corrected for the number of pairs, so every pair is compared before any status is set.
    drafts = [_judge_alone(a, b, pair, level, paired=paired) for pair in pairs]
    statuses = iter(stats.verdicts([line.comparison for line in drafts if line.comparison], level))
    judged = [line._replace(status=next(statuses)) if line.comparison else line for line in drafts]
    if gate is None:
        return judged
    compared = [line.comparison for line in judged if line.comparison]
    among, beyond = sum(one.decides for one in compared), iter(stats.exceed(compared, gate.limit or 0.0, gate.level))
    return [_gate_pair(line, gate, among, beyond=bool(line.comparison) and next(beyond)) for line in judged]


def _judge_alone(a: Results, b: Results, pair: ConfigurationPair, level: float, *, paired: bool) -> PairResult:
    """Return the result of one pair. If both sides have times, the status is provisional; `judge_pairs` replaces it by
    a verdict that is corrected for the number of pairs."""
    ours, theirs = pair.a, pair.b
    if ours is None or theirs is None:
        one = ours or theirs
        assert one is not None
        return PairResult(ours, theirs, "only in A" if ours else "only in B", _describe_failure(one))
    if pair.differ:
        return PairResult(ours, theirs, "not comparable", ", ".join(map(str, pair.differ)), differ=pair.differ)
    failures = _describe_failure(ours), _describe_failure(theirs)
    if all(failures):
        return PairResult(ours, theirs, "failed in both", f"A {failures[0]}; B {failures[1]}")
    if any(failures):
        status: Status = "failed in A" if failures[0] else "failed in B"
        hidden = () if _list_own_outcomes(b, theirs) else (_ENDED_OUTSIDE,)
        return PairResult(ours, theirs, status, "".join(failures), hidden=hidden)
    if None in (ours.row["step_s"], theirs.row["step_s"]):  # a rehearsal, or only busy runs
        busy = " and ".join(side for side, one in (("A", ours), ("B", theirs)) if is_disturbed(one.row))
        disturbed = f"all runs of {busy} were made on a busy machine or were paused"
        return PairResult(ours, theirs, "not comparable", disturbed if busy else "the runs have no step times")
    # Counts and bytes come from the records, since the summary has no collectives.
    before, after = (_build_pace(side, one, paired) for side, one in ((a, ours), (b, theirs)))
    if paired:
        shared = before.runs.keys() & after.runs.keys()
        if not shared:
            return PairResult(ours, theirs, "not comparable", "A and B have no common repeats, which --paired compares")
        before, after = (
            Pace({name: pace.runs[name] for name in pace.runs if name in shared}) for pace in (before, after)
        )
    records = [[side.record(place) for place in side.behind(one.row)] for side, one in ((a, ours), (b, theirs))]
    why = _explain_shared_nodes(a.find_hosts(ours.row), b.find_hosts(theirs.row))
    why = "; ".join(filter(None, (why, _explain_order(*records) if paired else "")))
    compared = compare_paces(after, before, level)
    found = PairResult(ours, theirs, stats.TOO_FEW, why, compared, find_changes(*records), pair.intended)
    sides = (a, ours), (b, theirs)
    return found._replace(hidden=_list_hidden(*sides), uneven=_explain_uneven_load(*records))


def _list_own_outcomes(side: Results, one: ComparedConfiguration) -> list[str]:
    """Return the outcomes of a configuration's repeats, without those that were ended from outside."""
    return [outcome for outcome in side.list_outcomes(one.row) if outcome not in _FROM_OUTSIDE]


def _explain_uneven_load(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> str:
    """Return a text if the runs of one side had a higher background load than those of the other, by more than the load
    that makes a machine busy; otherwise empty. Runs with such a load are compared only in `zeroscale ab`."""
    means = []
    for side in (a, b):
        loads = [load for record in side if record.observations for load in record.observations.load or ()]
        known = [share for load in loads if (share := compute_background_load(load)) is not None]
        if not known:
            return ""
        means.append(statistics.fmean(known))
    if abs(means[1] - means[0]) <= BUSY_SHARE:
        return ""
    shown = " and ".join(f"{100 * mean:.0f} % in {name}" for name, mean in zip("AB", means, strict=True))
    return f"background load differs: it took {shown} of the cores"


def _list_hidden(*sides: tuple[Results, ComparedConfiguration]) -> tuple[str, ...]:
    """Return reasons why a configuration may be slower in B than its times show: slow runs may be those without a
    time."""
    found = []
    a, b = (_list_own_outcomes(side, one) for side, one in sides)
    failures = [sum(outcome != "ok" for outcome in outcomes) for outcomes in (a, b)]
    if failures[1] * len(a) > failures[0] * len(b):  # a larger share of the runs
        found.append(_MORE_FAILED if failures[0] else _SOME_FAILED)
    before, after = (
        sum(may_cause_busy(side.record(place)) for place in side.list_excluded(one.row)) for side, one in sides
    )
    if after > before:
        runs = format_count(after, "excluded run")
        found.append(f"{runs} of B may have caused the waits or the CPU quota that made the machine busy")
    return tuple(found)


def _explain_shared_nodes(a: Mapping[str, set[str]], b: Mapping[str, set[str]]) -> str:
    """Return a warning if A and B ran on different nodes, and several repeats of A or of B ran on the same node;
    otherwise empty.

    Repeats on the same node are not independent, so a slow node looks like a slow configuration.
    """
    used = [Counter(host for hosts in side.values() for host in hosts) for side in (a, b)]
    if used[0].keys() == used[1].keys():
        return ""
    sides = []
    for name, counts in zip("AB", used, strict=True):
        again = sorted(host for host, times in counts.items() if times > 1)[:3]
        sides += [f"repeats of {name} share nodes ({', '.join(again)})"] if again else []
    return f"{' and '.join(sides)}, so a slow node looks like a slow configuration" if sides else ""


def _explain_order(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> str:
    """Return a warning if some repeat of A and the same repeat of B did not run one directly after the other."""
    shared = {one.circumstance.repeat for one in a} & {one.circumstance.repeat for one in b}
    starts = sorted((one.circumstance.started_at, one.circumstance.repeat) for one in (*a, *b))
    repeats = [repeat for _, repeat in starts if repeat in shared]
    return "" if repeats[::2] == repeats[1::2] else "A and B did not alternate, so --paired compares runs far apart"


def _describe_failure(one: ComparedConfiguration) -> str:
    """Return the reason why a configuration has no measured time; empty if it has one."""
    if one.row["n"]:
        return ""
    if one.row["outcome"] == "ok":
        return "all runs are drills, with an injected fault"
    return ": ".join(part for part in (one.row["outcome"], one.row["reason"]) if part)


def _build_pace(side: Results, one: ComparedConfiguration, paired: bool) -> Pace:
    """Return the seconds per sample of each timed step, grouped by allocation or, if `paired`, by repeat."""
    runs = {} if paired else side.runs(one.row)
    for place in side.list_timed(one.row) if paired else ():
        runs.setdefault(str(side.table["repeat"].iloc[place]), []).extend(side.window(place))
    batch = one.row["global_batch"]
    return Pace({name: [seconds / batch for seconds in steps] for name, steps in runs.items()})


def _gate_pair(line: PairResult, gate: Gate, among: int, *, beyond: bool) -> PairResult:
    if line.comparison:
        broken = _list_violations(line, gate, beyond=beyond and not line.uneven)
        opened = _list_doubts(line.comparison, gate, max(among, 1))
        opened += (*line.hidden, *filter(None, [line.uneven])) if gate.limit is not None else ()
        held: GateStatus = "broken" if broken else "open" if opened else "kept"
        return line._replace(held=held, gate_reasons=broken or opened)
    if line.status == "failed in B":
        return line._replace(held="open" if line.hidden else "broken", gate_reasons=line.hidden)
    missing = line.status == "only in A" and not line.why
    return line._replace(held="open") if missing or line.status == "not comparable" else line


def _list_violations(line: PairResult, gate: Gate, *, beyond: bool) -> tuple[str, ...]:
    """Return the names of quantities that break the regression gate, and "some runs failed in B" if such failures break
    it. `beyond` is True if the time per sample breaks the gate."""
    assert line.comparison and line.a and line.b
    found = []
    if beyond and gate.limit is not None:
        found.append("time per sample")
    for change in line.changes:
        grown = gate.limit is not None and change.name == PEAK and change.growth > 1 + gate.limit
        if (grown or (gate.exact and change.exact)) and change.name not in gate.allowed:
            found.append(change.name)
    if gate.exact:
        found += [reason for reason in line.hidden if reason == _SOME_FAILED]
    return tuple(found)


def _list_doubts(comparison: stats.Comparison, gate: Gate, among: int) -> tuple[str, ...]:
    """Return the reasons why the time of a pair does not keep the regression gate. There are none if the comparison
    shows that the slowdown from A to B is at most the gate's limit, or if the gate has no limit. `among` is the number
    of comparisons for which verdicts are corrected."""
    if gate.limit is None:
        return ()
    more = count_missing_repeats(comparison, gate.limit, among, gate.level)
    seen = find_smallest_slowdown(comparison, among, gate.level)
    if seen is None:
        return stats.TOO_FEW, f"at least {more} more repeats of A and of B are needed"
    if comparison.interval and comparison.interval.high <= 1 + gate.limit:
        return ()
    # The estimate of missing repeats assumes the noise measured so far, so it is rough.
    wanted = f"about {more}" if more < MOST else f"over {MOST}"
    reasons = (
        f"a slowdown above {format_share(gate.limit)} cannot be excluded",
        f"a slowdown below {format_significant(100 * seen, 2)} % cannot be detected with these runs",
        f"{wanted} more repeats of A and of B would detect {format_share(gate.limit)}",
    )
    return reasons if more else reasons[:2]
