"""Tests that every engine loads and saves weights in transformers' format. The checkpoints are tiny models with random
weights that transformers wrote, not published models."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from started_ranks import start_ranks
from started_runs import Command
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
from weight_ranks import SHARD_BYTES, VOCABULARY, micro_batch

from bench import engines, models
from bench.config import compose
from bench.core.errors import Check, UserError
from bench.core.spec import RunSpec
from bench.engines.precision.update import whole
from bench.models.checkpoint import INDEX, WEIGHTS, find_folder
from bench.models.checkpoint.tensors import build_config, load_weights, save_adapters
from bench.sweep import plan
from bench.sweep.prepare import staging

RANKS = 2
KINDS = "t5", "t5_v1_1", "gpt2", "llama", "opt"
"""Models: T5 with a tied head, T5 v1.1 with a separate head, GPT-2, Llama, and a model of family hugging_face."""


def build_theirs(kind: str) -> Any:
    """Return a tiny model of transformers of this kind (one of KINDS). All its weights are random, including biases and
    norms, which otherwise start as zeros and ones."""
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
    """Folder of checkpoints that transformers wrote. The folder has a subfolder for each model in KINDS, such as
    `llama`."""
    folder = tmp_path_factory.mktemp("theirs")
    for kind in KINDS:
        build_theirs(kind).save_pretrained(folder / kind)
    return folder


def compute_loss(folder: Path, spec: RunSpec, data_rank: int, adapter: Path | None = None) -> float:
    """Load the model in `folder` with transformers, and return the loss of this model for the micro-batch of a
    data-parallel rank. If `adapter` is given, peft adds the adapters in that folder to the model."""
    kind: Any = AutoModelForCausalLM if "tokens" in spec.sequence else AutoModelForSeq2SeqLM
    model, found = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(found.values()), found
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return float(model.eval()(**micro_batch(spec, data_rank)).loss)


def ask(folder: Path, *words: str) -> RunSpec:
    """Return the spec of a run with `model=hugging_face` and the checkpoint in `folder`. `words` are further
    overrides."""
    lengths = (
        ["sequence.encoder=12", "sequence.decoder=6"] if "t5" in folder.name.split()[0] else ["sequence.tokens=12"]
    )
    usual = ["model=hugging_face", f"model.checkpoint={folder}", "precision=fp32", "batch.micro=2", "machine=cpu",
             "devices_per_node=2", "loss_mean=micro_batches", *lengths]  # fmt: skip
    given = {word.partition("=")[0]: word for word in (*usual, *words)}
    return compose.compose_request(compose.parse_single(list(given.values()))).spec


def load(spec: RunSpec) -> Any:
    """Build the whole model of a spec in this process, with the weights of its checkpoint, and return it."""
    module = models.load_builder(spec.model.family).build(spec)
    folder = find_folder(str(spec.model.checkpoint))
    load_weights(module, spec, whole, folder, is_main=True)
    return module.eval()


# ------------------------------------------------------------------------------------------ what is loaded


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_folder_gives_shape_and_weights(written: Path, kind: str) -> None:
    spec = ask(written / kind, "devices_per_node=1")
    assert spec.model.family == {"t5": "t5", "t5_v1_1": "t5", "opt": "hugging_face"}.get(kind, "gpt")
    with torch.no_grad():
        found = float(load(spec)(**micro_batch(spec, 0)).loss)
    assert found == pytest.approx(compute_loss(written / kind, spec, 0), rel=1e-6)


@pytest.mark.parametrize("kind", ["t5", "t5_v1_1", "gpt2"])
def test_chunked_loss_loads_the_head_of_the_checkpoint(written: Path, kind: str) -> None:
    spec = ask(written / kind, "devices_per_node=1", "model.loss_chunk_tokens=5")
    loss = load(spec).train()(**micro_batch(spec, 0)).loss
    assert loss.item() == pytest.approx(compute_loss(written / kind, spec, 0), rel=1e-6)


def test_old_and_sharded_gpt2_checkpoints_are_loaded(written: Path, tmp_path: Path) -> None:
    """In the published checkpoint of GPT-2, tensor names lack the prefix `transformer.`, and there are mask buffers.
    Checkpoints of larger models consist of several files."""
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


@pytest.mark.parametrize("model", ["gpt2", "llama_3_8b", "mt5_small", "umt5_small", "t5_v1_1_small", "t5_3b"])
def test_written_config_gives_the_same_shape_when_read(model: str) -> None:
    words = [f"model={model}", "devices_per_node=1", "batch.micro=1", "machine=cpu", "precision=bf16"]
    spec = compose.compose_request(compose.parse_single(words)).spec
    config, family = build_config(spec), models.load(spec.model.family)
    shapes = family.from_hugging_face(config), family.Shape.model_validate(spec.model.shape)
    assert family.stacks(shapes[0]) == family.stacks(shapes[1])
    assert config["dtype"] == "bfloat16"


def test_written_config_has_no_special_tokens_outside_the_vocabulary() -> None:
    words = ["model=gpt2_tiny", "devices_per_node=1", "machine=cpu"]
    config = build_config(compose.compose_request(compose.parse_single(words)).spec)
    known = {key: value for key, value in config.items() if key.endswith("_token_id") and value is not None}
    assert all(value < config["vocab_size"] for value in known.values()), known
    assert config["eos_token_id"] is None, "GPT2Config's own end token is 50256"


def test_saving_a_model_that_transformers_lacks_is_refused() -> None:
    """transformers has no config for a GPT-2 with RMS norms as in Llama. A run that must save such a model is refused
    before its first step."""
    words = ["model=gpt2_tiny", "model.name=own", "model.parameters=null", "model.shape.norm=rms"]
    spec = compose.compose_request(compose.parse_single([*words, "devices_per_node=1", "machine=cpu"])).spec
    with pytest.raises(UserError, match="model=own: transformers has no model of this shape"):
        build_config(spec)


def test_saving_adapters_of_random_weights_is_refused() -> None:
    words = ["model=gpt2_tiny", "adapter=lora", "data=text", "learning.tokens=10_000", "learning.save_model=true"]
    asked = compose.compose_request(compose.parse_single([*words, "devices_per_node=1", "machine=cpu"]))
    with pytest.raises(UserError, match=r"learning\.save_model=true: without model\.checkpoint the adapters belong to"):
        compose.check(asked, "cpu")


def test_config_id_depends_on_the_checkpoint_and_specs_without_one_omit_the_field(written: Path) -> None:
    one, other = ask(written / "gpt2"), ask(written / "gpt2")
    random = one.model_copy(update={"model": one.model.model_copy(update={"checkpoint": None})})
    assert compose.config_id(one) == compose.config_id(other) != compose.config_id(random)
    assert "checkpoint" not in random.model_dump()["model"]


# --------------------------------------------------------------------------------------------- engines


ENGINES = {
    "ddp": ["engine=ddp"], "zero1": ["engine=zero1"],
    "zero3": ["engine=zero3", "engine.stage3_param_persistence_threshold=0"],  # without it, small tensors stay whole
    "fsdp": ["engine=fsdp"],
    "pipeline": ["engine=pipeline", "parallel.pipeline=2"], "tensor": ["engine=pipeline", "parallel.tensor=2"],
}  # fmt: skip


def build_jobs(written: Path) -> dict[str, RunSpec]:
    """Return the specs of runs on two ranks. The label of a spec consists of the kind of model, the engine, the
    precision, and `lora` for a run with adapters."""
    described = [kind for kind in KINDS if kind != "opt"]
    asked = [(kind, engine, "fp32") for kind in described for engine in ENGINES]
    asked += [("opt", engine, "fp32") for engine in ("ddp", "zero3", "fsdp")]  # cannot be divided into parts
    asked += [("llama", engine, "bf16") for engine in ("ddp", "zero3", "fsdp")]
    lora = [(kind, engine, "fp32 lora") for kind in ("t5", "gpt2") for engine in ("ddp", "zero3", "fsdp")]
    return {
        f"{kind} {engine} {form}": ask(
            written / kind, *ENGINES[engine], f"precision={form[:4]}", "optimizer.lr=1e-2",
            *["adapter=lora"] * ("lora" in form),
        )
        for kind, engine, form in asked + lora
    }  # fmt: skip


@pytest.mark.processes
def test_every_engine_loads_trains_and_saves(written: Path, tmp_path: Path) -> None:
    """transformers must compute the same loss as the run, both with the loaded weights and with the weights or adapters
    that the run saved. If a second run loads the saved folder, it must have the same loss, too. Rank 0 divides the
    weights into files of limited size."""
    jobs = build_jobs(written)
    plain = {label: spec.model_dump(mode="json", by_alias=True) for label, spec in jobs.items()}
    seen = start_ranks("weight_ranks.py", plain, RANKS, tmp_path / "ranks")
    for label, spec in jobs.items():
        kind, engine, precision, *adapted = label.split()
        near, folder = {"rel": 1e-5 if precision == "fp32" else 2e-2}, tmp_path / "ranks" / label
        for rank, found in enumerate(one[label] for one in seen):
            if found["loaded"] is not None:  # the first stage of a pipeline has no loss
                data_rank = rank if engine not in ("pipeline", "tensor") else 0
                assert found["loaded"] == pytest.approx(compute_loss(written / kind, spec, data_rank), **near), label
            if "saved" in found:
                assert found["saved"] < found["loaded"] - 0.1, "the training changed the weights"
                places = (written / kind, spec, rank, folder) if adapted else (folder, spec, rank)
                assert found["saved"] == pytest.approx(compute_loss(*places), **near), label
        if "saved" in seen[0][label] and precision == "fp32" and not adapted:
            again = ask(folder)
            loss = load(again)(**micro_batch(again, 0)).loss.detach()
            assert float(loss) == pytest.approx(seen[0][label]["saved"], rel=1e-5), label
            assert again.model.shape == spec.model.shape
    check_peaks(written, seen)


def check_peaks(written: Path, seen: list[dict[str, Any]]) -> None:
    """Check the largest number of bytes of live tensors on each rank. While partitioned weights are loaded, a rank
    holds its share of the model and a few whole tensors. While weights are saved, it holds a few whole tensors, and
    rank 0 also the tensors of one file."""
    for label in seen[0]:
        kind, engine, precision, *adapted = label.split()
        stored = load_file(written / kind / WEIGHTS).values()
        sizes = [tensor.numel() * (4 if precision == "fp32" else 2) for tensor in stored]
        few = 4 * max(sizes)
        for rank, found in enumerate(one[label] for one in seen):
            if engine in ("ddp", "zero1"):
                assert found["load_peak"] >= sum(sizes), (label, rank)
            else:
                assert sum(sizes) / RANKS + few < sum(sizes), "the bound is below the whole model"
                assert found["load_peak"] <= sum(sizes) / RANKS + few, (label, rank)
            if "save_peak" in found and not (adapted and rank == 0):  # all adapters are in one file
                assert found["save_peak"] <= few + SHARD_BYTES * (rank == 0), (label, rank)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_saved_adapters(written: Path, tmp_path: Path, kind: str) -> None:
    """The adapters of a model are saved. With the original weights and the saved adapters, peft must compute the loss
    of our model with its adapters. All matrices of the blocks have adapters, and no adapter is zero."""
    spec = ask(written / kind, "devices_per_node=1", "adapter=lora", "adapter.rank=4")
    module = load(spec)
    outside = {"lm_head", "embed_tokens", "embed_positions", "shared"}
    targets = [
        name for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and name.rpartition(".")[2] not in outside
    ]  # fmt: skip
    torch.manual_seed(3)
    config = {"r": 4, "lora_alpha": spec.adapter.alpha, "target_modules": targets, "init_lora_weights": False}
    peft.inject_adapter_in_model(peft.LoraConfig(**config), module)
    save_adapters(spec, engines.list_parameters(module, only_trained=True), tmp_path / "adapter", is_main=True)
    with torch.no_grad():
        expected = float(module.eval()(**micro_batch(spec, 0)).loss)
    assert compute_loss(written / kind, spec, 0, tmp_path / "adapter") == pytest.approx(expected, rel=1e-5)
    assert abs(expected - compute_loss(written / kind, spec, 0)) > 1e-3, "the adapters change the loss"


@pytest.mark.processes
def test_training_continues_from_a_saved_model_with_another_engine(tmp_path: Path) -> None:
    """A training saves its weights, and a second training with another engine loads them. The held-out loss at the end
    of the first training must equal that at the start of the second. The records have the seconds of loading and the
    bytes written."""
    pytest.importorskip("datasets")
    training = (
        "data=text", "data.max_bytes=100000", "machine=cpu", "precision=fp32", "sequence.tokens=32", "batch.micro=4",
        "devices_per_node=2", "optimizer.lr=1e-3", "learning.tokens=2560", "learning.save_model=true",
        "measure.inspect=false",
    )  # fmt: skip
    first = Command(tmp_path / "first", (*training, "model=gpt2_tiny", "engine=ddp")).record()
    [folder] = (tmp_path / "first").rglob("model")
    partitioned = ("engine=zero3", "engine.stage3_param_persistence_threshold=0")
    again = (*training, "model=hugging_face", f"model.checkpoint={folder}", *partitioned)
    second = Command(tmp_path / "second", again).record()
    assert first.observations and second.observations
    assert second.spec.model.shape == first.spec.model.shape
    before, after = first.observations.evaluations, second.observations.evaluations
    assert before and after and before[0].loss and before[-1].loss
    assert before[-1].loss < before[0].loss - 0.1
    assert after[0].loss == pytest.approx(before[-1].loss, rel=1e-5)
    assert "weights" not in first.observations.phases_s and second.observations.phases_s["weights"] > 0
    written = first.observations.checkpoints
    assert written and [(one.kind, one.step) for one in written] == [("model", before[-1].step)]
    assert written[0].bytes == sum(path.stat().st_size for path in folder.iterdir())


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", {"model.norm.weight": torch.ones(8)},
         "tensor model.norm.weight is 8, and the model has 32; choose the model of the checkpoint"),
        ("gpt2", {"transformer.h.0.attn.c_attn.weight": torch.ones(96, 32)},
         "tensor transformer.h.0.attn.c_attn.weight is 96 × 32, and the model has 32 × 96"),
        ("t5", {"shared.weight": None}, "lacks shared.weight; "),
        ("t5_v1_1", {"decoder.final_layer_norm.weight": None}, "lacks decoder.final_layer_norm.weight; "),
        ("llama", {f"model.layers.{n}.mlp.up_proj.weight": None for n in range(5)}, "up_proj.weight and 2 more; "),
        ("llama", {"model.layers.9.mlp.up_proj.weight": torch.ones(48, 32)},
         "has tensors that the model lacks: model.layers.9.mlp.up_proj.weight; "),
        ("gpt2", {"lm_head.weight": torch.ones(VOCABULARY, 32)},
         "transformer.wte.weight and lm_head.weight differ, and the model has one parameter for both"),
        ("llama", {"model.norm.weight": torch.ones(32, dtype=torch.uint8)},
         "tensor model.norm.weight has dtype U8, and only F64, F32, F16, BF16 are loaded"),
    ],
)  # fmt: skip
def test_checkpoint_tensors_of_another_model_are_refused_in_one_line(
    written: Path, tmp_path: Path, kind: str, change: dict[str, torch.Tensor | None], message: str
) -> None:
    folder = shutil.copytree(written / kind, tmp_path / kind)
    changed = {name: tensor for name, tensor in (load_file(folder / WEIGHTS) | change).items() if tensor is not None}
    save_file(changed, folder / WEIGHTS)
    with pytest.raises(UserError) as caught:
        load(ask(folder))
    assert str(caught.value).startswith(f"model.checkpoint={folder}: ")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_or_missing_weight_files_are_refused_before_and_in_the_run(written: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(written / "gpt2", tmp_path / "gpt2")
    spec, weights, index = ask(folder), folder / WEIGHTS, folder / INDEX
    words = ["model=hugging_face", f"model.checkpoint={folder}", "model.name=own", "sequence.tokens=8", "machine=cpu"]
    whole_file = weights.read_bytes()

    def refuse(message: str) -> None:
        with pytest.raises(UserError) as before:
            plan.plan_point(words, "adhoc", None)
        with pytest.raises(UserError) as during:
            load(spec)
        assert str(before.value) == str(during.value)
        assert message in str(before.value) and "\n" not in str(before.value)

    weights.write_bytes(whole_file[:-100])
    refuse(
        f"{WEIGHTS} is damaged: its header describes {len(whole_file):,} bytes, and it has {len(whole_file) - 100:,}"
    )
    for content in (whole_file[:100], b"\xff" * 99, b"", b"version https://git-lfs.github.com/spec/v1"):
        weights.write_bytes(content)
        refuse(
            "it is a pointer of Git LFS" if content[:1] == b"v" else "do not begin with a header of safetensors; copy"
        )
    for header in (b"xxxx", b'{"a": {"shape": [1]}}', b"[]"):
        weights.write_bytes(len(header).to_bytes(8, "little") + header)
        refuse("its header cannot be read; copy or download the file again")
    weights.unlink()
    refuse(f"has no {WEIGHTS}; write one with transformers' save_pretrained")
    (folder / "part.safetensors").write_bytes(whole_file)
    places = dict.fromkeys(load_file(folder / "part.safetensors"), "part.safetensors")
    index.write_text(json.dumps({"weight_map": places | {"gone": "part.safetensors"}}))
    refuse(f"part.safetensors lacks the tensor gone, which {INDEX} lists; copy or download both files again")
    index.write_text(json.dumps({"weight_map": places | {"gone": "model-00001-of-00002.safetensors"}}))
    refuse("has no model-00001-of-00002.safetensors; copy or download it")
    index.write_text("[]")
    refuse(f"{INDEX} is not an index of safetensors")


def test_folder_of_adapters_is_refused_with_its_base_model(tmp_path: Path) -> None:
    words = ["model=hugging_face", f"model.checkpoint={tmp_path}", "model.name=own", "machine=cpu"]
    for config, message in {
        '{"base_model_name_or_path": "my/model"}': "has adapters for the base model my/model, and no model; "
        "start from model.checkpoint=my/model, or merge them into their base model with peft's",
        "{}": "has adapters, and no model; merge them into their base model with peft's",
    }.items():
        (tmp_path / "adapter_config.json").write_text(config)
        (tmp_path / "adapter_model.safetensors").touch()
        with pytest.raises(UserError, match=re.escape(f"model.checkpoint={tmp_path}: {message}")):
            plan.plan_point(words, "adhoc", None)


def test_prepare_checks_the_checkpoint(written: Path, tmp_path: Path) -> None:
    """Before a job is submitted, `zeroscale prepare` finds the weights and compares the names and shapes of their
    tensors with the model."""
    spec = ask(written / "gpt2")
    needs = staging.StagingNeeds(device="cpu", models=(spec,), elsewhere=True)
    name, size = f"weights {spec.model.checkpoint}", (written / "gpt2" / WEIGHTS).stat().st_size
    [staged] = [found for found in staging.stage(needs) if isinstance(found, Check) and found.subject == name]
    assert staged.state == "note" and staged.found.startswith(f"{size:,} bytes of weights")
    assert staged.remedy == "set model.checkpoint to a folder on a shared file system"
    [checked] = [found for found in staging.check(needs) if isinstance(found, Check) and found.subject == name]
    tensors = len(load_file(written / "gpt2" / WEIGHTS))
    assert (checked.state, checked.found) == ("ok", f"{tensors} tensors, which match the model")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model=hugging_face",), "model.config_file: missing; give the path of a config.json, or set model.check"),
        (("model=hugging_face", "model.checkpoint=/nowhere"), "model.checkpoint=/nowhere: no such folder; give a"),
        (("model=hugging_face", "model.checkpoint=a/b@c"), "model.checkpoint=a/b@c: neither a folder nor available"),
        (("model=hugging_face", "model.checkpoint={empty}"), "has no config.json; give a folder that transformers"),
        (("model=gpt2_tiny", "model.checkpoint={gpt2}"), "has width=32, and model=gpt2_tiny has 128; choose"),
        (("model=tiny", "model.checkpoint={gpt2}"), "model_type=gpt2: not of the family built here"),
    ],
)
def test_unreadable_checkpoint_is_refused_before_the_run(
    written: Path, tmp_path: Path, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    asked = [word.format(gpt2=written / "gpt2", empty=tmp_path) for word in words]
    with pytest.raises(UserError) as caught:
        compose.compose_request(compose.parse_single(asked))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_checkpoint_name_on_the_hub_is_found_in_the_cache(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network, a checkpoint that was downloaded earlier is found in huggingface_hub's cache by its name on
    the hub."""
    repository, revision = tmp_path / "models--someone--small", "ab" * 20
    shutil.copytree(written / "gpt2", repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("someone/small", f"someone/small@{revision}"):
        assert find_folder(name).name == revision
    with pytest.raises(UserError, match=r"model\.checkpoint=someone/small@other: neither a folder nor available"):
        find_folder("someone/small@other")
