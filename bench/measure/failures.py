"""Outcomes of exceptions, by type, by the place that raised them, or by message for types without meaning.

Only the caught exception's own message is matched, never the text of a log.

Faults can be injected on purpose, to test a harness, a cluster or an alarm.
ZEROSCALE_DRILL="rank=1 step=3 action=sleep" makes rank 1 sleep for an hour before step 3. Other actions are `raise`,
`exit`, `slow` (150 ms more before this and every later step) and `slow_compute` (150 ms more between forward and
backward, in every step). The record names the drill, and tables flag it.
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
    """An injected fault; `text` is its description in the environment."""

    rank: int
    step: int
    action: str
    text: str

    @classmethod
    def read_environment(cls) -> Self | None:
        """Return the fault that the environment asks for, or None; raise UserError for one that cannot be parsed."""
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
        """Execute the fault if it is for this rank and step; call it before every step."""
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
        """Attach a fault inside a step to the model."""
        if rank == self.rank and self.action == "slow_compute":
            from bench.engines.distributed.executor import RankStages

            called = module.first if isinstance(module, RankStages) else module
            called.register_forward_hook(lambda *_: time.sleep(_SLOW_S))


class Refused(Exception):
    """The run would not measure what its record claims: another model, another machine, a slower transport."""


class WrongTransport(Refused):
    """The network between the nodes is not the one that the site's file names: results would be of another machine."""


# Outcomes after which the use of the memory is read.
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
# Libraries raise these for errors without a type of their own. Messages of other types are not matched.
_UNTYPED = ("RuntimeError", "OSError", "AcceleratorError", "DistBackendError")
# The first match counts. Messages of network libraries about memory come after the device's own: NCCL needs device
# memory too, and a network library that cannot pin memory has a problem with the network.
_MESSAGES: tuple[tuple[str, OutcomeKind], ...] = (
    ("CUDA out of memory", "oom"),
    ("CUDA error: out of memory", "oom"),
    ("CUDA driver error: out of memory", "oom"),  # from the allocator with expandable segments
    ("HIP out of memory", "oom"),  # from torch for AMD's devices
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
    """Return the outcome of a caught exception, and the rule that decided it.

    `oom_kills` is the number of processes in this one's control group that the kernel's out-of-memory killer ended
    meanwhile. `others_bytes` is the memory of other processes on the rank's device: next to them, running out of memory
    is no property of the point, which may fit at another time.
    """
    kind, rule = _find_outcome(error, oom_kills)
    if kind == "oom" and others_bytes is not None and others_bytes >= FOREIGN_BYTES:
        return "error", f"{rule}, next to {others_bytes / 1e9:.1f} GB of other processes on the device"
    return kind, rule


def _find_outcome(error: BaseException, oom_kills: int) -> tuple[OutcomeKind, str]:
    names, message = [base.__name__ for base in type(error).__mro__], str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ConnectionError | EOFError):
        # A connection that closes inside torch's DataLoader leads to one of its processes, and not to a peer.
        is_loader_lost = any("torch/utils/data" in frame.filename for frame in frames)
    else:
        is_loader_lost = isinstance(error, RuntimeError) and message.startswith("DataLoader worker")
        is_loader_lost = is_loader_lost and any(text in message for text in _LOADER_LOST)
    if is_loader_lost:
        rule = f"a loader's process was lost, {oom_kills} ended by the kernel's out-of-memory killer"
        return ("host_oom" if oom_kills else "error"), rule
    if names[0] in _UNTYPED:
        # CUDA reports a lack of host memory for pinning as "out of memory" as well.
        pins = bool(frames) and (frames[-1].name == "pin_memory" or "pin_memory" in (frames[-1].line or ""))
        if "error: out of memory" in message and (pins or "in pin memory thread" in message):
            return "host_oom", "raised while host memory was pinned"
        for text, kind in _MESSAGES:
            if text in message:
                return kind, f"message '{text}'"
    for name in names:
        if name in _TYPES:
            return _TYPES[name], f"type {name}"
    return "error", f"type {type(error).__name__}"


def count_oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this control group the kernel's out-of-memory killer has ended so far.

    Without a group that counts them, those of the host count. Files are read under `root`.
    """
    names = ("memory.events", "memory.oom_control")  # by version
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
