"""What this machine is and what runs on it, without importing what is only asked for its version."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from bench.measure import devices
from bench.record import Environment, EnvironmentClass

_PACKAGES = (
    "zeroscale", "torch", "deepspeed", "transformers", "tokenizers", "datasets", "numpy", "pyarrow", "hydra-core",
    "triton",
)  # fmt: skip
_VARIABLES = re.compile(
    r"(NCCL|GLOO|TORCH_NCCL|OMP|MKL|KMP|DS|FI|UCX|RCCL|HSA)_\w+|CUDA_(VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING)"
    r"|(PYTORCH|TORCH)_\w*ALLOC_CONF|TORCH(DYNAMO|INDUCTOR)_(?!CACHE_DIR)\w+|NVIDIA_TF32_OVERRIDE|CUBLAS(LT)?_WORKSPACE_\w+"
    r"|ZEROSCALE_DRILL|HF_(HUB_OFFLINE|DATASETS_OFFLINE)|LD_PRELOAD|TRANSFORMERS_OFFLINE"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS", re.IGNORECASE)
_SLURM = re.compile(
    r"SLURM_(JOB_(ID|NAME|PARTITION|NODELIST|NUM_NODES)|ARRAY_(JOB|TASK)_ID|CLUSTER_NAME|RESTART_COUNT)"
)


def device_kind() -> str:
    """Return "cuda" if this machine has a device that this torch can use and the user has not hidden, else "cpu"."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    built = _torch_constant("cuda") or _torch_constant("hip")
    return "cuda" if built and not hidden and (devices.count() or Path("/dev/kfd").exists()) else "cpu"


def classify(device: str, devices_per_node: int) -> EnvironmentClass:
    """Return what an answer measured here with `device` ("cpu" or "cuda") depends on besides its spec."""
    on_gpu = device == "cuda"
    versions = {
        "torch": version("torch"),
        "cuda": _torch_constant("cuda") if on_gpu else None,
        "nccl": _nccl_version() if on_gpu else None,
        "driver": devices.driver_version() if on_gpu else None,
        "deepspeed": version("deepspeed"),
        "transformers": version("transformers"),
    }
    return EnvironmentClass(
        device=(devices.name(0) or "unknown") if on_gpu else cpu_model(),
        devices_per_node=devices_per_node,
        container=os.environ.get("ZEROSCALE_CONTAINER_DIGEST"),
        versions=versions,
    )


def environment_id(classification: EnvironmentClass) -> str:
    """Return the short name of an environment class: 8 hexadecimal digits."""
    return hashlib.sha256(classification.model_dump_json().encode()).hexdigest()[:8]


def probe(classification: EnvironmentClass, hosts: tuple[str, ...], cpus: dict[str, Any]) -> Environment:
    """Describe the machine that this process runs on; `hosts` by node, `cpus` what the ranks say of theirs."""
    return Environment(
        environment_id=environment_id(classification),
        classification=classification,
        versions={name: version(name) for name in _PACKAGES}
        | {"python": platform.python_version(), "os": platform.platform()},
        git=_git(Path(__file__).parent),
        hosts=hosts,
        cpus={"model": cpu_model(), "cores": os.cpu_count(), **cpus},
        devices=tuple(devices.snapshot()),
        slurm={k: v for k, v in os.environ.items() if _SLURM.fullmatch(k)},
        variables=allowed_variables(dict(os.environ)),
    )


def allowed_variables(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that change what is measured; never one that looks like a secret."""
    return {k: v for k, v in sorted(environment.items()) if _VARIABLES.fullmatch(k) and not _SECRET.search(k)}


def version(package: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def cpu_model() -> str:
    """Return the processor's own name."""
    match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _torch_constant(name: str) -> str | None:
    """Read torch/version.py without importing torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    match = re.search(rf"^{name}\b.*= '([^']+)'", Path(found.origin).with_name("version.py").read_text(), re.MULTILINE)
    return match[1] if match else None


def _nccl_version() -> str | None:
    names = (d.metadata["Name"] or "" for d in importlib.metadata.distributions())
    return next((version(name) for name in names if name.startswith("nvidia-nccl-")), None)


def _git(folder: Path) -> dict[str, Any] | None:
    def ask(*question: str) -> str:
        command = ["git", "-C", str(folder), *question]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        ask("ls-files", "--error-unmatch", Path(__file__).name)  # else it is the history of somebody else's project
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--", ":/"))}
    except (OSError, subprocess.SubprocessError):
        return None  # an installed wheel has no history
