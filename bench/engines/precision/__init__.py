"""Optimizer code that engines share, without importing torch: loss scaling for fp16, checks of specs, and the memory of
optimizer states and temporaries.

The loss is multiplied by a loss scale, which lifts small gradients into fp16's range. A step whose gradients overflow
is skipped.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from bench.core.errors import UserError
from bench.core.network import EqualTensors
from bench.core.spec import FULL, Device, Frozen, OptimizerSpec, Positive, RunSpec

if TYPE_CHECKING:
    from bench.core.engine_costs import ModelSizes

DRAWN_AT_ONCE = 2**24
"""Number of elements that are drawn in fp32 at a time when a model is initialised (bench.models.modules). Because of
this limit, a large parameter never exists a second time as a whole in fp32, which would raise the peak of memory."""
BLOCK_8BIT, SMALLEST_8BIT = 256, 4096
"""Two constants of bitsandbytes, in elements: the size of a block, which has its own scale, and the size of the
smallest tensor whose moments have 8 bits."""
TABLES_8BIT = 2 * FULL * 256
"""Bytes of two lookup tables, one for each of AdamW's moments. Each has the fp32 values of the 256 codes of an 8-bit
moment."""
SCARCE = 2
"""If a model has at most this many tensors of one size, they are assumed not to follow each other in the optimizer's
list of tensors. Examples are embedding and head, or the position biases of two stacks."""


class LossScale(Frozen):
    """Options of loss scaling, with the names and defaults of DeepSpeed's section `fp16` (runtime/precision_config.py).
    All engines with a loss scale use them."""

    loss_scale: float = Field(0.0, ge=0, description="fixed loss scale; 0: dynamic loss scale")
    initial_scale_power: int = Field(16, ge=0, description="exponent of 2 of the initial dynamic loss scale")
    loss_scale_window: Positive = Field(1000, description="steps without overflow after which the loss scale doubles")
    hysteresis: Positive = Field(
        2, description="number of overflows after which the loss scale halves; earlier overflows only skip the step"
    )
    consecutive_hysteresis: bool = Field(
        False, description="True: a step without overflow resets the count of `hysteresis`"
    )
    min_loss_scale: Positive = 1


class DynamicScale:
    """Loss scale of one run, updated step by step as in DeepSpeed's DynamicLossScaler (runtime/fp16/loss_scaler.py)."""

    def __init__(self, options: LossScale) -> None:
        self._options = options
        self._dynamic = options.loss_scale == 0
        self.value = float(2**options.initial_scale_power) if self._dynamic else options.loss_scale
        self._hysteresis = options.hysteresis
        self._step, self._last_overflow = 0, -1

    def state(self) -> tuple[float, int, int, int]:
        """Return the values that `load_state` restores."""
        return self.value, self._hysteresis, self._step, self._last_overflow

    def load_state(self, state: tuple[float, int, int, int]) -> None:
        """Restore the values that `state` returned."""
        self.value, self._hysteresis, self._step, self._last_overflow = state

    def update(self, *, overflow: bool) -> None:
        """Update the scale after a step. After an overflow, a scale at its minimum stays there; DeepSpeed's ZeRO stages
        raise an error instead."""
        if not self._dynamic:
            return
        if overflow:
            if self._hysteresis == 1:
                self.value = max(self.value / 2, self._options.min_loss_scale)
            else:
                self._hysteresis -= 1
            self._last_overflow = self._step
        else:
            stable_steps = self._step - self._last_overflow - 1
            doubles = stable_steps > 0 and stable_steps % self._options.loss_scale_window == 0
            if doubles or self._options.consecutive_hysteresis:
                self._hysteresis = self._options.hysteresis
            self.value *= 2 if doubles else 1
        self._step += 1


def check_optimizer(spec: RunSpec) -> None:
    """Raise UserError if the spec sets optimizer.implementation=native. Engines without an optimizer of their own
    call this check."""
    if spec.optimizer.implementation == "native":
        rule = f"engine {spec.engine.name} has no native optimizer"
        raise UserError("optimizer.implementation=native", rule, "set optimizer.implementation=torch or fused")


def check_whole(spec: RunSpec, updated: str) -> None:
    """Raise UserError if the spec sets optimizer.name=adafactor. An engine calls this check if each of its ranks
    updates only a part of a parameter. `updated` describes this part for the error message, such as "some of their
    rows"."""
    if spec.optimizer.name == "adafactor":
        rule = f"its sums by row and column need whole matrices, and a rank of engine {spec.engine.name} has {updated}"
        raise UserError("optimizer.name=adafactor", rule, "choose engine=ddp or zero0, or optimizer.name=adamw_8bit")


def check_unscaled(spec: RunSpec) -> None:
    """Raise UserError if the spec sets optimizer.implementation=native or precision=fp16. Engines that have neither an
    optimizer of their own nor a loss scale call this check."""
    check_optimizer(spec)
    if spec.precision == "fp16":
        rule = f"engine {spec.engine.name} has no loss scale"
        raise UserError("precision=fp16", rule, "choose precision=bf16, or engine=ddp")


def count_model_moment_bytes(optimizer: OptimizerSpec, model: "ModelSizes") -> int:
    """Return the bytes of the optimizer's state on a rank that updates whole parameters. For a matrix, Adafactor's
    state is one fp32 sum per row and one per column. For a vector, it is one fp32 value per element."""
    if optimizer.name != "adafactor":
        return count_moment_bytes(optimizer, model.tensors)
    shapes = [(one, number) for unit in model.units for one, number in unit.matrices if one.trained]
    return FULL * sum((one.rows + one.columns if one.columns > 1 else one.rows) * number for one, number in shapes)


def count_moment_bytes(optimizer: OptimizerSpec, sizes: Iterable[EqualTensors]) -> int:
    """Return the bytes of AdamW's two moments for tensors of these sizes.

    Moments in 8 bits have an fp32 scale for each block of 256 elements. Moments of small tensors stay in fp32
    (bitsandbytes 0.50, optim/optimizer.py).
    """

    def count(elements: int) -> int:
        if optimizer.name != "adamw_8bit" or elements < SMALLEST_8BIT:
            return 2 * FULL * elements
        return 2 * (elements + FULL * -(-elements // BLOCK_8BIT))

    total = sum(count(size.elements) * size.number for size in sizes)
    return total + TABLES_8BIT * (optimizer.name == "adamw_8bit")


def count_update_bytes(optimizer: OptimizerSpec, device: Device, sizes: Sequence[EqualTensors]) -> int:
    """Return the bytes of the temporaries of an optimizer's step for tensors of these sizes.

    On a GPU, torch 2.13's AdamW computes the square roots of all tensors at once. On a CPU, AdamW updates one tensor
    after the other. A tensor then needs two temporaries: a square root and a quotient. A temporary of the previous
    tensor may still be allocated. Adafactor has as many temporaries at the same time as AdamW on a CPU.

    On a CPU, bitsandbytes has five temporaries for a tensor: its two moments in fp32, a copy of its gradient, a square
    root and a quotient. Kernels that update in place have no temporaries.
    """
    if optimizer.name == "adamw_8bit":
        wide = [size.elements for size in sizes if size.elements >= SMALLEST_8BIT]
        return 0 if device == "cuda" else 5 * FULL * max(wide, default=0)
    if optimizer.implementation != "torch":
        return 0
    if device == "cuda" and optimizer.name == "adamw":
        return FULL * sum(size.elements * size.number for size in sizes)
    # Adafactor's temporaries: the squared gradient, its sum with a constant, and the previous tensor's update
    # embedding and head have small neighbours in the optimizer's list; a layer's matrices have each other
    return FULL * max((3 if size.number > SCARCE else 2) * size.elements for size in sizes)
