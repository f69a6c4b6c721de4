"""Tests of the data source `instructions` (prompts with answers, or chats): labels, packing, and order of samples."""

import gzip
import json
from collections.abc import Callable
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("datasets")

import torch

from bench import models
from bench.core.errors import UserError
from bench.core.spec import RunSpec
from bench.data import MicroBatch, instructions
from bench.data.instructions import Options, pack

pytestmark = pytest.mark.usefixtures("cache")

GPT = {"width": 16, "layers": 2, "heads": 4, "inner": 32, "vocab": 384, "positions": 64}
LLAMA = GPT | {
    "norm": "rms", "activation": "silu", "gated": True, "biases": False, "fused": False, "key_heads": 2,
    "separate_head": True, "scaled_residuals": False, "rotary_base": 10000.0,
}  # fmt: skip
PAIRS = [{"prompt": f"{number} + 1?", "answer": str(number + 1)} for number in range(10, 50)]
CHAT = [
    {"role": "system", "content": "Count."},
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "é"},
    {"role": "assistant", "content": "3 4"},
    {"role": "user", "content": "unanswered"},
]
EOS, IGNORED = 1, -100
MakeSpec = Callable[..., RunSpec]


@pytest.fixture
def make(make_spec: MakeSpec, tmp_path: Path) -> MakeSpec:
    """Function that writes its argument `lines` (JSON objects) to a data file, and returns the RunSpec of a run on this
    file. With the objective seq2seq, the model is a tiny T5. With any other objective, it is a tiny GPT."""

    def build(lines: Any = PAIRS, objective: str = "causal_lm", **fields: Any) -> RunSpec:
        path = tmp_path / "lines.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        lengths: dict[str, Any] = {"objective": objective, "sequence": {"encoder": 24, "decoder": 8}}
        if objective != "seq2seq":
            shape = fields.pop("shape", GPT)
            lengths |= {
                "model": {"name": "tiny", "family": "gpt", "shape": shape},
                "sequence": {"tokens": fields.pop("tokens", 64)},
            }
        options = {"files": [str(path)], **fields.pop("options", {})}
        return make_spec("instructions", options, **{"precision": "fp32", **lengths, **fields})

    return build


def byt5(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


def read(row: Any) -> str:
    """Return the text of a row of tokens, with ⊣ for EOS and · for padding or a label without a loss."""
    marks = {EOS: b"\xe2\x8a\xa3", 0: b"\xc2\xb7", IGNORED: b"\xc2\xb7"}
    return b"".join(marks[token] if token in marks else bytes([token - 3]) for token in row.tolist()).decode()


def take(spec: RunSpec, count: int, first: int = 0) -> list[MicroBatch]:
    return list(islice(instructions.micro_batches(spec, 0, first), count))


# ---------------------------------------- labels


def test_seq2seq_sample_has_the_prompt_as_input_and_the_answer_as_labels(make: MakeSpec) -> None:
    spec = make([{"prompt": "red?", "answer": "no"}], "seq2seq", batch={"micro": 1})
    [(tensors, padding)] = take(spec, 1)
    assert tensors["input_ids"].tolist() == [[*byt5("red?"), EOS, *[0] * 19]]
    assert tensors["attention_mask"].sum() == 5
    assert tensors["labels"].tolist() == [[*byt5("no"), EOS, *[IGNORED] * 5]]
    assert padding == {"encoder": 19, "decoder": 5}


def test_causal_sample_has_prompt_and_answer_as_input_and_the_answer_as_labels(make: MakeSpec) -> None:
    [(tensors, padding)] = take(
        make([{"q": "red?", "a": "no"}], tokens=12, batch={"micro": 1}, options={"prompt": "q", "answer": "a"}), 1
    )
    assert read(tensors["input_ids"][0]) == "red?\nno⊣····"
    assert read(tensors["labels"][0]) == "·····no⊣····"
    assert tensors.keys() == {"input_ids", "labels"}
    assert padding == {"tokens": 4}


def test_chat_in_the_plain_template_has_labels_for_every_answer(make: MakeSpec) -> None:
    options = {"messages": "turns"}
    [(tensors, _)] = take(
        make([{"turns": CHAT}], tokens=80, shape=GPT | {"positions": 80}, batch={"micro": 1}, options=options), 1
    )
    text = "system: Count.\nuser: 1\nassistant: 2⊣\nuser: é\nassistant: 3 4⊣"
    assert read(tensors["input_ids"][0]).rstrip("·") == text
    hidden = "·" * len("system: Count.\nuser: 1\nassistant: "), "·" * len("\nuser: xx\nassistant: ")  # é: two bytes
    assert read(tensors["labels"][0]).rstrip("·") == f"{hidden[0]}2⊣{hidden[1]}3 4⊣"


def test_seq2seq_chat_has_the_last_answer_as_labels_and_earlier_turns_as_input(make: MakeSpec) -> None:
    spec = make(
        [{"messages": CHAT}],
        "seq2seq",
        sequence={"encoder": 64, "decoder": 8},
        batch={"micro": 1},
        options={"messages": "messages"},
    )
    [(tensors, _)] = take(spec, 1)
    assert read(tensors["input_ids"][0]).rstrip("·") == "system: Count.\nuser: 1\nassistant: 2\nuser: é\nassistant: ⊣"
    assert read(tensors["labels"][0]).rstrip("·") == "3 4⊣"


TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'system' %}{{ raise_exception('no system\nplease') }}{% endif %}"
    "<{{ turn.role }}>{{ turn.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Function that saves a tokenizer of single characters with a given chat template. It returns the folder."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    def save(template: str) -> str:
        names = ["<pad>", "</s>", "<unk>", "<user>", "<assistant>", "<system>", *map(chr, range(32, 127)), "\n"]
        whole = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
        whole.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        whole.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=whole, eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
            additional_special_tokens=["<user>", "<assistant>", "<system>"],
        )  # fmt: skip
        tokenizer.chat_template = template
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save_pretrained(folder)
        return str(folder)

    return save


def test_chat_is_formatted_with_the_tokenizers_chat_template(make: MakeSpec, templated: Callable[[str], str]) -> None:
    folder = templated(TEMPLATE)
    options = {"messages": "messages", "tokenizer": folder}
    turns = [turn for turn in CHAT[1:] if turn["content"] != "é"]
    learning = {"tokens": 4096, "held_out": 0.5, "evaluation_samples": 2, "quality": ["exact_match"]}
    spec = make(
        [{"messages": [*turns[:2], *turns[:number]]} for number in range(6)], options=options, learning=learning
    )
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    for tensors, _ in take(spec, 4):
        for ids, labels in zip(tensors["input_ids"], tensors["labels"], strict=True):
            text = theirs.decode(ids[ids != 0]).replace(" ", "")
            assert text.startswith("<user>1</s><assistant>2</s>")
            assert theirs.decode(labels[labels != IGNORED]).replace(" ", "") in (
                "2</s>",
                "2</s>2</s>",
                "2</s>2</s>34</s>",
            )
    prompts = instructions.held_out_prompts(spec, 0)
    assert {text for batch in prompts.batches for text in batch.references} <= {"2", "3 4"}


def test_unusable_chat_template_is_refused_in_one_line(make: MakeSpec, templated: Callable[[str], str]) -> None:
    def message(template: str) -> str:
        options = {"messages": "messages", "tokenizer": templated(template)}
        with pytest.raises(UserError) as caught:
            take(make([{"messages": CHAT}], options=options), 1)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "line 1 does not fit the tokenizer's chat template (no system" in message(TEMPLATE)
    last_only = "{{ messages[-1].content }}{% if add_generation_prompt %}<assistant>{% endif %}"
    assert "changes earlier turns" in message(last_only)


# ---------------------------------------- files


def test_samples_of_compressed_files_equal_those_of_one_plain_file(make: MakeSpec, tmp_path: Path) -> None:
    lines = [json.dumps(line) + "\n" for line in PAIRS]
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("".join(lines[:20]).encode()))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[20:]).encode()))  # with blank lines
    one, other = (take(make(options=options), 20) for options in ({}, {"files": [str(folder / "*.gz")]}))
    for here, there in zip(one, other, strict=True):
        assert torch.equal(here.tensors["input_ids"], there.tensors["input_ids"])


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "anwser": "b"}', {},
         "bad.jsonl: line 2 has no field answer; did you mean anwser?"),
        ('{"messages": []}', {}, "bad.jsonl: line 1 has no field prompt; set data.messages=messages for chats"),
        ('{"prompt": "a", "answer": "b"}', {"prompt": "question"},
         "bad.jsonl: line 1 has no field question; add it (existing fields: answer, prompt)"),
        ('{"prompt": "a", "answer": 3}', {}, "bad.jsonl: line 1 has a field answer of type int; give text"),
        ('{"prompt": "a",\n', {}, "bad.jsonl: line 1 is not JSON (Expecting property name"),
        ('["a", "b"]', {}, "bad.jsonl: line 1 is not a JSON object; write {"),
        ("\n \n", {}, "is empty; give a file with one JSON object per line"),
        ('{"prompt": "", "answer": "b"}', {"separator": ""}, "bad.jsonl: line 1 has an empty prompt; "),
        ('{"messages": [{"role": "user", "content": "a"}]}', {"messages": "messages"},
         "bad.jsonl: line 1 has no turn of the assistant; add an answer with role assistant, or remove the line"),
        ('{"messages": "a"}', {"messages": "messages"}, "line 1 has a field messages that is not a list of turns; "),
        ('{"messages": [{"role": "user"}]}', {"messages": "messages"}, "line 1 has a turn of the chat without content"),
        ('{"chat": []}', {"messages": "messages"}, "line 1 has no field messages; add it (existing fields: chat)"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": "0123456789"}', {},
         "sequence.tokens=10: the sample on line 2 of bad.jsonl has 13 tokens, its answer 11; "
         "raise it to 13, or set data.too_long=skip"),
        ('{"prompt": "a", "answer": "0123456789"}', {"too_long": "skip"}, "sequence.tokens=10: every sample is longer"),
        ('{"prompt": "a", "answer": "b"}', {}, "has one document"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": "b"}', {},
         "bad.jsonl: all 2 documents (samples) are equal; "),
    ],
)  # fmt: skip
def test_invalid_lines_are_refused_in_one_line_before_and_in_the_run(
    make: MakeSpec, tmp_path: Path, text: str, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    learning = {"tokens": 512, "evaluation_samples": 2}
    spec = make(tokens=10, options={"files": [str(path)], **options}, learning=learning)
    messages = set()
    for use in (lambda: instructions.check(Options(**spec.data.options), spec), lambda: take(spec, 1)):
        with pytest.raises(UserError) as caught:
            use()
        messages.add(str(caught.value))
    [found] = messages
    assert message.replace("bad.jsonl", str(path)) in found and "\n" not in found


def test_damaged_compressed_file_is_refused_in_one_line(make: MakeSpec, tmp_path: Path) -> None:
    contents = {"plain.jsonl.gz": b"{}", "cut.jsonl.gz": gzip.compress(b"{}" * 999)[:-9], "x.xz": b"{}"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}: cannot be read \(.+\); repair or replace it$"):
            take(make(options={"files": [str(tmp_path / name)]}), 1)


def test_prompt_or_answer_longer_than_its_sequence_is_refused_or_skipped(make: MakeSpec) -> None:
    lines = [*PAIRS[:9], {"prompt": "a", "answer": "123456789"}, {"prompt": "p" * 30, "answer": "a"}]
    with pytest.raises(
        UserError, match=r"^sequence\.encoder=24: the prompt on line 11 of .*/lines\.jsonl has 31 tokens; "
    ):
        take(make(lines, "seq2seq"), 1)
    with pytest.raises(
        UserError, match=r"^sequence\.decoder=8: the answer on line 10 of .*lines\.jsonl has 10 tokens; "
    ):
        take(make(lines[:10], "seq2seq"), 1)
    spec = make(lines, "seq2seq", options={"too_long": "skip"})
    facts = instructions.describe(spec)
    assert (facts["samples"], facts["too_long"], facts["corpus"]["samples"]) == (9, 2, 9)
    seen = {read(row).partition("⊣")[0] for tensors, _ in take(spec, 9) for row in tensors["input_ids"]}
    assert seen == {pair["prompt"] for pair in PAIRS[:9]}


@pytest.mark.parametrize(
    ("objective", "options", "message"),
    [
        ("causal_lm", {"packing": True}, r"data\.packing=true: with objective=causal_lm, attention would cross"),
        ("seq2seq", {"packing": True}, r"data\.packing=true: with objective=seq2seq, attention would cross"),
        ("span_corruption", {}, "has no samples for objective=span_corruption; choose objective=seq2seq"),
        ("causal_lm", {"files": ["nowhere.jsonl"]}, r"data\.files=nowhere\.jsonl: no such file"),
        ("causal_lm", {"files": [], "messages": "messages"}, r"data\.messages=messages: names a field of files"),
    ],
)
def test_incompatible_options_are_refused(
    make: MakeSpec, objective: str, options: dict[str, Any], message: str
) -> None:
    spec = make(objective=objective if objective != "span_corruption" else "seq2seq", options=options)
    spec = spec.model_copy(update={"objective": objective})
    with pytest.raises(UserError, match=message):
        instructions.check(Options(**spec.data.options), spec)
    small = make(shape=GPT | {"vocab": 100})
    with pytest.raises(UserError, match=r"model\.shape\.vocab=100: tokenizer byt5 has 384 tokens"):
        instructions.check(Options(**small.data.options), small)


# ---------------------------------------- order


@pytest.mark.parametrize("packing", [False, True])
def test_epochs_have_every_sample_once_in_different_orders_and_resume_at_any_step(
    make: MakeSpec, packing: bool
) -> None:
    objective = "causal_lm_documents" if packing else "causal_lm"
    spec = make(objective=objective, options={"packing": packing}, batch={"micro": 1})
    each = instructions.describe(spec)["sequences"]
    assert (each < 15) if packing else (each == 40)
    batches = take(spec, 2 * each)
    texts = [read(tensors["input_ids"][0]).rstrip("·").split("⊣")[:-1] for tensors, _ in batches]
    wanted = sorted(f"{pair['prompt']}\n{pair['answer']}" for pair in PAIRS)
    first, second = texts[:each], texts[each:]
    assert sorted(chain(*first)) == sorted(chain(*second)) == wanted
    assert first != second
    assert [
        read(one.tensors["input_ids"][0]).rstrip("·").split("⊣")[:-1] for one in take(spec, 5, first=each - 2)
    ] == texts[each - 2 : each + 3]


def test_bytes_are_refused_for_a_checkpoint_with_a_tokenizer(make: MakeSpec, tmp_path: Path) -> None:
    model = {"name": "mine", "family": "gpt", "shape": GPT, "checkpoint": str(tmp_path)}
    spec = make(model=model, learning={"tokens": 1000, "evaluation_samples": 2})
    options = Options(files=tuple(spec.data.options["files"]))
    instructions.check(options, spec)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"data.tokenizer=byt5: the checkpoint \S+ has a tokenizer of its own; set data"
    ):
        instructions.check(options, spec)
    instructions.check(options, make(model=model))  # a measurement of steps does not need sensible tokens
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    instructions.check(options, spec)


def test_held_out_samples_are_excluded_from_training_and_independent_of_the_seed(make: MakeSpec) -> None:
    learning = {"tokens": 4096, "held_out": 0.2, "evaluation_samples": 8, "quality": ["exact_match"]}
    specs = [make([*PAIRS, *PAIRS], seed=seed, learning=learning, devices_per_node=2) for seed in (0, 1)]
    assert instructions.describe(specs[0])["held_out"] == {"samples": 16, "sequences": 16}, "8 of 40, each twice"
    held = [
        [
            read(row)
            for rank in range(2)
            for tensors, _ in instructions.held_out_batches(spec, rank)
            for row in tensors["input_ids"]
        ]
        for spec in specs
    ]
    assert held[0] == held[1]
    alone = specs[0].model_copy(update={"devices_per_node": 1})
    trained = {read(row) for tensors, _ in take(alone, 32) for row in tensors["input_ids"]}
    assert len(trained) == 32
    assert not trained & set(held[0])

    prompts = [instructions.held_out_prompts(specs[0], rank) for rank in range(2)]
    assert {one.limit for one in prompts} == {3}, "two digits and EOS"
    asked = {}
    for one in prompts:
        for batch in one.batches:
            for number, row, end, reference in zip(
                batch.numbers, batch.tensors["input_ids"], batch.ends, batch.references, strict=True
            ):
                asked[number] = read(row[:end]), reference
                assert not row[end:].any() and len(row) == len("49 + 1?\n") + 3
    assert sorted(asked) == list(range(8)), "each sample on one rank"
    assert {f"{prompt}{answer}⊣".ljust(64, "·") for prompt, answer in asked.values()} <= set(held[0])
    with pytest.raises(UserError, match=r"learning\.evaluation_samples=20: the held-out data make 16 sequences"):
        instructions.held_out_batches(make([*PAIRS, *PAIRS], learning=learning | {"evaluation_samples": 20}), 0)


def test_seq2seq_prompts_have_the_encoder_length_and_answers_the_decoder_length(make: MakeSpec) -> None:
    learning = {
        "tokens": 4096,
        "held_out": 0.2,
        "evaluation_samples": 4,
        "quality": ["exact_match"],
        "answer_tokens": 99,
    }
    prompts = instructions.held_out_prompts(make(objective="seq2seq", learning=learning), 0)
    assert prompts.limit == 8
    tensors = prompts.batches[0].tensors
    assert tensors["input_ids"].shape == (2, 24)
    assert tensors["attention_mask"].sum(1).tolist() == prompts.batches[0].ends.tolist()
    assert read(tensors["input_ids"][0]).endswith("?⊣" + "·" * (24 - int(prompts.batches[0].ends[0])))


@pytest.mark.processes
def test_micro_batches_do_not_depend_on_the_number_of_workers(make: MakeSpec) -> None:
    options = {"packing": True}
    alone, shared = (
        instructions.micro_batches(make(objective="causal_lm_documents", options=options, workers=workers), 0)
        for workers in (0, 2)
    )
    for one, other in zip(islice(alone, 7), shared, strict=False):
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


# ---------------------------------------- packing


def test_packing_puts_whole_samples_into_few_sequences() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 200).tolist()
    packs = pack(lengths, 40)
    assert sorted(chain(*packs)) == list(range(200))
    assert max(sum(lengths[sample] for sample in samples) for samples in packs) <= 40
    # best-fit decreasing needs at most 11/9 of the optimal number of sequences; this is a lower bound of the optimum
    assert len(packs) <= 11 / 9 * -(-sum(lengths) // 40) + 1
    assert pack([10, 30, 5, 35, 40], 40) == [[4], [3, 2], [1, 0]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_packed_batch_has_the_loss_and_gradients_of_its_separate_samples(
    make: MakeSpec, shape: dict[str, Any], attention: str
) -> None:
    """The samples are chats with EOS inside. So EOS cannot mark the boundary between two packed samples."""
    lines = [{"messages": CHAT[1 : 3 + number % 3]} for number in range(1, 8)]
    spec = make(
        lines, "causal_lm_documents", batch={"micro": 2}, options={"messages": "messages", "packing": True},
        model={"name": "tiny", "family": "gpt", "shape": shape, "attention": attention},
    )  # fmt: skip
    builder = models.load_builder("gpt")
    module: Any = builder.build(spec)
    builder.initialise(module, spec)
    each = instructions.describe(spec)["sequences"]
    [(tensors, _)] = take(spec, 1)
    places = tensors["position_ids"]
    samples = []
    for ids, labels, of_row in zip(tensors["input_ids"], tensors["labels"], places, strict=True):
        begins = [*(of_row == 0).nonzero()[:, 0].tolist(), len(ids)]
        for begin, end in pairwise(begins):
            if end - begin > 1:  # padding has one token
                samples.append((ids[None, begin:end], labels[None, begin:end]))
    assert each == 4 and len(samples) > 2, "two sequences have more samples than two"

    def gradients() -> list[Any]:
        return [parameter.grad.clone() for parameter in module.parameters()]

    loss = module(**tensors).loss
    loss.backward()
    packed = gradients()
    module.zero_grad()
    counts = [int((labels[:, 1:] != IGNORED).sum()) for _, labels in samples]
    total = 0.0
    for (ids, labels), count in zip(samples, counts, strict=True):
        share = module(ids, labels).loss * count / sum(counts)
        share.backward()
        total += float(share.detach())
    assert float(loss.detach()) == pytest.approx(total, rel=1e-6)
    for one, other in zip(packed, gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    module.zero_grad()
    crossing = module(tensors["input_ids"], tensors["labels"]).loss
    assert abs(float(crossing.detach()) - total) > 1e-4, "without positions, attention crosses samples"
