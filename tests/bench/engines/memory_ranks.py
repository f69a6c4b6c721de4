"""One rank that trains jobs and writes down the live tensor bytes of each: `python memory_ranks.py JOBS OUT`, with
torchrun's variables set. With PRETENDED set its collectives are those of a rehearsal, and no other rank is there."""

import gc
import json
import os
import sys
from pathlib import Path

import torch
from engine_ranks import micro_batches
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import engines, models
from bench.measure import memory
from bench.spec import RunSpec

CPU = torch.device("cpu")


def main() -> None:
    torch.set_num_threads(1)
    memory.count_on(CPU)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "PRETENDED" in os.environ:
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    else:
        distributed.init_process_group("gloo", f"file://{sys.argv[2]}-meeting", rank=rank, world_size=ranks)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    seen = {label: taken(RunSpec.model_validate(plain)) for label, plain in jobs.items()}
    Path(f"{sys.argv[2]}-{rank}.json").write_text(json.dumps(seen))


def taken(spec: RunSpec) -> dict[str, int | None]:
    """Return the bytes at the peak of building, between two steps, and at the peak of the third one."""
    gc.collect()
    before = memory.live_bytes(CPU)
    assert before is not None
    memory.forget_peak(CPU)
    backend, family = engines.load_builder(spec.engine.backend), models.load_builder(spec.model.family)
    module = family.build(spec, backend.construction(spec))
    family.initialise(module, spec, backend.whole)
    engine = backend.build(module, spec)
    built = memory.peak_bytes(CPU)
    for step in range(2):
        engine.train_step(micro_batches(spec, step))
    gc.collect()
    resident = memory.live_bytes(CPU)
    memory.forget_peak(CPU)
    engine.train_step(micro_batches(spec, 2))
    found = {"init_peak": built, "resident": resident, "peak": memory.peak_bytes(CPU)}
    return {name: bytes_ - before for name, bytes_ in found.items() if bytes_ is not None}


if __name__ == "__main__":
    main()
