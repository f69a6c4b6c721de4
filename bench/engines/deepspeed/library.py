"""The deepspeed package, imported without what no run here uses and every start of a process would pay for."""

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

# DeepSpeed imports these when it is first used; a version without one of them has another order.
_LATE = ("zero.muon.muon_optimizer", "zero.stage_1_and_2", "zero.stage3")


def preload_deepspeed() -> Any:
    """Import deepspeed and what it imports later; return the package."""
    with _without_mlflow():
        deepspeed = importlib.import_module("deepspeed")
    compiler = importlib.import_module("deepspeed.runtime.compiler")
    with mock.patch.object(compiler, "compile", lambda: _leave_as_it_is):
        for name in _LATE:
            with contextlib.suppress(ImportError):
                importlib.import_module(f"deepspeed.runtime.{name}")
    return deepspeed


def load_deepspeed() -> Any:
    """Return the package, its communication bound to the process group that exists."""
    deepspeed = preload_deepspeed()
    if not deepspeed.comm.is_initialized():
        # torch 2.13 says so in every collective that DeepSpeed calls, thousands of times per step at stage 3
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        # On a CPU DeepSpeed compiles an all-reduce over shared memory for half a minute (comm/torch.py, build_shm_op).
        # Inference alone calls it, and not where no operator is marked compatible; nothing else reads the marks.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(auto_mpi_discovery=False, dist_init_required=False, verbose=False)
    return deepspeed


@contextlib.contextmanager
def _without_mlflow() -> Iterator[None]:
    """DeepSpeed's autotuner, which nobody calls here, imports MLflow where it is installed: 1.3 s."""
    if "mlflow" in sys.modules:
        yield
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # what Python takes for "cannot be imported"
    try:
        yield
    finally:
        del sys.modules["mlflow"]


def _leave_as_it_is(function: Any) -> Any:
    """In place of torch.compile, which Muon's update is decorated with: importing the compiler takes 1.7 s, and Muon is
    no optimizer of a run here."""
    return function
