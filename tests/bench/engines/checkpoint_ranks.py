"""Script that runs one rank, which trains jobs together with the other ranks: `python checkpoint_ranks.py JOBS OUT`.
torchrun's environment variables must be set.

JOBS is the path of a JSON file that maps labels to RunSpecs. If a job has no checkpoint yet, the rank trains it, saves
a checkpoint and continues. Otherwise it resumes the job from its checkpoint. In both cases, OUT-<rank>.json gets the
losses and the gradient norm of the steps after the checkpoint, by label. The checkpoints lie next to the folder that
contains JOBS.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from engine_ranks import micro_batches
from torch import distributed

from bench import engines, models
from bench.core.spec import RunSpec
from bench.models.modules.adapters import adapt

STEPS = 3
"""Number of steps before the checkpoint, and of steps after it."""


def main() -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group("gloo", f"file://{sys.argv[2]}-meeting", rank=rank, world_size=ranks)
    jobs, folder = Path(sys.argv[1]), Path(sys.argv[1]).parent
    seen = {
        label: train_or_resume(RunSpec.model_validate(plain), folder.parent / label, rank)
        for label, plain in json.loads(jobs.read_text()).items()
    }
    Path(f"{sys.argv[2]}-{rank}.json").write_text(json.dumps(seen))
    distributed.destroy_process_group()


def train_or_resume(spec: RunSpec, folder: Path, rank: int) -> dict[str, Any]:
    backend, family = engines.load_builder(spec.engine.backend), models.load_builder(spec.model.family)
    module = family.build(spec, backend.construction(spec))
    family.initialise(module, spec, backend.whole)
    adapt(module, spec, backend)
    engine = backend.build(module, spec)
    fresh = not folder.exists()
    distributed.barrier()
    # different seeds, so that results are equal only if `load` restores the random state
    torch.manual_seed(spec.seed + rank + 100 * (not fresh))
    if fresh:
        for step in range(STEPS):
            engine.train_step(micro_batches(spec, step))
        engine.save(folder, STEPS)
        steps = STEPS
    else:
        steps = engine.load(folder)
    before = float(engine.evaluate(micro_batches(spec, steps)))
    losses = [float(engine.train_step(micro_batches(spec, steps + step))) for step in range(STEPS)]
    norm = float(engine.gradient_norm())
    return {"loaded": not fresh, "steps": steps, "before": before, "losses": losses, "norm": norm}


if __name__ == "__main__":
    main()
