"""Script that runs one rank, which trains jobs together with the other ranks: `python engine_ranks.py JOBS OUT`.
torchrun's environment variables must be set.

JOBS is the path of a JSON file that maps labels to RunSpecs. Each RunSpec is a job. The script writes its observations
of each job to OUT-<rank>.json. If a label begins with MEMORY, only the memory of the job is observed, in bytes.

The ranks connect through a file next to OUT. They do not use a port, because another process could take a free port
before the ranks do. If the environment variable PRETENDED is set, no other rank exists. The rank then runs as in a
rehearsal, with a fake process group.
"""

import contextlib
import gc
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import engines, models
from bench.core.plugins import EngineBuilder
from bench.core.spec import RunSpec
from bench.measure import memory
from bench.measure.collectives import CollectiveCounter
from bench.models.modules.adapters import adapt

STEPS = 4
MEMORY = "memory: "
CPU = torch.device("cpu")


def main() -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "PRETENDED" in os.environ:
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    else:
        distributed.init_process_group("gloo", f"file://{sys.argv[2]}-meeting", rank=rank, world_size=ranks)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    if any(label.startswith(MEMORY) for label in jobs):
        memory.install_counter(CPU)
    linear = functional.linear
    seen: dict[str, Any] = {}
    for label, plain in jobs.items():
        spec = RunSpec.model_validate(plain)
        seen[label] = take_memory(spec) if label.startswith(MEMORY) else train(spec)
        functional.linear = linear  # DeepSpeed's stage 3 with memory_efficient_linear replaces it permanently
    Path(f"{sys.argv[2]}-{rank}.json").write_text(json.dumps(seen))
    distributed.destroy_process_group()


def train(spec: RunSpec) -> dict[str, Any]:
    backend, family = engines.load_builder(spec.engine.backend), models.load_builder(spec.model.family)
    module = family.build(spec, backend.construction(spec))
    family.initialise(module, spec, backend.whole)
    weights = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        with backend.whole([parameter]):
            weights.update(name.encode() + parameter.detach().float().numpy().tobytes())
    adapt(module, spec, backend)
    before = copy_whole_weights(backend, module)
    engine = backend.build(module, spec)
    losses, norms = [], []
    for step in range(STEPS):
        counter = CollectiveCounter(wait=lambda: None)
        with counter if step == STEPS - 1 else contextlib.nullcontext():
            losses.append(engine.train_step(micro_batches(spec, step)))
        norm = engine.gradient_norm()
        norms.append(None if norm is None else float(norm))
    seen = {
        "weights": weights.hexdigest(),
        "parameters": backend.parameter_count(module.parameters()),
        "trained": backend.parameter_count(engines.trained(module)),
        "changed": [
            name for name, now in copy_whole_weights(backend, module).items() if not is_equal(now, before[name])
        ],
        "losses": [float(loss) for loss in losses],
        "loss_is_plain": all(loss.shape == () and not loss.requires_grad for loss in losses),
        "norms": norms,
        "moments": count_moments(engine),
        "skipped": engine.skipped_steps(),
        "config": engine.config(),
        "collectives": {kind: (calls, counter.payload_bytes[kind]) for kind, calls in counter.calls.items()},
    }
    if spec.engine.backend == "deepspeed":
        seen["measures"] = list_measuring(engine._engine)
        engine._engine.destroy()
    return seen


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if all bytes of the tensors are equal. Values are not compared, because packed quantised weights look
    like NaN in some dtypes, and NaN does not equal itself."""
    return one.flatten().view(torch.uint8).equal(other.flatten().view(torch.uint8))


def count_moments(engine: Any) -> int:
    """Return the number of elements of AdamW's first moments that this rank holds."""
    update = engine._engine.basic_optimizer if hasattr(engine, "_engine") else engine._update
    optimizer = getattr(update, "optimizer", getattr(update, "_optimizer", update))
    moments = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]  # AdamW's
    return sum((one.to_local() if isinstance(one, DTensor) else one).numel() for one in moments)


def list_measuring(engine: Any) -> list[str]:
    """Return the names of DeepSpeed's own timers and loggers that are enabled during the steps. The list should be
    empty, because timers and loggers would disturb the step times."""
    from deepspeed.comm.comm import comms_logger

    parts = {
        "communication": comms_logger.enabled, "phases": engine.wall_clock_breakdown(),
        "flops": engine.flops_profiler_enabled(), "throughput": engine.tput_timer.config.enabled,
        "memory": engine.memory_breakdown(), "monitor": engine.monitor.enabled,
    }  # fmt: skip
    return [name for name, is_on in parts.items() if is_on]


def take_memory(spec: RunSpec) -> dict[str, int]:
    """Return the bytes of live tensors at three times: at the peak of building the engine (`init_peak`), between the
    second and the third step (`resident`), and at the peak of the third step (`peak`)."""
    gc.collect()
    before = memory.read_live_bytes(CPU)
    memory.reset_peak(CPU)
    backend, family = engines.load_builder(spec.engine.backend), models.load_builder(spec.model.family)
    module = family.build(spec, backend.construction(spec))
    family.initialise(module, spec, backend.whole)
    adapt(module, spec, backend)
    engine = backend.build(module, spec)
    built = memory.read_peak_bytes(CPU)
    for step in range(2):
        engine.train_step(micro_batches(spec, step))
    gc.collect()
    resident = memory.read_live_bytes(CPU)
    memory.reset_peak(CPU)
    engine.train_step(micro_batches(spec, 2))
    peak = memory.read_peak_bytes(CPU)
    assert before is not None and built is not None and resident is not None and peak is not None
    return {"init_peak": built - before, "resident": resident - before, "peak": peak - before}


def copy_whole_weights(backend: EngineBuilder, module: torch.nn.Module) -> dict[str, Tensor]:
    """Return a copy of every parameter, by name. Partitioned parameters are gathered for the copy."""
    copies = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):  # FSDP's engine has partitioned the parameter
            copies[name] = parameter.full_tensor().detach()
            continue
        with backend.whole([parameter]):
            copies[name] = parameter.detach().clone()
    return copies


def micro_batches(spec: RunSpec, step: int) -> list[dict[str, Tensor]]:
    """Return the micro-batches of a step. Their tokens are random, and depend on the rank, the step and the micro-step
    but not on the engine."""
    batches = []
    for micro_step in range(spec.accumulation):
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro_step + int(os.environ["RANK"]))

        def tokens(length: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randint(2, spec.model.shape["vocab"], (spec.batch.micro, length), generator=generator)

        batches.append({"input_ids": tokens(spec.sequence["encoder"]), "labels": tokens(spec.sequence["decoder"])})
    return batches


if __name__ == "__main__":
    main()
