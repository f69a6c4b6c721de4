"""AdamW after backward, as ZeRO does it: norm, clipping and update in fp32, on master weights below fp32."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.core.engine_facts import SUMMED_STEPS
from bench.core.spec import OptimizerSpec, Precision
from bench.engines.precision.optimizer import DynamicScale, LossScale

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter


class Update:
    """Updates `parameters` from their gradients, which are the same on every rank."""

    def __init__(
        self, parameters: "Sequence[Parameter]", precision: Precision, optimizer: OptimizerSpec, loss_scale: LossScale
    ) -> None:
        import torch

        self._parameters: list[Tensor] = list(parameters)
        self._masters: list[Tensor] = self._parameters
        if precision != "fp32":
            self._masters = [parameter.detach().float() for parameter in parameters]
        self._optimizer = torch.optim.AdamW(
            self._masters,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True if optimizer.implementation == "fused" else None,
        )
        self._clipping = optimizer.gradient_clipping
        self._scale = DynamicScale(loss_scale) if precision == "fp16" else None
        self._separate = precision != "fp32"
        self.norm: Tensor | None = None  # of the last step, before clipping; 0-d on the device
        self.skipped = 0
        self.steps = 0  # so far, over all attempts at a training

    @property
    def loss_scale(self) -> float:
        """What every loss is multiplied by before backward."""
        return self._scale.value if self._scale else 1.0

    def set_learning_rate(self, rate: float) -> None:
        """Update with another learning rate from now on."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def state(self) -> dict[str, Any]:
        """Return all that the next update depends on, the master weights included; `load_state` takes it up."""
        scale = self._scale.state() if self._scale else None
        return {"masters": self._masters, "optimizer": self._optimizer.state_dict(), "scale": scale,
                "skipped": self.skipped}  # fmt: skip

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned, and write the parameters from their master weights."""
        import torch

        with torch.no_grad():
            torch._foreach_copy_(self._masters, state["masters"])
            if self._separate:
                torch._foreach_copy_(self._parameters, self._masters)
        self._optimizer.load_state_dict(state["optimizer"])
        if self._scale:
            self._scale.load_state(state["scale"])
        self.skipped = state["skipped"]

    def __call__(self) -> None:
        """Make one step. fp16 alone reads a flag from the device: whether to step at all is decided on the host."""
        import torch

        from bench.engines.distributed.ranks import sum_squares

        if self._separate:
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        gradients = [master.grad for master in self._masters if master.grad is not None]
        self.norm = torch.nn.utils.get_total_norm(gradients)
        summed: Tensor | None = None
        if self._scale is None or self._unscaled(gradients, self._scale):
            summed = sum_squares(gradients).sqrt() if self.steps < SUMMED_STEPS else None
            self._step()
        self.norm = self.norm if summed is None else summed  # before, gradients are clipped by torch's
        self.steps += 1
        if self._separate:
            self._optimizer.zero_grad(set_to_none=True)

    def _unscaled(self, gradients: "list[Tensor]", scale: DynamicScale) -> bool:
        """Undo the loss scale on norm and gradients; false, and counted, where they overflowed."""
        import torch

        assert self.norm is not None
        torch._foreach_mul_([*gradients, self.norm], 1.0 / scale.value)
        finite = bool(torch.isfinite(self.norm))
        self.skipped += not finite
        scale.update(overflow=not finite)
        return finite

    def _step(self) -> None:
        import torch

        if self._clipping > 0:
            assert self.norm is not None
            torch.nn.utils.clip_grads_with_norm_(self._masters, self._clipping, self.norm)
        self._optimizer.step()
        if self._separate:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self._masters)
