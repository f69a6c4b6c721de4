"""Tests of held-out text, which is selected from a corpus, excluded from training, and used in evaluations."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

pytest.importorskip("datasets")

from bench.core.errors import UserError
from bench.core.spec import RunSpec
from bench.data import text
from bench.data.pipeline.corpus import Corpus, divide

pytestmark = pytest.mark.usefixtures("cache")

MakeSpec = Callable[..., RunSpec]


def corpus(*documents: str) -> Corpus:
    """Return a corpus of these documents. Its tokens are the documents' character codes, and a token 1 (end of
    sequence) follows each document."""
    tokens = [np.array([*map(ord, document), 1], np.int32) for document in documents]
    return Corpus("letters", len(documents), 0, "", np.concatenate(tokens), np.cumsum([len(one) for one in tokens]))


def read(part: Corpus) -> list[str]:
    return "".join(map(chr, part.tokens)).split("\x01")[:-1]


def test_held_out_text_is_the_smallest_number_of_whole_documents_with_the_share() -> None:
    documents = [letter * 9 for letter in "abcdefghij"]
    learned, held_out = map(read, divide(corpus(*documents), 0.25, seed=0))
    assert len(held_out) == 3
    assert sorted([*learned, *held_out]) == documents
    assert learned == sorted(learned), "the order of the text stays"


def test_held_out_documents_depend_on_the_seed() -> None:
    whole = corpus(*(letter * 9 for letter in "abcdefghij"))
    drawn = [read(divide(whole, 0.2, seed)[1]) for seed in range(8)]
    assert drawn[0] == read(divide(whole, 0.2, 0)[1])
    assert len({tuple(one) for one in drawn}) > 4


def test_copies_of_a_document_are_never_in_both_training_and_held_out_text() -> None:
    whole = corpus(*("abcdefghij" * 3), "k" * 30)
    for seed in range(8):
        learned, held_out = map(read, divide(whole, 0.3, seed))
        assert not set(learned) & set(held_out)


def test_held_out_text_of_a_single_document_is_refused() -> None:
    with pytest.raises(UserError, match=r"held-out text needs whole documents; set data\.sample_by"):
        divide(corpus("abc"), 0.5, 0)
    with pytest.raises(UserError, match=r": all 2 documents \(samples\) are equal; add different documents$"):
        divide(corpus("abc", "abc"), 0.5, 0)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a text file with 60 documents of 30 bytes. Each document repeats a different character."""
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("\n".join(chr(33 + number) * 30 for number in range(60)))
    return str(path)


@pytest.fixture
def make_learning(make_spec: MakeSpec, lines: str) -> MakeSpec:
    """Function that builds the RunSpec of a training of a tiny GPT on the documents of the file `lines`, with six
    samples per step and with held-out samples."""

    def make(**fields: Any) -> RunSpec:
        chosen = {"tokens": 1000, "held_out": 0.2, "evaluation_samples": 12} | fields.pop("learning", {})
        shape = {"width": 4, "layers": 1, "heads": 1, "inner": 4, "vocab": 384, "positions": 16}
        plain = {
            "model": {"name": "tiny", "family": "gpt", "shape": shape},
            "objective": "causal_lm",
            "sequence": {"tokens": 16},
            "batch": {"micro": 6},
            "learning": chosen,
        }
        return make_spec("text", {"files": [lines], "sample_by": "line"}, **plain | fields)

    return make


def characters(batches: Any) -> set[int]:
    return {int(token) for batch in batches for token in batch.tensors["input_ids"].unique()} - {1}


def test_training_micro_batches_have_no_held_out_text(make_learning: MakeSpec) -> None:
    spec = make_learning()
    learned = characters(islice(text.micro_batches(spec, 0), 40))  # more than an epoch of 48 documents
    evaluated = characters(text.held_out_batches(spec, 0))
    assert len(learned) == 48
    assert evaluated
    assert not learned & evaluated
    assert text.describe(spec)["held_out"] == {"documents": 12, "tokens": 372, "samples": 23}


def test_held_out_samples_do_not_depend_on_seed_ranks_or_micro_batch_size(make_learning: MakeSpec) -> None:
    def list_rows(spec: RunSpec) -> list[list[int]]:
        ranks = range(spec.data_parallel)
        batches = [batch for rank in ranks for batch in text.held_out_batches(spec, rank)]
        return sorted(row for batch in batches for row in batch.tensors["input_ids"].tolist())

    one = list_rows(make_learning())
    assert len(one) == 12
    assert one == list_rows(make_learning(seed=7)) == list_rows(make_learning(devices_per_node=2))
    assert one == list_rows(make_learning(batch={"micro": 3}, devices_per_node=4))
    assert one != list_rows(make_learning(learning={"held_out_seed": 1}))


def test_resumed_training_has_the_samples_of_uninterrupted_training(make_learning: MakeSpec) -> None:
    spec = make_learning(devices_per_node=2)
    whole, rest = text.micro_batches(spec, 1), text.micro_batches(spec, 1, first=7)
    for one, other in zip(islice(whole, 7, 12), islice(rest, 5), strict=True):
        assert one.tensors["input_ids"].equal(other.tensors["input_ids"])


def test_more_evaluation_samples_than_held_out_samples_are_refused(make_learning: MakeSpec) -> None:
    with pytest.raises(
        UserError, match=r"learning\.evaluation_samples=24: the held-out data make 23 samples; set .*=18, raise"
    ):
        text.held_out_batches(make_learning(learning={"evaluation_samples": 24}), 0)


def test_run_without_learning_uses_all_documents(make_spec: MakeSpec, make_learning: MakeSpec) -> None:
    spec = make_learning().model_dump(by_alias=True)
    whole = RunSpec.model_validate({name: value for name, value in spec.items() if name != "learning"})
    assert len(characters(islice(text.micro_batches(whole, 0), 40))) == 60
    assert "held_out" not in text.describe(whole)
