"""Numbers and claims of papers (`results/published`), and which configurations speak for or against each claim."""

import csv
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from analysis import questions
from analysis.claims import Claim, Effect, Verdict
from bench.core.errors import UserError, suggest_nearest
from bench.core.formatting import format_count
from bench.core.spec import Batch, EngineSpec, Parallel, RunSpec, canonical


class Published(NamedTuple):
    """One file: where its numbers come from and in which setting, and its cells as they are printed there."""

    source: str
    rows: tuple[dict[str, str], ...]


def find_published_folder() -> Path:
    """Return the folder of the files: in a checkout beside the packages, in a wheel inside `analysis`."""
    inside = Path(__file__).parents[1] / "published"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "results" / "published"


def list_published() -> list[str]:
    """Return the names of the files, without their ending."""
    return sorted(path.stem for path in find_published_folder().glob("*.csv"))


def read_published(name: str) -> Published:
    """Read one file by its name; comment lines at its head are its source. UserError where there is none."""
    path = find_published_folder() / f"{name}.csv"
    if not path.is_file():
        raise UserError(name, f"no such file in {find_published_folder()}", suggest_nearest(name, list_published()))
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ") for line in lines if line.startswith("#")]
    return Published(" ".join(comments), tuple(csv.DictReader(lines[len(comments) :])))


STUDY = "arXiv 2310.05350"
"""Of whose tables of results none is at hand, so that no number of its is shown."""
FRONTIER = "arXiv 2312.12705"
LAYERED = "arXiv 2106.02679"

_STAGES = ("zero0", "zero1", "zero2", "zero3")
_SHARDED = ("zero3", "fsdp")
"""Engines that hold no whole copy of the weights, and gather them again for every micro-batch."""


def _but_nodes(spec: RunSpec) -> str:
    return canonical(spec.model_copy(update={"nodes": 1, "batch": Batch(micro=spec.batch.micro)}))


def _more_nodes(one: RunSpec, other: RunSpec) -> bool:
    """Whether nodes are added, to the same work per device (weak scaling) or per step (strong scaling)."""
    same_work = one.accumulation == other.accumulation or one.global_batch == other.global_batch
    return same_work and one.nodes < other.nodes


def _higher_stage(one: RunSpec, other: RunSpec) -> bool:
    stages = (one.engine.name, other.engine.name) in itertools.combinations(_STAGES, 2)
    return stages and questions.may_be_compared(one, other)


def _two_and_three(one: RunSpec, other: RunSpec) -> bool:
    stages = (one.engine.name, other.engine.name) == ("zero2", "zero3")
    return stages and questions.may_be_compared(one, other)


def _layered(one: RunSpec, other: RunSpec) -> bool:
    """Whether both accumulate over shared states, the second layer by layer."""
    return one.engine.name in _SHARDED and other.engine.name == "lga" and min(one.accumulation, other.accumulation) > 1


def _modular(one: RunSpec, other: RunSpec) -> bool:
    names = (one.engine.name, other.engine.name) == ("pipeline", "modular")
    return names and one.parallel.pipeline == other.parallel.pipeline


def _slices_between_nodes(one: RunSpec, other: RunSpec) -> bool:
    """Whether matrices are shared by more ranks, and by more than a node has."""
    ours, theirs = one.parallel, other.parallel
    alike = ours.pipeline == theirs.pipeline == 1 and other.engine.name == "pipeline"
    from_copies = one.engine.name in ("ddp", "pipeline")
    return alike and from_copies and ours.tensor < theirs.tensor and theirs.tensor > other.devices_per_node


def _more_stages(one: RunSpec, other: RunSpec) -> bool:
    """Whether the layers are divided among more ranks, with the same micro-batches for each copy of the model."""
    alike = one.engine == other.engine and one.accumulation == other.accumulation
    return alike and 1 < one.parallel.pipeline < other.parallel.pipeline


def _but_layout(spec: RunSpec) -> str:
    """Return all of a spec but its engine and layout: how many samples a step has, not how they are divided."""
    engine = EngineSpec(name="any", backend="any")
    alike = {"engine": engine, "parallel": Parallel(), "batch": Batch(micro=spec.batch.micro)}
    return f"{spec.global_batch} {canonical(spec.model_copy(update=alike))}"


def _but_stages(spec: RunSpec) -> str:
    """Return all of a spec but how many ranks share the layers, and so how many there are."""
    parallel = spec.parallel.model_copy(update={"pipeline": 1})
    alike = {"nodes": 1, "parallel": parallel, "batch": Batch(micro=spec.batch.micro)}
    return canonical(spec.model_copy(update=alike))


SMALL: Mapping[Effect, Effect] = {
    "faster": "faster by less than 3 %",
    "slower": "slower by less than 3 %",
    "less": "less by less than 3 %",
    "more": "more by less than 3 %",
}
_NEVER_RAN: Mapping[Effect, Effect] = {"slower": "second out of memory", "faster": "first out of memory"}


def _not_consistently_faster(counts: Mapping[Effect, int]) -> Verdict:
    """One comparison that became slower by 3 % or more shows it; only all of them faster speak against it. A side that
    ran out of memory after a step further is no step that became slower."""
    if _has_any(counts, "slower"):
        return "as in the study"
    return "not as in the study" if _are_all(counts, "faster") else "cannot be told"


def _always(effect: Effect, against: Effect) -> Callable[[Mapping[Effect, int]], Verdict]:
    """All of them must have the effect; one with the opposite, by 3 % or more, speaks against it. No difference, or one
    below 3 % the other way, says neither."""

    def judge(counts: Mapping[Effect, int]) -> Verdict:
        if _has_any(counts, against, _NEVER_RAN.get(against, against)):
            return "not as in the study"
        return "as in the study" if _are_all(counts, effect) else "cannot be told"

    return judge


def _has_any(counts: Mapping[Effect, int], *effects: Effect) -> bool:
    return any(counts.get(effect) for effect in effects)


def _are_all(counts: Mapping[Effect, int], effect: Effect) -> bool:
    """Whether all comparisons have an effect, of any size, and not only because a side ran out of memory."""
    detected = {effect, SMALL[effect]}
    return bool(detected & set(counts)) and set(counts) <= detected | {_NEVER_RAN.get(effect, effect)}


def _nodes(spec: RunSpec, other: RunSpec) -> str:
    return format_count(spec.nodes, "node")


def _engine(spec: RunSpec, other: RunSpec) -> str:
    return questions.describe_engine(spec, other)


def _layout(spec: RunSpec, other: RunSpec) -> str:
    at = spec.parallel
    kinds = {"tensor": at.tensor, "pipeline": at.pipeline}
    degrees = " × ".join(f"{name} {degree}" for name, degree in kinds.items() if degree > 1)
    name = spec.engine.name
    return degrees if name == "pipeline" and degrees else f"{name}, {degrees}" if degrees else name


CLAIMS = {
    STUDY: (
        Claim(
            "C1", "adding nodes did not consistently increase steps per second, because of communication overhead",
            STUDY, _but_nodes, _more_nodes, _nodes, _not_consistently_faster,
        ),
        Claim(
            "C2", "progressing through ZeRO stages did not consistently increase steps per second",
            STUDY, questions.dump_without_engine, _higher_stage, _engine, _not_consistently_faster,
        ),
        Claim(
            "C3", "ZeRO-2 had lower seconds per step than ZeRO-3 for mT5-XXL (13B) at every node count tried",
            STUDY, questions.dump_without_engine, _two_and_three, _engine, _always("slower", "faster"),
        ),
    ),
    FRONTIER: (
        Claim(
            "F1", "tensor parallelism over more devices than a node has makes steps slower",
            FRONTIER, _but_layout, _slices_between_nodes, _layout, _always("slower", "faster"),
        ),
        Claim(
            "F2", "more pipeline stages at a fixed number of micro-batches leave ranks idle for longer",
            FRONTIER, _but_stages, _more_stages, _layout, _always("more", "less"), "idle_share",
        ),
    ),
    LAYERED: (
        Claim(
            "L1", "layered gradient accumulation moves less data than accumulation with sharded states",
            LAYERED, _but_layout, _layered, _layout, _always("less", "more"), "moved_bytes",
        ),
        Claim(
            "L2", "with it a fast connection between nodes is not necessary: on a slow one its steps are faster",
            LAYERED, _but_layout, _layered, _layout, _always("faster", "slower"), of_slow_network=True,
        ),
        Claim(
            "L3", "ranks of a modular pipeline are idle for less of the time, at equal micro-batches",
            LAYERED, _but_layout, _modular, _layout, _always("less", "more"), "idle_share",
        ),
    ),
}  # fmt: skip
"""By source, as the summary page of the first and the abstracts and observations of the others have them."""
