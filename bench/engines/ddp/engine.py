"""Engine for torch's DistributedDataParallel with AdamW. Its losses are the reference for the losses of all other
engines.

In bf16 and fp16 the engine trains as ZeRO does. Weights and gradients have the low precision. Gradients are also summed
over micro-steps and all-reduced in this precision. Norm, clipping and AdamW use fp32 and master weights. Every rank
holds all weights, gradients and optimizer state. Between steps they take 2 + 2 + 12 bytes per parameter: weights,
gradients, and fp32 master weights with two moments. An update needs 4 more bytes per parameter for fp32 gradients.

A single rank also trains under DDP, with gradient buckets, although it has no gradients to exchange. Without DDP, the
first point of a scaling curve would measure a different program than the other points.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from bench.core.spec import RunSpec
from bench.engines import list_buffers, list_parameters, trained
from bench.engines.ddp.options import Options
from bench.engines.distributed.ranks import evaluate, load_random_state, predict_tokens, save_random_state, weigh
from bench.engines.precision.update import (
    Update,
    construction,
    describe_optimizer,
    parameter_count,
    torch_dtype,
    whole,
)

__all__ = ["DataParallel", "build", "construction", "parameter_count", "whole"]

_STATE = "state.pt"
"""Checkpoint file with the state of all trained parameters. The rest of the model is rebuilt from the seed."""


def build(module: Module, spec: RunSpec) -> "DataParallel":
    """Return the engine with `module` wrapped in DDP. The module must be on this rank's device, and the process group
    must exist."""
    return DataParallel(module, spec, Options.of(spec))


class DataParallel:
    """DDP engine. `bench.engines.Engine` documents its methods."""

    def __init__(self, module: Module, spec: RunSpec, options: Options) -> None:
        self._given: dict[str, Any] = {
            **options.model_dump(include={"bucket_cap_mb", "gradient_as_bucket_view", "static_graph"}),
            "find_unused_parameters": False,  # T5 uses all parameters, and the search takes time
        }
        self._model = DistributedDataParallel(module.to(torch_dtype(spec.precision)), **self._given)
        if dist.get_backend() == "fake":
            self._model.register_comm_hook(None, _pretend_all_reduce)
        self._update = Update(trained(module), spec.precision, spec.optimizer, options.fp16)
        self._spec, self._options = spec, options

    def train_step(self, micro_batches: Iterable[dict[str, Tensor]]) -> Tensor:
        losses, count = [], self._spec.accumulation
        for index, batch in enumerate(weigh(micro_batches, self._spec), start=1):
            # the rank sums gradients over micro-steps; only the last micro-step's backward all-reduces them
            with nullcontext() if index == count else self._model.no_sync():
                loss = batch.weigh(self._model(**batch.tensors).loss)  # 0-d
                (loss / count * self._update.loss_scale).backward()
            losses.append(loss.detach().float())
        self._update()
        # With several micro-steps, gradients are zeroed in place and stay in their buckets. New gradients would need
        # memory next to the buckets until the last micro-step.
        self._model.zero_grad(set_to_none=count == 1)
        return torch.stack(losses).mean()

    def evaluate(self, batches: Iterable[dict[str, Tensor]]) -> Tensor:
        return evaluate(self._model.module, batches)

    def predict_tokens(self, tensors: dict[str, Tensor]) -> Tensor:
        return predict_tokens(self._model.module, tensors)

    def set_learning_rate(self, rate: float) -> None:
        self._update.set_learning_rate(rate)

    def save(self, folder: Path, steps: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # all ranks have the same state, so rank 0 writes it; after the barrier the checkpoint is complete
        if dist.get_rank() == 0:
            torch.save({"update": self._update.state(), "steps": steps}, folder / _STATE)
        save_random_state(folder)
        dist.barrier()

    def load(self, folder: Path) -> int:
        found = torch.load(folder / _STATE, map_location="cpu")
        self._update.load_state(found["update"])
        load_random_state(folder)
        self._update.steps = int(found["steps"])
        return self._update.steps

    def list_weights(self, only_trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        yield from list_parameters(self._model.module, only_trained)
        yield from () if only_trained else list_buffers(self._model.module)

    def gradient_norm(self) -> Tensor | None:
        return self._update.norm

    def skipped_steps(self) -> int:
        return self._update.skipped

    def config(self) -> dict[str, Any]:
        """Return DDP's arguments, the optimizer, and fp16's loss scale."""
        scale = {"fp16": self._options.fp16.model_dump()} if self._spec.precision == "fp16" else {}
        given = {"ddp": self._given, "precision": self._spec.precision, "optimizer": describe_optimizer(self._spec)}
        return given | scale


def _pretend_all_reduce(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """DDP communication hook for rehearsals on torch's fake process group: all-reduce as DDP does, and return a
    completed future. DDP reads the result of this future. The future of the fake process group itself has no result."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
