"""What a seed does: which sweep, and which faults befall it. Pure: the same seed is the same round everywhere.

At which step of a point a fault strikes depends on the machine and is no part of a seed; what is done to what is.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

MODES = ("packed", "array", "point", "local")
ON_NODES = (
    "kill rank", "kill member agent", "kill coordinator", "kill fork server", "kill srun", "stop rank briefly",
    "stop rank for long", "slurmd down briefly", "slurmd down for long", "crash node", "controller stopped",
    "controller killed", "cut link briefly", "cut link for long", "requeue", "scancel", "scancel with SIGKILL",
    "fill disk", "two resumes at once", "kill the sweep command",
)  # fmt: skip
HERE = (
    "kill rank", "kill coordinator", "stop rank briefly", "stop rank for long", "fill disk", "two resumes at once",
    "kill the sweep command", "interrupt the sweep command",
)  # fmt: skip
"""Of a local sweep: it has no agents, no fork server and no scheduler."""
_OF_MANY_NODES = ("kill member agent", "cut link for long")
POINTS = 3
FAULTS = 3


class PlannedFault(NamedTuple):
    """One fault: what, when, and to which of those that it could befall."""

    kind: str
    choice: int  # its remainder by their number tells which
    after_s: float  # from when there is something to strike


class Round(NamedTuple):
    """A sweep and what befalls it."""

    seed: int
    mode: str
    nodes: int
    points: int
    faults: tuple[PlannedFault, ...]

    def format_line(self) -> str:
        kinds = ", ".join(fault.kind for fault in self.faults)
        return f"seed {self.seed}: {self.mode}, {self.points} points on {self.nodes} nodes: {kinds}"


def plan_round(seed: int, modes: Sequence[str] = MODES) -> Round:
    """Return what a seed does. Modes take turns, so that pieces of seeds have all of them."""
    chance = random.Random(seed)
    mode = modes[seed % len(modes)]
    nodes = 1 if mode == "local" else chance.choice((1, 2, 2))
    possible = HERE if mode == "local" else ON_NODES
    kinds = [kind for kind in possible if nodes > 1 or kind not in _OF_MANY_NODES]
    faults = tuple(
        PlannedFault(kind, chance.randrange(1000), round(chance.uniform(0, 3), 2))
        for kind in chance.sample(kinds, FAULTS)
    )
    # What befalls the command that submits can only come first.
    return Round(seed, mode, nodes, POINTS, tuple(sorted(faults, key=lambda fault: fault.kind != _FIRST[mode])))


_FIRST = dict.fromkeys(MODES, "kill the sweep command") | {"local": ""}
