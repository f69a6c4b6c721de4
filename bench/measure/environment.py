"""Description of the machine and its software: devices, versions, environment variables and the environment class. The
environment class is everything that the results of a run depend on, except its spec.

Package versions are read without importing the packages. torch is imported only by the functions that find a rank's
device.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.core import installed_plugins, plugins
from bench.core.job_environment import read_job
from bench.core.machine import Machine
from bench.core.private import is_secret
from bench.core.record import Environment, EnvironmentClass, ScheduledJob
from bench.core.scheduling import JobContext
from bench.core.spec import RunSpec
from bench.measure import devices
from bench.measure.control_group import read_quota_cores
from bench.measure.failures import Refused

if TYPE_CHECKING:
    import torch

_PACKAGES = (
    "zeroscale", "torch", "deepspeed", "transformers", "tokenizers", "datasets", "numpy", "pyarrow", "hydra-core",
    "triton", "peft", "bitsandbytes",
)  # fmt: skip
_VARIABLES = re.compile(
    r"NCCL_(ALGO|PROTO|DEBUG|DEBUG_SUBSYS|DEBUG_FILE|SOCKET_(IFNAME|FAMILY)|OOB_NET_IFNAME|IB_(HCA|ADDR_FAMILY|ADDR_RANGE)|NET"
    r"|(NET|TUNER|PROFILER)_PLUGIN|(P2P|NET_GDR)_LEVEL|(TOPO|TOPO_DUMP|GRAPH|CONF)_FILE|COMM_ID|LAUNCH_MODE|GIN_TYPE)"
    r"|GLOO_(SOCKET_IFNAME|DEVICE_TRANSPORT)|OMP_(SCHEDULE|PROC_BIND|PLACES|WAIT_POLICY|STACKSIZE|DISPLAY_ENV|TOOL)"
    r"|GOMP_(CPU_AFFINITY|STACKSIZE)|KMP_(AFFINITY|HW_SUBSET|LIBRARY|STACKSIZE)"
    r"|MKL_(ENABLE_INSTRUCTIONS|CBWR|(THREADING|INTERFACE)_LAYER|DYNAMIC)|DS_(ACCELERATOR|BUILD_\w+)"
    r"|FI_(PROVIDER|LOG_LEVEL|(TCP|SOCKETS)_IFACE)|UCX_(TLS|NET_DEVICES|LOG_LEVEL|RNDV_(SCHEME|THRESH)|PROTO_ENABLE)|HSA_OVERRIDE_GFX_VERSION"
    r"|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING)"
    r"|(PYTORCH|TORCH)_\w*ALLOC_CONF|TORCH(DYNAMO|INDUCTOR)_(?!CACHE_DIR)\w+|NVIDIA_TF32_OVERRIDE|CUBLAS(LT)?_WORKSPACE_\w+"
    r"|ZEROSCALE_DRILL|HF_(HUB_OFFLINE|DATASETS_OFFLINE)|LD_PRELOAD|TRANSFORMERS_OFFLINE"
)
"""Environment variables whose values are always recorded."""
_OF_LIBRARIES = re.compile(r"(NCCL|GLOO|TORCH_NCCL|G?OMP|MKL|KMP|DS|FI|UCX|RCCL|HSA)_\w+")
"""Further environment variables of libraries. Their values are recorded only if they are numbers or switches such as
`true`."""
_PLAIN = re.compile(r"[-+]?\d{1,12}(\.\d+)?([KMG]B?|m?s|us)?(,\d{1,6})*|true|false|yes|no|on|off|y|n", re.IGNORECASE)
_NOT_RECORDED = "(set, not recorded)"

_OPENMP_WAIT = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that set how long OpenMP threads spin before they sleep."""
_OPENMP_WAIT_DEFAULT = {"GOMP_SPINCOUNT": "1000"}

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables that hide GPUs from a process. torch for AMD obeys all of them."""


def find_device_kind() -> str:
    """Return "cuda" if this machine has a visible GPU that the installed torch supports, else "cpu"."""
    built = _read_torch_constant("cuda") or _read_torch_constant("hip")
    found = devices.count_devices() or Path("/dev/kfd").exists()
    return "cuda" if built and found and _count_visible() != 0 else "cpu"


def count_local_devices(kind: str) -> int | None:
    """Return the default number of devices of a run on this machine, for the device kind "cuda" or "cpu".

    For "cuda" this is the number of visible GPUs that torch supports; None if there are GPUs but their number is
    unknown. For "cpu" a device is a process. The default is two processes, or one process if this process may use only
    a single core.
    """
    if kind == "cpu":
        return min(2, count_cores())
    if find_device_kind() == "cpu":
        return 0
    visible = _count_visible()
    return min([devices.count_devices(), *([] if visible is None else [visible])]) or None


def read_device_name(kind: str) -> str | None:
    """Return the name of the first "cuda" or "cpu" device; None if the driver does not report it."""
    name: str | None = read_cpu_model() if kind == "cpu" else devices.query(0, "name")
    return name


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _count_visible() -> int | None:
    """Return the number of GPUs listed in environment variables such as CUDA_VISIBLE_DEVICES (VISIBLE). If several of
    these variables are set, the shortest list is used. None if none of these variables is set."""
    named = [os.environ[name].split(",") for name in VISIBLE if name in os.environ]
    # CUDA ignores the first invalid entry of a list and all entries after it.
    valid = (itertools.takewhile(lambda entry: entry.strip() not in ("", "-1"), entries) for entries in named)
    return min((len(list(entries)) for entries in valid), default=None)


def find_device(machine: Machine, devices_per_node: int, local_rank: int) -> "torch.device":
    """Return this rank's device, and make it torch's current device.

    Raise Refused if the node has fewer than `devices_per_node` GPUs, or if the device's name does not match `machine`.
    """
    import torch

    device = torch.device(machine.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = read_cpu_model()
    if device.type != "cpu":
        count = torch.cuda.device_count()
        if count < devices_per_node:
            raise Refused(f"devices_per_node={devices_per_node}, but this node has {count} devices")
        torch.cuda.set_device(local_rank)
        device, name = torch.device("cuda", local_rank), torch.cuda.get_device_name(local_rank)
    if not machine.accepts(name):
        raise Refused(f"machine={machine.name} expects {' or '.join(machine.device_names)}, but this node has {name}")
    return device


def read_driver_name(device: "torch.device") -> str | None:
    """Return the name by which the driver knows a device: the UUID for NVIDIA, the PCI address for AMD.

    Return None for a CPU, or if torch does not report the address. For a MIG slice, the result is the slice's own UUID,
    but it begins with `GPU-`. The driver's name for the slice begins with `MIG-` instead.
    """
    import torch

    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:
        return f"GPU-{properties.uuid}"
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    address: list[Any] = [getattr(properties, name, None) for name in names]
    return None if None in address else "{:04x}:{:02x}:{:02x}.0".format(*address)


def classify(device: str, devices_per_node: int, uuid: str | None = None) -> EnvironmentClass:
    """Return the environment class of runs on this machine: everything that their results depend on, except the spec.

    `device` is "cpu" or "cuda". `uuid` names the GPU; the default is the first visible GPU. The numbers of cores and
    threads in the class are those of one rank.
    """
    on_gpu, threads = device == "cuda", _count_threads(devices_per_node)
    versions = {
        "torch": read_version("torch"),
        "cuda": _read_torch_constant("cuda") if on_gpu else None,
        "nccl": _read_nccl_version() if on_gpu else None,
        "driver": devices.query(0, "driver_version") if on_gpu else None,
        "deepspeed": read_version("deepspeed"),
        "transformers": read_version("transformers"),
    }
    if on_gpu and (hip := _read_torch_constant("hip")):
        versions["hip"] = hip
    return EnvironmentClass(
        device=(devices.query(uuid or _find_first_visible(), "name") or "unknown") if on_gpu else read_cpu_model(),
        devices_per_node=devices_per_node,
        cores=count_cores(),
        threads=threads,
        quota_cores=read_quota_cores(),
        openmp_wait=None if on_gpu or threads == 1 else _format_openmp_wait(),
        container=os.environ.get("ZEROSCALE_CONTAINER_DIGEST"),
        versions=versions,
    )


def check_alike(classes: Sequence[EnvironmentClass]) -> None:
    """Raise Refused if the ranks are in different environment classes, because their combined result would belong to
    none of these classes. `classes` has the class of each rank.

    Cores, threads and the OpenMP wait policy may differ, because ranks may be bound to different numbers of cores.
    """
    # These fields are not compared. A rank with fewer cores may be slower, but in every run the slowest rank determines
    # the step time.
    bound = {"cores": None, "threads": None, "openmp_wait": None}
    first, *others = (one.model_copy(update=bound) for one in classes)
    for rank, other in enumerate(others, start=1):
        if other != first:
            differ = [name for name in EnvironmentClass.model_fields if getattr(other, name) != getattr(first, name)]
            shown = "; ".join(f"{name} {getattr(other, name)} and {getattr(first, name)}" for name in differ)
            raise Refused(f"ranks {rank} and 0 are of different environments: {shown}")


def _find_first_visible() -> int | str:
    """Return the index or name of the first visible GPU, as used by the driver."""
    named = next((os.environ[name] for name in VISIBLE if name in os.environ), "0")
    first = named.split(",")[0].strip()
    return int(first) if first.isdigit() else first or 0


def choose_openmp_variables(device: str, devices_per_node: int) -> dict[str, str]:
    """Return the default OpenMP variables of a rank on `device` ("cpu" or "cuda"). Variables that the user has set are
    excluded.

    The variables set the number of threads. On a CPU, they also reduce the time for which a waiting thread spins.
    Otherwise threads of libgomp spin for milliseconds before they sleep. Under background load, a spinning thread can
    occupy the core that another thread of the rank needs. A step then takes many times as long.
    """
    chosen = {"OMP_NUM_THREADS": str(_count_threads(devices_per_node))}
    if device == "cpu" and not any(name in os.environ for name in _OPENMP_WAIT):
        chosen |= _OPENMP_WAIT_DEFAULT
    return {name: value for name, value in chosen.items() if name not in os.environ}


def _count_threads(devices_per_node: int) -> int:
    """Return the number of OpenMP threads of a rank: OMP_NUM_THREADS if the user has set it, else the rank's share of
    the cores.

    The cores in the process's affinity mask are divided by the number of ranks per node. The scheduler may also report
    the number of cores per process. In this case, the smaller of the two numbers of cores is used, because a scheduler
    may not bind processes to cores. The smaller number is divided by the number of ranks per node, unless the scheduler
    starts one process per rank.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit():
        return int(given)
    job = read_job(os.environ) or JobContext()
    if job.cores is None:
        return max(1, count_cores() // devices_per_node)
    has_process_per_rank = job.processes == job.nodes * devices_per_node
    return max(1, min(count_cores(), job.cores) // (1 if has_process_per_rank else devices_per_node))


def _format_openmp_wait() -> str:
    """Return the OpenMP wait variables in effect for a rank, as text: `NAME=value`, separated by spaces."""
    given = {name: os.environ[name] for name in _OPENMP_WAIT if name in os.environ} or _OPENMP_WAIT_DEFAULT
    return " ".join(f"{name}={value}" for name, value in sorted(given.items()))


# Fields of the environment class that were added in later versions of the record.
_LATER_FIELDS = ("cores", "threads", "quota_cores", "openmp_wait")


def compute_environment_id(classification: EnvironmentClass) -> str:
    """Return the id of an environment class: the first 8 hexadecimal digits of its SHA-256 hash.

    A field of `_LATER_FIELDS` that is None is not hashed. So environment classes in older records keep their ids.
    """
    later = {name for name in _LATER_FIELDS if getattr(classification, name) is None}
    return hashlib.sha256(classification.model_dump_json(exclude=later).encode()).hexdigest()[:8]


def probe(
    classification: EnvironmentClass, hosts: tuple[str, ...], cpus: dict[str, Any], job: JobContext, spec: RunSpec
) -> Environment:
    """Return the description of the machine that this process runs on.

    `hosts` are the host names of the nodes, in the order of the nodes. `cpus` has the host, the CPU affinity, the
    number of threads and the device of each rank. `job` is the scheduler's job that this process runs in. `spec` names
    the plug-ins of the run.
    """
    scheduled = ScheduledJob(job_id=job.job_id, cluster=job.cluster, restart=job.restart, nodelist=job.nodelist)
    return Environment(
        environment_id=compute_environment_id(classification),
        classification=classification,
        versions={name: read_version(name) for name in _PACKAGES}
        | read_loaded_collectives()
        | read_plugin_versions(spec)
        | {"python": platform.python_version(), "os": platform.platform()},
        git=_read_git(Path(__file__).parent),
        hosts=hosts,
        cpus={"model": read_cpu_model(), "cores": os.cpu_count(), **cpus},
        devices=tuple(devices.read_states()),
        job=scheduled if job.job_id else None,
        slurm=job.variables,
        variables=select_variables(dict(os.environ)),
    )


def select_variables(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment variables that affect results, without any variable that looks like a secret.

    Variables that match `_VARIABLES` are always kept with their values. Other variables of libraries such as NCCL may
    contain private text. Their value is kept only if it is a number or a word such as `true` or `off`. Any other value
    is replaced by a note that the variable was set.
    """
    shown = {}
    for name, value in sorted(environment.items()):
        if is_secret(name, value):
            continue
        if _VARIABLES.fullmatch(name):
            shown[name] = value
        elif _OF_LIBRARIES.fullmatch(name):
            shown[name] = value if _PLAIN.fullmatch(value) else _NOT_RECORDED
    return shown


def read_version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_plugin_versions(spec: RunSpec) -> dict[str, str | None]:
    """Return the versions of the installed packages whose plug-ins a run uses. Each key is the text `plug-in PACKAGE`.
    A version is followed by a hash of the package's Python files, because the code may change without a new version.
    The result is empty for a run that uses only plug-ins of zeroscale."""
    used = (
        (plugins.ENGINE, spec.engine.backend), (plugins.FAMILY, spec.model.family),
        (plugins.OBJECTIVE, spec.objective), (plugins.DATA, spec.data.source),
    )  # fmt: skip
    found: dict[str, str | None] = {}
    for kind, name in used:
        for entry in installed_plugins.find_entries(kind.name).get(name, ()):
            digest = hashlib.sha256()
            for path in installed_plugins.list_installed_files(kind.name, name):
                digest.update(path.read_bytes())
            package, version = (entry.dist.name, entry.dist.version) if entry.dist else (entry.module, "unknown")
            found[f"plug-in {package}"] = f"{version} (files {digest.hexdigest()[:8]})"
    return found


@functools.cache
def read_cpu_model() -> str:
    """Return the model name of this machine's CPU; the architecture if the kernel reports no name."""
    match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def read_host_memory_bytes() -> int:
    """Return the size of this host's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _read_torch_constant(name: str) -> str | None:
    """Return a version constant such as `cuda` from torch/version.py without importing torch; None if it is not set."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    match = re.search(rf"^{name}\b.*= '([^']+)'", Path(found.origin).with_name("version.py").read_text(), re.MULTILINE)
    return match[1] if match else None


def read_loaded_collectives() -> dict[str, str | None]:
    """Return the version of NCCL, or of RCCL on AMD, that the imported torch uses. The key is the name of the library.

    Empty if torch is not imported, if no GPU is available, or if torch was built without the library.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    try:
        return {name_collectives(): ".".join(map(str, torch.cuda.nccl.version()))}
    except (AttributeError, RuntimeError, TypeError):  # torch was built without NCCL
        return {}


def name_collectives() -> str:
    """Return the name of the GPU communication library: "rccl" on AMD, else "nccl". torch calls both `nccl`."""
    return "rccl" if _read_torch_constant("hip") else "nccl"


def _read_nccl_version() -> str | None:
    names = (d.metadata["Name"] or "" for d in importlib.metadata.distributions())
    return next((read_version(name) for name in names if name.startswith("nvidia-nccl-")), None)


# The folders results/ and docs/ are not included, because a study writes its own files there.
_CODE = (":/bench", ":/analysis", ":/conf")
"""Folders of the repository in which an untracked file may change the results of a run."""


def _read_git(folder: Path) -> dict[str, Any] | None:
    """Return the git commit of the code, and whether files differ from it (`dirty`); None outside of a git checkout."""

    def ask(*question: str) -> str:
        command = ["git", "-C", str(folder), *question]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # This fails if the repository is another project that contains this folder.
        ask("ls-files", "--error-unmatch", Path(__file__).name)
        changed = ask("status", "--porcelain", "--untracked-files=no", "--", ":/")
        # An untracked file outside of these folders does not affect results.
        added = ask("status", "--porcelain", "--", *_CODE)
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(changed or added)}
    except (OSError, subprocess.SubprocessError):
        return None  # an installed wheel has no history
