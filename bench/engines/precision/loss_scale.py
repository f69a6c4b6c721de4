"""Loss scaling for fp16: small gradients are lifted into fp16's range, and a step that overflowed is left out."""

from pydantic import Field

from bench.spec import Frozen, Positive


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
