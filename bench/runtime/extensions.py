"""Loading of DeepSpeed's compiled ops that an engine needs, and choice of the folder in which they are built.

DeepSpeed compiles an op when it is first loaded. This takes a minute or more and needs compilers. By default torch
keeps all builds for one version of Python and CUDA in one folder. In that folder, builds for different GPUs, CPUs or
containers would overwrite each other, or end a run with an illegal instruction. So each combination of library
versions, GPU, CPU and container gets its own folder.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from bench.core.errors import UserError
from bench.core.files import get_cache_folder
from bench.engines.deepspeed.library import preload_deepspeed
from bench.measure import devices
from bench.measure.environment import read_cpu_model, read_version

FOLDER = "TORCH_EXTENSIONS_DIR"
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
IMAGE = "ZEROSCALE_CONTAINER_DIGEST"

_BUILDS = "extensions"
"""Name of the folder for compiled ops in our cache folder."""
_BUILD_S = 900.0  # maximum seconds to build an op
# Names of ops that are compiled for the host's CPU, even on a node with a GPU.
_FOR_PROCESSORS = frozenset({"CPUAdam", "PinMemory", "AsyncIO"})
# Libraries that ops are linked with, and the Debian packages that have their headers.
_LIBRARIES = {"AsyncIO": ("libaio", "libaio-dev")}
_INSTRUCTIONS = re.compile(r"\b(?:(?:avx|sse|ssse|sve|bmi|fma|amx)\w*|abm|movbe|popcnt|f16c|adx|asimd\w*)\b")
"""CPU instruction sets that a compiler may use with DeepSpeed's `-march=native`. Other CPU flags are ignored because
they differ between kernel versions."""


def build_environment(names: Sequence[str], device: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return a dict with the environment variable TORCH_EXTENSIONS_DIR, for a process that loads ops on `device` ("cpu"
    or "cuda").

    `names` are the ops, and `variables` are the other environment variables of the process. Return an empty dict if
    there are no ops, if the user has set the folder, or if the GPU architecture is unknown.
    """
    if not names or variables.get(FOLDER):
        return {}
    key = [sys.implementation.cache_tag, f"torch-{read_version('torch')}", f"deepspeed-{read_version('deepspeed')}"]
    if has_gpu_kernel(names, device):
        architectures = variables.get(ARCHITECTURES) or devices.query(0, "capability")
        if architectures is None:
            return {}
        key.append(f"sm{architectures.replace('.', '')}")
    if device == "cpu" or _FOR_PROCESSORS.intersection(names):
        key.append(_name_processor())
    if image := variables.get(IMAGE):
        key.append(image[-80:])
    name = re.sub(r"[^\w.+-]+", "_", "-".join(key))
    return {FOLDER: str(get_cache_folder(variables) / _BUILDS / name)}


def has_gpu_kernel(names: Sequence[str], device: str) -> bool:
    """Return True if any of these ops has GPU kernels on `device`. Such kernels are built for one GPU architecture."""
    return device == "cuda" and not _FOR_PROCESSORS.issuperset(names)


@functools.cache
def _name_processor() -> str:
    """Return a short name for the instruction sets of this CPU. An op that was built on one CPU runs on every CPU with
    the same name."""
    flags_line = re.search(r"^(?:flags|Features)\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    instructions = " ".join(sorted(set(_INSTRUCTIONS.findall(flags_line[1])))) if flags_line else read_cpu_model()
    return f"{platform.machine()}-{hashlib.sha256(instructions.encode()).hexdigest()[:6]}"


def load(name: str, device: str, folder: Path) -> bool:
    """Load the op `name` from `folder`, the value of TORCH_EXTENSIONS_DIR. If the op is not built yet, build it before
    loading it. Return True if the op was built."""
    preload_deepspeed()
    from deepspeed.ops import op_builder

    builder = getattr(op_builder, f"{name}Builder")()
    home = folder / builder.name
    own = folder.parent == get_cache_folder(os.environ) / _BUILDS
    if not (own and _find_library(folder, builder.name).exists()):
        _wait_for(home / "lock")
    before = _read_built_at(home)
    with _pretend_gpu(device), _import_complete_ops(folder) if own else contextlib.nullcontext():
        if name in _LIBRARIES and not builder.is_compatible(verbose=False):
            library, package = _LIBRARIES[name]
            raise UserError(f"DeepSpeed's op {name}", f"it cannot be built without {library}", f"install {package}")
        if home.exists():
            builder.load(verbose=False)
        else:
            _build_aside(builder, folder)
    return _read_built_at(home) != before


def _import_complete_ops(folder: Path) -> AbstractContextManager[object]:
    """Return a context in which ops that are already built in `folder` are imported without torch's loader. `folder`
    must be a folder of zeroscale's cache.

    The loader makes a lock file at every load. If a process is killed at that time, the file stays and blocks all later
    runs. For a folder that the user has set, the caller uses the loader and not this function. An op in such a folder
    may come from another version of torch, and the loader rebuilds it.
    """
    from torch.utils import cpp_extension

    build: Any = cpp_extension.load

    def load_or_build(name: str, **options: Any) -> Any:
        library = _find_library(folder, name)
        return _import_library(name, library) if library.exists() else build(name=name, **options)

    return mock.patch.object(cpp_extension, "load", load_or_build)


def _find_library(folder: Path, name: str) -> Path:
    return folder / name / f"{name}.so"


def _import_library(name: str, library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build_aside(builder: Any, folder: Path) -> None:
    """Build an op, and the ops that it needs, in a temporary folder. Then move them to `folder`.

    No other process can then find an incomplete build.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".", ignore_cleanup_errors=True) as aside:
        os.environ[FOLDER] = aside
        try:
            builder.load(verbose=False)
        finally:
            os.environ[FOLDER] = str(folder)
        for built in Path(aside).iterdir():
            with contextlib.suppress(OSError):  # another process has built the op first
                built.rename(folder / built.name)


def _wait_for(lock: Path) -> None:
    """Wait while another process builds an op.

    `lock` is the lock file of that build. Raise UserError if the file is older than `_BUILD_S` seconds: its build was
    killed, and torch would wait forever.
    """
    with contextlib.suppress(FileNotFoundError):
        while time.time() - lock.stat().st_mtime < _BUILD_S:
            time.sleep(0.5)
        raise UserError(str(lock), "a killed build left this lock file, and every run waits for it", "delete this file")


def _read_built_at(home: Path) -> float:
    return max((path.stat().st_mtime for path in home.glob("*.so")), default=0.0)


def _pretend_gpu(device: str) -> AbstractContextManager[object]:
    """Return a context in which torch reports a GPU while ops for GPUs are built, even on a node without a GPU.

    If torch finds no GPU, DeepSpeed omits compiler flags, and each node would build the op again.
    """
    import torch

    if device == "cuda":
        return mock.patch.object(torch.cuda, "is_available", lambda: True)
    return contextlib.nullcontext()
