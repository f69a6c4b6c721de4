"""DeepSpeed's compiled ops, which an engine's facts name: the folder where they are built, and how they are loaded.

DeepSpeed compiles an op when it is first loaded, which takes a minute or more and needs compilers. Left alone, torch
keeps all builds for one version of Python and CUDA in one place: what was built for another GPU or processor, or in
another container, would be rebuilt in turns, or end a run by an illegal instruction.
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
from bench.measure.environment import read_cpu_model, read_version

FOLDER = "TORCH_EXTENSIONS_DIR"
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
IMAGE = "ZEROSCALE_CONTAINER_DIGEST"

_BUILD_S = 900.0  # no op takes longer to build
_FOR_PROCESSORS = frozenset({"CPUAdam", "PinMemory", "AsyncIO"})  # also beside a GPU
_INSTRUCTIONS = re.compile(r"\b(?:(?:avx|sse|ssse|sve|bmi|fma|amx)\w*|abm|movbe|popcnt|f16c|adx|asimd\w*)\b")
"""What DeepSpeed's `-march=native` lets a compiler use; other flags of a processor differ from kernel to kernel."""


def build_environment(names: Sequence[str], device: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to the environment `variables` of a process that loads these ops on a "cpu" or "cuda" device:
    the folder of their builds. Nothing where the user chose one, or nobody knows what GPU it is for."""
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
    """Whether some of these ops are kernels for a GPU, which are built for its architecture."""
    return device == "cuda" and not _FOR_PROCESSORS.issuperset(names)


@functools.cache
def read_capability() -> str | None:
    """Return the architecture of the first GPU here as the driver tells it, e.g. "9.0"; None without any."""
    try:
        import pynvml

        pynvml.nvmlInit()
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
    except Exception:  # no package, no driver, no device
        return None
    return f"{major}.{minor}"


@functools.cache
def _name_processor() -> str:
    """Return a short name that processors share which run each other's code."""
    flags_line = re.search(r"^(?:flags|Features)\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    instructions = " ".join(sorted(set(_INSTRUCTIONS.findall(flags_line[1])))) if flags_line else read_cpu_model()
    return f"{platform.machine()}-{hashlib.sha256(instructions.encode()).hexdigest()[:6]}"


def load(name: str, device: str, folder: Path) -> bool:
    """Load an op from the folder of builds, which TORCH_EXTENSIONS_DIR names; return whether it had to be built."""
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
    """Build an op in a folder of its own that is renamed at the end: nobody finds half of it, or its lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".", ignore_cleanup_errors=True) as aside:
        os.environ[FOLDER] = aside
        try:
            builder.load(verbose=False)
        finally:
            os.environ[FOLDER] = str(folder)
        with contextlib.suppress(OSError):  # somebody else was first
            Path(aside, builder.name).rename(folder / builder.name)


def _wait_for(lock: Path) -> None:
    """Give whoever builds the op the time that it takes: for one that was killed torch would wait for ever."""
    with contextlib.suppress(FileNotFoundError):
        while time.time() - lock.stat().st_mtime < _BUILD_S:
            time.sleep(0.5)
        raise UserError(str(lock), "left by a build that was killed, and every run waits for it", "delete that file")


def _read_built_at(home: Path) -> float:
    return max((path.stat().st_mtime for path in home.glob("*.so")), default=0.0)


@contextlib.contextmanager
def _pretend_gpu(device: str) -> Iterator[None]:
    """Have an op for GPUs built as where there is one: where torch sees none, DeepSpeed leaves flags of the compiler
    out, and each node would build it again."""
    import torch

    seen = torch.cuda.is_available
    if device == "cuda":
        torch.cuda.is_available = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = seen
