"""Construction of models in a run's precision, and the optimizer's update after backward, computed as in ZeRO.

The norm of the gradients, clipping and the update are computed in fp32. In bf16 and fp16, the optimizer updates fp32
master weights.

The functions `construction`, `whole` and `parameter_count` belong to the interface of an engine
(`bench.core.plugins.EngineBuilder`). An engine whose ranks hold whole parameters uses these three functions unchanged.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bench.core.engine_facts import SUMMED_STEPS
from bench.core.errors import UserError
from bench.core.spec import OptimizerSpec, Precision, RunSpec
from bench.engines.precision import DynamicScale, LossScale

_CHUNK = 2**16
"""Number of elements that are converted to fp64 at a time. torch would copy the whole tensor in fp64."""

SMALLEST = 1e-6
"""Value that is added to a norm before clipping divides by it, as in torch.nn.utils.clip_grads_with_norm_."""

TYPES = {
    "adamw": "torch.optim.AdamW",
    "adamw_8bit": "bitsandbytes.optim.AdamW8bit",
    "adafactor": "transformers.Adafactor",
}
"""Classes of the optimizers, by `optimizer.name`."""
ADAFACTOR: dict[str, Any] = {
    "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": None,
    "relative_step": False, "scale_parameter": False, "warmup_init": False,
}  # fmt: skip
"""Settings of Adafactor that a spec does not have. The first row has the constants of its paper (arXiv 1804.04235),
without a first moment.

In the paper, the step size follows from the step number and the norm of each parameter. This rule is off here, so that
`lr` and learning-rate schedules mean the same for all optimizers. transformers' class is used because
torch.optim.Adafactor cannot turn the rule off.
"""


def torch_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of weights and activations for a precision."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


@contextmanager
def on_device(precision: Precision) -> Iterator[None]:
    """Return a context that builds modules on this rank's device and in `precision` from the start, as
    deepspeed.zero.Init does.

    A random generator draws different numbers on a GPU than on a CPU. Engines therefore start from the same weights
    only if all of them initialise the weights on the device. Weights have the run's precision from the start, so no
    fp32 copy of the model raises the peak of memory.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch_dtype(precision))
    # DS_ACCELERATOR is DeepSpeed's own variable for choosing the CPU on a machine with GPUs
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    try:
        with torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def construction(spec: RunSpec) -> AbstractContextManager[Any]:
    """Return the context in which the model, or a part of it, is built: on this rank's device, in the run's
    precision."""
    return on_device(spec.precision)


def whole(parameters: Sequence[Parameter]) -> AbstractContextManager[Any]:
    """Return a context that does nothing, because every rank already holds each parameter whole."""
    return nullcontext()


def parameter_count(parameters: Iterable[Parameter]) -> int:
    """Return the total number of elements in `parameters`."""
    return sum(parameter.numel() for parameter in parameters)


def build_optimizer(parameters: Iterable[Tensor], optimizer: OptimizerSpec, **more: Any) -> torch.optim.Optimizer:
    """Return the optimizer with the settings of a spec. `more` has further arguments for torch's AdamW. Raise UserError
    if the library of the optimizer (such as bitsandbytes) is not installed."""
    settings = optimizer.model_dump(include={"lr", "betas", "eps", "weight_decay"})
    found: torch.optim.Optimizer
    if optimizer.name == "adamw_8bit":
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError as error:
            rule, remedy = f"bitsandbytes cannot be imported ({error})", "pip install 'zeroscale[adapters]'"
            raise UserError("optimizer.name=adamw_8bit", rule, remedy) from error
        found = AdamW8bit(parameters, **settings)
    elif optimizer.name == "adafactor":
        from transformers import Adafactor

        found = Adafactor(parameters, lr=optimizer.lr, weight_decay=optimizer.weight_decay, **ADAFACTOR)
    else:
        found = torch.optim.AdamW(parameters, fused=optimizer.implementation == "fused" or None, **settings, **more)
    return found


def describe_optimizer(spec: RunSpec) -> dict[str, Any]:
    """Return the type and settings of the optimizer that `build_optimizer` builds, for an engine's `config`."""
    settings = spec.optimizer.model_dump(mode="json")
    if spec.optimizer.name == "adafactor":
        settings = {name: value for name, value in settings.items() if name != "betas"} | ADAFACTOR
    return {"type": TYPES[spec.optimizer.name], **settings}


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of all parameter groups, from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def sum_squares(gradients: Iterable[Tensor]) -> Tensor:
    """Return the sum of the squares of all gradients in fp64, 0-d. It is on the device of the gradients, or on the host
    if there are none.

    The sum is used for verification in the first steps only; clipping uses torch's norm in every step. torch's norm is
    not exact enough for verification: on a CPU, torch 2.13 sums the squares of a large fp32 tensor with errors that
    grow with its size. For example, its norm of 2^27 elements is 1.4 % too small.
    """
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        total = total.to(gradient.device)
        for chunk in torch.split(gradient.detach().flatten(), _CHUNK):
            total += chunk.double().square_().sum()
    return total


def find_clipping_factor(norm: Tensor, limit: float) -> Tensor:
    """Return the factor by which clipping multiplies gradients, as a 0-d tensor. `norm` is the norm of the gradients,
    and `limit` is the largest norm that is allowed. The factor is at most 1."""
    return (limit / (norm + SMALLEST)).clamp(max=1.0)


class Update:
    """Optimizer update of `parameters` from gradients that are the same on every rank."""

    def __init__(
        self, parameters: Sequence[Parameter], precision: Precision, optimizer: OptimizerSpec, loss_scale: LossScale
    ) -> None:
        self._parameters: list[Tensor] = list(parameters)
        self._separate = precision != "fp32"
        self._masters = [one.detach().float() for one in parameters] if self._separate else self._parameters
        self._optimizer = build_optimizer(self._masters, optimizer)
        self._clipping = optimizer.gradient_clipping
        self._scale = DynamicScale(loss_scale) if precision == "fp16" else None
        self.norm: Tensor | None = None  # of the last step's gradients before clipping; 0-d on the device
        self.skipped = 0
        self.steps = 0  # optimizer steps so far, including those before a resume

    @property
    def loss_scale(self) -> float:
        """Factor by which every loss is multiplied before backward."""
        return self._scale.value if self._scale else 1.0

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate from the next step on."""
        set_learning_rate(self._optimizer, rate)

    def state(self) -> dict[str, Any]:
        """Return everything that the next update depends on, including master weights. `load_state` restores it."""
        scale = self._scale.state() if self._scale else None
        return {"masters": self._masters, "optimizer": self._optimizer.state_dict(), "scale": scale,
                "skipped": self.skipped}  # fmt: skip

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the values that `state` returned, and write the parameters from their master weights."""
        with torch.no_grad():
            torch._foreach_copy_(self._masters, state["masters"])
        self._publish()
        self._optimizer.load_state_dict(state["optimizer"])
        if self._scale:
            self._scale.load_state(state["scale"])
        self.skipped = state["skipped"]

    def __call__(self) -> None:
        """Make one optimizer step. Only in fp16, the host waits for the device: a step whose gradients overflow must be
        skipped."""
        # all gradients are copied to fp32 at once, because norm and clipping need all of them
        if self._separate:
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        gradients = [master.grad for master in self._masters if master.grad is not None]
        norm = summed = torch.nn.utils.get_total_norm(gradients)
        overflow = False
        if self._scale:
            torch._foreach_mul_([*gradients, norm], 1.0 / self._scale.value)
            overflow = not torch.isfinite(norm)  # waits for the device
            self.skipped += overflow
            self._scale.update(overflow=overflow)
        if not overflow:
            # computed before clipping, which scales the gradients in place
            summed = sum_squares(gradients).sqrt() if self.steps < SUMMED_STEPS else norm
            if self._clipping > 0:
                torch.nn.utils.clip_grads_with_norm_(self._masters, self._clipping, norm)
            self._optimizer.step()
            self._publish()
        self.norm = summed
        self.steps += 1
        if self._separate:
            self._optimizer.zero_grad(set_to_none=True)

    def _publish(self) -> None:
        """Write the parameters from their master weights."""
        if self._separate:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self._masters)
