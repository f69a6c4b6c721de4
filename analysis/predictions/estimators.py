"""What users have to go by today: DeepSpeed's memory estimators, and 6·N·tokens for FLOPs.

The estimators' arithmetic is that of DeepSpeed 0.19.8: estimate_zero2_model_states_mem_needs of runtime/zero/
stage_1_and_2.py, estimate_zero3_model_states_mem_needs of stage3.py; a test compares with the real functions. They
count model states of 16-bit training only, whatever the precision, and there is none for stages 0 and 1.
"""

from typing import Any

from bench.engines import find_facts
from bench.spec import RunSpec

HALF = 2
"""Bytes of a weight in 16 bits."""
DIVIDED = 18
"""Bytes per parameter that both estimators divide among GPUs: 2 gradient in 16 bits, 4 in 32 bits, 4 master weight,
8 moments. At stage 2 the weights come on top, at stage 3 (so DeepSpeed) they are among them."""
LAYER = 4
"""Bytes per parameter of the largest layer at stage 3: weight and gradient in 16 bits."""
FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Forward and backward by the rule of thumb (arXiv 2001.08361, section 2.1)."""


def estimate_zero2(parameters: int, ranks: int, *, offload: bool) -> int:
    """Return bytes per GPU by estimate_zero2_model_states_mem_needs."""
    return HALF * parameters if offload else HALF * parameters + int(DIVIDED * parameters / ranks)


def estimate_zero3(parameters: int, largest_layer: int, ranks: int, *, offload: bool, offload_weights: bool) -> int:
    """Return bytes per GPU by estimate_zero3_model_states_mem_needs; `largest_layer` in parameters."""
    if not offload:
        return LAYER * largest_layer + int(DIVIDED * parameters / ranks)
    return LAYER * largest_layer + (0 if offload_weights else int(HALF * parameters / ranks))


def find_stage(spec: RunSpec) -> int | None:
    """Return the ZeRO stage in the run's DeepSpeed config; None where it has no such config."""
    facts = find_facts(spec)
    if facts is None or facts.deepspeed_config is None:
        return None
    return int(facts.deepspeed_config(spec)["zero_optimization"]["stage"])


def estimate_memory(spec: RunSpec, parameters: int) -> int | None:
    """Return what DeepSpeed's estimator of the run's stage says, in bytes per GPU; None where it has none."""
    options, at = spec.engine.options, find_stage(spec)
    offload, offload_weights = (_is_offloaded(options, name) for name in ("offload_optimizer", "offload_param"))
    if at == 2:
        return estimate_zero2(parameters, spec.data_parallel, offload=offload)
    if at == 3:
        layer = count_largest_layer(spec.model.shape)
        return estimate_zero3(parameters, layer, spec.data_parallel, offload=offload, offload_weights=offload_weights)
    return None


def count_largest_layer(shape: dict[str, Any]) -> int:
    """Return the parameters of the largest module of a T5 that holds any itself: one matrix."""
    widest: int = max(shape["vocab"], shape["d_ff"], shape["heads"] * shape["d_kv"])
    return int(shape["d_model"]) * widest


def estimate_flops(parameters: int, tokens: float) -> float:
    """Return 6·N·tokens: FLOPs of forward and backward over all `tokens`."""
    return FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens


def _is_offloaded(options: dict[str, Any], name: str) -> bool:
    return bool((options.get(name) or {}).get("device", "none") != "none")
