"""Which outcome an exception is evidence of: by its type, and by the caught exception's own message where the library
has no type of its own. Never by a search in a log."""

from bench.record import OutcomeKind


class Refused(Exception):
    """The run would not measure what it claims: another model, another machine, a transport that fell back."""


_TYPES: dict[str, OutcomeKind] = {
    "OutOfMemoryError": "oom",  # torch: the device's allocator
    "MemoryError": "host_oom",
    "DistBackendError": "comm_error",
    "DistNetworkError": "comm_error",
    "DistStoreError": "comm_error",
    "ConnectionError": "comm_error",
}
# Libraries raise these for what has no type of its own; a message in any other type is somebody else's business.
_UNTYPED = ("RuntimeError", "OSError", "AcceleratorError", "DistBackendError")
_MESSAGES: tuple[tuple[str, OutcomeKind], ...] = (
    ("CUDA out of memory", "oom"),
    ("CUDA error: out of memory", "oom"),
    ("CUBLAS_STATUS_ALLOC_FAILED", "oom"),
    ("Cuda failure 2 'out of memory'", "oom"),
    ("DefaultCPUAllocator: can't allocate memory", "host_oom"),
    ("DefaultCPUAllocator: not enough memory", "host_oom"),
    ("Cannot allocate memory", "host_oom"),
    ("std::bad_alloc", "host_oom"),
    ("Connection closed by peer", "comm_error"),
    ("Connection reset by peer", "comm_error"),
    ("Broken pipe", "comm_error"),
    ("gloo/transport", "comm_error"),
    ("NCCL error", "comm_error"),
)


def outcome_of(error: BaseException) -> tuple[OutcomeKind, str]:
    """Return the outcome that a caught exception is evidence of, and the rule that says so."""
    names = [base.__name__ for base in type(error).__mro__]
    if names[0] in _UNTYPED:
        for text, kind in _MESSAGES:
            if text in str(error):
                return kind, f"message '{text}'"
    for name in names:
        if name in _TYPES:
            return _TYPES[name], f"type {name}"
    return "error", f"type {type(error).__name__}"
