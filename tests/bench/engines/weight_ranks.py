"""Script that runs one rank. Together with the other ranks, it loads checkpoints of transformers, trains the models,
and saves them: `python weight_ranks.py JOBS OUT`. torchrun's environment variables must be set.

JOBS is the path of a JSON file that maps labels to RunSpecs. OUT-<rank>.json gets the results by label. A trained model
is saved in a folder next to JOBS, named after the job's label.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from bench import engines, models
from bench.core.engine_facts import place
from bench.core.spec import RunSpec
from bench.engines.distributed.executor import build_stages
from bench.measure import memory
from bench.models.checkpoint import tensors
from bench.models.checkpoint.tensors import load_weights, save_adapters, save_weights
from bench.models.modules.adapters import adapt

STEPS = 2
SHARD_BYTES = tensors.SHARD_BYTES = 20_000
"""Size of a file of weights, so small that these models have several files."""
VOCABULARY = 96
CPU = torch.device("cpu")


def main() -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group("gloo", f"file://{sys.argv[2]}-meeting", rank=rank, world_size=ranks)
    memory.install_counter(CPU)
    jobs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent
    seen = {label: train(RunSpec.model_validate(plain), folder / label, rank) for label, plain in jobs.items()}
    Path(f"{sys.argv[2]}-{rank}.json").write_text(json.dumps(seen))
    distributed.destroy_process_group()


def train(spec: RunSpec, folder: Path, rank: int) -> dict[str, Any]:
    """Load the checkpoint of a spec, train and save. Return the loss of the loaded weights (`loaded`), the loss of the
    weights or adapters at the end (`saved`), and the largest numbers of live bytes while loading and saving. If the
    engine divides the model into stages, nothing is saved."""
    backend, family = engines.load_builder(spec.engine.backend), models.load_builder(spec.model.family)
    gc.collect()
    memory.reset_peak(CPU)
    before, cut = memory.read_live_bytes(CPU) or 0, engines.facts(spec).cut
    if cut is None:
        module = family.build(spec, backend.construction(spec))
    else:
        network = models.get_network(spec.model)
        divided = models.load_divided_builder(spec.model.family)
        module = build_stages(spec, rank, divided, backend, network, cut(spec, network))
    load_weights(module, spec, backend.whole, Path(str(spec.model.checkpoint)), is_main=rank == 0)
    seen: dict[str, Any] = {"load_peak": (memory.read_peak_bytes(CPU) or 0) - before}
    if spec.adapter.rank is not None:
        adapt(module, spec, backend)
    engine, batches = backend.build(module, spec), [micro_batch(spec, place(spec, rank).data)]
    if cut is not None:
        loss = engine.train_step(batches)
        return seen | {"loaded": None if loss is None else float(loss)}
    seen["loaded"] = float(engine.evaluate(batches))
    for _ in range(STEPS):
        engine.train_step(batches)
    gc.collect()
    memory.reset_peak(CPU)
    resident = memory.read_live_bytes(CPU) or 0
    if spec.adapter.rank is None:
        save_weights(spec, engine.list_weights(), folder, is_main=rank == 0)
    else:
        save_adapters(spec, engine.list_weights(only_trained=True), folder, is_main=rank == 0)
    seen["save_peak"] = (memory.read_peak_bytes(CPU) or 0) - resident
    return seen | {"saved": float(engine.evaluate(batches))}


def micro_batch(spec: RunSpec, data_rank: int) -> dict[str, Tensor]:
    """Return a micro-batch of random tokens. They depend only on the data-parallel rank."""
    generator = torch.Generator().manual_seed(data_rank)

    def tokens(length: int) -> Tensor:
        return torch.randint(2, VOCABULARY, (spec.batch.micro, length), generator=generator)

    if "tokens" in spec.sequence:
        ids = tokens(spec.sequence["tokens"])
        return {"input_ids": ids, "labels": ids}
    return {"input_ids": tokens(spec.sequence["encoder"]), "labels": tokens(spec.sequence["decoder"])}


if __name__ == "__main__":
    main()
