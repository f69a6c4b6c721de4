"""Script that trains jobs on several ranks, most of them in a pipeline: `python pipeline_ranks.py JOBS OUT`.

JOBS is the path of a JSON file that maps labels to RunSpecs. After all imports, ranks are forked for each world size.
They connect through files next to OUT. OUT-<world size>-<rank>.pt gets the observations of a rank by label, such as
losses, gradient norms, and weights by name.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from engine_ranks import copy_whole_weights
from torch import Tensor, distributed
from torch.nn import functional

from bench import engines, models, objectives
from bench.core.engine_facts import place
from bench.core.spec import RunSpec
from bench.engines.deepspeed.engine import ZeroEngine
from bench.engines.distributed.executor import RankStages, build_stages
from bench.engines.distributed.slices import find_slice
from bench.engines.pipeline.engine import PipelineEngine
from bench.measure.collectives import CollectiveCounter
from bench.measure.training import generate_answers

STEPS = 5
PROMPT_TOKENS, ANSWER_TOKENS = (3, 8), 4
"""Numbers of tokens of the two prompts that a decoder-only model answers, and of an answer. The second prompt leaves
room for two tokens."""
EVALUATED, HELD_OUT = (0, 3), 99
"""EVALUATED has the steps before which an engine evaluates, if it can. HELD_OUT is the step number of the micro-batches
that it evaluates. The inputs of the first of these micro-batches are also the prompts that a model answers."""
WITHOUT_TARGETS = {(0, 1, 0), (1, 1, 2), (0, 3, 3)}
"""Micro-batches of padded data that have no target token: data-parallel rank, step and micro-step."""


def main() -> None:
    jobs = {label: RunSpec.model_validate(plain) for label, plain in json.loads(Path(sys.argv[1]).read_text()).items()}
    for spec in jobs.values():  # imported once, before the ranks are forked
        models.load_builder(spec.model.family)
        engines.load_builder(spec.engine.backend)
    for world in sorted({spec.world_size for spec in jobs.values()}):
        mine = {label: spec for label, spec in jobs.items() if spec.world_size == world}
        children = []
        for rank in range(world):
            if (child := os.fork()) == 0:
                run_rank(rank, world, mine)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit(f"a rank of {world} failed")


def run_rank(rank: int, world: int, jobs: dict[str, RunSpec]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_SIZE": str(world)}
    status = 1
    try:
        distributed.init_process_group("gloo", f"file://{sys.argv[2]}-meeting-{world}", rank=rank, world_size=world)
        seen = {label: train(spec, rank) for label, spec in jobs.items()}
        torch.save(seen, f"{sys.argv[2]}-{world}-{rank}.pt")
        distributed.barrier()
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
        os._exit(status)


def train(spec: RunSpec, rank: int) -> dict[str, Any]:
    """Train a job and return its observations. If the engine supports evaluations, the job is trained a second time
    without them, and `changed` lists the results that differ between the two trainings."""
    seen = train_once(spec, rank, evaluates="evaluate" in engines.facts(spec).members)
    seen["changed"] = []
    if seen["evaluations"]:
        without = train_once(spec, rank, evaluates=False)
        seen["changed"] = [name for name in ("losses", "norms") if seen[name] != without[name]]
        weights = seen["weights"]
        seen["changed"] += [name for name, weight in without["weights"].items() if not weight.equal(weights[name])]
    return seen


def train_once(spec: RunSpec, rank: int, *, evaluates: bool) -> dict[str, Any]:
    linear = functional.linear
    backend, family = engines.load_builder(spec.engine.backend), models.load_builder(spec.model.family)
    module = build_module(spec, rank)
    family.initialise(module, spec, backend.whole)
    slices = {name: part for name, parameter in module.named_parameters() if (part := find_slice(parameter))}
    begun = copy_weights(module) if isinstance(module, RankStages) else copy_whole_weights(backend, module)
    engine = backend.build(module, spec)
    losses, norms, idle, evaluations, answers = [], [], [], dict[int, list[float]](), dict[int, Tensor]()
    data = place(spec, rank).data
    torch.manual_seed(models.derived_seed(spec.seed, f"rank {rank}"))  # the same seed as in bench.runtime.worker
    for step in range(STEPS):
        if evaluates and step in EVALUATED:
            evaluations[step] = [float(engine.evaluate([batch])) for batch in micro_batches(spec, HELD_OUT, data)]
            prompts = {"input_ids": micro_batches(spec, HELD_OUT, data)[0]["input_ids"]}
            ends = None if "decoder" in spec.sequence else torch.tensor(PROMPT_TOKENS)
            answers[step] = generate_answers(engine, prompts, ends, ANSWER_TOKENS)
        counter = CollectiveCounter(wait=lambda: None)
        with counter if step == STEPS - 1 else contextlib.nullcontext():
            loss = engine.train_step(iter(micro_batches(spec, step, data)))
        losses.append(None if loss is None else float(loss))
        norms.append(float(engine.gradient_norm()))
        idle.append(engine.idle_s() if isinstance(engine, PipelineEngine) else None)
    weights = (
        read_weights(engine, module) if isinstance(engine, PipelineEngine) else copy_whole_weights(backend, module)
    )
    seen = {
        "begun": begun, "weights": weights, "slices": {name: tuple(part) for name, part in slices.items()},
        "losses": losses, "norms": norms, "idle_s": idle, "config": engine.config(), "evaluations": evaluations,
        "answers": answers,
        "traffic": {kind: (calls, counter.payload_bytes[kind]) for kind, calls in counter.calls.items()},
    }  # fmt: skip
    if isinstance(engine, ZeroEngine):
        engine._engine.destroy()
    functional.linear = linear  # DeepSpeed's stage 3 replaces it permanently
    return seen


def build_module(spec: RunSpec, rank: int) -> Any:
    """Build and return the pipeline stages of this rank. If the engine does not divide the model into stages, build the
    whole model."""
    backend, cut = engines.load_builder(spec.engine.backend), engines.facts(spec).cut
    if cut is None:
        return models.load_builder(spec.model.family).build(spec, backend.construction(spec))
    family, network = models.load_divided_builder(spec.model.family), models.get_network(spec.model)
    return build_stages(spec, rank, family, backend, network, cut(spec, network))


def read_weights(engine: PipelineEngine, module: Any) -> dict[str, Tensor]:
    """Return copies of the weights of this rank's stages, by name. Weights that ZeRO partitions among the copies of the
    model are gathered first."""
    for gathered in engine.gathered.values():
        gathered.gather()
        gathered.wait()
    weights = copy_weights(module)
    for gathered in engine.gathered.values():
        gathered.release()
    return weights


def copy_weights(module: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def micro_batches(spec: RunSpec, step: int, data: int) -> list[dict[str, Tensor]]:
    """Return the micro-batches of a step on the data-parallel rank `data`. Tokens are random and depend on this rank,
    the step and the micro-step. Some labels are excluded from the loss. For some models, some inputs are masked."""
    batches = []
    for micro_step in range(spec.accumulation):
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro_step + data)

        def tokens(length: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randint(2, spec.model.shape["vocab"], (spec.batch.micro, length), generator=generator)

        inputs, *targets = (tokens(length) for length in spec.sequence.values())
        batch = {"input_ids": inputs, "labels": targets[0] if targets else inputs.clone()}
        batch["labels"][0, -2:] = -100
        if objectives.weighs_targets(spec):  # a different number of target tokens in every micro-batch of a rank
            batch["labels"][-1, 2 + (micro_step + 2 * data + step) % 4 :] = -100
            if (data, step, micro_step) in WITHOUT_TARGETS:
                batch["labels"][:] = -100
        if spec.model.name == "masked":
            batch["attention_mask"] = torch.ones_like(inputs)
            batch["attention_mask"][0, -3:] = 0
        if spec.model.name == "documents":
            batch["position_ids"] = torch.arange(inputs.shape[1]).remainder(5).expand_as(inputs)
        batches.append(batch)
    return batches


if __name__ == "__main__":
    main()
