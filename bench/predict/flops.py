"""FLOPs of one optimizer step: what throughput in TFLOP/s and MFU are made of."""

from bench import models
from bench.spec import Frozen, RunSpec


class StepFlops(Frozen):
    """Matmul FLOPs of one optimizer step over all ranks, padding computed like any token."""

    model: int  # what the model needs: forward and backward
    hardware: int  # what is run: recomputed activations as well


def flops_per_step(spec: RunSpec) -> StepFlops:
    """Return the FLOPs of one optimizer step of `spec` over all ranks and micro-steps, exact by matmul.

    Divide by world size and step time for FLOP/s per device. Raises UserError for an unknown family.
    """
    family = models.load(spec.model.family)
    shape = family.Shape.model_validate(spec.model.shape)
    lengths = (shape, spec.sequence["encoder"], spec.sequence["decoder"])
    model = spec.global_batch * family.training_flops(*lengths)
    if not spec.activation_checkpointing:
        return StepFlops(model=model, hardware=model)
    recomputed = family.recomputed_flops(*lengths, dropout=spec.model.dropout, precision=spec.precision)
    return StepFlops(model=model, hardware=model + spec.global_batch * recomputed)
