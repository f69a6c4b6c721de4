"""Specs of tiny models in a pipeline. Some tests train them, and others only build the models."""

from pathlib import Path
from typing import Any

import yaml

from bench import engines, models
from bench.core.network import Part
from bench.core.spec import RunSpec

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "encoder_layers": 3, "decoder_layers": 3, "heads": 4, "vocab": 96,
      "gated": True, "activation": "gelu_new", "separate_head": True}  # fmt: skip
GPT = {"width": 32, "layers": 4, "heads": 4, "inner": 64, "vocab": 96, "positions": 16}
LLAMA = GPT | {"norm": "rms", "activation": "silu", "gated": True, "biases": False, "fused": False, "key_heads": 2,
               "separate_head": True, "scaled_residuals": False, "rotary_base": 10000.0}  # fmt: skip
SHAPES = {"t5": T5, "tied": T5 | {"separate_head": False}, "umt5": T5 | {"bias_per_layer": True}, "masked": T5,
          "eager": T5,
          "gpt": GPT, "llama": LLAMA, "documents": GPT}  # fmt: skip
CONF = Path(__file__).parents[3] / "conf/engine"
CLIPPING = 0.4
MICRO, ENCODER, DECODER, TOKENS = 2, 12, 6, 10


def spec(
    model: str, schedule: str, pipeline: int, stages: int = 1, data: int = 1, tensor: int = 1,
    by_tokens: bool = False, sharding: str = "zero1", preset: str = "pipeline", **fields: Any,
) -> RunSpec:  # fmt: skip
    """Return the spec of a tiny model that is trained in a pipeline. If `preset` names an engine preset without a
    pipeline, the model is not divided.

    `model` is a key of SHAPES. `pipeline`, `data` and `tensor` are numbers of ranks, `stages` is the number of stages
    per rank, and `by_tokens` turns on sequence parallelism. Gradient clipping, weight decay and accumulation are chosen
    so that an error in one of them changes the result.
    """
    shape = SHAPES[model]
    encodes = "encoder_layers" in shape
    options = {"name": preset, "backend": preset, "schedule": schedule, "sharding": sharding}
    if preset != "pipeline":
        options = yaml.safe_load((CONF / f"{preset}.yaml").read_text())
    plain = {
        "model": {
            "name": model, "family": "t5" if encodes else "gpt", "shape": shape,
            "attention": "eager" if model == "eager" else "sdpa",
        },
        "engine": {"name": options.pop("name"), "backend": options.pop("backend"), "options": options},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": MICRO, "accumulation": 4},
        "devices_per_node": pipeline * data * tensor,
        "objective": "span_corruption" if encodes else "causal_lm",
        "sequence": {"encoder": ENCODER, "decoder": DECODER} if encodes else {"tokens": TOKENS},
        "parallel": {"pipeline": pipeline, "stages_per_rank": stages, "tensor": tensor, "sequence": by_tokens},
        "precision": "fp32",
        # With eps=1e-8, AdamW's first updates hardly depend on the size of a gradient, so rounding errors of small
        # gradients become visible. Gradients of parts and of the whole model agree to 1.5e-7 of each tensor's largest
        # gradient. Yet with breadth-first stages, a few weights differed by more than 1e-6 after one step. Their
        # gradients were below 1e-5 of the largest, where rounding errors reach 1 %. In fp64 with eps=1e-8, all weights
        # agreed to 3e-12.
        "optimizer": {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1, "gradient_clipping": CLIPPING},
    }  # fmt: skip
    return RunSpec.model_validate(plain | fields)


def pad(job: RunSpec, loss_mean: str = "tokens") -> RunSpec:
    """Return a copy of the spec with padded data, in which micro-batches have different numbers of target tokens.
    `loss_mean` states how the loss of a step is averaged: over `tokens` or over `micro_batches`."""
    data = {"name": "text", "source": "text", "options": {"packing": False}}
    plain = job.model_dump(mode="json", by_alias=True)
    return RunSpec.model_validate(plain | {"data": data, "loss_mean": loss_mean})


def drop(job: RunSpec) -> RunSpec:
    """Return a copy of the spec whose model has dropout."""
    return job.model_copy(update={"model": job.model.model_copy(update={"dropout": 0.1})})


def parts_of(job: RunSpec) -> tuple[Part, ...]:
    network, cut = models.build_network(job.model), engines.facts(job).cut
    assert network and cut
    return cut(job, network)
