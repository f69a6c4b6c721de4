import json
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")

from bench import data
from bench.core.errors import UserError
from bench.core.spec import RunSpec
from bench.data.pipeline import corpus

pytestmark = pytest.mark.usefixtures("cache")

MakeSpec = Callable[..., RunSpec]
WORDS = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {word: 3 + n for n, word in enumerate("abcdefgh")}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """List with the path of one text file. The file has 20 documents of 10, 20, …, 200 bytes, one per line."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "lines.txt").write_text("\n".join(chr(96 + n) * 10 * n for n in range(1, 21)))
    return [str(folder / "lines.txt")]


def batches(spec: RunSpec, count: int, rank: int = 0) -> list[data.MicroBatch]:
    return list(islice(data.load("text").micro_batches(spec, rank), count))


def equal(one: data.MicroBatch, other: data.MicroBatch) -> bool:
    same = all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    return same and one.tensors.keys() == other.tensors.keys() and one[1:] == other[1:]


def raw(batch: data.MicroBatch) -> list[bytes]:
    """Return the original text of each sample of a micro-batch to which span corruption was applied. Each sentinel of
    the input is replaced by the tokens that follow this sentinel in the labels. Tokens are ByT5's, one per byte."""
    texts = []
    for inputs, labels in zip(batch.tensors["input_ids"].tolist(), batch.tensors["labels"].tolist(), strict=True):
        hidden: dict[int, list[int]] = {}
        for token in labels[: labels.index(1, labels.index(259))]:
            if token >= 259:
                spot = hidden.setdefault(token, [])
            else:
                spot.append(token)
        pieces = [hidden.pop(token, [token]) for token in inputs[: len(inputs) - inputs[::-1].index(1) - 1]]
        texts.append(bytes(token - 3 for piece in pieces for token in piece if token != 1))
    return texts


def test_packed_text_has_no_encoder_padding_and_no_mask(make_spec: MakeSpec, files: list[str]) -> None:
    spec = make_spec("text", {"files": files, "sample_by": "line"})
    for batch in batches(spec, 5):
        assert batch.tensors.keys() == {"input_ids", "labels"}
        assert batch.padding["encoder"] == 0
        assert batch.padding["decoder"] == int((batch.tensors["labels"] == -100).sum()) == 2 * (32 - 14)


def test_packed_text_has_encoder_padding_when_the_decoder_limits_its_length(
    make_spec: MakeSpec, files: list[str]
) -> None:
    spec = make_spec("text", {"files": files}, sequence={"encoder": 64, "decoder": 8})
    batch = batches(spec, 1)[0]
    assert batch.padding["decoder"] == 0
    assert batch.padding["encoder"] == int((batch.tensors["attention_mask"] == 0).sum()) > 0


def test_unpacked_text_has_one_document_per_sample(make_spec: MakeSpec, files: list[str]) -> None:
    spec = make_spec("text", {"files": files, "sample_by": "line", "packing": False}, batch={"micro": 20})
    batch = batches(spec, 1)[0]
    texts = sorted(raw(batch))
    assert [len(text) for text in texts] == [min(10 * n, 70) for n in range(1, 21)]
    assert all(len(set(text)) == 1 for text in texts)
    assert batch.padding["encoder"] == int((batch.tensors["attention_mask"] == 0).sum())
    assert batch.padding["encoder"] == int((batch.tensors["input_ids"] == 0).sum())
    assert batch.padding["decoder"] == int((batch.tensors["labels"] == -100).sum())


def test_every_epoch_has_its_own_order_and_noise(make_spec: MakeSpec, files: list[str]) -> None:
    spec = make_spec("text", {"files": files, "sample_by": "line", "packing": False}, batch={"micro": 20})
    first, second = batches(spec, 2)
    assert raw(first) != raw(second) and sorted(raw(first)) == sorted(raw(second))
    longest = [max(batch.tensors["labels"].tolist()) for batch in (first, second)]
    assert longest[0] != longest[1]


def test_samples_depend_on_seed_and_index_and_not_on_ranks(make_spec: MakeSpec, files: list[str]) -> None:
    options = {"files": files}
    alone = batches(make_spec("text", options, batch={"micro": 4}), 1)[0]
    assert equal(alone, batches(make_spec("text", options, batch={"micro": 4}), 1)[0])
    assert not equal(alone, batches(make_spec("text", options, batch={"micro": 4}, seed=1), 1)[0])
    pair = [batches(make_spec("text", options, devices_per_node=2), 1, rank)[0] for rank in (0, 1)]
    assert torch.equal(torch.cat([half.tensors["labels"] for half in pair]), alone.tensors["labels"])


@pytest.mark.processes
def test_text_micro_batches_do_not_depend_on_the_number_of_workers(make_spec: MakeSpec, files: list[str]) -> None:
    options = {"files": files, "sample_by": "line", "packing": False}
    alone, shared = (batches(make_spec("text", options, workers=workers), 12) for workers in (0, 2))
    assert all(equal(one, other) for one, other in zip(alone, shared, strict=True))


def save_tokenizer(folder: Path, words: dict[str, int], **special: str) -> str:
    """Save a tokenizer with one token per whole word, and return its folder."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>"} | special
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


def test_custom_tokenizer_is_used_and_its_vocabulary_checked(make_spec: MakeSpec, tmp_path: Path) -> None:
    sentinels = [f"<extra_id_{n}>" for n in range(9, -1, -1)]  # T5's order: <extra_id_0> is the last word
    words = WORDS | {name: len(WORDS) + n for n, name in enumerate(sentinels)}
    tokenizer = save_tokenizer(tmp_path, words, eos_token="</s>")
    (tmp_path / "text.txt").write_text("a b c d e f g h " * 40)
    options = {"files": [str(tmp_path / "text.txt")], "tokenizer": tokenizer}
    spec = make_spec("text", options)
    labels = batches(spec, 1)[0].tensors["labels"]
    assert labels[:, 0].tolist() == [words["<extra_id_0>"]] * 2
    facts = data.load("text").describe(spec)
    assert facts["tokenizer"] == {"name": tokenizer, "vocabulary": len(words)}
    with pytest.raises(UserError, match=r"^model\.shape\.vocab=20: tokenizer .* has 21 tokens; "):
        batches(make_spec("text", options, vocab=20), 1)


def test_sentinels_are_appended_to_a_tokenizer_without_sentinels(make_spec: MakeSpec, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, WORDS, eos_token="</s>")
    (tmp_path / "text.txt").write_text("a b c d e f g h " * 40)
    options = {"files": [str(tmp_path / "text.txt")], "tokenizer": tokenizer}
    with pytest.raises(UserError, match=r"has no sentinels .*; set data\.sentinels=append"):
        batches(make_spec("text", options), 1)
    spec = make_spec("text", options | {"sentinels": "append"})
    assert batches(spec, 1)[0].tensors["labels"][:, 0].tolist() == [len(WORDS)] * 2
    assert data.load("text").describe(spec)["tokenizer"]["vocabulary"] == len(WORDS) + 100
    with pytest.raises(UserError, match=rf"^model\.shape\.vocab=20: tokenizer .* has {len(WORDS) + 100} tokens; "):
        batches(make_spec("text", options | {"sentinels": "append"}, vocab=20), 1)


def test_tokenizer_without_eos_is_refused_with_a_remedy(make_spec: MakeSpec, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b c d e f g h " * 40)
    options = {"files": [str(tmp_path / "text.txt")], "tokenizer": save_tokenizer(tmp_path, WORDS)}
    with pytest.raises(UserError, match=r"has no EOS; set its `eos_token="):
        batches(make_spec("text", options), 1)


def test_description_names_the_corpus(make_spec: MakeSpec, files: list[str]) -> None:
    facts = data.load("text").describe(make_spec("text", {"files": files, "sample_by": "line"}))
    text = facts["corpus"]
    assert (text["name"], text["documents"], text["bytes"], text["tokens"]) == (files[0], 20, 2100, 2120)
    assert len(text["sha256"]) == 64
    assert facts["tokenizer"] == {"name": "byt5", "vocabulary": 384}
    assert (facts["raw_tokens_per_sample"], facts["samples_per_epoch"]) == (70, 2120 // 70)


def refusal(options: dict[str, Any], spec: RunSpec) -> str:
    source = data.load("text")
    with pytest.raises(UserError) as error:
        source.check(source.Options(**options), spec)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_refusals_have_value_rule_and_remedy(make_spec: MakeSpec, files: list[str]) -> None:
    spec = make_spec("text")
    data.load("text").check(data.load("text").Options(files=files), spec)
    both = refusal({"files": files, "hub": "c4"}, spec)
    assert both == "data.hub=c4: data.files is given too; give one of them"
    assert refusal({"hub_config": "en"}, spec).startswith("data.hub_config=en: belongs to data.hub")
    assert refusal({"files": ["gone.txt"]}, spec).startswith("data.files=gone.txt: no such file")
    assert refusal({}, make_spec("text", vocab=383)).startswith("model.shape.vocab=383: tokenizer byt5 has 384")
    short = refusal({}, make_spec("text", sequence={"encoder": 2, "decoder": 9}))
    assert short.startswith("sequence.encoder=2 sequence.decoder=9: ")


def test_suggested_mean_span_length_is_accepted(make_spec: MakeSpec) -> None:
    spec = make_spec("text", sequence={"encoder": 4096, "decoder": 1024})
    message = refusal({}, spec)
    assert message.startswith("data.mean_span_length=3.0: a sample needs 227 sentinels, tokenizer byt5 has 125; ")
    data.load("text").check(data.load("text").Options(mean_span_length=6), spec)
    assert "raise it to 6 " in message


LEARNING = {"tokens": 1000, "evaluation_samples": 2}


@pytest.mark.parametrize(
    ("name", "text", "options", "learning", "message"),
    [
        ("a.txt", "short", {}, {},
         "its 6 tokens are fewer than the 70 of one sample; give more text, raise data.max_bytes, or shorten"),
        ("a.txt", f"{'a' * 400}\n\nb", {"sample_by": "paragraph"}, LEARNING | {"held_out": 0.5},
         " are fewer than the 70 of one sample; give more text, raise data.max_bytes, change learning.held_out, or"),
        ("a.txt", "", {}, {}, "holds no text; choose by data.files or data.hub"),
        ("a.txt", "long enough " * 50, {}, LEARNING,
         "has one document, and held-out text needs whole documents; set data.sample_by=line or paragraph"),
        ("a.txt", "\n\n".join(f"{number:0100}" for number in range(10)), {"sample_by": "paragraph"}, LEARNING,
         "learning.evaluation_samples=2: the held-out data make 1 sample, and an evaluation needs at least 2; raise"),
        ("a.jsonl", '{"text": "a"}\n{"text":\n', {}, {}, "a.jsonl: line 2 is not JSON (Expecting value, column 1); "),
        ("a.jsonl", '{"text": "a"}\n{"txt": "b"}', {}, {}, "data.field=text: no such column in line 2 of {path}; did"),
        ("a.jsonl", "", {}, {}, "a.jsonl: is empty; give a file with one JSON object per line"),
        ("a.txt.gz", "no gzip", {}, {}, "a.txt.gz: cannot be read (Not a gzipped file"),
    ],
)  # fmt: skip
def test_unusable_files_are_refused_before_and_in_the_run(
    make_spec: MakeSpec, tmp_path: Path, name: str, text: str, options: dict[str, Any], learning: Any, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    spec = make_spec("text", {"files": [str(path)], **options}, learning=learning)
    before = refusal(spec.data.options, spec)
    with pytest.raises(UserError) as during:
        batches(spec, 1)
        data.load_held_out("text").held_out_batches(spec, 0)
    assert before == str(during.value) and message.replace("{path}", str(path)) in before


def test_only_the_run_reads_the_rest_of_a_large_file(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "FIRST_DOCUMENTS", 5)
    source, path = data.load("text"), tmp_path / "a.jsonl"
    for good in (4, 5):
        path.write_text('{"text": "good"}\n' * good + '{"txt": "bad"}')
        spec = make_spec("text", {"files": [str(path)]})
        message = f"no such column in line {good + 1} of {path}"
        if good == 4:
            assert message in refusal(spec.data.options, spec)
        else:
            source.check(source.Options(**spec.data.options), spec)
        with pytest.raises(UserError, match=message):
            batches(spec, 1)


def test_a_json_array_is_read_like_json_lines(make_spec: MakeSpec, tmp_path: Path) -> None:
    rows = [{"text": f"the document with the number {number}"} for number in range(9)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    hashes = []
    for name in ("a.json", "a.jsonl"):
        spec = make_spec("text", {"files": [str(tmp_path / name)]})
        data.load("text").check(data.load("text").Options(**spec.data.options), spec)
        hashes.append(data.load("text").describe(spec)["corpus"]["sha256"])
    assert hashes[0] == hashes[1]


@pytest.mark.processes
def test_options_of_sources_load_without_heavy_imports() -> None:
    code = (
        "import sys; from bench import data\n"
        "for name in ('synthetic', 'text', 'mixture'): data.load(name).Options()\n"
        "print({'torch', 'transformers', 'datasets', 'pandas', 'pyarrow'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_yaml_of_each_source_has_every_option_with_its_default() -> None:
    yaml = pytest.importorskip("yaml")
    from bench.core.spec import DataSpec

    for name in ("synthetic", "text", "mixture"):
        written = yaml.safe_load((Path(__file__).parents[3] / f"conf/data/{name}.yaml").read_text())
        options = {key: value for key, value in written.items() if key not in DataSpec.model_fields}
        loading = {key: value for key, value in written.items() if key in DataSpec.model_fields}
        Options = data.load(name).Options
        assert set(options) == set(Options.model_fields)
        assert Options(**options).model_dump(exclude_defaults=True) == {}
        assert DataSpec(**loading) == DataSpec(name=name, source=name)
