"""Classification of exceptions into outcomes of a run, and injection of faults.

An exception is classified by its type or by the code that raised it. Its message is matched only for unspecific types
such as RuntimeError. Only the message of the caught exception is matched, never the text of a log.

Faults can be injected to test the harness, a cluster or an alarm. ZEROSCALE_DRILL="rank=1 step=3 action=sleep" makes
rank 1 sleep for an hour before step 3. Other actions are `raise`, `exit`, `slow` and `slow_compute`. `slow` adds 150 ms
before this step and every later step. `slow_compute` adds 150 ms between the forward and backward pass of every step.
The record contains the fault, and tables flag the run.
"""

import os
import time
import traceback
from typing import TYPE_CHECKING, NamedTuple, Self

from bench.core.errors import UserError
from bench.core.quantities import FOREIGN_BYTES
from bench.core.record import OutcomeKind

if TYPE_CHECKING:
    from torch.nn import Module

DRILL_VARIABLE = "ZEROSCALE_DRILL"
_ACTIONS = ("sleep", "raise", "exit", "slow", "slow_compute")
_SLOW_S = 0.15


class InjectedFault(NamedTuple):
    """A fault to inject into a run. `text` is the value of the environment variable that describes it."""

    rank: int
    step: int
    action: str
    text: str

    @classmethod
    def read_environment(cls) -> Self | None:
        """Return the fault described by ZEROSCALE_DRILL, or None if it is not set; raise UserError for an invalid
        description."""
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
        """Inject the fault if it is meant for this rank and step. Call this before every step. The fault `slow_compute`
        is not injected here but by `attach`."""
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
        """Add the fault `slow_compute`, which acts inside a step, to this rank's model. Do nothing for another fault or
        rank."""
        if rank == self.rank and self.action == "slow_compute":
            from bench.engines.distributed.executor import RankStages

            called = module.first if isinstance(module, RankStages) else module
            called.register_forward_hook(lambda *_: time.sleep(_SLOW_S))


class Refused(Exception):
    """Error for a run that would not measure what its record claims, because the actual model, machine or transport
    differs from the stated one."""


class WrongTransport(Refused):
    """Error for a network between nodes that is not the network expected in the site file, or is slower than the
    minimum in the machine file."""


class NotQuiet(Refused):
    """Error for a run that waited for a quiet machine, and whose machine stayed busy."""


# Outcomes of a rank that ran out of memory. For these outcomes, the record says how much memory was in use.
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
# Libraries raise these types for errors without a type of their own. Messages of exceptions of any other type are not
# matched.
_UNTYPED = ("RuntimeError", "OSError", "AcceleratorError", "DistBackendError")
# The first match counts. Device memory comes before network libraries, because NCCL may run out of device memory too.
# Host memory comes after them, because a network library that cannot pin memory has a problem with the network.
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
    """Return the outcome of a run that ended with this exception, and the rule that determined the outcome.

    `oom_kills` is the number of processes in this control group that the kernel's out-of-memory killer ended since the
    rank started. `others_bytes` is the memory of other processes on the rank's device. If this memory is large and the
    device ran out of memory, the outcome is `error` instead of `oom`, because the configuration may fit without the
    other processes.
    """
    kind, rule = _find_outcome(error, oom_kills)
    if kind == "oom" and others_bytes is not None and others_bytes >= FOREIGN_BYTES:
        return "error", f"{rule}, next to {others_bytes / 1e9:.1f} GB of other processes on the device"
    return kind, rule


def _find_outcome(error: BaseException, oom_kills: int) -> tuple[OutcomeKind, str]:
    names, message = [base.__name__ for base in type(error).__mro__], str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ConnectionError | EOFError):
        # If the error comes from torch's DataLoader, the closed connection led to a loader process, and not to another
        # rank.
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
