"""The claims of arXiv 2310.05350, and what a set of runs says of them: an analogue of them, never a reproduction. What
tests a claim nevertheless, and the verdict, say `analysis.claims.rule` and `analysis.claims.verdicts`.

Pure, from results to findings. Two configurations are compared that differ in one thing only, of one machine, one
environment class and measured evidence, by the time of a step over the whole window; a finding says of a claim what its
comparisons say together, by machine and model.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import pandas as pd

from analysis import engines
from analysis.early_failures import drop_retried, may_be_same
from analysis.results import Results
from analysis.scaling.time_per_sample import Pace, compare_paces
from analysis.stats import compare as stats
from analysis.summary import Row
from analysis.table import list_rows
from bench.formatting import format_count
from bench.spec import Batch, RunSpec, canonical

SOURCE = "arXiv 2310.05350"

Effect = Literal[
    "faster", "slower", "equal within 3 %", "no detectable difference", "too few repeats to tell", "unknown"
]  # fmt: skip
"""Of the second configuration beside the first, in steps per second, corrected for the number of comparisons of the
finding; equal where it is shown to differ by less than anybody would act on, whether or not that was detected; unknown
where one has no number."""
Verdict = Literal["as in the study", "not as in the study", "cannot be told"]

_STAGES = ("zero0", "zero1", "zero2", "zero3")


class ClaimSide(NamedTuple):
    """One of two configurations that are compared: its row of the summary, and what was asked."""

    row: Row
    spec: RunSpec


class ClaimComparison(NamedTuple):
    """Two configurations that differ in one thing; `held` says what they share."""

    before: Row
    after: Row
    differ: tuple[str, str]
    shared_text: str
    tested: stats.Comparison | None  # seconds per step, the second's over the first's; None where one has no number
    as_preset: bool = True  # whatever option only one of their engines knows is as its preset has it
    effect: Effect = "unknown"


class Claim(NamedTuple):
    """A claim of the study, and what in a set of runs can speak for or against it."""

    id: str
    text: str
    shared: Callable[[RunSpec], str]  # what two configurations must share
    compared: Callable[[RunSpec, RunSpec], bool]  # whether two that do are a comparison, in this order
    differ: Callable[[RunSpec, RunSpec], str]  # what the first is, beside the second
    judge: Callable[[Mapping[Effect, int]], Verdict]


class ClaimFinding(NamedTuple):
    """What became of a claim on one machine with one model."""

    claim: Claim
    machine: str
    model: str
    comparisons: tuple[ClaimComparison, ...]

    @property
    def counts(self) -> Counter[Effect]:
        return Counter(comparison.effect for comparison in self.comparisons)

    @property
    def verdict(self) -> Verdict:
        return self.claim.judge(self.counts)


def findings(results: Results) -> list[ClaimFinding]:
    """Return what becomes of every claim on each machine with each model. Nothing where the set spans neither two node
    counts nor two ZeRO stages on several nodes."""
    places: dict[tuple[str, str], list[ClaimSide]] = {}
    for row in _measured(list_rows(results.summary)):
        places.setdefault((row["machine"], row["model"]), []).append(ClaimSide(row, results.specs[row["config_id"]]))
    found = [_findings(machine, model, sides, results) for (machine, model), sides in places.items()]
    return [finding for of_place in found if _spans_nodes(of_place) for finding in of_place]


def as_table(found: Sequence[ClaimFinding]) -> pd.DataFrame:
    """Return every comparison as a row: what was compared, both medians with their intervals, the ratio of the mean
    step times with its own, and the effect."""
    rows = [_plain(finding, comparison) for finding in found for comparison in finding.comparisons]
    return pd.DataFrame(rows)


def _measured(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that can be compared: a rehearsal communicates nothing, and early failures of what was tried
    again say nothing."""
    return drop_retried([row for row in rows if row["evidence"] == "measured"])


def _findings(machine: str, model: str, sides: Sequence[ClaimSide], results: Results) -> list[ClaimFinding]:
    return [
        ClaimFinding(claim, machine, model, tuple(_add_effects(_comparisons(claim, sides, results))))
        for claim in CLAIMS
    ]


def _add_effects(comparisons: Iterable[ClaimComparison]) -> Iterable[ClaimComparison]:
    """Add to comparisons of one claim what their runs tell, all of them taken together."""
    pending = list(comparisons)
    effects = iter(stats.relevant_verdicts([one.tested for one in pending if one.tested]))
    return [one._replace(effect=next(effects)) if one.tested else one for one in pending]


def _tested(before: Row, after: Row, results: Results) -> stats.Comparison | None:
    """Return how the step times of the second configuration compare with the first's; None where one has no number."""
    ours, theirs = results.runs(before), results.runs(after)
    if not (ours and theirs):
        return None
    return compare_paces(Pace(theirs, results.unsound(after)), Pace(ours, results.unsound(before)))


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
        one.row, other.row, differ, _describe_shared(one, other), _tested(one.row, other.row, results), as_preset
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


# -- the claims


def _but_nodes(spec: RunSpec) -> str:
    return canonical(spec.model_copy(update={"nodes": 1, "batch": Batch(micro=spec.batch.micro)}))


def _more_nodes(one: RunSpec, other: RunSpec) -> bool:
    """Whether nodes are added, to the same work per device (weak scaling) or per step (strong scaling)."""
    shared = one.accumulation == other.accumulation or one.global_batch == other.global_batch
    return shared and one.nodes < other.nodes


def _higher_stage(one: RunSpec, other: RunSpec) -> bool:
    stages = (one.engine.name, other.engine.name) in itertools.combinations(_STAGES, 2)
    return stages and engines.may_be_compared(one, other)


def _two_and_three(one: RunSpec, other: RunSpec) -> bool:
    stages = (one.engine.name, other.engine.name) == ("zero2", "zero3")
    return stages and engines.may_be_compared(one, other)


def _not_consistently_faster(counts: Mapping[Effect, int]) -> Verdict:
    """One comparison that became slower, or no faster, shows it; only all of them faster speak against it."""
    if counts.get("slower") or counts.get(stats.EQUAL):
        return "as in the study"
    return "not as in the study" if set(counts) == {"faster"} else "cannot be told"


def _always_slower(counts: Mapping[Effect, int]) -> Verdict:
    """All of them must be slower; one that is faster, or no slower, speaks against it."""
    if counts.get("faster") or counts.get(stats.EQUAL):
        return "not as in the study"
    return "as in the study" if set(counts) == {"slower"} else "cannot be told"


def _nodes(spec: RunSpec, other: RunSpec) -> str:
    return format_count(spec.nodes, "node")


def _engine(spec: RunSpec, other: RunSpec) -> str:
    return engines.describe_engine(spec, other)


CLAIMS = (
    Claim(
        "C1", "adding nodes did not consistently increase steps per second, because of communication overhead",
        _but_nodes, _more_nodes, _nodes, _not_consistently_faster,
    ),
    Claim(
        "C2", "progressing through ZeRO stages did not consistently increase steps per second",
        engines.dump_without_engine, _higher_stage, _engine, _not_consistently_faster,
    ),
    Claim(
        "C3", "ZeRO-2 had lower seconds per step than ZeRO-3 for mT5-XXL (13B) at every node count tried",
        engines.dump_without_engine, _two_and_three, _engine, _always_slower,
    ),
)  # fmt: skip
"""As the summary page of the paper has them. Its tables of results are not at hand, so no number of its is shown."""
