"""Engine for DeepSpeed's ZeRO, stages 0 to 3. It uses the process group that torch has already set up.

In bf16, stages 1 to 3 hold 16 bytes per parameter in total. Stage 1 partitions 12 of the 16 bytes among the ranks,
stage 2 partitions 14 of them, and stage 3 partitions all 16. DeepSpeed divides the loss of each micro-step by the
number of micro-steps, and updates at the end of the last one. `train_step` therefore calls forward, backward and step
for every micro-batch, as DeepSpeed's documentation does.
"""

import copy
import functools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from bench.core.engine_facts import SCRATCH, SUMMED_STEPS
from bench.core.errors import UserError
from bench.core.spec import RunSpec
from bench.engines import list_buffers, list_parameters, trained
from bench.engines.deepspeed.facts import build_deepspeed_config
from bench.engines.deepspeed.library import load_deepspeed
from bench.engines.deepspeed.options import Options
from bench.engines.distributed.ranks import evaluate, load_random_state, predict_tokens, save_random_state, weigh
from bench.engines.precision.update import build_optimizer, on_device, set_learning_rate, sum_squares

_STATE = "state"
"""DeepSpeed's tag for the only checkpoint in a folder."""


def construction(spec: RunSpec) -> AbstractContextManager[Any]:
    """Return the context in which the model is built: on this rank's device and in the run's precision. At stage 3,
    each parameter is partitioned as soon as it is built. DeepSpeed reads LOCAL_RANK from the environment."""
    options = Options.of(spec)
    if options.stage < 3:
        return on_device(spec.precision)
    partitioned: AbstractContextManager[Any] = load_deepspeed().zero.Init(config_dict_or_path=_configure(spec))
    return partitioned


def whole(parameters: Sequence[Parameter]) -> AbstractContextManager[Any]:
    """Return a context in which `parameters` are whole on every rank. Rank 0's changes to them are kept. Collective."""
    gathered: AbstractContextManager[Any] = load_deepspeed().zero.GatheredParameters(parameters, modifier_rank=0)
    return gathered  # does nothing for parameters that are not partitioned


def parameter_count(parameters: Iterable[Parameter]) -> int:
    """Return the total number of elements in `parameters`. A partitioned parameter counts with its full size."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)


def build(module: Module, spec: RunSpec) -> "ZeroEngine":
    """Return the engine with `module` passed to deepspeed.initialize. The process group must exist."""
    # a copy, since DeepSpeed changes the dict, and `config` reports the original
    config, own = _configure(spec), spec.optimizer.name == "adamw"
    optimizer = None if own else functools.partial(build_optimizer, optimizer=spec.optimizer)
    engine, *_ = load_deepspeed().initialize(
        model=module, optimizer=optimizer, model_parameters=trained(module), config=copy.deepcopy(config),
        dist_init_required=False,
    )  # fmt: skip
    return ZeroEngine(engine, config, spec)


def _configure(spec: RunSpec) -> dict[str, Any]:
    """Return DeepSpeed's config. With offload to NVMe, `nvme_path` becomes a folder for this run alone. Raise UserError
    if files cannot be written there."""
    config = build_deepspeed_config(Options.of(spec), spec)
    for name in ("offload_param", "offload_optimizer"):
        tier = config["zero_optimization"].get(name, {})
        if tier.get("device") != "nvme":
            continue
        folder = Path(tier["nvme_path"], os.environ.get(SCRATCH, ""))
        try:
            folder.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                # DeepSpeed opens its files in this way, and would end the process without a message
                os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
        except OSError as error:
            rule = f"files for direct I/O cannot be written there ({error.strerror})"
            remedy = "set a writable folder on a local disk"
            raise UserError(f"engine.{name}.nvme_path={tier['nvme_path']}", rule, remedy) from error
        tier["nvme_path"] = str(folder)
    return config


class ZeroEngine:
    """ZeRO engine. `bench.engines.Engine` documents its methods."""

    def __init__(self, engine: Any, config: dict[str, Any], spec: RunSpec) -> None:
        self._engine, self._config, self._spec = engine, config, spec
        self._fp32_norm: Tensor | None = None
        self._own_norm = True  # True if DeepSpeed computes a norm
        self._steps = 0  # optimizer steps so far, including those before a resume
        self._summed_norm: Tensor | None = None  # norm of the last step, if it was one of the first SUMMED_STEPS
        self._scale = 1.0  # loss scale in DeepSpeed's norm of the last step
        # Stage 0 has no ZeRO optimizer. Below fp32 DeepSpeed wraps AdamW in its own class; in fp32 it uses AdamW.
        if engine.zero_optimization_stage() == 0:
            if hasattr(engine.optimizer, "refresh_fp32_params"):
                _forget_first_step(engine.optimizer)
            else:
                engine.clip_fp32_gradients = self._clip
                self._own_norm = engine.gradient_clipping() > 0
        # at stages 1 to 3 DeepSpeed itself sums squares in fp64
        self._sums_norm = engine.zero_optimization_stage() == 0 and not engine.fp16_enabled()

    def train_step(self, micro_batches: Iterable[dict[str, Tensor]]) -> Tensor:
        losses = []
        for batch in weigh(micro_batches, self._spec):
            loss = batch.weigh(self._engine(**batch.tensors).loss)  # 0-d
            self._engine.backward(loss)
            # At stage 0 in fp16 with torch's optimizers DeepSpeed's norm is still multiplied by the loss scale
            # (runtime/fp16/unfused_optimizer.py). Read before the step, which may change it.
            if type(optimizer := self._engine.optimizer).__name__ == "FP16_UnfusedOptimizer":
                self._scale = float(optimizer.loss_scale_config.cur_scale)
            # computed before the step, which clips the gradients; later steps do not need it
            if self._sums_norm:
                gradients = (parameter.grad for parameter in self._engine.module.parameters())
                present = (gradient for gradient in gradients if gradient is not None)
                self._summed_norm = sum_squares(present).sqrt() if self._steps < SUMMED_STEPS else None
            self._engine.step()  # updates only in the last of `gradient_accumulation_steps` micro-steps
            losses.append(loss.detach().float())
        self._steps += 1
        return torch.stack(losses).mean()

    def evaluate(self, batches: Iterable[dict[str, Tensor]]) -> Tensor:
        return evaluate(self._engine, batches)

    def predict_tokens(self, tensors: dict[str, Tensor]) -> Tensor:
        return predict_tokens(self._engine, tensors)

    def set_learning_rate(self, rate: float) -> None:
        set_learning_rate(self._engine.optimizer, rate)

    def save(self, folder: Path, steps: int) -> None:
        # frozen weights are rebuilt as at the start of the run
        self._engine.save_checkpoint(
            str(folder), tag=_STATE, client_state={"steps": steps}, exclude_frozen_parameters=True
        )
        save_random_state(folder)

    def load(self, folder: Path) -> int:
        strict = all(parameter.requires_grad for parameter in self._engine.module.parameters())
        _, kept = self._engine.load_checkpoint(str(folder), tag=_STATE, load_module_strict=strict)
        load_random_state(folder)
        self._steps = int(kept["steps"])
        return self._steps

    def list_weights(self, only_trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in list_parameters(self._engine.module, only_trained):
            with load_deepspeed().zero.GatheredParameters([parameter]):
                yield name, parameter
        yield from () if only_trained else list_buffers(self._engine.module)

    def _clip(self) -> None:
        """Clip the gradients and keep their norm. Replaces DeepSpeedEngine.clip_fp32_gradients, which discards the norm
        at stage 0."""
        from deepspeed.runtime.utils import clip_grad_norm_

        parameters = self._engine.module.parameters()
        self._fp32_norm = clip_grad_norm_(parameters, max_norm=self._engine.gradient_clipping())

    def gradient_norm(self) -> Tensor | float | None:
        if self._summed_norm is not None:
            return self._summed_norm
        if self._fp32_norm is not None or not self._own_norm:
            return self._fp32_norm
        norm: Tensor | float | None = self._engine.get_global_grad_norm()
        return norm if norm is None else norm / self._scale

    def skipped_steps(self) -> int:
        return int(self._engine.skipped_steps)

    def config(self) -> dict[str, Any]:
        """Return DeepSpeed's config, its ZeRO section as DeepSpeed resolved it, and the class names of the optimizers
        that DeepSpeed chose."""
        zero = self._engine._config.zero_config.model_dump(mode="json", by_alias=True, exclude_none=True)
        chosen = {"wrapper": self._engine.optimizer, "optimizer": self._engine.basic_optimizer}
        names = {role: f"{type(one).__module__}.{type(one).__qualname__}" for role, one in chosen.items()}
        return {**self._config, "zero_optimization": zero, "chosen": names}


def _forget_first_step(optimizer: Any) -> None:
    """Undo DeepSpeed's AdamW step with zero gradients. At stage 0 in bf16 and fp16, DeepSpeed makes this step to
    allocate the optimizer state (runtime/fp16/unfused_optimizer.py and fused_optimizer.py,
    initialize_optimizer_states).

    The step decays the master weights and shifts the bias correction. If it were not undone, the first real update
    would be 0.74 times that of every other engine. The allocated state is kept.
    """
    for state in optimizer.state.values():
        step = state["step"]
        state["step"] = torch.zeros_like(step) if isinstance(step, torch.Tensor) else 0
    optimizer.refresh_fp32_params()
