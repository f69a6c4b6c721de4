"""Script that measures the memory of pipeline ranks: `python rehearsed_memory.py JOBS`. The ranks run in this process,
one after another. Each is a rehearsal: the rank is real, and the other ranks are simulated.

JOBS is a JSON object from label to RunSpec. The output is a JSON object from label to a list, with the memory of the
first rank at each position of the pipeline. The memory of a rank is three numbers of bytes: at the peak of its
initialisation, at the peak of a step, and between steps.
"""

import gc
import json
import os
import sys

import torch
from pipeline_ranks import build_module, micro_batches
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import engines, models
from bench.core.engine_facts import LayoutPosition, find_rank
from bench.core.spec import RunSpec
from bench.measure import memory

CPU = torch.device("cpu")


def main() -> None:
    torch.set_num_threads(1)
    memory.install_counter(CPU)
    jobs = {label: RunSpec.model_validate(plain) for label, plain in json.loads(sys.argv[1]).items()}
    print(json.dumps({label: [run(job, p) for p in range(job.parallel.pipeline)] for label, job in jobs.items()}))


def run(job: RunSpec, pipeline: int) -> list[int]:
    rank = find_rank(job, LayoutPosition(pipeline, 0, 0))
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(job.world_size)}
    distributed.init_process_group("fake", rank=rank, world_size=job.world_size, store=FakeStore())
    backend, family = engines.load_builder(job.engine.backend), models.load_builder(job.model.family)
    before = memory.read_live_bytes(CPU)
    memory.reset_peak(CPU)
    module = build_module(job, rank)
    family.initialise(module, job, backend.whole)
    engine = backend.build(module, job)
    built = memory.read_peak_bytes(CPU)
    for _ in range(2):
        engine.train_step(iter(micro_batches(job, 0, 0)))
    gc.collect()
    between = memory.read_live_bytes(CPU)
    memory.reset_peak(CPU)
    engine.train_step(iter(micro_batches(job, 0, 0)))
    step = memory.read_peak_bytes(CPU)
    assert before is not None and built and step and between
    seen = [live - before for live in (built, step, between)]
    del engine, module
    gc.collect()
    distributed.destroy_process_group()
    return seen


if __name__ == "__main__":
    main()
