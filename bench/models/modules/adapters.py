"""Adapters for the models of all families: low-rank matrices next to frozen weights (LoRA, by peft), quantised frozen
weights (QLoRA, by bitsandbytes), and parameters that are frozen without adapters.

`adapt` adds adapters to an initialised model before its engine is built. All weights other than adapters therefore
start as in a run without adapters. The second matrix of each adapter is zero at first, so the first loss is also the
same as without adapters.
"""

import importlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import Linear, Module, ModuleList, Parameter

from bench.core.adapted import check_targets
from bench.core.errors import UserError
from bench.core.plugins import EngineBuilder
from bench.core.spec import AdapterSpec, RunSpec
from bench.models import derived_seed
from bench.models.modules import SkippedInitialisation

OUTLIERS = 6.0
"""Threshold of LLM.int8 (arXiv 2208.07339), also the default of transformers. Columns of an input that contain a larger
value are not quantised."""
_PEFT_FLAGS = {"is_loaded_in_4bit": "nf4", "is_loaded_in_8bit": "int8"}
_FIRST, _SECOND = "lora_A", "lora_B"
"""peft's names for the two matrices of an adapter: (rank, inputs) and (outputs, rank)."""


def adapt(module: Module, spec: RunSpec, engine: EngineBuilder) -> Module:
    """Put the spec's adapters into an initialised model, and freeze the weights that are not trained. Return the model.
    Raise the errors of `check_adapter`. All ranks must call this function."""
    check_adapter(module, spec.adapter)
    for name, parameter in module.named_parameters():
        if spec.adapter.frozen and re.search(spec.adapter.frozen, name):
            parameter.requires_grad_(False)
    if spec.adapter.rank is not None:
        targets = _find_targets(module, spec.adapter)
        if spec.adapter.quantization != "none":
            _quantise(module, spec, engine)
        _insert(module, targets, spec, engine)
        _draw(module, spec.seed, engine)
    return module


def check_adapter(module: Module, adapter: AdapterSpec) -> None:
    """Raise UserError if the model cannot have these adapters or frozen parameters.

    Possible reasons: an adapter target that is not a matrix of a block, a pattern `adapter.frozen` that matches no
    parameter or all parameters, or a library that is not installed. The model may be on the meta device.
    """
    if adapter.frozen:
        names = [name for name, _ in module.named_parameters()]  # a shared parameter has one name
        found = [name for name in names if re.search(adapter.frozen, name)]
        if not found or len(found) == len(names):
            rule = "finds every parameter, so nothing would be trained" if found else "finds no parameter"
            remedy = f"names are, for example, {', '.join(names[:: max(1, len(names) // 3)][:3])}"
            raise UserError(f"adapter.frozen={adapter.frozen}", rule, remedy)
    if adapter.rank is not None:
        _find_targets(module, adapter)
        for library in ("peft", *["bitsandbytes"] * (adapter.quantization != "none")):
            try:
                importlib.import_module(library)
            except ImportError as error:
                rule = f"{library} cannot be imported ({error})"
                raise UserError(f"adapter={adapter.name}", rule, "pip install 'zeroscale[adapters]'") from error


def list_matrices(module: Module) -> dict[str, Any]:
    """Return the matrices of all blocks by name: the linear layers within the model's outermost ModuleLists."""
    conv = _load_conv1d()
    return {
        name: layer
        for prefix, block in _list_blocks(module)
        for name, layer in block.named_modules(prefix=prefix)
        if isinstance(layer, (Linear, conv))
    }


def _load_conv1d() -> type[Module]:
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer in transformers, with a transposed weight

    kind: type[Module] = Conv1D
    return kind


def _list_blocks(module: Module, prefix: str = "") -> Iterator[tuple[str, Module]]:
    for name, child in module.named_children():
        path = f"{prefix}.{name}".lstrip(".")
        if isinstance(child, ModuleList):
            yield path, child
        else:
            yield from _list_blocks(child, path)


def _find_targets(module: Module, adapter: AdapterSpec) -> list[str]:
    """Return the full names of the matrices that get adapters: the matrices that `adapter.targets` names, or all
    matrices of blocks if `adapter.targets` is empty."""
    names = {name: name.rpartition(".")[2] for name in list_matrices(module)}
    if not names:
        raise UserError(f"adapter={adapter.name}", "the blocks of the model have no linear layers", "leave it out")
    check_targets(adapter.targets, names.values())
    return [name for name, own in names.items() if not adapter.targets or own in adapter.targets]


def _quantise(module: Module, spec: RunSpec, engine: EngineBuilder) -> None:
    """Replace the matrices of all blocks by quantised ones, one at a time.

    Matrices that transformers keeps in fp32 are not quantised. An example is T5's matrix `wo`. T5 converts activations
    to the dtype of `wo` before it multiplies them with `wo`. If `wo` were packed into bytes, this conversion would
    destroy the activations without any error.
    """
    hold = getattr(engine, "hold", None)  # an engine that partitions parameters before it is built
    kept = frozenset(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, layer in list_matrices(module).items():
        owner, _, own = name.rpartition(".")
        if own not in kept:
            with torch.no_grad(), engine.whole([layer.weight]):
                packed = _pack(layer, spec.adapter)
            if hold is not None:
                held = hold(packed.weight, layer.weight)
                for fact in ("quant_type", "compress_statistics"):  # peft reads them
                    setattr(held, fact, getattr(packed.weight, fact))
                packed.weight = held
            setattr(module.get_submodule(owner), own, packed)


def _pack(layer: Any, adapter: AdapterSpec) -> Any:
    """Return a layer that can replace the linear layer `layer`. The new layer's weight is quantised by bitsandbytes.
    The weight of `layer` must not be partitioned."""
    from bitsandbytes import nn as quantised
    from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

    weight = layer.weight.detach()
    if not isinstance(layer, Linear):
        weight = weight.t().contiguous()  # Conv1D
    outputs, inputs = weight.shape
    if adapter.quantization == "int8":
        made = quantised.Linear8bitLt(inputs, outputs, False, has_fp16_weights=False, threshold=OUTLIERS, device="meta")
        rows, scales, _ = int8_vectorwise_quant(weight.to(torch.float16))
        made.weight = quantised.Int8Params(rows, requires_grad=False, CB=rows, SCB=scales)
    else:
        # packed weights have the run's dtype, because FSDP gathers parameters of that dtype without a conversion
        form = {"quant_type": "nf4", "quant_storage": weight.dtype, "compress_statistics": adapter.double_quantization}
        made = quantised.Linear4bit(inputs, outputs, False, compute_dtype=weight.dtype, device="meta", **form)
        rows, made.quant_state = quantize_4bit(weight, **form)
        made.weight = quantised.Params4bit(
            rows, requires_grad=False, quant_state=made.quant_state, module=made, bnb_quantized=True, **form
        )
        # in evaluations it would repack the weights for AVX-512 in place, and their gradients would fail afterwards
        made.support_avx512bf16_for_cpu = False
    made.bias = layer.bias
    return made


def _insert(module: Module, targets: Sequence[str], spec: RunSpec, engine: EngineBuilder) -> None:
    """Add uninitialised adapters to the matrices named `targets`, and freeze all other parameters."""
    # imported before `construction` is entered, because deepspeed.zero.Init changes the classes that exist then
    from peft import LoraConfig, inject_adapter_in_model

    adapter = spec.adapter
    # peft's own flags, by which it chooses its layers for bitsandbytes' layers
    for flag, form in _PEFT_FLAGS.items():
        setattr(module, flag, adapter.quantization == form)
    config = LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=adapter.dropout, target_modules=list(targets),
        init_lora_weights=False, fan_in_fan_out=isinstance(module.get_submodule(targets[0]), _load_conv1d()),
    )  # fmt: skip
    with engine.construction(spec), SkippedInitialisation():
        inject_adapter_in_model(config, module)
    for flag in _PEFT_FLAGS:
        delattr(module, flag)


def _draw(module: Module, seed: int, engine: EngineBuilder) -> None:
    """Set the weights of all adapters as peft does: the first matrix uniformly within ±1/√inputs, the second to zero.
    Values depend only on the seed and the parameter's name."""
    for name, parameter in module.named_parameters():
        kind = name.split(".")[-3] if name.count(".") > 1 else ""
        if kind not in (_FIRST, _SECOND):
            continue
        with engine.whole([parameter]), torch.no_grad():
            if kind == _SECOND:
                parameter.zero_()
            else:
                _draw_uniform(parameter, parameter.shape[1] ** -0.5, derived_seed(seed, name))


def _draw_uniform(parameter: Parameter, limit: float, seed: int) -> None:
    """Fill a parameter with values between -limit and limit, drawn in fp32 and rounded to its dtype."""
    generator = torch.Generator(parameter.device).manual_seed(seed)
    drawn = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    parameter.copy_(drawn.uniform_(-limit, limit, generator=generator))
