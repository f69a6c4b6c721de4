"""Plan of a round for each seed: a sweep and the faults that are injected into it.

The same seed gives the same plan on every machine. The step at which a fault happens depends on the machine and is not
determined by the seed. Kinds of faults are dealt like cards from a shuffled deck. So consecutive seeds contain every
kind about equally often.
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
"""Kinds of faults of a local sweep, which has no agents, no fork server and no scheduler."""
_OF_MANY_NODES = ("kill member agent", "cut link for long")
POINTS = 2  # number at the start; points are added while faults are left
FAULTS = 6
_AFTER_S = 1.5
_WINDOW_S, _LONG_WINDOW_S = 5, 12  # seconds of a point's window. The long window lasts until a lost job is restarted


class PlannedFault(NamedTuple):
    """Planned fault: its kind, its time, and a number that selects one of the possible targets."""

    kind: str
    choice: int  # modulo the number of targets, this is the index of the target
    after_s: float  # seconds after a target has appeared


class Round(NamedTuple):
    """Plan of one round: a sweep with its faults."""

    seed: int
    mode: str
    nodes: int
    window_s: int  # seconds for which each point makes steps
    faults: tuple[PlannedFault, ...]

    def format_line(self) -> str:
        kinds = ", ".join(fault.kind for fault in self.faults)
        return f"seed {self.seed}: {self.mode}, points on {self.nodes} nodes for {self.window_s} s: {kinds}"


def plan_round(seed: int, modes: Sequence[str] = MODES) -> Round:
    """Return the plan of the round with this seed. A round is one sweep with the faults that are injected into it.
    Consecutive seeds take the modes (such as `packed` or `local`) in turn, so that every mode is tested."""
    mode, chance = modes[seed % len(modes)], random.Random(seed)
    kinds = _deal(mode, seed // len(modes) * FAULTS)
    nodes = 1 if mode == "local" else 2 if set(kinds) & set(_OF_MANY_NODES) else chance.choice((1, 2))
    window_s = _LONG_WINDOW_S if "slurmd down for long" in kinds else _WINDOW_S
    faults = [PlannedFault(kind, chance.randrange(1000), round(chance.uniform(0, _AFTER_S), 2)) for kind in kinds]
    return Round(seed, mode, nodes, window_s, tuple(faults))


def _deal(mode: str, first: int) -> list[str]:
    """Return the kinds of faults of one round. All kinds of faults of a mode (such as `packed`) are shuffled again and
    again, like a deck of cards. `first` is the number of cards that earlier rounds have used. On Slurm, a fault in the
    submitting command comes first in the round."""
    cards: list[str] = []
    while len(cards) < first + FAULTS:
        deck = list(HERE if mode == "local" else ON_NODES)
        random.Random(f"{mode} {len(cards)}").shuffle(deck)
        cards += deck
    return sorted(cards[first : first + FAULTS], key=lambda kind: mode == "local" or kind != "kill the sweep command")
