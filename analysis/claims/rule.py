"""The rule that decides when a set of runs tests a claim, and what of a study's settings a set covers.

What falls short of the rule is an analogue.
"""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from analysis.claims import ClaimComparison, ClaimFinding, Starts
from analysis.claims.sources import STUDY, read_published
from analysis.formats import format_significant
from analysis.results import Results
from analysis.stats.compare import INTEREST, LEAST_RUNS
from analysis.summary import Row
from analysis.table import list_rows
from bench.core.spec import RunSpec

SMALLEST, LARGEST = 580e6, 13e9
"""Parameters of the study's models, by its abstract."""
LARGE = 1e9
"""Parameters from which on a model is one of those that the other sources speak of."""

DOUBTFUL = ("short", "straggler", "busy")
"""Flags of runs that test no claim: of a window too short to be believed, or of a machine that was not as it should be.
Busy runs take no part beside others of their configuration; a side is flagged where it has no others."""

TEXT = (
    f"A set tests a claim of {STUDY} only as that study did: an mT5 model of 580M to 13B parameters (the count of a "
    "published shape; for C3 mT5-XXL), on GPUs of one machine and environment class, on two or more node counts, for "
    f"C1 with the same work per step on all of them, with {LEAST_RUNS} or more independent repeats of each side, "
    f"compared with correction for their number, that ran in one allocation or in overlapping time, "
    f"of runs without the flags {', '.join(DOUBTFUL)} and of repeats that all ended ok, and with every option of two "
    "stages alike that both know, and as its preset has it where one does. It tests one of another source with a "
    "model of a billion parameters or more on several nodes with GPUs, and as many repeats without those flags; one "
    "about a slow network by two that were compared on a faster network as well. A difference below "
    f"{100 * INTEREST:g} % decides nothing against a claim, and equality decides nothing at all. A side that ran out "
    "of memory counts with its fastest micro-batch that fits, and where none does the other side is the faster one. "
    "Anything else is an analogue and tests nothing, whatever it shows. Which GPUs and node counts the study had is "
    "not known here, nor is it required."
)

_XXL = "mt5_xxl"


def testing(finding: ClaimFinding) -> list[ClaimComparison]:
    """Return the comparisons that a test of the claim consists of; those with too few repeats are among them."""
    return [comparison for comparison in finding.comparisons if not _outside(finding, comparison)]


def list_rejected(finding: ClaimFinding) -> list[str]:
    """Return of every other comparison why it is no part of a test."""
    return [reason for comparison in finding.comparisons if (reason := _outside(finding, comparison))]


def repeated(comparison: ClaimComparison) -> bool:
    """Whether both sides have enough independent repeats to speak for others."""
    return comparison.tested is not None and comparison.tested.decides


def obstacles(finding: ClaimFinding) -> list[str]:
    """Return in which respects a finding falls short of the rule; none where it tests its claim."""
    if not finding.comparisons:
        return ["nothing that differs only in this was measured"]
    return list(_obstacles(finding))


def studied(parameters: int | None) -> str | None:
    """Return the mT5 model within the study's range that has so many parameters; None if there is none."""
    shapes = {
        row["parameters"]: row["model"] for row in read_published("t5_shapes").rows if row["model"].startswith("mt5_")
    }
    return shapes.get(str(parameters)) if SMALLEST <= (parameters or 0) <= LARGEST else None


def millions(parameters: int | None) -> str:
    """Return a number of parameters for a reader."""
    return f"{format_significant(parameters / 1e6, 3)}M parameters" if parameters else "parameters not counted"


def _obstacles(finding: ClaimFinding) -> Iterator[str]:
    yield from (_obstacles_of_study if finding.claim.source == STUDY else _obstacles_elsewhere)(finding)
    tests = testing(finding)
    if not tests:
        yield from dict.fromkeys(list_rejected(finding))
        return
    nodes = {row["nodes"] for comparison in tests for row in _sides(comparison)}
    if len(nodes) < 2 and finding.claim.source == STUDY:
        yield "one node count only"
    if not any(map(repeated, tests)):
        yield f"fewer than {LEAST_RUNS} independent repeats a side"


def _obstacles_elsewhere(finding: ClaimFinding) -> Iterator[str]:
    numbers = [row for comparison in finding.comparisons for row in _sides(comparison) if row["n"]]
    least = min((row["parameters"] or 0 for row in numbers), default=0)
    if least < LARGE:
        yield f"{finding.model} ({millions(least)}) has less than a billion"
    if not numbers or any(row["peak_reserved_bytes"] is None for row in numbers):
        yield "not on GPUs"


def _obstacles_of_study(finding: ClaimFinding) -> Iterator[str]:
    numbers = [row for comparison in finding.comparisons for row in _sides(comparison) if row["n"]]
    counts = {row["parameters"] for row in numbers}
    model = studied(counts.pop()) if len(counts) == 1 else None
    if model is None:
        size_text = millions(numbers[0]["parameters"]) if numbers else "no run ended ok"
        yield f"{finding.model} ({size_text}) is no mT5 of 580M to 13B"
    elif finding.claim.id == "C3" and model != _XXL:
        yield f"{finding.model} is not mT5-XXL"
    if any(row["peak_reserved_bytes"] is None for row in numbers):  # known wherever the device is a GPU
        yield "not on GPUs"


def _outside(finding: ClaimFinding, comparison: ClaimComparison) -> str:
    """Return why a comparison is no part of a test of its claim; empty if it is one."""
    before, after = _sides(comparison)
    if finding.claim.id == "C1" and before["global_batch"] != after["global_batch"]:
        return "the work per step grew with the nodes, so that no more steps per second could be expected"
    if not comparison.as_preset and finding.claim.source == STUDY:
        return "an option that only one of the two stages knows is not its preset's"
    if comparison.effect == "unknown" and any(not row["n"] for row in (before, after)):
        outcomes = dict.fromkeys(row["outcome"] for row in (before, after) if not row["n"])
        return f"a side has no number ({', '.join(outcomes)})"
    if finding.claim.of_slow_network and not comparison.is_slow_network:
        return "the same two were not compared on a faster network as well"
    flags = {flag for row in (before, after) for flag in row["flags"].split()}
    if "mixed" in flags:
        return "some repeats of a side failed"
    if doubtful := [flag for flag in DOUBTFUL if flag in flags]:
        return f"a side is flagged {', '.join(doubtful)}"
    return _explain_times_apart(*comparison.find_starts()) if comparison.tested else ""


def _explain_times_apart(before: Starts, after: Starts) -> str:
    """Return why a difference may be one of two days; empty where the runs of both sides shared an allocation, or some
    of each side started between two of the other's."""
    if {one.allocation for one in before} & {one.allocation for one in after}:
        return ""
    times = [[one.started_at for one in side] for side in (before, after)]
    if not all(times) or not all(all(side) for side in times):
        return "it is not recorded when a side ran"
    (first, last), (begin, end) = ((min(side), max(side)) for side in times)
    return "" if first <= end and begin <= last else "one side ran before the other"


def _sides(comparison: ClaimComparison) -> tuple[Row, Row]:
    return comparison.before, comparison.after


def covered(claim: str, results: Results) -> str:
    """Return what of the setting that a claim states was measured; empty for a claim that nothing is known of."""
    measured = [row for row in list_rows(results.table) if row["evidence"] == "measured"]
    specs = [results.specs[row["config_id"]] for row in measured]
    if claim == "C4":
        return _models({row["model"]: row["parameters"] for row in measured})
    values = {name: sorted(set(map(of, specs))) for name, of in _SETTINGS.get(claim, {}).items()}
    return "; ".join(f"{name} {', '.join(map(str, found)) or 'none'}" for name, found in values.items())


def _models(counts: Mapping[str, int | None]) -> str:
    within = [name for name, count in counts.items() if studied(count)]
    models = ", ".join(f"{name} ({millions(count)})" for name, count in counts.items())
    return f"{models or 'no model'}; of the mT5 models from 580M to 13B: {', '.join(within) or 'none'}"


_SETTINGS: Mapping[str, Mapping[str, Callable[[RunSpec], Any]]] = {
    "C5": {
        "micro-batch": attrgetter("batch.micro"), "samples per step": attrgetter("global_batch"),
        "learning rate": attrgetter("optimizer.lr"), "precision": attrgetter("precision"),
    },
    "C6": {"data": attrgetter("data.name"), "loader workers": attrgetter("data.workers")},
}  # fmt: skip
