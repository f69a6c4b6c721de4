"""What becomes of the claims of arXiv 2310.05350 in a set of runs: an analogue of them, never a reproduction.

Pure, from results to findings. Two configurations are compared that differ in one thing only, of one machine, one
environment class and measured evidence; a finding says of a claim what its comparisons say together, by machine and
model.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import pandas as pd

from analysis.results import Results
from analysis.stats import compare as stats
from analysis.summary import Row
from analysis.table import plain
from bench.spec import Batch, EngineSpec, RunSpec, canonical

SOURCE = "arXiv 2310.05350"

Effect = Literal["faster", "slower", "no detectable difference", "unknown"]
"""Of the second configuration beside the first, in steps per second, corrected for the number of comparisons of the
finding; unknown where one has no number, or too few steps to tell."""
Verdict = Literal["as in the study", "not as in the study", "cannot be told"]

_STAGES = ("zero0", "zero1", "zero2", "zero3")


class Side(NamedTuple):
    """One of two configurations that are compared: its row of the summary, and what was asked."""

    row: Row
    spec: RunSpec


class Comparison(NamedTuple):
    """Two configurations that differ in one thing; `held` says what they share."""

    before: Row
    after: Row
    differ: tuple[str, str]
    held: str
    effect: Effect = "unknown"

    @property
    def ratio(self) -> float | None:
        """Seconds per step of the second divided by those of the first."""
        one, other = self.before["step_s"], self.after["step_s"]
        return None if one is None or other is None else other / one


class Claim(NamedTuple):
    """A claim of the study, and what in a set of runs can speak for or against it."""

    id: str
    text: str
    alike: Callable[[RunSpec], str]  # what two configurations must share
    compared: Callable[[RunSpec, RunSpec], bool]  # whether two that do are a comparison, in this order
    differ: Callable[[RunSpec], str]
    judge: Callable[[Mapping[Effect, int]], Verdict]


class Finding(NamedTuple):
    """What became of a claim on one machine with one model."""

    claim: Claim
    machine: str
    model: str
    comparisons: tuple[Comparison, ...]

    @property
    def counts(self) -> Counter[Effect]:
        return Counter(comparison.effect for comparison in self.comparisons)

    @property
    def verdict(self) -> Verdict:
        return self.claim.judge(self.counts)


def findings(results: Results) -> list[Finding]:
    """Return what becomes of every claim on each machine with each model. Nothing where the set spans neither two node
    counts nor two ZeRO stages on several nodes."""
    places: dict[tuple[str, str], list[Side]] = {}
    for row in _measured(plain(results.summary)):
        places.setdefault((row["machine"], row["model"]), []).append(Side(row, results.specs[row["config_id"]]))
    found = [_findings(machine, model, sides, results) for (machine, model), sides in places.items()]
    return [finding for of_place in found if _spans_nodes(of_place) for finding in of_place]


def as_table(found: Sequence[Finding]) -> pd.DataFrame:
    """Return every comparison as a row: what was compared, both medians with their intervals, and the effect."""
    rows = [_plain(finding, comparison) for finding in found for comparison in finding.comparisons]
    return pd.DataFrame(rows)


def _measured(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that can be compared: a rehearsal communicates nothing, and an attempt that failed before it knew
    its environment does not count beside a later one that has its answer."""
    answered = {(row["config_id"], row["machine"]) for row in rows if row["n"]}
    return [
        row
        for row in rows
        if row["evidence"] == "measured" and (row["n"] or (row["config_id"], row["machine"]) not in answered)
    ]


def _findings(machine: str, model: str, sides: Sequence[Side], results: Results) -> list[Finding]:
    return [Finding(claim, machine, model, tuple(_told(_comparisons(claim, sides), results))) for claim in CLAIMS]


def _told(comparisons: Iterable[Comparison], results: Results) -> Iterable[Comparison]:
    """Add to comparisons of one claim what their runs tell, all of them taken together."""
    asked = list(comparisons)
    judged = {place: tested for place, one in enumerate(asked) if (tested := contrast(one, results))}
    effects = dict(zip(judged, stats.verdicts(list(judged.values())), strict=True))
    return (one._replace(effect=effects.get(place, "unknown")) for place, one in enumerate(asked))


def contrast(comparison: Comparison, results: Results) -> stats.Comparison | None:
    """Return how step times of the second configuration compare with the first's, blocked where both ran in the same
    allocations; None where one has no number, or too few steps to tell."""
    before, after = results.runs(comparison.before), results.runs(comparison.after)
    if not before or not after:
        return None
    blocked = before.keys() == after.keys()
    other = [before[name] for name in (after if blocked else before)]
    tested = stats.compare(list(after.values()), other, blocked=blocked)
    return tested if tested.interval else None


def _spans_nodes(found: Sequence[Finding]) -> bool:
    """Whether node counts are compared, or stages on several nodes."""
    rows = [(comparison.before, comparison.after) for finding in found for comparison in finding.comparisons]
    return any(before["nodes"] > 1 or before["nodes"] != after["nodes"] for before, after in rows)


def _comparisons(claim: Claim, sides: Sequence[Side]) -> Iterable[Comparison]:
    groups: dict[str, list[Side]] = {}
    for side in sides:
        groups.setdefault(claim.alike(side.spec), []).append(side)
    for members in groups.values():
        for one, other in itertools.permutations(members, 2):
            if claim.compared(one.spec, other.spec) and _one_environment(one.row, other.row):
                yield _comparison(claim, one, other)


def _one_environment(one: Row, other: Row) -> bool:
    """Whether two rows are of one class; a run that failed before it knew its own stands with any."""
    classes = {one["environment_id"], other["environment_id"]} - {None}
    return len(classes) <= 1


def _comparison(claim: Claim, one: Side, other: Side) -> Comparison:
    differ = (claim.differ(one.spec), claim.differ(other.spec))
    return Comparison(one.row, other.row, differ, _held(one, other))


def _held(one: Side, other: Side) -> str:
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


def _plain(finding: Finding, comparison: Comparison) -> Row:
    numbers = ("config_id", "n", "step_s", "step_s_low", "step_s_high", "interval_kind", "interval_level", "flags")
    sides = {"before": comparison.before, "after": comparison.after}
    return {
        "claim": finding.claim.id,
        "model": finding.model,
        "machine": finding.machine,
        "environment_id": comparison.before["environment_id"] or comparison.after["environment_id"],
        "held": comparison.held,
        "before": comparison.differ[0],
        "after": comparison.differ[1],
        **{f"{side}_{name}": row[name] for side, row in sides.items() for name in numbers},
        "ratio": comparison.ratio,
        "effect": comparison.effect,
    }


# -- the claims


def _but_nodes(spec: RunSpec) -> str:
    return canonical(spec.model_copy(update={"nodes": 1, "batch": Batch(micro=spec.batch.micro)}))


def _but_engine(spec: RunSpec) -> str:
    return canonical(spec.model_copy(update={"engine": EngineSpec(name="any", backend="any")}))


def _more_nodes(one: RunSpec, other: RunSpec) -> bool:
    """Whether nodes are added, to the same work per device (weak scaling) or per step (strong scaling)."""
    alike = one.accumulation == other.accumulation or one.global_batch == other.global_batch
    return alike and one.nodes < other.nodes


def _higher_stage(one: RunSpec, other: RunSpec) -> bool:
    return (one.engine.name, other.engine.name) in itertools.combinations(_STAGES, 2)


def _two_and_three(one: RunSpec, other: RunSpec) -> bool:
    return (one.engine.name, other.engine.name) == ("zero2", "zero3")


def _not_consistently_faster(counts: Mapping[Effect, int]) -> Verdict:
    """One comparison that became slower shows it; only all of them faster speak against it."""
    if counts.get("slower"):
        return "as in the study"
    return "not as in the study" if set(counts) == {"faster"} else "cannot be told"


def _always_slower(counts: Mapping[Effect, int]) -> Verdict:
    """All of them must be slower; one that is faster speaks against it."""
    if counts.get("faster"):
        return "not as in the study"
    return "as in the study" if set(counts) == {"slower"} else "cannot be told"


def _nodes(spec: RunSpec) -> str:
    return f"{spec.nodes} node{'s' if spec.nodes > 1 else ''}"


def _engine(spec: RunSpec) -> str:
    return spec.engine.name


CLAIMS = (
    Claim(
        "C1", "adding nodes did not consistently increase steps per second, because of communication overhead",
        _but_nodes, _more_nodes, _nodes, _not_consistently_faster,
    ),
    Claim(
        "C2", "progressing through ZeRO stages did not consistently increase steps per second",
        _but_engine, _higher_stage, _engine, _not_consistently_faster,
    ),
    Claim(
        "C3", "ZeRO-2 had lower seconds per step than ZeRO-3 for mT5-XXL (13B) at every node count tried",
        _but_engine, _two_and_three, _engine, _always_slower,
    ),
)  # fmt: skip
"""As the summary page of the paper has them. Its tables of results are not at hand, so no number of its is shown."""
