"""Show what this machine can run, what is missing, and how to install it.

The command imports torch and DeepSpeed, so it takes some seconds. The exit code is 0 if a run can
start here.
"""

import argparse
import importlib
import itertools
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from bench.cli import options
from bench.core import plugins, terminal
from bench.core.errors import Check, UserError
from bench.core.files import find_conf_folder
from bench.core.machine import Machine
from bench.measure import devices, environment
from bench.sweep.prepare.staging import check_memory_counter

OLDEST_SLURM = (21, 8)
"""Oldest Slurm version whose `sacct` reports the field `Reason`."""
_RDMA_CARDS = "/sys/class/infiniband"
_KINDS: tuple[plugins.Kind[Any], ...] = (
    plugins.ENGINE, plugins.FAMILY, plugins.OBJECTIVE, plugins.DATA, plugins.LAUNCHER, plugins.METRIC, plugins.FIGURE,
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the checks. Return the exit code: 0 if everything that a run needs is present."""
    return terminal.print_findings(check_all(), as_json=args.json)


def check_all() -> list[Check]:
    """Return a check of each requirement of a run, in the order in which a run needs them."""
    checkers = (
        _check_host, _check_tools, check_memory_counter, _check_accelerator, _check_operations, _check_slurm,
        _check_locked_memory, _check_plugins,
    )  # fmt: skip
    found = list(itertools.chain.from_iterable(checker() for checker in checkers))
    free = shutil.disk_usage(Path.cwd()).free
    shown = f"{free / 2**30:.1f} GiB free"
    enough = free > 2**30
    return [*found, Check("disk here", "ok" if enough else "note", shown, "" if enough else "free some space")]


def _check_host() -> Iterator[Check]:
    cores, memory = len(os.sched_getaffinity(0)), environment.read_host_memory_bytes()
    yield Check("processor", "ok", f"{environment.read_cpu_model()}, {cores} cores, {memory / 2**30:.0f} GiB memory")
    yield Check("python", "ok", ".".join(map(str, sys.version_info[:3])))


def _check_tools() -> Iterator[Check]:
    """Yield checks of the packages that a run imports, and of the programs with which DeepSpeed builds its ops."""
    for name in ("torch", "deepspeed", "transformers", "datasets"):
        none = Check(name, "missing", "not installed", "pip install 'zeroscale[run]'")
        yield _confirm(none, environment.read_version(name))
    for name in ("peft", "bitsandbytes"):
        none = Check(name, "note", "not installed: no runs with adapters", "pip install 'zeroscale[adapters]'")
        yield _confirm(none, environment.read_version(name))
    without = "none: memory on a CPU is not measured, and DeepSpeed cannot build its ops"
    compiler = os.environ.get("CXX", "c++")
    yield _check_program("C++ compiler", compiler, without, "install g++ (Debian: apt-get install g++)")
    ninja = shutil.which("ninja") or environment.read_version("ninja")
    none = Check("ninja", "note", "not installed: DeepSpeed cannot build its ops", "pip install ninja")
    yield _confirm(none, ninja)


def _confirm(none: Check, found: str | None) -> Check:
    """Return an `ok` check with the text `found`, such as a version. If `found` is empty or None, return the check
    `none` instead. Both checks have the same subject."""
    return Check(none.subject, "ok", found) if found else none


def _check_program(subject: str, program: str, without: str, remedy: str) -> Check:
    """Return a check with the version of `program`, or with the text `without` if the program is not installed."""
    path = shutil.which(program)
    return _confirm(Check(subject, "note", without, remedy), path and _read_first_line(path, "--version"))


def _check_accelerator() -> Iterator[Check]:
    torch = _import_or_none("torch")
    if torch is None or not torch.cuda.is_available():
        if shown := ", ".join(str(state["name"]) for state in devices.read_states()):
            rule = f"the driver reports {shown}, but this build of torch cannot use it"
            yield Check("accelerator", "note", rule, "install a CUDA build of torch")
        else:
            yield Check("accelerator", "note", "none: runs use the CPU, with one process per device")
        return
    name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
    files = sorted((find_conf_folder() / "machine").glob("*.yaml"))
    machines = (Machine.model_validate(yaml.safe_load(path.read_text())) for path in files)
    fitting = [machine.name for machine in machines if machine.device_names and machine.accepts(name)]
    hint = "no file of conf/machine matches it: MFU is unknown"
    hint = f"machine={fitting[0]} has its peak rates" if fitting else hint
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    driver = f"driver {devices.query(0, 'driver_version')}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    yield Check("accelerator", "ok", f"{count} × {name}, {memory:.0f} GiB, CUDA {torch.version.cuda}, {driver}", hint)
    without, remedy = "none: DeepSpeed cannot build GPU ops", "install the CUDA toolkit of torch's CUDA version"
    yield _check_program("nvcc", "nvcc", without, remedy)


def _check_operations() -> Iterator[Check]:
    """Yield a check for each DeepSpeed op that Adam or offload to NVMe needs: whether the op can be built here. torch's
    own optimizer needs none of these ops."""
    # Without this variable DeepSpeed detects the accelerator by importing the packages of all vendors.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if devices.count_devices() else "cpu")
    builders = _import_or_none("deepspeed.ops.op_builder")
    needed_by = {"CPUAdam": "optimizer.implementation=native", "AsyncIO": "offload to NVMe"}
    if devices.count_devices():
        needed_by["FusedAdam"] = needed_by["CPUAdam"]
    for name, setting in needed_by.items():
        if builders and getattr(builders, f"{name}Builder")().is_compatible(verbose=False):
            yield Check(f"DeepSpeed {name}", "ok", "can be built")
        elif builders:
            rule = f"cannot be built: {setting} is not available"
            yield Check(f"DeepSpeed {name}", "note", rule, "install libaio-dev" if name == "AsyncIO" else "")


def _check_slurm() -> Iterator[Check]:
    """Yield a check of the Slurm version. Nothing is yielded on a machine without Slurm."""
    told = _read_slurm_version()
    if not told:
        return
    found = re.match(r"slurm\S* (\d+)\.(\d+)", told)
    if found is None:
        yield Check("Slurm", "note", f"unknown version: {told}", "run zeroscale doctor on a login node of the cluster")
    elif (int(found[1]), int(found[2])) < OLDEST_SLURM:
        rule = f"{told} is older than {OLDEST_SLURM[0]}.{OLDEST_SLURM[1]:02}: sacct does not report why a job ended"
        yield Check("Slurm", "note", rule, "update Slurm")
    else:
        yield Check("Slurm", "ok", told)


def _read_slurm_version() -> str:
    """Return the output of `sbatch --version`. Empty on a machine that belongs to no cluster: sbatch is not installed,
    or finds no slurm.conf."""
    if shutil.which("sbatch") is None:
        return ""
    done = subprocess.run(("sbatch", "--version"), capture_output=True, text=True, check=False)
    told = done.stdout or done.stderr
    return "" if "Could not establish a configuration source" in told else told.partition("\n")[0]


def _check_locked_memory() -> Iterator[Check]:
    """Yield a check of the limit on locked memory. RDMA network cards need locked memory, and Slurm applies the limit
    of the submitting shell to jobs. Nothing is yielded on a machine that has neither Slurm nor an RDMA card."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_slurm = bool(_read_slurm_version())
    if not has_slurm and not any(Path(_RDMA_CARDS).glob("*")):
        return
    if limit == resource.RLIM_INFINITY:
        yield Check("locked memory", "ok", "unlimited")
        return
    why = f"{limit / 2**20:.3g} MiB: InfiniBand may fail to register memory"
    remedy = "ulimit -l unlimited, or memlock in /etc/security/limits.conf"
    if has_slurm:
        why += ", also in jobs submitted from here"
        remedy = "ulimit -l unlimited, or PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    yield Check("locked memory", "note", why, remedy)


def _check_plugins() -> Iterator[Check]:
    """Yield the names of the plug-ins of each kind, and a check for every plug-in that cannot be used."""
    for kind in _KINDS:
        names = plugins.list_names(kind)
        yield Check(f"{kind.name} plug-ins", "ok", ", ".join(names))
        for name in names:
            try:
                plugins.load(kind, name)
            except UserError as error:
                yield Check(error.value, "note", f"cannot be used: {error.rule}", error.remedy)


def _import_or_none(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    except Exception as error:  # a broken installation may raise anything
        raise UserError(name, f"cannot be imported ({error})", "reinstall it") from error


def _read_first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).splitlines()[0]
