"""Fetch and build the data, checkpoints and compiled ops that a sweep needs, or check that they can be used: `python -m
bench.sweep.prepare.staging stage|check`.

Reads `StagingNeeds` as JSON from standard input and prints one JSON value per line. A string names the current step. An
object is a finding: something that works or is missing. `stage` may use the network, and fills caches. `check` does the
first steps of a run.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal

from bench import data, models
from bench.core.errors import Check, UserError
from bench.core.spec import Frozen, RunSpec
from bench.measure.environment import read_version
from bench.models.checkpoint import find_folder, is_folder, list_files
from bench.runtime import extensions

_LIBRARIES = ("torch", "transformers", "datasets", "deepspeed")
_OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # folders that are not shared between nodes

StagingMessage = str | Check


class StagingNeeds(Frozen):
    """Compiled ops, data and models that points (configurations) need on nodes with one kind of device. One spec in
    `data` or `models` represents all points that need the same data or the same model."""

    device: Literal["cpu", "cuda"]
    operations: tuple[str, ...] = ()
    architecture: str | None = None  # compute capability of the GPUs, such as "9.0"; None: that of the local GPU
    data: tuple[RunSpec, ...] = ()
    models: tuple[RunSpec, ...] = ()
    elsewhere: bool = False  # the points run on other machines


def main() -> None:
    """Read from standard input which data, models and compiled ops are needed. Fetch or build them (argument `stage`),
    or check that a run can use them (argument `check`). Print messages to standard output; the output of libraries goes
    to standard error instead."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    signal.signal(signal.SIGTERM, _end_group)
    needs = StagingNeeds.model_validate_json(sys.stdin.read())
    os.environ["DS_ACCELERATOR"] = needs.device
    if needs.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if needs.architecture:
        os.environ[extensions.ARCHITECTURES] = needs.architecture
    os.environ |= extensions.build_environment(needs.operations, needs.device, os.environ)
    for message in {"stage": stage, "check": check}[sys.argv[1]](needs):
        print(json.dumps(message if isinstance(message, str) else message._asdict()), file=answers, flush=True)


def _end_group(number: int, frame: FrameType | None) -> None:
    """End all child processes, then this process. Its exit removes incomplete results."""
    signal.signal(number, signal.SIG_IGN)
    os.killpg(0, number)
    with contextlib.suppress(ChildProcessError):
        while os.wait():  # wait for all children: ninja ends its compilers before itself
            pass
    sys.exit(128 + number)


def stage(needs: StagingNeeds) -> Iterator[StagingMessage]:
    """Fetch or build everything for which a run would need a network or a compiler, and yield the findings."""
    for spec in needs.data:
        yield from _run_check(f"data {spec.data.name}", partial(_stage_data, spec, needs))
    for spec in needs.models:
        if spec.model.checkpoint is not None:
            yield from _run_check(f"weights {spec.model.checkpoint}", partial(_stage_weights, spec, needs))
    yield from _check_compiled(needs)


def check(needs: StagingNeeds) -> Iterator[StagingMessage]:
    """Do the steps that a run does before it builds its engine, and yield the findings."""
    yield _check_network()
    yield from _run_check("libraries", partial(_check_libraries, needs))
    if needs.device == "cuda":
        yield from _run_check("GPU", _check_gpu)
    for spec in needs.models:
        yield from _run_check(f"model {spec.model.name}", partial(_check_model, spec))
    for spec in needs.data:
        yield from _run_check(f"data {spec.data.name}", partial(_check_micro_batch, spec))
    yield from _check_compiled(needs)


def _check_compiled(needs: StagingNeeds) -> Iterator[StagingMessage]:
    if needs.device == "cpu":
        yield from _run_check("CPU memory counter", check_memory_counter)
    for name in needs.operations:
        yield from _run_check(f"op {name}", partial(_check_operation, name, needs))


def _run_check(subject: str, checker: Callable[[], Iterable[Check]]) -> Iterator[StagingMessage]:
    """Yield the subject of a check, then its findings. If the check raises an error, the error is yielded as a
    finding."""
    yield subject
    try:
        yield from checker()
    except UserError as error:
        yield Check(subject, "missing", f"{error.value}: {error.rule}", error.remedy)
    except Exception as error:  # libraries raise errors of any type
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        message = next((line for line in lines if "error:" in line), lines[0])
        yield Check(subject, "missing", f"{type(error).__name__}: {message}")


def _check_network() -> Check:
    interfaces = {name for _, name in socket.if_nameindex()} - {"lo"}
    if not interfaces:
        return Check("network", "ok", "disconnected during the following checks")
    message = "HF_HUB_OFFLINE and similar variables are set, but the network cannot be disconnected (unshare --net)"
    return Check("network", "note", f"{message}: other access to the network would not be detected")


def _check_libraries(needs: StagingNeeds) -> Iterator[Check]:
    torch = importlib.import_module("torch")
    if needs.device == "cuda" and not (torch.version.cuda or torch.version.hip):
        message, remedy = f"torch {torch.__version__} is a build for CPUs only", "install a CUDA build of torch"
        yield Check("libraries", "missing", message, remedy)
        return
    for name in _LIBRARIES:
        importlib.import_module(name)
    yield Check("libraries", "ok", ", ".join(f"{name} {read_version(name)}" for name in _LIBRARIES))


def _check_gpu() -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        yield Check("GPU", "ok", torch.cuda.get_device_name())
    else:
        yield Check("GPU", "note", "none on this machine: GPU ops can be loaded, but not run")


def _check_model(spec: RunSpec) -> Iterator[Check]:
    """Build a model on the meta device, where its weights take no memory, and check its number of parameters. If the
    model has a checkpoint, also check its tensors."""
    import torch

    from bench.models.modules.adapters import check_adapter

    module = models.load_builder(spec.model.family).build(spec, torch.device("meta"))
    found = sum(parameter.numel() for parameter in module.parameters())
    expected = models.count_expected_parameters(spec.model)
    check_adapter(module, spec.adapter)
    if expected in (found, None):
        yield Check(f"model {spec.model.name}", "ok", f"can be built: {found:,} parameters")
    else:
        message, remedy = f"{found:,} parameters instead of {expected:,}", "install another version of transformers"
        yield Check(f"model {spec.model.name}", "missing", message, remedy)
    if spec.model.checkpoint is not None:
        from bench.models.checkpoint.tensors import count_tensors

        found = count_tensors(spec)
        yield Check(f"weights {spec.model.checkpoint}", "ok", f"{found:,} tensors, which match the model")


def _stage_weights(spec: RunSpec, needs: StagingNeeds) -> Iterator[Check]:
    """Fetch a checkpoint from the Hub, unless it is a local folder or in the cache already."""
    checkpoint = str(spec.model.checkpoint)
    folder = find_folder(checkpoint)
    size = sum(path.stat().st_size for path in list_files(checkpoint, folder))
    result = Check(f"weights {checkpoint}", "ok", f"{size:,} bytes of weights, in {folder}")
    yield _check_folder(result, folder, "model.checkpoint" if is_folder(checkpoint) else "HF_HOME", needs)


def _stage_data(spec: RunSpec, needs: StagingNeeds) -> Iterator[Check]:
    subject, facts = f"data {spec.data.name}", data.load(spec.data.source).describe(spec)
    corpora = [one["corpus"] for one in facts.get("sources", {"": facts}).values() if "corpus" in one]
    if not corpora:
        yield Check(subject, "ok", "generated during the run; nothing to fetch")
        return
    from datasets import config
    from huggingface_hub import constants

    tokenizer, cache = facts["tokenizer"], Path(config.HF_DATASETS_CACHE)
    size = sum(path.stat().st_size for path in (cache / "generator").rglob("*") if path.is_file())
    for corpus in corpora:
        sizes = f"{corpus['bytes']:,} bytes of text, {corpus['tokens']:,} tokens of {tokenizer['name']}"
        message = f"{corpus['name']}: {sizes}, in {cache} (whole cache: {size:,} bytes)"
        yield _check_folder(Check(subject, "ok", message), cache, "HF_HOME", needs)
    hub = Path(constants.HF_HUB_CACHE, f"models--{tokenizer['name'].replace('/', '--')}")
    if hub.exists():
        message = f"{tokenizer['vocabulary']:,} tokens, in {hub}"
        yield _check_folder(Check(f"tokenizer {tokenizer['name']}", "ok", message), hub, "HF_HOME", needs)


def _check_folder(result: Check, folder: Path, variable: str, needs: StagingNeeds) -> Check:
    """Return `result`, the result of a check of `folder`. Exception: return a note if the points run on other nodes and
    the folder exists only on this machine, such as a folder in /tmp. The note names `variable`, the setting with which
    the user can select another folder."""
    inside = {str(path) for path in (folder.resolve(), *folder.resolve().parents)}
    if not needs.elsewhere or inside.isdisjoint((*_OF_ONE_NODE, tempfile.gettempdir())):
        return result
    message = f"{result.found}, which other nodes cannot read"
    return result._replace(state="note", found=message, remedy=f"set {variable} to a folder on a shared file system")


def _check_micro_batch(spec: RunSpec) -> Iterator[Check]:
    in_process = spec.model_copy(update={"data": spec.data.model_copy(update={"workers": 0, "pin_memory": False})})
    try:
        batch = next(data.load(spec.data.source).micro_batches(in_process, 0))
    except UserError as error:
        remedy = f"{error.remedy}; or run `zeroscale prepare` on a machine with a network"
        raise UserError(error.value, error.rule, remedy) from error
    samples, tokens = len(next(iter(batch.tensors.values()))), "/".join(map(str, spec.sequence.values()))
    yield Check(f"data {spec.data.name}", "ok", f"first micro-batch read: {samples} × {tokens} tokens")


def check_memory_counter() -> Iterator[Check]:
    """Check that the bytes of tensors in CPU memory are counted exactly. The counter is compiled when it is first
    used."""
    try:
        memory, torch = importlib.import_module("bench.measure.memory"), importlib.import_module("torch")
    except ImportError:
        return  # another check reports it
    cpu = torch.device("cpu")
    memory.install_counter(cpu)
    before = memory.read_live_bytes(cpu)
    tensor = torch.empty(1000, dtype=torch.float32)
    counted = None if before is None else memory.read_live_bytes(cpu) - before
    if counted == tensor.nbytes:
        yield Check("CPU memory counter", "ok", "counts a tensor's bytes exactly")
    else:
        message = f"counted {counted} instead of {tensor.nbytes} bytes"
        yield Check("CPU memory counter", "note", message, "install a C++ compiler (see zeroscale doctor)")


def _check_operation(name: str, needs: StagingNeeds) -> Iterator[Check]:
    """Load one of DeepSpeed's compiled ops in the same way as a run does. The op is built when it is first loaded."""
    if extensions.FOLDER not in os.environ:
        remedy = "set --arch: 9.0 for H100 and H200, 8.0 for A100"
        yield Check(f"op {name}", "missing", "the GPU architecture is unknown, because this machine has no GPU", remedy)
        return
    folder, begin = Path(os.environ[extensions.FOLDER]), time.monotonic()
    built = extensions.load(name, needs.device, folder)
    how = f"built in {time.monotonic() - begin:.0f} s" if built else "loaded"
    yield _check_folder(Check(f"op {name}", "ok", f"{how}, in {folder}"), folder, "XDG_CACHE_HOME", needs)


if __name__ == "__main__":
    main()
