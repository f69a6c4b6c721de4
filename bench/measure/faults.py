"""Faults planted on purpose, to see what a harness, a cluster or an alarm makes of them.

ZEROSCALE_DRILL="rank=1 step=3 action=sleep" makes rank 1 sleep for an hour before step 3; other actions are `raise`,
`exit`, `slow` (150 ms more before this and every later step) and `slow_compute` (150 ms more between forward and
backward, in every step). The record names the drill, and the table flags it.
"""

import os
import time
from typing import TYPE_CHECKING, NamedTuple, Self

from bench.errors import UserError

if TYPE_CHECKING:
    from torch.nn import Module

VARIABLE = "ZEROSCALE_DRILL"
_ACTIONS = ("sleep", "raise", "exit", "slow", "slow_compute")
_SLOW_S = 0.15


class InjectedFault(NamedTuple):
    """A planted fault; `text` is what was asked."""

    rank: int
    step: int
    action: str
    text: str

    @classmethod
    def read_environment(cls) -> Self | None:
        """Return the drill asked for by the environment, or None; UserError for one that cannot be read."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        try:
            fields = dict(part.split("=") for part in text.split())
            drill = cls(int(fields["rank"]), int(fields["step"]), fields["action"], text)
        except (ValueError, KeyError) as error:
            raise UserError(f"{VARIABLE}={text}", "not a drill", "write rank=1 step=3 action=sleep") from error
        if drill.action not in _ACTIONS:
            raise UserError(f"{VARIABLE}={text}", "no such action", f"choose from {', '.join(_ACTIONS)}")
        return drill

    def inject(self, rank: int, step: int) -> None:
        """Before a step: do harm if it is this rank's turn."""
        if rank != self.rank or step < self.step or self.action == "slow_compute":
            return
        if self.action == "slow":
            time.sleep(_SLOW_S)
        elif step == self.step:
            if self.action == "sleep":
                time.sleep(3600)
            elif self.action == "exit":
                os._exit(3)
            raise RuntimeError(f"drill: rank {rank} raises at step {step}")

    def attach(self, rank: int, module: "Module") -> None:
        """Prepare the harm that happens inside a step."""
        if rank == self.rank and self.action == "slow_compute":
            from bench.distributed.stages import RankStages

            called = module.first if isinstance(module, RankStages) else module
            called.register_forward_hook(lambda *_: time.sleep(_SLOW_S))
