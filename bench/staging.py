"""What a sweep needs on its nodes, fetched, built and tried: `python -m bench.staging stage|check`.

Reads Needs as JSON from standard input and prints JSON, line by line: a text says what is being done, an object is a
Finding. `stage` may use the network and leaves all that is needed in caches; `check` does what a run will do first.
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

from bench import data, extensions, models
from bench.errors import UserError
from bench.findings import Finding
from bench.measure.environment import version
from bench.spec import Frozen, RunSpec

_LIBRARIES = ("torch", "transformers", "datasets", "deepspeed")
_OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")

Told = str | Finding


class Needs(Frozen):
    """What points need on one kind of node; each spec stands for all that need the same of it."""

    device: Literal["cpu", "cuda"]
    operations: tuple[str, ...] = ()
    architecture: str | None = None  # of the GPUs; None is that of those here
    data: tuple[RunSpec, ...] = ()
    models: tuple[RunSpec, ...] = ()
    elsewhere: bool = False  # they run on other machines than this


def main() -> None:
    """Answer on standard output, which libraries are kept from."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    signal.signal(signal.SIGTERM, _end)
    needs = Needs.model_validate_json(sys.stdin.read())
    os.environ["DS_ACCELERATOR"] = needs.device
    if needs.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if needs.architecture:
        os.environ[extensions.ARCHITECTURES] = needs.architecture
    os.environ |= extensions.environment(needs.operations, needs.device, os.environ)
    for told in {"stage": stage, "check": check}[sys.argv[1]](needs):
        print(json.dumps(told if isinstance(told, str) else told._asdict()), file=answers, flush=True)


def _end(number: int, frame: FrameType | None) -> None:
    """End what was started, then this process, which clears away what is half done."""
    signal.signal(number, signal.SIG_IGN)
    os.killpg(0, number)
    with contextlib.suppress(ChildProcessError):
        while os.wait():  # ninja ends its compilers first, if it is let
            pass
    sys.exit(128 + number)


def stage(needs: Needs) -> Iterator[Told]:
    """Fetch and build whatever a run would need a network or a compiler for."""
    for spec in needs.data:
        yield from _looked(f"data {spec.data.name}", partial(_staged, spec, needs))
    yield from _compiled(needs)


def check(needs: Needs) -> Iterator[Told]:
    """Do what a run does before its first step, up to the engine."""
    yield _network()
    yield from _looked("libraries", partial(_libraries, needs))
    if needs.device == "cuda":
        yield from _looked("GPU", _gpu)
    for spec in needs.models:
        yield from _looked(f"model {spec.model.name}", partial(_model, spec))
    for spec in needs.data:
        yield from _looked(f"data {spec.data.name}", partial(_micro_batch, spec))
    yield from _compiled(needs)


def _compiled(needs: Needs) -> Iterator[Told]:
    if needs.device == "cpu":
        yield from _looked("CPU memory counter", memory_counter)
    for name in needs.operations:
        yield from _looked(f"op {name}", partial(_operation, name, needs))


def _looked(subject: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Told]:
    """Say what is looked at, then what was found; what goes wrong is a finding too."""
    yield subject
    try:
        yield from look()
    except UserError as error:
        yield Finding(subject, "missing", f"{error.value}: {error.rule}", error.remedy)
    except Exception as error:  # a library raises whatever it likes
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        told = next((line for line in lines if "error:" in line), lines[0])
        yield Finding(subject, "missing", f"{type(error).__name__}: {told}")


def _network() -> Finding:
    interfaces = {name for _, name in socket.if_nameindex()} - {"lo"}
    if not interfaces:
        return Finding("network", "ok", "none in what follows")
    told = "HF_HUB_OFFLINE and its like are set, but the network could not be taken away (unshare --net)"
    return Finding("network", "note", f"{told}: what finds another way out is not noticed")


def _libraries(needs: Needs) -> Iterator[Finding]:
    torch = importlib.import_module("torch")
    if needs.device == "cuda" and not (torch.version.cuda or torch.version.hip):
        told, remedy = f"torch {torch.__version__} is built for processors only", "install a CUDA build of torch"
        yield Finding("libraries", "missing", told, remedy)
        return
    for name in _LIBRARIES:
        importlib.import_module(name)
    yield Finding("libraries", "ok", ", ".join(f"{name} {version(name)}" for name in _LIBRARIES))


def _gpu() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        yield Finding("GPU", "ok", torch.cuda.get_device_name())
    else:
        yield Finding("GPU", "note", "none in sight: what needs one can be loaded here, and not be tried")


def _model(spec: RunSpec) -> Iterator[Finding]:
    """Build a model without memory for its weights."""
    import torch

    module = models.load_builder(spec.model.family).build(spec, torch.device("meta"))
    found = sum(parameter.numel() for parameter in module.parameters())
    expected = models.expected_parameters(spec.model)
    if expected in (found, None):
        yield Finding(f"model {spec.model.name}", "ok", f"can be built: {found:,} parameters")
    else:
        told, remedy = f"{found:,} parameters where {expected:,} were expected", "install another transformers"
        yield Finding(f"model {spec.model.name}", "missing", told, remedy)


def _staged(spec: RunSpec, needs: Needs) -> Iterator[Finding]:
    subject, facts = f"data {spec.data.name}", data.load(spec.data.source).describe(spec)
    if "corpus" not in facts:
        yield Finding(subject, "ok", "made when it is needed, nothing to fetch")
        return
    from datasets import config
    from huggingface_hub import constants

    corpus, tokenizer, cache = facts["corpus"], facts["tokenizer"], Path(config.HF_DATASETS_CACHE)
    size = sum(path.stat().st_size for path in (cache / "generator").rglob("*") if path.is_file())
    told = f"{corpus['name']}: {corpus['bytes']:,} bytes of text, {corpus['tokens']:,} tokens of {tokenizer['name']}"
    yield _kept(Finding(subject, "ok", f"{told}, in {cache} ({size:,} bytes in all)"), cache, "HF_HOME", needs)
    hub = Path(constants.HF_HUB_CACHE, f"models--{tokenizer['name'].replace('/', '--')}")
    if hub.exists():
        told = f"{tokenizer['vocabulary']:,} tokens, in {hub}"
        yield _kept(Finding(f"tokenizer {tokenizer['name']}", "ok", told), hub, "HF_HOME", needs)


def _kept(finding: Finding, folder: Path, variable: str, needs: Needs) -> Finding:
    """Doubt a finding whose folder the nodes will not see."""
    inside = {str(path) for path in (folder.resolve(), *folder.resolve().parents)}
    if not needs.elsewhere or inside.isdisjoint((*_OF_ONE_NODE, tempfile.gettempdir())):
        return finding
    told = f"{finding.found}, which is this machine's own folder"
    return finding._replace(state="note", found=told, remedy=f"set {variable} to a folder that all nodes share")


def _micro_batch(spec: RunSpec) -> Iterator[Finding]:
    here = spec.model_copy(update={"data": spec.data.model_copy(update={"workers": 0, "pin_memory": False})})
    try:
        batch = next(data.load(spec.data.source).micro_batches(here, 0))
    except UserError as error:
        remedy = f"{error.remedy}; or call `zeroscale prepare` where there is a network"
        raise UserError(error.value, error.rule, remedy) from error
    samples, tokens = len(next(iter(batch.tensors.values()))), "/".join(map(str, spec.sequence.values()))
    yield Finding(f"data {spec.data.name}", "ok", f"first micro-batch read: {samples} × {tokens} tokens")


def memory_counter() -> Iterator[Finding]:
    """Say whether a CPU's memory can be counted; its counter is compiled if it has not been."""
    try:
        memory, torch = importlib.import_module("bench.measure.memory"), importlib.import_module("torch")
    except ImportError:
        return  # said elsewhere
    cpu = torch.device("cpu")
    memory.count_on(cpu)
    before = memory.live_bytes(cpu)
    tensor = torch.empty(1000, dtype=torch.float32)
    counted = None if before is None else memory.live_bytes(cpu) - before
    if counted == tensor.nbytes:
        yield Finding("CPU memory counter", "ok", "counts a tensor's bytes exactly")
    else:
        told, remedy = f"counted {counted} bytes for {tensor.nbytes}", "install a C++ compiler (see zeroscale doctor)"
        yield Finding("CPU memory counter", "note", told, remedy)


def _operation(name: str, needs: Needs) -> Iterator[Finding]:
    """Load an op of DeepSpeed's like a run does; what was never built is built."""
    if extensions.FOLDER not in os.environ:
        remedy = "give --arch, e.g. 9.0 for H100 and H200, 8.0 for A100"
        yield Finding(f"op {name}", "missing", "no GPU here tells for which to build it", remedy)
        return
    folder, begin = Path(os.environ[extensions.FOLDER]), time.monotonic()
    built = extensions.load(name, needs.device, folder)
    how = f"built in {time.monotonic() - begin:.0f} s" if built else "loaded"
    yield _kept(Finding(f"op {name}", "ok", f"{how}, in {folder}"), folder, "XDG_CACHE_HOME", needs)


if __name__ == "__main__":
    main()
