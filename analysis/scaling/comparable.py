"""Which rows of the summary a curve may join: those that differ in nodes and batch only, one thing of the batch held.

A machine and an environment class never mix; the class holds the devices per node and not the nodes, so more nodes of
the same kind stay in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from analysis import questions
from analysis.questions import assign_environments, describe_series, drop_retried, may_be_same
from analysis.results import Results
from analysis.scaling.time_per_sample import read_once
from analysis.summary import Row
from analysis.table import list_rows
from bench.core.formatting import format_count
from bench.core.spec import Batch, RunSpec, canonical

Law = Literal["strong", "weak"]
"""Strong: every node count does the same global batch. Weak: every device makes as many micro-steps per step; at equal
micro-batch it does the same work."""
BatchChoice = Literal["equal micro-batch", "best micro-batch"]
"""Two questions: what nodes bring to one setting, and to who sets the micro-batch anew for each node count."""

LAWS: Mapping[Law, str] = {"strong": "global_batch", "weak": "accumulation"}
"""What is held besides, a column of the summary."""


class Track(NamedTuple):
    """The rows of one curve by node count, the smallest first; at equal micro-batch one row each."""

    law: Law
    batch: BatchChoice
    spec: RunSpec  # of any of its rows
    by_nodes: Mapping[int, Sequence[Row]]

    @property
    def any_row(self) -> Row:
        return next(iter(self.by_nodes.values()))[0]

    @property
    def environment_id(self) -> str | None:
        """None where all failed before theirs was known."""
        known = (row["environment_id"] for rows in self.by_nodes.values() for row in rows)
        return next((name for name in known if name), None)

    @property
    def fixed_work(self) -> int:
        """The global batch of a strong track, the accumulation of a weak one."""
        return int(self.any_row[LAWS[self.law]])

    @property
    def micro(self) -> int | None:
        return int(self.any_row["micro"]) if self.batch == "equal micro-batch" else None

    @property
    def name(self) -> str:
        """Engine, micro-batch and work, e.g. "zero2, micro 4, 256 samples per step"."""
        micro = "best micro-batch" if self.micro is None else f"micro {self.micro}"
        return ", ".join([describe_series(self.any_row | {"accumulation": 1}), micro, self._work()])

    def _work(self) -> str:
        if self.law == "strong":
            return f"{self.fixed_work} samples per step"
        if self.micro is None:
            return format_count(self.fixed_work, "micro-step")
        return f"{self.micro * self.fixed_work} samples per step and device"


@read_once
def list_tracks(results: Results) -> tuple[Track, ...]:
    """Return every track of at least two node counts, in the order of the summary.

    The best micro-batch is a question only where a node count was tried with two, and where one was tried at two node
    counts: else each had the one that its batch left it.
    """
    found = (_list_tracks_of_law(results, rows, law) for rows in list_families(results) for law in LAWS)
    return tuple(track for of_law in found for track in of_law)


def list_families(results: Results) -> list[list[Row]]:
    """Return the measured rows that are equal in everything but nodes and batch, one of each nodes and batch.

    Early failures stand with those that asked the same (`analysis.early_failures`).
    """
    measured = drop_retried([row for row in list_rows(results.summary) if row["evidence"] == "measured"])
    family_keys = {
        row["config_id"]: canonical(_drop_nodes_and_batch(results.specs[row["config_id"]])) for row in measured
    }
    groups: dict[tuple[str | None, ...], list[Row]] = {}
    for row, environment_id in assign_environments(
        measured, lambda row: (row["machine"], family_keys[row["config_id"]])
    ):
        groups.setdefault((row["machine"], family_keys[row["config_id"]], environment_id), []).append(row)
    return list(groups.values())


def differ_in_engine(one: Track, other: Track) -> bool:
    """Whether two tracks differ in the engine and nothing else (`analysis.engines`)."""
    same = (one.law, one.batch, one.fixed_work, one.micro, one.any_row["machine"])
    return (
        same == (other.law, other.batch, other.fixed_work, other.micro, other.any_row["machine"])
        and may_be_same(one.environment_id, other.environment_id)
        and questions.differ_in_engine(_drop_nodes_and_batch(one.spec), _drop_nodes_and_batch(other.spec))
    )


def _list_tracks_of_law(results: Results, rows: Sequence[Row], law: Law) -> Iterator[Track]:
    for fixed_work in _group_by_column(rows, LAWS[law]):
        equal = [_group_by_nodes(of_micro) for of_micro in _group_by_column(fixed_work, "micro")]
        equal = [by_nodes for by_nodes in equal if len(by_nodes) > 1]
        best = (
            [_group_by_nodes(fixed_work)]
            if equal and any(len(tried) > 1 for tried in _group_by_nodes(fixed_work).values())
            else []
        )
        spec = results.specs[fixed_work[0]["config_id"]]
        yield from (Track(law, "equal micro-batch", spec, by_nodes) for by_nodes in equal)
        yield from (Track(law, "best micro-batch", spec, by_nodes) for by_nodes in best)


def _group_by_nodes(rows: Sequence[Row]) -> dict[int, list[Row]]:
    return {
        int(group[0]["nodes"]): group for group in _group_by_column(sorted(rows, key=lambda row: row["nodes"]), "nodes")
    }


def _group_by_column(rows: Sequence[Row], name: str) -> list[list[Row]]:
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return list(groups.values())


def _build_family_key(spec: RunSpec) -> str:
    return canonical(_drop_nodes_and_batch(spec))


def _drop_nodes_and_batch(spec: RunSpec) -> RunSpec:
    return spec.model_copy(update={"nodes": 1, "batch": Batch(micro=1)})
