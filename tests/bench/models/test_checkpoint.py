"""Weights in transformers' format are loaded and saved by every engine. The models are tiny and written by
transformers; no published weights are used."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from bench import models
from bench.config import compose
from bench.core.spec import RunSpec
from bench.engines.precision.update import whole
from bench.models.checkpoint import INDEX, WEIGHTS, find_folder
from bench.models.checkpoint.tensors import load_weights

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from started_ranks import start_ranks
from weight_ranks import SHARD_BYTES, VOCABULARY, micro_batch

CONF = Path(__file__).parents[3] / "conf/engine"
RANKS = 2
KINDS = "t5", "t5_v1_1", "gpt2", "llama", "opt"
"""Models: T5 with a tied head, T5 v1.1 with a separate head, GPT-2, Llama, and a model of family hugging_face."""


def build_theirs(kind: str) -> Any:
    """Return a model of transformers whose weights are all random, biases and norms included."""
    torch.manual_seed(5)
    if kind.startswith("t5"):
        config = T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0,
            tie_word_embeddings=kind == "t5",
        )  # fmt: skip
        config.tie_word_embeddings = kind == "t5"
        model: Any = T5ForConditionalGeneration(config)
        if kind != "t5":
            model.encoder.embed_tokens.weight = model.decoder.embed_tokens.weight = model.shared.weight
    elif kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 16, "vocab_size": VOCABULARY}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    elif kind == "llama":
        sizes = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"intermediate_size": 48, "max_position_embeddings": 16, "vocab_size": VOCABULARY, "head_dim": 10}
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "ffn_dim": 48}
        sizes |= {"max_position_embeddings": 16, "word_embed_proj_dim": 32, "vocab_size": VOCABULARY}
        model = OPTForCausalLM(OPTConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a checkpoint of each kind, as transformers writes it."""
    folder = tmp_path_factory.mktemp("theirs")
    for kind in KINDS:
        build_theirs(kind).save_pretrained(folder / kind)
    return folder


def compute_loss(folder: Path, spec: RunSpec, data_rank: int) -> float:
    """Return the loss that transformers computes for a rank's micro-batch with the weights in a folder."""
    kind: Any = AutoModelForCausalLM if "tokens" in spec.sequence else AutoModelForSeq2SeqLM
    model, found = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(found.values()), found
    with torch.no_grad():
        return float(model.eval()(**micro_batch(spec, data_rank)).loss)


def ask(folder: Path, *words: str) -> RunSpec:
    """Return the spec of a user who names only the folder of a checkpoint."""
    lengths = (
        ["sequence.encoder=12", "sequence.decoder=6"] if "t5" in folder.name.split()[0] else ["sequence.tokens=12"]
    )
    usual = ["model=hugging_face", f"model.checkpoint={folder}", "precision=fp32", "batch.micro=2", "machine=cpu",
             "devices_per_node=2", "loss_mean=micro_batches", *lengths]  # fmt: skip
    given = {word.partition("=")[0]: word for word in (*usual, *words)}
    return compose.compose_request(compose.parse_single(list(given.values()))).spec


def load(spec: RunSpec) -> Any:
    """Return the whole model of a spec in one process, with the weights of its checkpoint."""
    module = models.load_builder(spec.model.family).build(spec)
    folder = find_folder(str(spec.model.checkpoint))
    load_weights(module, spec, whole, folder, is_main=True)
    return module.eval()


# ------------------------------------------------------------------------------------------ what is loaded


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_shape_and_weights(written: Path, kind: str) -> None:
    spec = ask(written / kind, "devices_per_node=1")
    assert spec.model.family == {"t5": "t5", "t5_v1_1": "t5", "opt": "hugging_face"}.get(kind, "gpt")
    with torch.no_grad():
        found = float(load(spec)(**micro_batch(spec, 0)).loss)
    assert found == pytest.approx(compute_loss(written / kind, spec, 0), rel=1e-6)


@pytest.mark.parametrize("kind", ["t5", "t5_v1_1", "gpt2"])
def test_a_chunked_loss_reads_the_same_head(written: Path, kind: str) -> None:
    spec = ask(written / kind, "devices_per_node=1", "model.loss_chunk_tokens=5")
    loss = load(spec).train()(**micro_batch(spec, 0)).loss
    assert loss.item() == pytest.approx(compute_loss(written / kind, spec, 0), rel=1e-6)


def test_older_and_divided_forms_of_gpt2_are_read(written: Path, tmp_path: Path) -> None:
    """The published GPT-2 has names without their first word, and masks. Larger models have several files."""
    theirs = build_theirs("gpt2")
    theirs.transformer.save_pretrained(tmp_path / "base")
    masks = {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "h.0.attn.masked_bias": torch.zeros(())}
    save_file(load_file(tmp_path / "base" / WEIGHTS) | masks, tmp_path / "base" / WEIGHTS)
    theirs.save_pretrained(tmp_path / "divided", max_shard_size="30KB")
    assert (tmp_path / "divided" / INDEX).exists()
    expected = load(ask(written / "gpt2")).state_dict()
    for folder in ("base", "divided"):
        found = load(ask(tmp_path / folder)).state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_identity_depends_on_the_checkpoint_and_a_model_without_one_keeps_its_record(written: Path) -> None:
    one, other = ask(written / "gpt2"), ask(written / "gpt2")
    random = one.model_copy(update={"model": one.model.model_copy(update={"checkpoint": None})})
    assert compose.config_id(one) == compose.config_id(other) != compose.config_id(random)
    assert "checkpoint" not in random.model_dump()["model"]


# --------------------------------------------------------------------------------------------- engines


ENGINES = {
    "ddp": ["engine=ddp"], "zero1": ["engine=zero1"],
    "zero3": ["engine=zero3", "engine.stage3_param_persistence_threshold=0"],  # otherwise small tensors stay whole
    "fsdp": ["engine=fsdp"],
    "pipeline": ["engine=pipeline", "parallel.pipeline=2"], "tensor": ["engine=pipeline", "parallel.tensor=2"],
}  # fmt: skip


def build_jobs(written: Path) -> dict[str, RunSpec]:
    """Return the specs of runs on two ranks, by label: kind of model, engine and precision."""
    described = [kind for kind in KINDS if kind != "opt"]
    asked = [(kind, engine, "fp32") for kind in described for engine in ENGINES]
    asked += [("opt", engine, "fp32") for engine in ("ddp", "zero3", "fsdp")]  # cannot be divided into parts
    asked += [("llama", engine, "bf16") for engine in ("ddp", "zero3", "fsdp")]
    return {
        f"{kind} {engine} {precision}": ask(
            written / kind, *ENGINES[engine], f"precision={precision}", "optimizer.lr=1e-2"
        )
        for kind, engine, precision in asked
    }


@pytest.mark.processes
def test_every_engine_loads_trains_and_saves(written: Path, tmp_path: Path) -> None:
    """transformers computes the loss of the run with the loaded weights and with the saved weights, and so does a run
    with the saved folder as its checkpoint. Rank 0 writes files of limited size."""
    jobs = build_jobs(written)
    plain = {label: spec.model_dump(mode="json", by_alias=True) for label, spec in jobs.items()}
    seen = start_ranks("weight_ranks.py", plain, RANKS, tmp_path / "ranks")
    for label, spec in jobs.items():
        kind, engine, precision = label.split()
        near, folder = {"rel": 1e-5 if precision == "fp32" else 2e-2}, tmp_path / "ranks" / label
        for rank, found in enumerate(one[label] for one in seen):
            if found["loaded"] is not None:  # the first stage of a pipeline has no loss
                data_rank = rank if engine not in ("pipeline", "tensor") else 0
                assert found["loaded"] == pytest.approx(compute_loss(written / kind, spec, data_rank), **near), label
            if "saved" in found:
                assert found["saved"] < found["loaded"] - 0.1, "the training changed the weights"
                assert found["saved"] == pytest.approx(compute_loss(folder, spec, rank), **near), label
        if "saved" in seen[0][label] and precision == "fp32":
            again = ask(folder)
            loss = load(again)(**micro_batch(again, 0)).loss.detach()
            assert float(loss) == pytest.approx(seen[0][label]["saved"], rel=1e-5), label
            assert again.model.shape == spec.model.shape
    check_peaks(written, seen)


def check_peaks(written: Path, seen: list[dict[str, Any]]) -> None:
    """Check the largest number of live bytes on each rank. While partitioned weights are loaded, a rank has its share
    of the model and a few whole tensors. While they are saved, it has a few whole tensors; rank 0 also has those of a
    file."""
    for label in seen[0]:
        kind, engine, precision = label.split()
        stored = load_file(written / kind / WEIGHTS).values()
        sizes = [tensor.numel() * (4 if precision == "fp32" else 2) for tensor in stored]
        few = 4 * max(sizes)
        for rank, found in enumerate(one[label] for one in seen):
            if engine in ("ddp", "zero1"):
                assert found["load_peak"] >= sum(sizes), (label, rank)
            else:
                assert sum(sizes) / RANKS + few < sum(sizes), "the bound is below the whole model"
                assert found["load_peak"] <= sum(sizes) / RANKS + few, (label, rank)
            if "save_peak" in found:
                assert found["save_peak"] <= few + SHARD_BYTES * (rank == 0), (label, rank)
