"""What engines share of the optimizer, without torch: loss scaling for fp16, rules, bytes of AdamW's temporaries.

Small gradients are lifted into fp16's range, and a step that overflowed is left out.
"""

from collections.abc import Sequence

from pydantic import Field

from bench.core.errors import UserError
from bench.core.network import EqualTensors
from bench.core.spec import FULL, Device, Frozen, OptimizerSpec, Positive, RunSpec

SCARCE = 2
"""Tensors of one size that are not neighbours: embedding and head, the position biases of two stacks."""


class LossScale(Frozen):
    """DeepSpeed's `fp16` section, its names and defaults (runtime/precision_config.py); every engine follows it."""

    loss_scale: float = Field(0.0, ge=0, description="a fixed scale; 0: dynamic")
    initial_scale_power: int = Field(16, ge=0, description="the dynamic scale starts at 2 to this")
    loss_scale_window: Positive = Field(1000, description="steps without overflow after which the scale doubles")
    hysteresis: Positive = Field(2, description="the scale halves from this overflow on; those before are only skipped")
    consecutive_hysteresis: bool = Field(False, description="a step without overflow restores the hysteresis")
    min_loss_scale: Positive = 1


class DynamicScale:
    """The scale of one run, step by step, as DeepSpeed's DynamicLossScaler moves it (runtime/fp16/loss_scaler.py)."""

    def __init__(self, options: LossScale) -> None:
        self._options = options
        self._dynamic = options.loss_scale == 0
        self.value = float(2**options.initial_scale_power) if self._dynamic else options.loss_scale
        self._hysteresis = options.hysteresis
        self._step, self._last_overflow = 0, -1

    def state(self) -> tuple[float, int, int, int]:
        """Return where the scale is, for `load_state`."""
        return self.value, self._hysteresis, self._step, self._last_overflow

    def load_state(self, state: tuple[float, int, int, int]) -> None:
        """Go on from where another scale was."""
        self.value, self._hysteresis, self._step, self._last_overflow = state

    def update(self, *, overflow: bool) -> None:
        """Note the end of a step. A scale at its minimum stays there; DeepSpeed's ZeRO stages raise instead."""
        if self._dynamic:
            self._overflowed() if overflow else self._stable()
            self._step += 1

    def _overflowed(self) -> None:
        if self._hysteresis == 1:
            self.value = max(self.value / 2, self._options.min_loss_scale)
        else:
            self._hysteresis -= 1
        self._last_overflow = self._step

    def _stable(self) -> None:
        if self._options.consecutive_hysteresis:
            self._hysteresis = self._options.hysteresis
        stable_steps = self._step - self._last_overflow - 1
        if stable_steps > 0 and stable_steps % self._options.loss_scale_window == 0:
            self._hysteresis = self._options.hysteresis
            self.value *= 2


def check_unscaled(spec: RunSpec) -> None:
    """Raise UserError for what an engine cannot do that trains by torch's AdamW, and scales no loss."""
    if spec.optimizer.implementation == "native":
        rule = f"engine {spec.engine.name} has no optimizer of its own"
        raise UserError("optimizer.implementation=native", rule, "use torch or fused")
    if spec.precision == "fp16":
        rule = f"engine {spec.engine.name} has no loss scale"
        raise UserError("precision=fp16", rule, "choose precision=bf16, or engine=ddp")


def count_adamw_bytes(optimizer: OptimizerSpec, device: Device, sizes: Sequence[EqualTensors]) -> int:
    """Return the bytes of AdamW's intermediates (torch 2.13): on a GPU torch's takes all square roots at once, on a CPU
    one tensor's root and quotient, the last tensor's still beside them; fused kernels have none."""
    if optimizer.implementation != "torch":
        return 0
    if device == "cuda":
        from bench.core.engine_costs import count_elements  # numpy, which readers of options need not have

        return FULL * count_elements(sizes)
    # embedding and head have small neighbours, a layer's matrices each other
    return FULL * max((3 if size.number > SCARCE else 2) * size.elements for size in sizes)
