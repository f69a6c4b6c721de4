"""Which outcome an exception is evidence of: by its type, by where it was raised, and by the caught exception's own
message where the library has no type of its own. Never by a search in a log.

Faults are planted on purpose, to see what a harness, a cluster or an alarm makes of them.
ZEROSCALE_DRILL="rank=1 step=3 action=sleep" makes rank 1 sleep for an hour before step 3; other actions are `raise`,
`exit`, `slow` (150 ms more before this and every later step) and `slow_compute` (150 ms more between forward and
backward, in every step). The record names the drill, and the table flags it.
"""

import os
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from bench.core.errors import UserError
from bench.core.quantities import FOREIGN_BYTES
from bench.core.record import OutcomeKind
from bench.measure.control_group import own_groups

if TYPE_CHECKING:
    from torch.nn import Module

DRILL_VARIABLE = "ZEROSCALE_DRILL"
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
        text = os.environ.get(DRILL_VARIABLE)
        if not text:
            return None
        try:
            fields = dict(part.split("=") for part in text.split())
            drill = cls(int(fields["rank"]), int(fields["step"]), fields["action"], text)
        except (ValueError, KeyError) as error:
            raise UserError(f"{DRILL_VARIABLE}={text}", "not a drill", "write rank=1 step=3 action=sleep") from error
        if drill.action not in _ACTIONS:
            raise UserError(f"{DRILL_VARIABLE}={text}", "no such action", f"choose from {', '.join(_ACTIONS)}")
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
            from bench.engines.distributed.executor import RankStages

            called = module.first if isinstance(module, RankStages) else module
            called.register_forward_hook(lambda *_: time.sleep(_SLOW_S))


class Refused(Exception):
    """The run would not measure what it claims: another model, another machine, a transport that fell back."""


class WrongTransport(Refused):
    """What lies between the nodes is not what the site says: nothing measured over it would be of this machine."""


OUT_OF_MEMORY: tuple[OutcomeKind, ...] = ("oom", "host_oom")
_TYPES: dict[str, OutcomeKind] = {
    "OutOfMemoryError": "oom",  # torch: the device's allocator
    "MemoryError": "host_oom",
    "WrongTransport": "invalid",
    "DistBackendError": "comm_error",
    "DistNetworkError": "comm_error",
    "DistStoreError": "comm_error",
    "ConnectionError": "comm_error",
}
# Libraries raise these for what has no type of its own; a message in any other type is somebody else's business.
_UNTYPED = ("RuntimeError", "OSError", "AcceleratorError", "DistBackendError")
# The first that is found counts: what a network library says of memory is about the network, since it may only pin a
# little, but for the device's own, which NCCL needs as well.
_MESSAGES: tuple[tuple[str, OutcomeKind], ...] = (
    ("CUDA out of memory", "oom"),
    ("CUDA error: out of memory", "oom"),
    ("CUDA driver error: out of memory", "oom"),  # from the allocator with expandable segments
    ("HIP out of memory", "oom"),  # of a torch for AMD's devices
    ("HIP error: out of memory", "oom"),
    ("CUBLAS_STATUS_ALLOC_FAILED", "oom"),
    ("Cuda failure 2 'out of memory'", "oom"),
    ("Cuda failure 'out of memory'", "oom"),
    ("ibv_", "comm_error"),
    ("NCCL error", "comm_error"),
    ("gloo/transport", "comm_error"),
    ("DefaultCPUAllocator: can't allocate memory", "host_oom"),
    ("DefaultCPUAllocator: not enough memory", "host_oom"),
    ("Cannot allocate memory", "host_oom"),
    ("std::bad_alloc", "host_oom"),
    ("Connection closed by peer", "comm_error"),
    ("Connection reset by peer", "comm_error"),
    ("Broken pipe", "comm_error"),
)
_LOADER_LOST = ("is killed by signal: Killed", "exited unexpectedly")


def classify_error(
    error: BaseException, oom_kills: int = 0, others_bytes: int | None = None
) -> tuple[OutcomeKind, str]:
    """Return the outcome that a caught exception is evidence of, and the rule that says so. `oom_kills` is how many
    processes near this one the kernel's out-of-memory killer has ended meanwhile, `others_bytes` what somebody else has
    on the rank's device: memory that is short beside it may suffice another time."""
    kind, rule = _outcome_of(error, oom_kills)
    if kind == "oom" and others_bytes is not None and others_bytes >= FOREIGN_BYTES:
        return "error", f"{rule}, beside {others_bytes / 1e9:.1f} GB of somebody else's on the device"
    return kind, rule


def _outcome_of(error: BaseException, oom_kills: int) -> tuple[OutcomeKind, str]:
    names, message = [base.__name__ for base in type(error).__mro__], str(error)
    if _is_loader_lost(error, message):
        rule = f"a loader's process was lost, {oom_kills} ended by the kernel's out-of-memory killer"
        return ("host_oom" if oom_kills else "error"), rule
    if names[0] in _UNTYPED:
        if "error: out of memory" in message and _is_pinning(error, message):
            return "host_oom", "raised while host memory was pinned"
        for text, kind in _MESSAGES:
            if text in message:
                return kind, f"message '{text}'"
    for name in names:
        if name in _TYPES:
            return _TYPES[name], f"type {name}"
    return "error", f"type {type(error).__name__}"


def count_oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this one's control group the kernel's out-of-memory killer has ended so far; of the
    host, where no group tells. Files are looked for under `root`."""
    names = ("memory.events", "memory.oom_control")  # of either version
    groups = [folder / name for folder in own_groups("memory", root) for name in names]
    for path in (*groups, root / "proc/vmstat"):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _is_loader_lost(error: BaseException, message: str) -> bool:
    """Whether an exception says that a process of torch's DataLoader is gone: in its own words, or by a connection that
    ends within it, which is none to a peer."""
    if isinstance(error, ConnectionError | EOFError):
        return any("torch/utils/data" in frame.filename for frame in traceback.extract_tb(error.__traceback__))
    said = message.startswith("DataLoader worker") and any(text in message for text in _LOADER_LOST)
    return said and isinstance(error, RuntimeError)


def _is_pinning(error: BaseException, message: str) -> bool:
    """Whether an exception was raised where host memory is pinned: CUDA calls that out of memory as well."""
    frames = traceback.extract_tb(error.__traceback__)
    here = bool(frames) and (frames[-1].name == "pin_memory" or "pin_memory" in (frames[-1].line or ""))
    return here or "in pin memory thread" in message
