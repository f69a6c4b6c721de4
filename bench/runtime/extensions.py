"""DeepSpeed's compiled ops, which an engine's facts name: the folder of their builds, and how they are loaded.

DeepSpeed compiles an op when it is first loaded, which takes a minute or more and needs compilers. By default torch
keeps all builds for one version of Python and CUDA in one folder. Builds for different GPUs, processors or containers
would replace each other there, or end a run with an illegal instruction.
"""

import contextlib
import functools
import hashlib
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core.errors import UserError
from bench.core.files import get_cache_folder
from bench.engines.deepspeed.library import preload_deepspeed
from bench.measure import devices
from bench.measure.environment import read_cpu_model, read_version

FOLDER = "TORCH_EXTENSIONS_DIR"
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
IMAGE = "ZEROSCALE_CONTAINER_DIGEST"

_BUILD_S = 900.0  # no op takes longer to build
# Compiled for the host's CPU, also with a GPU.
_FOR_PROCESSORS = frozenset({"CPUAdam", "PinMemory", "AsyncIO"})
_INSTRUCTIONS = re.compile(r"\b(?:(?:avx|sse|ssse|sve|bmi|fma|amx)\w*|abm|movbe|popcnt|f16c|adx|asimd\w*)\b")
"""Instructions that DeepSpeed's `-march=native` lets a compiler use. A processor's other flags differ from kernel to
kernel."""


def build_environment(names: Sequence[str], device: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with the folder of builds, for a process that loads these ops on a "cpu" or "cuda" device.

    `variables` are the process's other variables. Empty if the user chose a folder, or if the GPU is unknown.
    """
    if not names or variables.get(FOLDER):
        return {}
    key = [sys.implementation.cache_tag, f"torch-{read_version('torch')}", f"deepspeed-{read_version('deepspeed')}"]
    if has_gpu_kernel(names, device):
        architectures = variables.get(ARCHITECTURES) or read_capability()
        if architectures is None:
            return {}
        key.append(f"sm{architectures.replace('.', '')}")
    if device == "cpu" or _FOR_PROCESSORS.intersection(names):
        key.append(_name_processor())
    if image := variables.get(IMAGE):
        key.append(image[-80:])
    name = re.sub(r"[^\w.+-]+", "_", "-".join(key))
    return {FOLDER: str(get_cache_folder(variables) / "extensions" / name)}


def has_gpu_kernel(names: Sequence[str], device: str) -> bool:
    """Return whether some of these ops are kernels for a GPU, which are built for its architecture."""
    return device == "cuda" and not _FOR_PROCESSORS.issuperset(names)


def read_capability() -> str | None:
    """Return the architecture of the first GPU here, e.g. "9.0"; None without a GPU."""
    capability: str | None = devices.query(0, "capability")
    return capability


@functools.cache
def _name_processor() -> str:
    """Return a short name, the same for processors that can run each other's code."""
    flags_line = re.search(r"^(?:flags|Features)\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    instructions = " ".join(sorted(set(_INSTRUCTIONS.findall(flags_line[1])))) if flags_line else read_cpu_model()
    return f"{platform.machine()}-{hashlib.sha256(instructions.encode()).hexdigest()[:6]}"


def load(name: str, device: str, folder: Path) -> bool:
    """Load an op from the folder of builds, TORCH_EXTENSIONS_DIR; return whether it had to be built."""
    preload_deepspeed()
    from deepspeed.ops import op_builder

    builder = getattr(op_builder, f"{name}Builder")()
    home = folder / builder.name
    _wait_for(home / "lock")
    before = _read_built_at(home)
    with _pretend_gpu(device):
        if home.exists():
            builder.load(verbose=False)
        else:
            _build_aside(builder, folder)
    return _read_built_at(home) != before


def _build_aside(builder: Any, folder: Path) -> None:
    """Build an op in a temporary folder and rename it at the end, so that no process finds an incomplete build."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".", ignore_cleanup_errors=True) as aside:
        os.environ[FOLDER] = aside
        try:
            builder.load(verbose=False)
        finally:
            os.environ[FOLDER] = str(folder)
        with contextlib.suppress(OSError):  # another process was first
            Path(aside, builder.name).rename(folder / builder.name)


def _wait_for(lock: Path) -> None:
    """Wait for another process's build; raise UserError for a lock that is too old, for which torch would hang."""
    with contextlib.suppress(FileNotFoundError):
        while time.time() - lock.stat().st_mtime < _BUILD_S:
            time.sleep(0.5)
        raise UserError(str(lock), "left by a build that was killed, and every run waits for it", "delete that file")


def _read_built_at(home: Path) -> float:
    return max((path.stat().st_mtime for path in home.glob("*.so")), default=0.0)


@contextlib.contextmanager
def _pretend_gpu(device: str) -> Iterator[None]:
    """Build ops for GPUs as on a node with a GPU.

    If torch finds no GPU, DeepSpeed omits compiler flags, and each node would build the op again.
    """
    import torch

    is_available = torch.cuda.is_available
    if device == "cuda":
        torch.cuda.is_available = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = is_available
