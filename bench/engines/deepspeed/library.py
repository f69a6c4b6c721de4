"""Import of the deepspeed package without modules that no run uses and that would slow down every process start."""

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

# DeepSpeed imports these modules at its first use. Some versions lack one of them.
_LATE = ("zero.muon.muon_optimizer", "zero.stage_1_and_2", "zero.stage3")


def preload_deepspeed() -> Any:
    """Import deepspeed, and the modules that it would import at its first use. Return the package."""
    with _without_mlflow():
        deepspeed = importlib.import_module("deepspeed")
    compiler = importlib.import_module("deepspeed.runtime.compiler")
    # Muon's update is decorated with torch.compile, whose import takes 1.7 s; no run here uses Muon.
    with mock.patch.object(compiler, "compile", lambda: lambda function: function):
        for name in _LATE:
            with contextlib.suppress(ImportError):
                importlib.import_module(f"deepspeed.runtime.{name}")
    return deepspeed


def load_deepspeed() -> Any:
    """Return the deepspeed package, with its communication set up on the existing process group."""
    deepspeed = preload_deepspeed()
    if not deepspeed.comm.is_initialized():
        # torch 2.13 warns in every collective that DeepSpeed calls, thousands of times per step at stage 3
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        # On a CPU DeepSpeed compiles an all-reduce over shared memory for half a minute (comm/torch.py, build_shm_op).
        # Only inference uses it. DeepSpeed skips it if no operator is marked compatible; nothing else reads the marks.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(auto_mpi_discovery=False, dist_init_required=False, verbose=False)
    return deepspeed


@contextlib.contextmanager
def _without_mlflow() -> Iterator[None]:
    """Prevent the import of MLflow (1.3 s) by DeepSpeed's autotuner, which no run uses."""
    if "mlflow" in sys.modules:
        yield
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # Python's mark of a module that cannot be imported
    try:
        yield
    finally:
        del sys.modules["mlflow"]
