"""Show what this machine can do, what it lacks, and how to get it.

Imports torch and DeepSpeed, so it takes some seconds. Exit code 0 if a run can start here.
"""

import argparse
import importlib
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.cli import options
from bench.config.compose import find_conf_folder
from bench.core import plugins, terminal
from bench.core.errors import Check, CheckState, UserError
from bench.core.machine import Machine
from bench.measure import devices, environment
from bench.sweep.prepare.staging import check_memory_counter

OLDEST_SLURM = (21, 8)
"""Before, `sacct` has no field `Reason`."""
_KINDS: tuple[plugins.Kind[Any], ...] = (
    plugins.ENGINE, plugins.FAMILY, plugins.OBJECTIVE, plugins.DATA, plugins.LAUNCHER, plugins.METRIC, plugins.FIGURE,
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if nothing is missing that a run needs."""
    return terminal.print_findings(check_all(), as_json=args.json)


def check_all() -> list[Check]:
    """Look at everything a run stands on, in the order in which it is needed."""
    checkers: list[Callable[[], Iterable[Check]]] = [
        _check_host,
        _check_packages,
        _check_compiler,
        check_memory_counter,
        _check_accelerator,
        _check_operations,
        _check_slurm,
        _check_locked_memory,
        _check_plugins,
        _check_folders,
    ]
    return [found_check for checker in checkers for found_check in checker()]


def _check_host() -> list[Check]:
    cores, memory = len(os.sched_getaffinity(0)), environment.read_host_memory_bytes()
    python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    return [
        Check("processor", "ok", f"{environment.read_cpu_model()}, {cores} cores, {memory / 2**30:.0f} GiB memory"),
        Check("python", "ok", python),
    ]


def _check_packages() -> list[Check]:
    names = ("torch", "deepspeed", "transformers", "datasets")
    return [
        Check(name, "ok", found)
        if (found := environment.read_version(name))
        else Check(name, "missing", "not installed", "pip install 'zeroscale[run]'")
        for name in names
    ]


def _check_compiler() -> list[Check]:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    ninja = shutil.which("ninja") or environment.read_version("ninja")
    without = "install g++ (Debian: apt-get install g++)"
    return [
        Check("C++ compiler", "ok", _read_first_line(compiler, "--version")) if compiler
        else Check("C++ compiler", "note", "none: CPU memory stays unknown, DeepSpeed builds no op", without),
        Check("ninja", "ok", str(ninja)) if ninja
        else Check("ninja", "note", "none: DeepSpeed builds no op", "pip install ninja"),
    ]  # fmt: skip


def _check_accelerator() -> list[Check]:
    torch = _import_or_none("torch")
    if torch is None or not torch.cuda.is_available():
        shown = ", ".join(str(d["name"]) for d in devices.read_states())
        if shown:
            return [
                Check(
                    "accelerator", "note", f"the driver shows {shown}, this torch cannot use it", "install a CUDA build"
                )
            ]
        return [Check("accelerator", "note", "none: runs use the processor, one process per device asked for")]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    fitting = [machine for machine in _read_machines() if machine.device_names and machine.accepts(names[0])]
    compiler = shutil.which("nvcc")
    without = Check("nvcc", "note", "none: DeepSpeed builds no GPU op", "install the CUDA toolkit of torch's version")
    nvcc = Check("nvcc", "ok", _read_first_line(compiler, "--version")) if compiler else without
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    driver = f"driver {devices.read_driver_version()}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    hint = (
        f"machine={fitting[0].name} knows its peaks" if fitting else "no file in conf/machine knows it: MFU stays empty"
    )
    description = f"{len(names)} × {names[0]}, {memory:.0f} GiB, CUDA {torch.version.cuda}, {driver}"
    return [Check("accelerator", "ok", description, hint), nvcc]


def _check_operations() -> list[Check]:
    """Which of DeepSpeed's ops for Adam can be built here; torch's own optimizer needs none of them."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if devices.count_devices() else "cpu")
    builders = _import_or_none("deepspeed.ops.op_builder")
    if builders is None:
        return []
    checks = []
    for name in ("CPUAdamBuilder", "FusedAdamBuilder") if devices.count_devices() else ("CPUAdamBuilder",):
        compatible = bool(getattr(builders, name)().is_compatible(verbose=False))
        description = (
            "can be built" if compatible else "cannot be built: optimizer.implementation=native will not work with it"
        )
        checks.append(Check(f"DeepSpeed {name.removesuffix('Builder')}", "ok" if compatible else "note", description))
    return checks


def _check_slurm() -> list[Check]:
    """Return the version of Slurm here; nothing on a machine without it."""
    if shutil.which("sbatch") is None:
        return []
    told = _read_first_line("sbatch", "--version")
    found = re.match(r"slurm\S* (\d+)\.(\d+)", told)
    if found is None:
        return [Check("Slurm", "note", f"its version is unknown: {told}", "ask on a machine of the cluster")]
    if (int(found[1]), int(found[2])) < OLDEST_SLURM:
        oldest = f"{OLDEST_SLURM[0]}.{OLDEST_SLURM[1]:02}"
        return [Check("Slurm", "note", f"{told} is older than {oldest}: how jobs ended is not read", "update Slurm")]
    return [Check("Slurm", "ok", told)]


def _check_locked_memory() -> list[Check]:
    """Return whether a process here may lock memory, which network cards that read it directly need; nothing on a
    machine without Slurm and without such a card. Slurm hands the limit of the submitting shell on to jobs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if shutil.which("sbatch") is None and not any(Path("/sys/class/infiniband").glob("*")):
        return []
    if limit == resource.RLIM_INFINITY:
        return [Check("locked memory", "ok", "unlimited")]
    why = f"{limit / 2**20:.3g} MiB: InfiniBand may fail to register memory, also in jobs that are submitted from here"
    return [
        Check(
            "locked memory", "note", why, "ulimit -l unlimited, or PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
        )
    ]


def _check_plugins() -> list[Check]:
    """What a config can name, of every kind, and what of it cannot be used."""
    return [found_check for kind in _KINDS for found_check in _check_plugins_of_kind(kind)]


def _check_plugins_of_kind(kind: plugins.Kind[Any]) -> Iterable[Check]:
    names = plugins.list_names(kind)
    yield Check(f"{kind.name} plug-ins", "ok", ", ".join(names))
    for name in names:
        try:
            plugins.load(kind, name)
        except UserError as error:
            yield Check(error.value, "note", f"cannot be used: {error.rule}", error.remedy)


def _check_folders() -> list[Check]:
    free = shutil.disk_usage(Path.cwd()).free
    state: CheckState = "ok" if free > 2**30 else "note"
    return [Check("disk here", state, f"{free / 2**30:.1f} GiB free", "" if state == "ok" else "free some space")]


def _read_machines() -> list[Machine]:
    import yaml

    return [
        Machine.model_validate(yaml.safe_load(path.read_text()))
        for path in sorted((find_conf_folder() / "machine").glob("*.yaml"))
    ]


def _import_or_none(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation raises whatever it likes
        if not isinstance(error, ModuleNotFoundError):
            raise UserError(name, f"cannot be imported ({error})", "reinstall it") from error
        return None


def _read_first_line(*command: str) -> str:
    description = subprocess.run(command, capture_output=True, text=True, check=False)
    return (description.stdout or description.stderr).splitlines()[0]
