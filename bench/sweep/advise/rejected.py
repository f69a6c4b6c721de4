"""What is not among the candidates of an answer, and why."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from bench.core.errors import UserError
from bench.core.formatting import describe_choice, format_count
from bench.predict.advice.candidates import Axes, CandidateSearch, Shortage
from bench.predict.memory import format_gigabytes

_SMALLER = "more nodes, a smaller model, or shorter sequences"


class Rejected(NamedTuple):
    what: str
    why: str


Remedy = Callable[[Sequence[Shortage]], str]
"""Returns in words what would make one of them fit, or nothing."""


def list_rejected(found: CandidateSearch, axes: Axes, remedy: Remedy) -> list[Rejected]:
    """Return a line for every engine and every node count of which nothing came into question."""
    engines = {candidate.spec.engine.name for candidate in found.candidates}
    nodes = {candidate.spec.nodes for candidate in found.candidates}
    short = [(s.spec.engine.name, s) for s in found.short if s.spec.engine.name not in engines]
    short += [(format_count(s.spec.nodes, "node"), s) for s in found.short if s.spec.nodes not in nodes]
    names = dict.fromkeys(name for name, _ in short)
    rejected = [_build_rejected(name, [s for other, s in short if other == name], remedy) for name in names]
    limit = axes.global_batch or axes.max_global_batch
    undivided = sorted({spec.data_parallel for spec in found.undivided if spec.nodes not in nodes})
    rule = f"{limit} samples per step cannot be divided among so many with these micro-batches"
    return rejected + [Rejected(format_count(ranks, "rank"), rule) for ranks in undivided]


def _build_rejected(name: str, short: Sequence[Shortage], remedy: Remedy) -> Rejected:
    helps = remedy(short)
    return Rejected(name, f"{_format_least_shortage(short)}; try {helps}" if helps else _format_least_shortage(short))


def build_nothing_fits_error(found: CandidateSearch, rejected: Sequence[Rejected], remedy: Remedy) -> UserError:
    """Return the error for a question without candidates."""
    if found.short:
        ways = [f"try {helps}"] if (helps := remedy(found.short)) else []
        return UserError("no point", _format_least_shortage(found.short), "; ".join([*ways, _SMALLER]))
    last = rejected[-1] if rejected else Rejected("batch", "leaves nothing to try")  # engines left out stand before it
    return UserError(last.what, last.why, "ask for another batch, or for other nodes")


def _format_least_shortage(short: Iterable[Shortage]) -> str:
    """Word the point that lacks least."""
    nearest = min(short, key=lambda shortage: shortage.bytes)
    what = f"{nearest.spec.engine.name}, {describe_choice(nearest.spec)}"
    if nearest.bytes <= 0:
        return f"does not fit: {what} ran out of memory when it was measured"
    return f"does not fit: {what} needs at least {format_gigabytes(nearest.bytes)} GB more than a device has"
