"""Tests of the quality of generated answers. The quality measures are compared with hand calculations. Greedy
generation is compared with that of transformers."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import models
from bench.config import compose
from bench.core import quality
from bench.core.errors import UserError
from bench.core.spec import RunSpec
from bench.data import PromptBatch, Prompts
from bench.engines.distributed.ranks import predict_tokens
from bench.measure import training
from bench.measure.peers import Peers

# ---------------------------------------- measures


@pytest.mark.parametrize(
    ("prediction", "reference", "f1"),
    [
        ("the cat sat", "The cat sat.", 1.0),  # case, punctuation and articles do not count
        ("a cat on the mat", "cat", 2 * (1 / 3) * 1 / (1 / 3 + 1)),  # words: "cat on mat"; precision 1/3, recall 1
        ("x x x y", "x x z", 4 / 7),  # two of four words are right, two of three are found: 2 × ½ × ⅔ / (½ + ⅔)
        ("blue", "red", 0.0),
        ("", "red", 0.0),
        ("the", "", 1.0),  # both are empty without the article
        ("well-known", "wellknown", 1.0),  # SQuAD removes punctuation without adding a space
    ],
)
def test_token_f1_equals_that_of_squad(prediction: str, reference: str, f1: float) -> None:
    assert quality.compute("token_f1", [prediction], [reference]) == pytest.approx(f1)
    assert quality.compute("token_f1", [prediction, "no"], [reference, "yes"]) == pytest.approx(f1 / 2)


def test_exact_match_counts_equal_answers() -> None:
    assert quality.compute("exact_match", ["a", " b\n", "C", "d."], ["a", "b", "c", "d"]) == 0.5


def test_function_of_a_module_is_a_measure_or_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_quality.py").write_text(
        "def longer(predictions, references):\n"
        "    return sum(len(one) > len(other) for one, other in zip(predictions, references))\n"
        "def broken(predictions, references):\n    raise ValueError('no\\nway')\n"
        "def words(predictions, references):\n    return 'many'\n"
        "NUMBER = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert quality.compute("mine_quality:longer", ["aa", "b", "cc"], ["a", "b", ""]) == 2.0

    def message(name: str) -> str:
        with pytest.raises(UserError) as caught:
            quality.compute(name, ["a"], ["b"])
        return str(caught.value)

    assert message("mine_quality:broken") == (
        "learning.quality=mine_quality:broken: the function failed (ValueError: no); correct the function"
    )
    assert "returned 'many', not a finite number" in message("mine_quality:words")
    assert "is not a function" in message("mine_quality:NUMBER")
    assert "has no attribute 'shorter'" in message("mine_quality:shorter")
    assert message("nowhere_quality:f").startswith(
        "learning.quality=nowhere_quality:f: cannot be imported (ModuleNotFoundError"
    )
    assert message("exact_macth") == (
        "learning.quality=exact_macth: no such measure; did you mean exact_match? "
        "Otherwise name a function as module:function"
    )


PIPELINE = "engine=pipeline", "parallel.pipeline=2", "devices_per_node=2", "batch.accumulation=8"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data=text", "learning.tokens=9999"), "data=text has no prompts with answers; choose data=instructions"),
        (("data=instructions",), r"learning\.quality=.* needs learning\.tokens"),
        (
            ("data=instructions", "learning.tokens=9999", *PIPELINE),
            "engine pipeline has no .*predict_tokens",
        ),
        (("data=instructions", "learning.tokens=9999", "learning.quality=[f1]"), "no such measure; choose from"),
        (
            ("data=instructions", "learning.tokens=9999", "learning.quality=[]", "learning.answer_tokens=4"),
            "answer_tokens=4 needs learning.quality; set learning.quality",
        ),
    ],
)
def test_training_with_unmeasurable_quality_is_refused(overrides: tuple[str, ...], message: str) -> None:
    words = ["model=gpt2_tiny", "machine=cpu", "devices_per_node=1", "engine=ddp", "learning.quality=[exact_match]"]
    given = {word.partition("=")[0]: word for word in (*words, *overrides)}
    with pytest.raises(UserError, match=message) as caught:
        compose.check(compose.compose_request(compose.parse_single(list(given.values()))), "cpu")
    assert "\n" not in str(caught.value)


# ---------------------------------------- generation

T5 = {
    "d_model": 16, "d_kv": 4, "d_ff": 32, "encoder_layers": 2, "decoder_layers": 2, "heads": 4, "vocab": 96,
    "gated": True, "activation": "gelu_new", "separate_head": True,
}  # fmt: skip
GPT = {"width": 16, "layers": 2, "heads": 4, "inner": 32, "vocab": 96, "positions": 32}
LLAMA = GPT | {
    "norm": "rms", "activation": "silu", "gated": True, "biases": False, "fused": False, "key_heads": 2,
    "separate_head": True, "scaled_residuals": False, "rotary_base": 10000.0,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
BART = {
    "model_type": "bart", "vocab_size": 96, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "max_position_embeddings": 32, "pad_token_id": 0, "is_encoder_decoder": True, "decoder_start_token_id": 2,
    "bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
LIMIT = 6


def build(family: str, shape: dict[str, Any], **model: Any) -> Any:
    lengths = {"tokens": 32} if "decoder" not in (kinds := kinds_of(family, shape)) else {"encoder": 12, "decoder": 8}
    spec = RunSpec.model_validate(
        {
            "model": {"name": "tiny", "family": family, "shape": shape, **model},
            "engine": {"name": "ddp", "backend": "ddp"},
            "data": {"name": "instructions", "source": "instructions"},
            "batch": {"micro": 2},
            "objective": "seq2seq" if "decoder" in kinds else "causal_lm",
            "sequence": lengths,
            "precision": "fp32",
        }
    )
    builder = models.load_builder(family)
    module = builder.build(spec)
    builder.initialise(module, spec)
    return module


def kinds_of(family: str, shape: dict[str, Any]) -> tuple[str, ...]:
    plugin = models.load(family)
    return plugin.token_kinds(plugin.Shape.model_validate(shape))


def engine_of(module: Any) -> Any:
    return SimpleNamespace(predict_tokens=partial(predict_tokens, module))


@pytest.mark.parametrize(
    ("family", "shape", "model"),
    [
        ("t5", T5, {"dropout": 0.3}),
        ("t5", T5, {"loss_chunk_tokens": 5}),
        ("t5", T5 | {"bias_per_layer": True}, {}),
        ("t5", T5 | {"separate_head": False}, {"loss_chunk_tokens": 5}),
        ("hugging_face", BART, {}),
    ],
)
def test_predicted_tokens_of_a_t5_equal_those_of_transformers_generate(
    family: str, shape: dict[str, Any], model: dict[str, Any]
) -> None:
    module = build(family, shape, **model)
    inputs = torch.randint(3, 96, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(inputs)
    inputs[0, 7:] = mask[0, 7:] = 0
    tensors = {"input_ids": inputs, "attention_mask": mask}
    found = training.generate_answers(engine_of(module), tensors, None, LIMIT)
    assert module.training
    plain = module
    if "loss_chunk_tokens" in model:  # transformers' own class with the same weights
        plain = build(family, shape)
        plain.load_state_dict(module.state_dict())
    plain.eval()
    plain.generation_config.eos_token_id = plain.generation_config.forced_eos_token_id = None
    theirs = plain.generate(**tensors, max_new_tokens=LIMIT, do_sample=False, num_beams=1, use_cache=False)
    assert found.tolist() == theirs[:, 1:].tolist()


@pytest.mark.parametrize(
    ("family", "shape", "model"),
    [("gpt", GPT, {}), ("gpt", LLAMA, {"loss_chunk_tokens": 5}), ("hugging_face", GPT2, {"dropout": 0.3})],
)
def test_decoder_continues_each_prompt_of_a_batch_as_if_alone(
    family: str, shape: dict[str, Any], model: dict[str, Any]
) -> None:
    module = build(family, shape, **model)
    ends = torch.tensor([9, 4, 1])
    rows = torch.randint(3, 96, (3, 9 + LIMIT), generator=torch.Generator().manual_seed(1))
    found = training.generate_answers(engine_of(module), {"input_ids": rows.clone()}, ends, LIMIT)
    module.eval()
    for row, end, answer in zip(rows, ends.tolist(), found.tolist(), strict=True):
        prompt = row[None, :end]
        if family == "hugging_face":
            module.generation_config.eos_token_id = None
            theirs = module.generate(prompt, max_new_tokens=LIMIT, do_sample=False, use_cache=False, pad_token_id=0)
        else:
            theirs = prompt
            for _ in range(LIMIT):
                following = module.lm_head(module.model(theirs))[:, -1:].argmax(-1)
                theirs = torch.cat([theirs, following], dim=1)
        assert answer == theirs[0, end:].tolist()


class Counting:
    """Engine whose model always predicts the next larger token id."""

    def predict_tokens(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors["input_ids"] + 1


def test_answers_end_at_eos_or_the_sequence_end_and_are_counted_once() -> None:
    rows = torch.tensor([[5, 6, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0]])
    batch = PromptBatch({"input_ids": rows}, torch.tensor([2, 5]), [1, 0], ["7 8", "6"])
    prompts = Prompts([batch], limit=4, eos=9, decode=lambda ids: " ".join(map(str, ids)))
    asked = list[int]()
    own = training.answer_prompts(Counting(), prompts, dict, lambda: asked.append(1))  # type: ignore[arg-type]
    # the first prompt continues with 7 8 9 10, and 9 is EOS; the second has room for one token
    assert [(one.number, one.prediction) for one in own] == [(1, "7 8"), (0, "6 0 0 0")]
    assert len(asked) == 1
    twice = SimpleNamespace(gather=lambda value: [value, value[:1]])
    names = ("exact_match", "token_f1")
    assert training.measure_quality(names, own, twice) == {"exact_match": 0.5, "token_f1": 0.7}  # type: ignore[arg-type]
    assert training.measure_quality(names, own, Peers()) == {"exact_match": 0.5, "token_f1": 0.7}
    others = SimpleNamespace(gather=lambda value: [])
    assert training.measure_quality(names, own, others) is None  # type: ignore[arg-type]
