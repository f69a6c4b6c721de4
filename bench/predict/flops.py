"""FLOPs of one optimizer step: what throughput in TFLOP/s and MFU are made of."""

import functools
from collections.abc import Mapping

from bench.predict.forward import compute_forward, compute_recomputed
from bench.predict.work import PassWork
from bench.predict.workload import Workload, get_network
from bench.spec import WIDTH, Frozen, Precision, RunSpec
from bench.stacks import Stacks

Lengths = tuple[tuple[str, int], ...]

_KEPT = 256  # networks and lengths: the runs of a study have a few, and each asks again


class StepFlops(Frozen):
    """Matmul FLOPs of one optimizer step over all ranks, padding computed like any token."""

    model: int  # what the model needs: forward and backward
    hardware: int  # what is run: recomputed activations as well


def compute_flops_per_step(spec: RunSpec) -> StepFlops:
    """Return the FLOPs of one optimizer step of `spec` over all ranks and micro-steps, exact by matmul.

    Divide by world size and step time for FLOP/s per device. Raises UserError for an unknown family, NoPrediction for
    one that does not describe its network.
    """
    network, sample = get_network(spec), spec.sequence
    model = spec.global_batch * compute_training_flops(network, sample)
    if not spec.activation_checkpointing:
        return StepFlops(model=model, hardware=model)
    again = compute_recomputed_flops(
        network,
        sample,
        dropout=spec.model.dropout,
        precision=spec.precision,
        compiled=spec.model.compile == "blocks",
    )
    return StepFlops(model=model, hardware=model + spec.global_batch * again)


def compute_training_flops(network: Stacks, sample: Mapping[str, int]) -> int:
    """Return the matmul FLOPs of forward and backward for one sample, its tokens by kind: model FLOPs.

    A multiply and an add are two FLOPs; element-wise work is left out; attention is counted over the full square,
    masked or not, and once, although fused kernels compute scores again in backward (the convention of PaLM,
    arXiv 2204.02311, appendix B). Backward has two matmuls, each as large, for every one of forward.
    """
    return _count_training_flops(network, tuple(sample.items()))


def compute_recomputed_flops(
    network: Stacks,
    sample: Mapping[str, int],
    *,
    dropout: float = 0.0,
    precision: Precision = "bf16",
    compiled: bool = False,
) -> int:
    """Return the matmul FLOPs for one sample that checkpointing every block adds to `compute_training_flops`.

    torch stops a recomputation at the last tensor that backward needs. That is the input of the block's last
    matmul, which is not run again, unless something behind it keeps a tensor as well: the mask of dropout, or the
    clamp with which transformers guards T5's fp16 activations; a `compiled` block is run again whole. Assumes weights
    in `precision`, not autocast.
    """
    load = _build_one_sample(tuple(sample.items()), dropout=dropout, precision=precision)._replace(compiled=compiled)
    return _count_recomputed_flops(network, load)


@functools.lru_cache(maxsize=_KEPT)
def _count_training_flops(network: Stacks, lengths: Lengths) -> int:
    return 3 * _count_flops(compute_forward(network, _build_one_sample(lengths)))


@functools.lru_cache(maxsize=_KEPT)
def _count_recomputed_flops(network: Stacks, load: Workload) -> int:
    return _count_flops(compute_recomputed(network, load))


def _build_one_sample(lengths: Lengths, *, dropout: float = 0.0, precision: Precision = "bf16") -> Workload:
    """One checkpointed sample; what its FLOPs do not depend on is anything."""
    return Workload(1, lengths, WIDTH[precision], "sdpa", dropout > 0, True, "cuda", precision == "fp16", None)


def _count_flops(work: PassWork) -> int:
    return work.matmul_flops + work.attention_flops
