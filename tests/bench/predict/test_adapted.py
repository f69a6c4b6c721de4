"""Tests of predictions for models with low-rank adapters. They are compared with closed forms, and with models to which
peft added the adapters."""

import gc
import os
from typing import Any

import pytest
import torch
from saved_tensors import kept_by_autograd
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bench import engines, models
from bench.config import compose
from bench.core.errors import NoPrediction, UserError
from bench.core.network import count_parameters, count_trained_parameters
from bench.core.spec import FULL, RunSpec
from bench.engines.precision.update import on_device
from bench.models.modules.adapters import adapt
from bench.predict.memory import activations, predict_memory
from bench.predict.work import compute_backward, compute_flops_per_step, compute_forward
from bench.predict.workload import build_workload, get_model_sizes, get_network, predict_engine_memory

pytest.importorskip("peft")
T5 = {
    "d_model": 48, "d_kv": 8, "d_ff": 80, "encoder_layers": 2, "decoder_layers": 3, "heads": 4, "vocab": 96,
    "gated": True, "activation": "gelu_new", "separate_head": True,
}  # fmt: skip
LLAMA = {
    "width": 48, "layers": 3, "heads": 6, "key_heads": 3, "inner": 80, "vocab": 96, "positions": 64, "norm": "rms",
    "activation": "silu", "gated": True, "biases": False, "fused": False, "separate_head": True,
    "scaled_residuals": False, "rotary_base": 10_000.0,
}  # fmt: skip
GPT2 = {"width": 48, "layers": 3, "heads": 4, "inner": 192, "vocab": 96, "positions": 64}
FIRST_T5 = T5 | {"gated": False, "activation": "relu", "separate_head": False}
SHAPES: dict[str, dict[str, Any]] = {
    "t5": T5, "first_t5": FIRST_T5, "umt5": T5 | {"bias_per_layer": True}, "llama": LLAMA, "gpt2": GPT2,
}  # fmt: skip
SOME = {"t5": ["q", "v"], "first_t5": ["v", "wi"], "umt5": ["o", "wo"], "llama": ["k_proj", "up_proj"],
        "gpt2": ["down_proj"]}  # fmt: skip


def spec_of(shape: dict[str, Any], adapter: dict[str, Any], dropout: float = 0.0, **rest: Any) -> RunSpec:
    family = "t5" if "d_model" in shape else "gpt"
    model = {"name": "small", "family": family, "shape": shape, "dropout": dropout}
    model["attention"] = rest.pop("attention", "sdpa")
    engine = {"name": "ddp", "backend": "ddp", "options": {"bucket_cap_mb": 25}}
    lengths = {"encoder": 20, "decoder": 12} if family == "t5" else {"tokens": 20}
    return RunSpec.model_validate({
        "model": model, "engine": engine, "data": {"name": "synthetic", "source": "synthetic"}, "batch": {"micro": 3},
        "sequence": lengths, "objective": "span_corruption" if family == "t5" else "causal_lm",
        "adapter": adapter, **rest,
    })  # fmt: skip


def adapted(spec: RunSpec) -> nn.Module:
    """Build the model of a spec with its adapters on the CPU, in the precision of the run, and return it."""
    builder = models.load_builder(spec.model.family)
    module = builder.build(spec, on_device(spec.precision))
    builder.initialise(module, spec)
    return adapt(module, spec, engines.load_builder("ddp"))


def batch(spec: RunSpec) -> dict[str, Tensor]:
    tokens = [torch.randint(2, 96, (spec.batch.micro, length)) for length in spec.sequence.values()]
    return {"input_ids": tokens[0], "labels": tokens[-1]}


# ---------------------------------------------------------------------------------------------- numbers of parameters


def test_trained_parameters_of_a_t5_equal_the_closed_form() -> None:
    d, inner, f, rank = 48, 32, 80, 4
    attention, mlp = 4 * (d + inner), 3 * (d + f)
    network = get_network(spec_of(T5, {"rank": rank}))
    assert count_trained_parameters(network) == rank * (2 * (attention + mlp) + 3 * (2 * attention + mlp))
    frozen = count_parameters(get_network(spec_of(T5, {})))
    assert count_parameters(network) == frozen + count_trained_parameters(network)


def test_trained_parameters_of_llama_3_8b_equal_the_number_printed_by_peft() -> None:
    """The numbers of trained parameters that peft prints for Llama 3 8B are 41,943,040 for rank 16 on all seven
    matrices of each of the 32 blocks, and 3,407,872 for rank 8 on queries and values."""
    llama = compose.compose_request(
        compose.parse_single(["model=llama_3_8b", "objective=causal_lm", "launcher=slurm", "devices_per_node=1"])
    )
    shape = llama.spec.model.shape
    for rank, targets, expected in [(16, [], 41_943_040), (8, ["q_proj", "v_proj"], 3_407_872)]:
        spec = spec_of(shape, {"rank": rank, "targets": targets})
        assert count_trained_parameters(get_network(spec)) == expected


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_of_trained_and_frozen_tensors_equal_those_of_the_peft_model(name: str) -> None:
    spec = spec_of(SHAPES[name], {"rank": 4, "targets": SOME[name]})
    parameters = list(adapted(spec).parameters())
    sizes = get_model_sizes(get_network(spec))
    trained = sorted(size.elements for size in sizes.tensors for _ in range(size.number))
    frozen = sorted(size.elements for size in sizes.frozen for _ in range(size.number))
    assert trained == sorted(one.numel() for one in parameters if one.requires_grad)
    assert frozen == sorted(one.numel() for one in parameters if not one.requires_grad)


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_activation_bytes_equal_the_tensors_saved_by_autograd(
    name: str, some: bool, dropout: float, attention: str, precision: str
) -> None:
    adapter = {"rank": 4, "dropout": dropout, "targets": SOME[name] * some}
    spec = spec_of(SHAPES[name], adapter, dropout, attention=attention, precision=precision)
    module, tokens = adapted(spec), batch(spec)
    predicted = activations.list_segments(get_network(spec), build_workload(spec, "cpu"))
    saved = sum(segment.saved * times for block, times in predicted for segment in block)
    sum_of_weights = 2 if precision == "bf16" and spec.model.family == "t5" else 4  # divisor of the loss, one number
    assert kept_by_autograd(module, lambda: module(**tokens).loss) - sum_of_weights == saved


def test_frozen_matrix_without_an_adapter_saves_no_input_for_backward() -> None:
    """Two models are compared: one with adapters on all matrices, and one with adapters only on the queries. In the
    second, an MLP still saves its three inner tensors for backward, but neither its own input nor the input of its last
    matrix."""
    rows, width, inner = 60, 48, 80
    keeps, none = (
        sum(
            segment.saved * times
            for block, times in activations.list_segments(get_network(spec), build_workload(spec, "cpu"))
            for segment in block
        )
        for spec in (spec_of(LLAMA, {"rank": 4, "targets": targets}, precision="fp32") for targets in ([], ["q_proj"]))
    )
    middles = 4 * rows * 6 * 4  # of the six adapters that the model with adapters on queries only lacks
    attended = 0  # the fused kernel keeps its output, which the last matrix of attention reads
    assert keeps - none == 3 * (4 * rows * (width + inner) + middles + attended)


@pytest.mark.parametrize(("name", "bits"), [("nf4", 4.5), ("nested", 4.127), ("int8", 8.0)])
def test_quantised_weights_have_the_published_bits_per_parameter(name: str, bits: float) -> None:
    """int8 has one fp32 scale for each row of a matrix. With 4096 columns, these scales add 32 / 4096 bits per
    parameter to the published 8 bits per parameter."""
    adapter = {"rank": 8, "quantization": "int8" if name == "int8" else "nf4", "double_quantization": name == "nested"}
    shape = LLAMA | {"width": 4096, "heads": 32, "key_heads": 32, "inner": 4096, "vocab": 128}
    sizes = get_model_sizes(get_network(spec_of(shape, adapter)))
    packed = [size for size in sizes.frozen if size.packed]
    assert sum(size.number for size in packed) == 3 * 7
    assert {round(8 * size.packed / size.elements, 3) for size in packed} == {
        round(bits + (32 / 4096 if name == "int8" else 0), 3)
    }


def test_norms_embeddings_and_wo_are_not_quantised() -> None:
    sizes = get_model_sizes(get_network(spec_of(T5, {"rank": 4, "quantization": "nf4"})))
    d, f = 48, 80
    whole = {(size.elements, size.number) for size in sizes.frozen if not size.packed}
    assert whole == {(96 * d, 2), (d, 2 * 2 + 3 * 3 + 2), (32 * 4, 2), (d * f, 5)}


def test_ddp_has_optimizer_states_for_adapters_and_weights_for_all_parameters() -> None:
    spec = spec_of(LLAMA, {"rank": 4})
    network = get_network(spec)
    trained, held = count_trained_parameters(network), predict_engine_memory(spec, "cpu").resident()
    assert held == {
        "weights": 2 * count_parameters(network), "master weights": 4 * trained, "optimizer moments": 8 * trained,
        "gradients": 2 * trained,
    }  # fmt: skip


@pytest.mark.parametrize(("precision", "form"), [("fp32", "none"), ("bf16", "none"), ("bf16", "nf4"), ("bf16", "int8")])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["t5", "llama"])
def test_predicted_peaks_of_ddp_with_adapters_are_within_4_percent(
    name: str, checkpointing: bool, precision: str, form: str, single_rank: None
) -> None:
    from bench.measure import memory

    wider: dict[str, Any] = {"d_model": 256, "d_kv": 32, "d_ff": 512} if name == "t5" else {"width": 240, "inner": 640}
    adapter = {"rank": 8, "quantization": form}
    spec = spec_of(SHAPES[name] | wider, adapter, precision=precision, activation_checkpointing=checkpointing)
    device = torch.device("cpu")
    memory.install_counter(device)
    backend = engines.load_builder("ddp")
    gc.collect()  # modules of earlier tests, which reference themselves
    before = memory.read_live_bytes(device)
    engine = backend.build(adapted(spec), spec)
    steps = [batch(spec) for _ in range(3)]
    for tokens in steps[:2]:
        engine.train_step(iter([tokens]))
    gc.collect()
    between = memory.read_live_bytes(device)
    memory.reset_peak(device)
    engine.train_step(iter(steps[2:]))
    peak = memory.read_peak_bytes(device)
    assert before is not None and peak and between
    predicted = predict_memory(spec, "cpu", rehearsed=True)
    assert predicted.resident == pytest.approx(between - before, rel=0.002)
    peak -= before
    # bitsandbytes' CPU kernels make additional copies to dequantise; its GPU kernels do not
    packed = [size.elements for size in get_model_sizes(get_network(spec)).frozen if size.packed]
    copies = 3 * FULL * max(packed, default=0)
    assert 0.96 * peak - copies <= predicted.peak <= 1.04 * peak


@pytest.fixture
def single_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provide a process group of one rank without communication."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


# ---------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_flops_of_a_step_with_adapters_equal_the_count_of_torch(name: str, some: bool, checkpointing: bool) -> None:
    """Attention is eager. A fused kernel would recompute the attention scores in backward. Model FLOPs do not include
    this recomputation."""
    adapter = {"rank": 4, "targets": SOME[name] * some}
    spec = spec_of(SHAPES[name], adapter, attention="eager", precision="fp32", activation_checkpointing=checkpointing)
    module, tokens = adapted(spec), batch(spec)
    with FlopCounterMode(display=False) as counter:
        module(**tokens).loss.backward()
    found = compute_flops_per_step(spec)
    assert found.hardware == counter.get_total_flops()
    assert (found.model < found.hardware) is checkpointing


def test_frozen_weights_have_4_flops_per_token_and_adapter_weights_6() -> None:
    """The model is a Llama of 3 blocks. Backward does not need the gradient for the input of the first block. So
    backward has one matrix product less for each matrix that reads this input, and one less for the adapter of this
    matrix. Attention needs 12 FLOPs for each pair of tokens and each element of a head."""
    d, kv, f, vocab, tokens, rank = 48, 24, 80, 96, 20, 4
    matrices = [(d, d), (d, kv), (d, kv), (d, d), (d, f), (d, f), (f, d)]
    frozen = 4 * (3 * sum(k * n for k, n in matrices) + d * vocab) - 2 * sum(k * n for k, n in matrices[:3])
    adapters = 6 * 3 * sum(rank * (k + n) for k, n in matrices) - 2 * 3 * rank * d
    attention = 3 * 12 * tokens * d
    spec = spec_of(LLAMA, {"rank": rank}, batch={"micro": 1})
    assert compute_flops_per_step(spec).model == tokens * (frozen + adapters + attention)


def test_dequantisation_reads_and_writes_each_weight_once_per_pass() -> None:
    plain, packed = (
        spec_of(LLAMA, {"rank": 4, "quantization": form, "double_quantization": form == "nf4"})
        for form in ("none", "nf4")
    )
    there, back = (compute_forward(get_network(spec), build_workload(spec, "cuda")) for spec in (packed, plain))
    sizes = get_model_sizes(get_network(packed)).frozen
    once = sum(size.number * (size.packed + 2 * size.elements) for size in sizes if size.packed)
    assert (there.moved_bytes - back.moved_bytes, compute_backward(there).dequantised_bytes) == (once, once)


# ---------------------------------------------------------------------------------------------- refusals


def test_unknown_adapter_target_is_refused_with_the_nearest_name_and_all_names() -> None:
    names = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(
        UserError,
        match=f"adapter.targets=q_prj: .* no matrix of this name; did you mean q_proj\\? Otherwise .*{names}$",
    ):
        get_network(spec_of(LLAMA, {"rank": 4, "targets": ["q_prj"]}))


def test_memory_with_parameters_frozen_by_a_pattern_is_not_predicted() -> None:
    with pytest.raises(NoPrediction, match=r"adapter.frozen=\^encoder: no prediction"):
        predict_memory(spec_of(T5, {"frozen": "^encoder"}))
