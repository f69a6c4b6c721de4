"""The rule that decides when a set of runs tests a claim of the study; what falls short of it is an analogue."""

from collections.abc import Iterable, Iterator

from analysis.claims import Comparison, Finding
from analysis.formats.numbers import significant
from analysis.ledger.published import read
from analysis.stats.compare import LEAST_RUNS
from analysis.summary import Row

SMALLEST, LARGEST = 580e6, 13e9
"""Parameters of the study's models, by its abstract."""

TEXT = (
    "A set tests a claim only as the study did: an mT5 model of 580M to 13B parameters (the count of a published "
    "shape; for C3 mT5-XXL), on GPUs of one machine and environment class, on two or more node counts, for C1 with "
    f"the same work per step on all of them, and with {LEAST_RUNS} or more independent repeats of each side, compared "
    "with Holm's correction. Anything else is an analogue and tests nothing, whatever it shows. Which GPUs and node "
    "counts the study had is not known here, nor is it required."
)

_XXL = "mt5_xxl"
_OUT_OF_MEMORY = ("oom", "host_oom")


def testing(finding: Finding) -> list[Comparison]:
    """Return the comparisons that a test of the claim consists of; those with too few repeats are among them, those of
    a side that cannot run for want of memory are not."""
    return [
        comparison
        for comparison in finding.comparisons
        if not any(row["outcome"] in _OUT_OF_MEMORY for row in _sides(comparison)) and _same_work(finding, comparison)
    ]


def repeated(comparison: Comparison) -> bool:
    """Whether both sides have enough independent repeats to speak for others."""
    return all(row["n"] >= LEAST_RUNS for row in _sides(comparison))


def obstacles(finding: Finding) -> list[str]:
    """Return in which respects a finding falls short of the rule; none where it tests its claim."""
    if not finding.comparisons:
        return ["nothing that differs only in this was measured"]
    return list(_obstacles(finding))


def studied(parameters: int | None) -> str | None:
    """Return the mT5 model within the study's range that has so many parameters; None if there is none."""
    shapes = {row["parameters"]: row["model"] for row in read("t5_shapes").rows if row["model"].startswith("mt5_")}
    return shapes.get(str(parameters)) if SMALLEST <= (parameters or 0) <= LARGEST else None


def millions(parameters: int | None) -> str:
    """Return a number of parameters for a reader."""
    return f"{significant(parameters / 1e6, 3)}M parameters" if parameters else "parameters not counted"


def _obstacles(finding: Finding) -> Iterator[str]:
    numbers = [row for comparison in finding.comparisons for row in _sides(comparison) if row["n"]]
    counts = {row["parameters"] for row in numbers}
    model = studied(counts.pop()) if len(counts) == 1 else None
    if model is None:
        told = millions(numbers[0]["parameters"]) if numbers else "no run ended ok"
        yield f"{finding.model} ({told}) is no mT5 of 580M to 13B"
    elif finding.claim.id == "C3" and model != _XXL:
        yield f"{finding.model} is not mT5-XXL"
    if any(row["peak_reserved_bytes"] is None for row in numbers):  # known wherever the device is a GPU
        yield "not on GPUs"
    tests = testing(finding)
    if finding.comparisons and not any(_same_work(finding, comparison) for comparison in finding.comparisons):
        yield "the work per step grew with the nodes, so that no more steps per second could be expected"
    elif len(_nodes(tests)) < 2:
        yield "one node count only"
    if not any(map(repeated, tests)):
        yield f"fewer than {LEAST_RUNS} independent repeats a side"


def _same_work(finding: Finding, comparison: Comparison) -> bool:
    """Whether both sides do the same work per step; stages always do, more nodes only in strong scaling."""
    before, after = _sides(comparison)
    return finding.claim.id != "C1" or before["global_batch"] == after["global_batch"]


def _nodes(comparisons: Iterable[Comparison]) -> set[int]:
    return {row["nodes"] for comparison in comparisons for row in _sides(comparison)}


def _sides(comparison: Comparison) -> tuple[Row, Row]:
    return comparison.before, comparison.after
