"""How points, amounts and files that cannot be read are worded."""

import sys
from collections.abc import Sequence

from bench.errors import printable
from bench.spec import RunSpec
from bench.store import Unreadable


def point(spec: RunSpec) -> str:
    """Describe what advice chooses, the engine aside."""
    batch = f"micro-batch {spec.batch.micro} × accumulation {spec.accumulation} = global {spec.global_batch}"
    return f"{count(spec.nodes, 'node')}, {batch}, {'' if spec.activation_checkpointing else 'no '}checkpointing"


def lengths(spec: RunSpec) -> str:
    """Describe the tokens of a sample, of every kind in the objective's order."""
    return f"{'/'.join(map(str, spec.sequence.values()))} tokens"


def overrides(spec: RunSpec) -> list[str]:
    """Return the same as overrides."""
    batch = [f"batch.micro={spec.batch.micro}", f"batch.accumulation={spec.accumulation}"]
    return [f"nodes={spec.nodes}", *batch, f"activation_checkpointing={str(spec.activation_checkpointing).lower()}"]


def count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def span(value: float, low: float, high: float) -> str:
    """Return a value with its interval."""
    return f"{number(value)} ({number(low)}–{number(high)})"


def percent(share: float) -> str:
    """Return a share of more or less, with its sign."""
    return f"{100 * share:+.{0 if abs(share) >= 0.1 else 1}f} %"


def name_unreadable(found: Sequence[Unreadable]) -> None:
    """Say on standard error which files count as not there."""
    if found:
        print(f"zeroscale: cannot be read, and counts as not there: {count(len(found), 'file')}", file=sys.stderr)
    for error in found:
        print(f"  {printable(str(error))}", file=sys.stderr)
