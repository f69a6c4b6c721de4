"""Show what this machine can do, what it lacks, and how to get it.

Imports torch and DeepSpeed, so it takes some seconds. Exit code 0 if a run can start here.
"""

import argparse
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import plugins, terminal
from bench.cli import options
from bench.config import conf_dir
from bench.errors import UserError
from bench.findings import Finding, State
from bench.machine import Machine
from bench.measure import devices, environment
from bench.staging import memory_counter

_KINDS: tuple[plugins.Kind[Any], ...] = (
    plugins.ENGINE, plugins.FAMILY, plugins.OBJECTIVE, plugins.DATA, plugins.LAUNCHER, plugins.METRIC, plugins.FIGURE,
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    options.as_json(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if nothing is missing that a run needs."""
    return terminal.print_findings(examine(), as_json=args.json)


def examine() -> list[Finding]:
    """Look at everything a run stands on, in the order in which it is needed."""
    looks: list[Callable[[], Iterable[Finding]]] = [
        _host,
        _packages,
        _compiler,
        memory_counter,
        _accelerator,
        _operations,
        _plugins,
        _folders,
    ]
    return [finding for look in looks for finding in look()]


def _host() -> list[Finding]:
    cores, memory = len(os.sched_getaffinity(0)), environment.host_memory_bytes()
    python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    return [
        Finding("processor", "ok", f"{environment.cpu_model()}, {cores} cores, {memory / 2**30:.0f} GiB memory"),
        Finding("python", "ok", python),
    ]


def _packages() -> list[Finding]:
    names = ("torch", "deepspeed", "transformers", "datasets")
    return [
        Finding(name, "ok", found)
        if (found := environment.version(name))
        else Finding(name, "missing", "not installed", "pip install 'zeroscale[run]'")
        for name in names
    ]


def _compiler() -> list[Finding]:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    ninja = shutil.which("ninja") or environment.version("ninja")
    without = "install g++ (Debian: apt-get install g++)"
    return [
        Finding("C++ compiler", "ok", _first_line(compiler, "--version")) if compiler
        else Finding("C++ compiler", "note", "none: CPU memory stays unknown, DeepSpeed builds no op", without),
        Finding("ninja", "ok", str(ninja)) if ninja
        else Finding("ninja", "note", "none: DeepSpeed builds no op", "pip install ninja"),
    ]  # fmt: skip


def _accelerator() -> list[Finding]:
    torch = _import("torch")
    if torch is None or not torch.cuda.is_available():
        shown = ", ".join(str(d["name"]) for d in devices.snapshot())
        if shown:
            return [
                Finding(
                    "accelerator", "note", f"the driver shows {shown}, this torch cannot use it", "install a CUDA build"
                )
            ]
        return [Finding("accelerator", "note", "none: runs use the processor, one process per device asked for")]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    fitting = [machine for machine in _machines() if machine.device_names and machine.accepts(names[0])]
    compiler = shutil.which("nvcc")
    without = Finding("nvcc", "note", "none: DeepSpeed builds no GPU op", "install the CUDA toolkit of torch's version")
    nvcc = Finding("nvcc", "ok", _first_line(compiler, "--version")) if compiler else without
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    driver = f"driver {devices.driver_version()}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    hint = (
        f"machine={fitting[0].name} knows its peaks" if fitting else "no file in conf/machine knows it: MFU stays empty"
    )
    told = f"{len(names)} × {names[0]}, {memory:.0f} GiB, CUDA {torch.version.cuda}, {driver}"
    return [Finding("accelerator", "ok", told, hint), nvcc]


def _operations() -> list[Finding]:
    """Which of DeepSpeed's ops for Adam can be built here; torch's own optimizer needs none of them."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if devices.count() else "cpu")
    builders = _import("deepspeed.ops.op_builder")
    if builders is None:
        return []
    findings = []
    for name in ("CPUAdamBuilder", "FusedAdamBuilder") if devices.count() else ("CPUAdamBuilder",):
        compatible = bool(getattr(builders, name)().is_compatible(verbose=False))
        told = (
            "can be built" if compatible else "cannot be built: optimizer.implementation=native will not work with it"
        )
        findings.append(Finding(f"DeepSpeed {name.removesuffix('Builder')}", "ok" if compatible else "note", told))
    return findings


def _plugins() -> list[Finding]:
    """What a config can name, of every kind, and what of it cannot be used."""
    return [finding for kind in _KINDS for finding in _plugins_of(kind)]


def _plugins_of(kind: plugins.Kind[Any]) -> Iterable[Finding]:
    names = plugins.names(kind)
    yield Finding(f"{kind.name} plug-ins", "ok", ", ".join(names))
    for name in names:
        try:
            plugins.load(kind, name)
        except UserError as error:
            yield Finding(error.value, "note", f"cannot be used: {error.rule}", error.remedy)


def _folders() -> list[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    state: State = "ok" if free > 2**30 else "note"
    return [Finding("disk here", state, f"{free / 2**30:.1f} GiB free", "" if state == "ok" else "free some space")]


def _machines() -> list[Machine]:
    import yaml

    return [
        Machine.model_validate(yaml.safe_load(path.read_text()))
        for path in sorted((conf_dir() / "machine").glob("*.yaml"))
    ]


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation raises whatever it likes
        if not isinstance(error, ModuleNotFoundError):
            raise UserError(name, f"cannot be imported ({error})", "reinstall it") from error
        return None


def _first_line(*command: str) -> str:
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return (told.stdout or told.stderr).splitlines()[0]
