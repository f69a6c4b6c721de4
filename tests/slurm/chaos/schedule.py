"""The content of a seed: which sweep, and which faults. The same seed gives the same round on every machine.

The step at which a fault strikes depends on the machine and is not part of the seed. Kinds of fault are dealt to the
rounds of a mode like cards, so that consecutive seeds contain every kind about equally often.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

MODES = ("packed", "array", "point", "local")
ON_NODES = (
    "kill rank", "kill member agent", "kill coordinator", "kill fork server", "kill srun", "stop rank briefly",
    "stop rank for long", "slurmd down briefly", "slurmd down for long", "crash node", "controller stopped",
    "controller killed", "cut link briefly", "cut link for long", "requeue", "scancel", "scancel with SIGKILL",
    "fill disk", "stall file system", "suspend", "two resumes at once", "kill the sweep command",
)  # fmt: skip
HERE = (
    "kill rank", "kill coordinator", "stop rank briefly", "stop rank for long", "fill disk", "two resumes at once",
    "kill the sweep command", "interrupt the sweep command",
)  # fmt: skip
"""Faults of a local sweep. It has no agents, no fork server and no scheduler."""
_OF_MANY_NODES = ("kill member agent", "cut link for long")
POINTS = 2  # to begin with; more are asked for as long as there are faults to come
FAULTS = 6
_AFTER_S = 1.5
_WINDOW_S, _LONG_WINDOW_S = 5, 12  # of a point; one whose job was given up has to last until that begins anew


class PlannedFault(NamedTuple):
    """One fault: its kind, its time, and which of the possible targets it strikes."""

    kind: str
    choice: int  # its remainder by their number tells which
    after_s: float  # from when there is something to strike


class Round(NamedTuple):
    """A sweep and its faults."""

    seed: int
    mode: str
    nodes: int
    window_s: int  # that each point takes steps for
    faults: tuple[PlannedFault, ...]

    def format_line(self) -> str:
        kinds = ", ".join(fault.kind for fault in self.faults)
        return f"seed {self.seed}: {self.mode}, points on {self.nodes} nodes for {self.window_s} s: {kinds}"


def plan_round(seed: int, modes: Sequence[str] = MODES) -> Round:
    """Return the round of a seed. Modes alternate, so that consecutive seeds contain all of them."""
    mode, chance = modes[seed % len(modes)], random.Random(seed)
    kinds = _deal(mode, seed // len(modes) * FAULTS)
    nodes = 1 if mode == "local" else 2 if set(kinds) & set(_OF_MANY_NODES) else chance.choice((1, 2))
    window_s = _LONG_WINDOW_S if "slurmd down for long" in kinds else _WINDOW_S
    faults = [PlannedFault(kind, chance.randrange(1000), round(chance.uniform(0, _AFTER_S), 2)) for kind in kinds]
    return Round(seed, mode, nodes, window_s, tuple(faults))


def _deal(mode: str, first: int) -> list[str]:
    """Return the kinds of fault of one round. Faults of the submitting command can only come first."""
    cards: list[str] = []
    while len(cards) < first + FAULTS:
        deck = list(HERE if mode == "local" else ON_NODES)
        random.Random(f"{mode} {len(cards)}").shuffle(deck)
        cards += deck
    return sorted(cards[first : first + FAULTS], key=lambda kind: mode == "local" or kind != "kill the sweep command")
