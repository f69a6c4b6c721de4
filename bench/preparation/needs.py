"""What points need by kind of node, and where the jobs that run them look for it."""

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import data, engines, extensions, launchers
from bench.config.compose import Request
from bench.errors import UserError
from bench.preparation.process import StagerMode
from bench.preparation.staging import StagingNeeds
from bench.scheduling import JobSetup, SchedulingOptions
from bench.spec import RunSpec
from bench.sweep import inputs

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def collect_needs(requests: Sequence[Request], architectures: Sequence[str | None] = (None,)) -> list[StagingNeeds]:
    """Return what points need by kind of node, each thing once."""
    kinds: dict[tuple[str, tuple[str, ...]], dict[str, list[RunSpec]]] = {}
    seen = set()
    for request in requests:
        operations = engines.facts(request.spec).compiled_ops
        kind = kinds.setdefault((_device(request), operations), {"data": [], "models": []})
        for part, key in _keys(request.spec).items():
            if key not in seen:
                seen.add(key)
                kind[part].append(request.spec)
    elsewhere = launchers.load(requests[0].launcher).QUEUES
    found = []
    for (device, names), specs in kinds.items():
        every = architectures if extensions.has_gpu_kernel(names, device) else (None,)
        for number, architecture in enumerate(every):
            plain = {"device": device, "operations": names, "architecture": architecture, "elsewhere": elsewhere}
            found.append(StagingNeeds.model_validate(plain | (specs if number == 0 else {})))
    return found


def _keys(spec: RunSpec) -> dict[str, str]:
    """Return what tells data, and models, apart."""
    text = [spec.data.source, spec.data.options, spec.objective, spec.sequence, data.vocabulary(spec)]
    shape = [spec.model.model_dump(mode="json"), spec.activation_checkpointing]
    return {"data": json.dumps(["data", *text]), "models": json.dumps(["model", *shape])}


def _device(request: Request) -> str:
    return inputs.find_device(request) or _setup(request).device or "cpu"


def _setup(request: Request) -> JobSetup:
    """Return what the jobs' commands run in; where there are no jobs, nothing but what is here."""
    launcher, options = launchers.load_queueing(request.launcher), request.launcher_options
    return launcher.job_setup(options) if launcher and isinstance(options, SchedulingOptions) else JobSetup()


def outside_of(request: Request) -> str | None:
    """Return the container image of the jobs, unless this runs in one already."""
    return None if extensions.IMAGE in os.environ else _setup(request).image


def architectures(listed: Sequence[str] | None, request: Request) -> list[str | None]:
    """Return the GPU architectures to build for; None is that of the GPU here."""
    if listed is None:
        return [None]
    given = f"--arch {','.join(listed)}"
    available = variables("check", request)
    if variable := available.get(extensions.ARCHITECTURES):
        rule = f"jobs will find {extensions.ARCHITECTURES}={variable} in their environment, and build for that"
        raise UserError(given, rule, "unset the variable, or leave --arch out")
    if not listed or not all(re.fullmatch(r"\d+\.\d[a-f]?", one) for one in listed):
        raise UserError(given, "not a list of architectures", "write it like 8.0,9.0")
    if len(listed) > 1 and extensions.FOLDER in available:
        rule = f"{extensions.FOLDER}={available[extensions.FOLDER]} holds the builds for one"
        raise UserError(given, rule, "unset the variable, or give one")
    return [*listed]


def variables(mode: StagerMode, request: Request) -> dict[str, str]:
    """Return the environment in which to stage or check: that of a job, with or without a network."""
    given = _setup(request).variables
    offline = dict.fromkeys(_OFFLINE, "1")
    if mode == "check":
        return dict(os.environ) | given | offline
    return dict(os.environ) | {name: value for name, value in given.items() if name not in offline}


def python(request: Request) -> tuple[str, ...]:
    """Return the jobs' own Python where it can be named from here: not in a container, and not found by modules."""
    setup = _setup(request)
    command = setup.python
    if not command or not Path(command[0]).is_absolute() or setup.image:
        return (sys.executable,)
    if not Path(command[0]).exists():
        raise UserError(f"launcher.python={command[0]}", "not on this machine", "call prepare where it is")
    return command
