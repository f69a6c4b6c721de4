"""Claims and published numbers of papers (`results/published`), and the configurations that each claim compares."""

import csv
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from analysis.claims import Claim, Effect, Verdict
from analysis.questions import describe_engine, dump_without_engine, may_be_compared
from bench.core.errors import UserError, suggest_nearest
from bench.core.formatting import format_count
from bench.core.spec import Batch, EngineSpec, Parallel, RunSpec, canonical


class Published(NamedTuple):
    """Contents of one file of published numbers: their source and setting as text, and the table cells as printed in
    the source."""

    source: str
    rows: tuple[dict[str, str], ...]


def find_published_folder() -> Path:
    """Return the folder of files with published numbers: `results/published` in a checkout, `analysis/published` in an
    installed wheel."""
    inside = Path(__file__).parents[1] / "published"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "results" / "published"


def list_published() -> list[str]:
    """Return the names of the files with published numbers, without the suffix `.csv`."""
    return sorted(path.stem for path in find_published_folder().glob("*.csv"))


def read_published(name: str) -> Published:
    """Read one file of published numbers by name; its leading comment lines state the source.

    Raise UserError if the file does not exist.
    """
    path = find_published_folder() / f"{name}.csv"
    if not path.is_file():
        raise UserError(name, f"no such file in {find_published_folder()}", suggest_nearest(name, list_published()))
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ") for line in lines if line.startswith("#")]
    return Published(" ".join(comments), tuple(csv.DictReader(lines[len(comments) :])))


STUDY = "arXiv 2310.05350"
"""The ZeRO study. Its tables of results are not available, so none of its numbers is shown."""
FRONTIER = "arXiv 2312.12705"
LAYERED = "arXiv 2106.02679"

_STAGES = ("zero0", "zero1", "zero2", "zero3")
_SHARDED = ("zero3", "fsdp")
"""Engines that shard the weights and gather them again for every micro-batch."""


def _dump(spec: RunSpec, **changes: Any) -> str:
    """Return a spec as canonical text, for comparison with other specs. Gradient accumulation is left out, and the
    fields in `changes` get the given values."""
    return canonical(spec.model_copy(update={"batch": Batch(micro=spec.batch.micro), **changes}))


def _dump_without_layout(spec: RunSpec) -> str:
    """Return a spec as text without engine, parallel layout and gradient accumulation. The global batch is kept. So
    specs with equal texts do the same work per step with the same micro-batch."""
    return f"{spec.global_batch} {_dump(spec, engine=EngineSpec(name='any', backend='any'), parallel=Parallel())}"


def _dump_without_stages(spec: RunSpec) -> str:
    """Return a spec as text without its number of nodes and its number of pipeline stages."""
    return _dump(spec, nodes=1, parallel=spec.parallel.model_copy(update={"pipeline": 1}))


def _has_more_nodes(one: RunSpec, other: RunSpec) -> bool:
    """Return True if `other` has more nodes than `one` and equal work per device (weak scaling) or per step (strong
    scaling)."""
    same_work = one.accumulation == other.accumulation or one.global_batch == other.global_batch
    return same_work and one.nodes < other.nodes


def _compare_stages(*pairs: tuple[str, str]) -> Callable[[RunSpec, RunSpec], bool]:
    """Return a function that takes two specs and decides whether they may be compared. It returns True if their engines
    form one of the pairs `pairs`, and if all options that both engines have are equal."""
    return lambda one, other: (one.engine.name, other.engine.name) in pairs and may_be_compared(one, other)


def _is_layered(one: RunSpec, other: RunSpec) -> bool:
    """Return True if both specs accumulate gradients, `one` shards the weights, and `other` uses layered gradient
    accumulation (engine `lga`)."""
    return one.engine.name in _SHARDED and other.engine.name == "lga" and min(one.accumulation, other.accumulation) > 1


def _is_modular(one: RunSpec, other: RunSpec) -> bool:
    names = (one.engine.name, other.engine.name) == ("pipeline", "modular")
    return names and one.parallel.pipeline == other.parallel.pipeline


def _slices_across_nodes(one: RunSpec, other: RunSpec) -> bool:
    """Return True if the tensor-parallel degree of `other` is higher than that of `one` and higher than the number of
    devices per node."""
    ours, theirs = one.parallel, other.parallel
    alike = ours.pipeline == theirs.pipeline == 1 and other.engine.name == "pipeline"
    from_copies = one.engine.name in ("ddp", "pipeline")
    return alike and from_copies and ours.tensor < theirs.tensor and theirs.tensor > other.devices_per_node


def _has_more_stages(one: RunSpec, other: RunSpec) -> bool:
    """Return True if `other` has more pipeline stages than `one`, and the same engine and number of micro-batches per
    step. Both specs must use a pipeline."""
    alike = one.engine == other.engine and one.accumulation == other.accumulation
    return alike and 1 < one.parallel.pipeline < other.parallel.pipeline


SMALL: Mapping[Effect, Effect] = {
    "faster": "faster by less than 3 %",
    "slower": "slower by less than 3 %",
    "less": "less by less than 3 %",
    "more": "more by less than 3 %",
}
# A configuration that ran out of memory counts as slower for claims "always slower". It does not count as
# slower for claims C1 and C2 ("not consistently faster"), because these are about measured steps per second.
_NEVER_RAN: Mapping[Effect, Effect] = {"slower": "second out of memory", "faster": "first out of memory"}


def _not_consistently_faster(counts: Mapping[Effect, int]) -> Verdict:
    """Judge the claim "not consistently faster" from the number of comparisons with each effect. The claim is supported
    if the second configuration is slower by 3 % or more in at least one comparison. It is contradicted if the second
    configuration is faster in all comparisons.

    A configuration that ran out of memory does not count as slower.
    """
    if counts.get("slower"):
        return "reproduced"
    return "contradicted" if _are_all(counts, "faster") else "cannot be told"


def _always(effect: Effect, against: Effect) -> Callable[[Mapping[Effect, int]], Verdict]:
    """Return the function that judges the claim "always `effect`". The claim is supported if all comparisons have
    this effect. It is contradicted if any comparison has the opposite effect `against`, of 3 % or more.

    In all other cases, such as a comparison without a detected difference, the verdict is "cannot be told". A
    configuration that ran out of memory counts as slower.
    """

    def judge(counts: Mapping[Effect, int]) -> Verdict:
        if counts.get(against) or counts.get(_NEVER_RAN.get(against, against)):
            return "contradicted"
        return "reproduced" if _are_all(counts, effect) else "cannot be told"

    return judge


def _are_all(counts: Mapping[Effect, int], effect: Effect) -> bool:
    """Return True if all comparisons support the effect `effect`, and at least one comparison detected it. A comparison
    supports `effect` if it detected this effect, even below 3 %. A comparison also supports `effect` if the
    configuration that should be slower ran out of memory."""
    detected = {effect, SMALL[effect]}
    return bool(detected & set(counts)) and set(counts) <= detected | {_NEVER_RAN.get(effect, effect)}


def _name_nodes(spec: RunSpec, other: RunSpec) -> str:
    return format_count(spec.nodes, "node")


def _name_layout(spec: RunSpec, other: RunSpec) -> str:
    at = spec.parallel
    kinds = {"tensor": at.tensor, "pipeline": at.pipeline}
    degrees = " × ".join(f"{name} {degree}" for name, degree in kinds.items() if degree > 1)
    name = spec.engine.name
    return degrees if name == "pipeline" and degrees else f"{name}, {degrees}" if degrees else name


CLAIMS = {
    STUDY: (
        Claim(
            "C1", "adding nodes did not consistently increase steps per second, because of communication overhead",
            STUDY, partial(_dump, nodes=1), _has_more_nodes, _name_nodes, _not_consistently_faster,
        ),
        Claim(
            "C2", "progressing through ZeRO stages did not consistently increase steps per second",
            STUDY, dump_without_engine, _compare_stages(*itertools.combinations(_STAGES, 2)), describe_engine,
            _not_consistently_faster,
        ),
        Claim(
            "C3", "ZeRO-2 had lower seconds per step than ZeRO-3 for mT5-XXL (13B) at every node count tried",
            STUDY, dump_without_engine, _compare_stages(("zero2", "zero3")), describe_engine,
            _always("slower", "faster"),
        ),
    ),
    FRONTIER: (
        Claim(
            "F1", "tensor parallelism over more devices than a node has makes steps slower",
            FRONTIER, _dump_without_layout, _slices_across_nodes, _name_layout, _always("slower", "faster"),
        ),
        Claim(
            "F2", "more pipeline stages at a fixed number of micro-batches leave ranks idle for longer",
            FRONTIER, _dump_without_stages, _has_more_stages, _name_layout, _always("more", "less"), "idle_share",
        ),
    ),
    LAYERED: (
        Claim(
            "L1", "layered gradient accumulation moves less data than accumulation with sharded states",
            LAYERED, _dump_without_layout, _is_layered, _name_layout, _always("less", "more"), "moved_bytes",
        ),
        Claim(
            "L2", "with it a fast connection between nodes is not necessary: on a slow one its steps are faster",
            LAYERED, _dump_without_layout, _is_layered, _name_layout, _always("faster", "slower"), of_slow_network=True,
        ),
        Claim(
            "L3", "ranks of a modular pipeline are idle for less of the time, at equal micro-batches",
            LAYERED, _dump_without_layout, _is_modular, _name_layout, _always("less", "more"), "idle_share",
        ),
    ),
}  # fmt: skip
"""Claims by publication. Those of the ZeRO study are from its summary page; those of the other papers are from their
abstracts and listed observations."""
