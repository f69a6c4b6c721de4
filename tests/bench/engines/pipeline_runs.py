"""Functions that run pipeline_ranks.py, and functions that repeat its trainings in one process, as the reference for
the comparison."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pipeline_ranks import ANSWER_TOKENS, EVALUATED, HELD_OUT, PROMPT_TOKENS, STEPS, micro_batches
from torch import Tensor

from bench import engines, models, objectives
from bench.core.spec import RunSpec
from bench.engines.distributed.slices import Slice
from bench.engines.precision.update import on_device

Ranks = list[dict[str, Any]]
"""Observations of a job, one dict per rank."""


def run_jobs(jobs: dict[str, RunSpec], folder: Path) -> dict[str, Ranks]:
    """Train each job with pipeline_ranks.py on the ranks of its spec. Return the observations of all ranks, by label.
    If a rank fails, raise RuntimeError with the output of the ranks."""
    plain = {label: job.model_dump(mode="json", by_alias=True) for label, job in jobs.items()}
    (folder / "jobs.json").write_text(json.dumps(plain))
    script = Path(__file__).with_name("pipeline_ranks.py")
    quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "jobs.json"), str(folder / "seen")],
        env=os.environ | quiet, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    worlds = {job.world_size for job in jobs.values()}
    by_world = {world: [torch.load(folder / f"seen-{world}-{rank}.pt") for rank in range(world)] for world in worlds}
    return {label: [rank[label] for rank in by_world[job.world_size]] for label, job in jobs.items()}


def train_alone(job: RunSpec) -> dict[str, Any]:
    """Train a job in one process, which has the whole model and the samples of all data-parallel ranks, and return its
    observations. Uses torch without an engine, and AdamW in fp32. Dropout for a rank's samples is drawn from that
    rank's seed."""
    family = models.load_builder(job.model.family)
    module = family.build(job, on_device(job.precision))
    family.initialise(module, job)
    named = dict(module.named_parameters())
    begun = {name: parameter.detach().clone() for name, parameter in named.items()}
    masters = [torch.nn.Parameter(parameter.detach().float().clone()) for parameter in named.values()]
    options = job.optimizer
    adamw = torch.optim.AdamW(
        masters, lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
    )
    losses, norms, evaluations = list[float](), list[float](), dict[int, list[list[float]]]()
    answers = dict[int, list[list[list[int]]]]()
    random = [
        torch.Generator().manual_seed(models.derived_seed(job.seed, f"rank {data}")).get_state()
        for data in range(job.data_parallel)
    ]
    for step in range(STEPS):
        if step in EVALUATED:
            evaluations[step] = [evaluate_alone(job, module, data) for data in range(job.data_parallel)]
            if "predict_tokens" in engines.facts(job).members:
                answers[step] = [answer_alone(job, module, data) for data in range(job.data_parallel)]
        owned = [(data, batch) for data in range(job.data_parallel) for batch in micro_batches(job, step, data)]
        found, shares = [], compute_shares(job, [batch for _, batch in owned])
        for (data, batch), share in zip(owned, shares, strict=True):
            torch.set_rng_state(random[data])
            if share:  # without any target, the mean is NaN
                loss = module(**batch).loss
                (loss * share).backward()
                found.append(float(loss.detach()) * share)
            elif job.model.dropout:
                module(**batch)  # runs nevertheless, to draw as many random numbers as any other micro-batch
            random[data] = torch.get_rng_state()
        for master, parameter in zip(masters, named.values(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters, options.gradient_clipping)))
        losses.append(sum(found))
        adamw.step()
        with torch.no_grad():
            for master, parameter in zip(masters, named.values(), strict=True):
                parameter.copy_(master)
    assert min(norms) > options.gradient_clipping, f"a step is not clipped: {norms}"
    weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    return {"begun": begun, "losses": losses, "norms": norms, "weights": weights, "evaluations": evaluations,
            "answers": answers}  # fmt: skip


def evaluate_alone(job: RunSpec, module: torch.nn.Module, data: int) -> list[float]:
    """Return the loss of each held-out micro-batch of the data-parallel rank `data`."""
    module.eval()
    with torch.no_grad():
        losses = [float(module(**batch).loss) for batch in micro_batches(job, HELD_OUT, data)]
    module.train()
    return losses


def answer_alone(job: RunSpec, module: Any, data: int) -> list[list[int]]:
    """Return the most likely answer, as tokens, to each prompt of the data-parallel rank `data`. Each prompt is a batch
    of its own without padding."""
    module.eval()
    answers = []
    for row, length in zip(micro_batches(job, HELD_OUT, data)[0]["input_ids"], PROMPT_TOKENS, strict=True):
        answer = list[int]()
        with torch.no_grad():
            for _ in range(ANSWER_TOKENS):
                if "decoder" in job.sequence:  # T5's decoder begins with token 0
                    logits = module(input_ids=row[None], decoder_input_ids=torch.tensor([[0, *answer]])).logits
                elif length + len(answer) < len(row):
                    logits = module.lm_head(module.model(torch.tensor([[*row[:length].tolist(), *answer]])))
                else:
                    break
                answer.append(int(logits[0, -1].argmax()))
        answers.append(answer + [0] * (ANSWER_TOKENS - len(answer)))
    module.train()
    return answers


def compute_shares(job: RunSpec, batches: list[dict[str, Tensor]]) -> list[float]:
    """Return one factor for each micro-batch. The loss of the step is the sum of the micro-batches' mean losses, each
    times its factor. Depending on the job, the factors are equal, or proportional to the number of target tokens."""
    if not objectives.weighs_targets(job):
        return [1 / len(batches)] * len(batches)
    first = int("decoder" not in job.sequence)  # nothing predicts the first token of a decoder-only model
    counts = [int((batch["labels"][:, first:] >= 0).sum()) for batch in batches]
    assert len(set(counts)) > 1
    return [count / sum(counts) for count in counts]


def average_losses(ranks: Ranks) -> list[float]:
    """Return the loss of each step, averaged over the ranks that compute a loss. In a pipeline, ranks without the last
    stage compute none."""
    with_loss = [rank["losses"] for rank in ranks if rank["losses"][0] is not None]
    return [sum(step) / len(step) for step in zip(*with_loss, strict=True)]


def cut_own(rank: dict[str, Any], name: str, whole: Tensor) -> Tensor:
    """Return the slice of the whole parameter that a tensor-parallel rank holds, or the whole parameter if it is not
    sliced. `rank` has the observations of the rank."""
    part = rank["slices"].get(name)
    return Slice(*part).cut(whole) if part else whole


def list_different_initial_weights(ranks: Ranks, begun: dict[str, Tensor]) -> list[str]:
    """Compare the initial weights of the ranks bitwise with the initial weights in the single process (`begun`). Return
    the names of parameters that differ on some rank, and the names of parameters that no rank has."""
    met = {name for rank in ranks for name in rank["begun"]}
    otherwise = {
        name
        for rank in ranks
        for name, weight in rank["begun"].items()
        if not weight.equal(cut_own(rank, name, begun[name]))
    }
    return sorted(otherwise | (begun.keys() - met))


def list_unequal_shared_weights(ranks: Ranks) -> list[str]:
    """Compare the final weights of parameters that several ranks hold. The ranks hold either the whole parameter or the
    same slice of it. Return the names of parameters whose values differ bitwise between these ranks."""
    held: dict[Any, list[Tensor]] = {}
    for rank in ranks:
        for name, weight in rank["weights"].items():
            held.setdefault((name, rank["slices"].get(name)), []).append(weight)
    return sorted({name for (name, _), weights in held.items() if any(not weights[0].equal(one) for one in weights)})


class Differences(NamedTuple):
    """Largest relative deviations between a run on several ranks and the same training in one process. The deviation of
    a weight is divided by the largest weight of its tensor."""

    losses: float
    norms: float
    weights: float
    evaluations: float  # 0 if the engine does not evaluate
    unequal: list[str]  # parameters and results that should be bitwise equal and are not


def compare_to_one_process(job: RunSpec, ranks: Ranks) -> Differences:
    """Repeat a run in one process. Return the largest deviations of the run, and the names of values that should be
    bitwise equal but differ."""
    alone = train_alone(job)
    losses = max(abs(here / there - 1) for here, there in zip(average_losses(ranks), alone["losses"], strict=True))
    norms = max(
        abs(here / there - 1) for rank in ranks for here, there in zip(rank["norms"], alone["norms"], strict=True)
    )
    weights = max(
        float((weight - cut_own(rank, name, alone["weights"][name])).abs().max() / alone["weights"][name].abs().max())
        for rank in ranks
        for name, weight in rank["weights"].items()
    )
    evaluations = max(
        (
            abs(here / there - 1)
            for number, rank in enumerate(ranks)
            for step, losses in rank["evaluations"].items()
            for here, there in zip(losses, alone["evaluations"][step][number], strict=True)
        ),
        default=0.0,
    )
    unequal = list_different_initial_weights(ranks, alone["begun"]) + list_unequal_shared_weights(ranks)
    changed = sorted({f"{name} by an evaluation" for rank in ranks for name in rank["changed"]})
    return Differences(losses, norms, weights, evaluations, unequal + changed)
