"""torch's DistributedDataParallel with AdamW: the reference that every other engine's losses are compared with.

In bf16 and fp16 it trains as ZeRO does: weights, gradients and their all-reduce in the low precision, the gradients of
all micro-steps summed there; then norm, clipping and AdamW in fp32 on master weights. Every rank holds everything:
2 + 2 + 12 bytes per parameter between steps, and 4 more for the fp32 gradients during an update.

One rank runs DDP too, buckets and all: a scaling curve whose base did without would compare two programs.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from bench.engines.precision import on_device, torch_dtype
from bench.engines.precision.loss_scale import LossScale
from bench.engines.precision.update import Update
from bench.errors import UserError
from bench.spec import Frozen, RunSpec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter


class Options(Frozen):
    """What torch.nn.parallel.DistributedDataParallel may be told, and fp16's loss scale."""

    bucket_cap_mb: float = Field(gt=0)  # MiB of gradients per all-reduce
    gradient_as_bucket_view: bool = True  # false holds every gradient twice
    static_graph: bool = False
    fp16: LossScale = LossScale()


def check(options: Options, spec: RunSpec, device: Literal["cpu", "cuda"] | None = None) -> None:
    """Raise UserError for what this engine cannot do."""
    if spec.optimizer.implementation == "native":
        rule = f"engine {spec.engine.name} has no optimizer of its own"
        raise UserError("optimizer.implementation=native", rule, "use torch or fused")


def construction(spec: RunSpec) -> AbstractContextManager[Any]:
    """Return the context in which the model is built, on this rank's device and in the run's precision."""
    return on_device(spec.precision)


def whole(parameters: "Sequence[Parameter]") -> AbstractContextManager[Any]:
    """Return a context that does nothing: every rank holds every parameter, and `build` broadcasts rank 0's."""
    return nullcontext()


def parameter_count(module: "Module") -> int:
    """Return the elements of all parameters, those shared counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def build(module: "Module", spec: RunSpec) -> "DataParallel":
    """Wrap `module` in DDP; it lies on this rank's device, and the process group exists."""
    return DataParallel(module, spec, Options.model_validate(spec.engine.options))


class DataParallel:
    """The engine; see `bench.engines.Engine`."""

    def __init__(self, module: "Module", spec: RunSpec, options: Options) -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        self._given: dict[str, Any] = {
            "bucket_cap_mb": options.bucket_cap_mb,
            "gradient_as_bucket_view": options.gradient_as_bucket_view,
            "static_graph": options.static_graph,
            "find_unused_parameters": False,  # T5 uses all of them, and searching costs time
        }
        self._model = DistributedDataParallel(module.to(torch_dtype(spec.precision)), **self._given)
        if dist.get_backend() == "fake":
            self._model.register_comm_hook(None, _pretended())
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._update = Update(trained, spec.precision, spec.optimizer, options.fp16)
        self._spec, self._options = spec, options

    def train_step(self, micro_batches: "Iterable[dict[str, Tensor]]") -> "Tensor":
        import torch

        losses, count = [], self._spec.accumulation
        for index, batch in enumerate(micro_batches, start=1):
            # gradients are summed on the rank, and averaged over ranks once, in the last micro-step's backward
            with nullcontext() if index == count else self._model.no_sync():
                loss = self._model(**batch).loss
                (loss / count * self._update.loss_scale).backward()
            losses.append(loss.detach().float())
        self._update()
        # a gradient that stays lies in its bucket; a fresh one would lie beside it until the last micro-step
        self._model.zero_grad(set_to_none=count == 1)
        return torch.stack(losses).mean()

    def gradient_norm(self) -> "Tensor | None":
        return self._update.norm

    def skipped_steps(self) -> int:
        return self._update.skipped

    def config(self) -> dict[str, Any]:
        """Return DDP's arguments, the optimizer, and the loss scale where there is one."""
        optimizer = {"type": "torch.optim.AdamW", **self._spec.optimizer.model_dump(mode="json")}
        scale = {"fp16": self._options.fp16.model_dump()} if self._spec.precision == "fp16" else {}
        return {"ddp": self._given, "precision": self._spec.precision, "optimizer": optimizer, **scale}


def _pretended() -> Any:
    """Return DDP's own all-reduce for a rehearsal: DDP asks for the result of the work, and pretended work has none."""
    import torch
    import torch.distributed as dist

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        dist.all_reduce(bucket.buffer())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return hook
