"""Tests of mixtures of texts. The share of each text is compared with a hand calculation. The order of samples is
compared with a theoretical bound. Each text repeats one letter, so that a sample shows the text that it comes from."""

from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("datasets")

from bench import data
from bench.core.errors import UserError
from bench.core.spec import RunSpec
from bench.data.mixture import Interleaving, compute_shares, order_evenly, round_shares

pytestmark = pytest.mark.usefixtures("cache")

MakeSpec = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of three texts, by name. The texts repeat the letters a, b and c. The text of a has 100 samples of 70
    bytes, that of b has 40, and that of c has 10."""
    folder = tmp_path_factory.mktemp("texts")
    for letter, samples in (("a", 100), ("b", 40), ("c", 10)):
        (folder / f"{letter}.txt").write_text(letter * 70 * samples)
    return {letter: {"files": [str(folder / f"{letter}.txt")]} for letter in "abc"}


def weighted(texts: dict[str, Any], **weights: float) -> dict[str, Any]:
    return {"sources": {name: texts[name] | {"weight": weight} for name, weight in weights.items()}}


def count_letters(spec: RunSpec, samples: int, rank: int = 0) -> Counter[str]:
    batches = islice(data.load("mixture").micro_batches(spec, rank), samples // spec.batch.micro)
    firsts = [int(token) for batch in batches for token in batch.tensors["input_ids"][:, 0]]
    return Counter(chr(token - 3) for token in firsts)


def test_shares_are_proportional_to_weights_and_more_equal_at_higher_temperature() -> None:
    assert compute_shares([1, 4], 1) == pytest.approx([0.2, 0.8])
    assert compute_shares([1, 4], 2) == pytest.approx([1 / 3, 2 / 3])  # shares in the ratio of the square roots, 1 to 2
    assert compute_shares([1, 1e300], 0.1) == pytest.approx([0, 1])  # the 10th powers of these weights overflow


def test_rounded_shares_are_at_least_one_for_every_text() -> None:
    assert round_shares(np.array([0.5, 0.25, 0.25]), 8).tolist() == [4, 2, 2]
    assert round_shares(np.array([0.47, 0.31, 0.22]), 10).tolist() == [5, 3, 2]  # largest remainder
    assert round_shares(np.array([0.999, 0.0005, 0.0005]), 100).tolist() == [98, 1, 1]
    assert round_shares(np.array([0.0] * 999 + [1.0])).tolist() == [1] * 1000


def test_every_beginning_of_the_order_has_each_text_by_its_share() -> None:
    random = np.random.default_rng(0)
    for streams in (1, 2, 3, 7, 40):
        counts = round_shares(random.dirichlet(np.full(streams, 0.5)))
        order = order_evenly(counts)
        given = np.cumsum(order[:, None] == np.arange(streams), axis=0)
        ideal = np.arange(1, 1001)[:, None] * counts / 1000
        assert given[-1].tolist() == counts.tolist()
        bound = (
            1 - 1 / (2 * streams - 2) if streams > 1 else 0
        )  # Tijdeman's bound, which no algorithm can improve for all shares
        assert np.abs(given - ideal).max() <= bound + 1e-9


def test_samples_of_each_text_appear_in_order_over_all_cycles() -> None:
    class Numbers:
        padded: frozenset[str] = frozenset()

        def __call__(self, index: int) -> tuple[int]:
            return (index,)

    mixed = Interleaving((Numbers(), Numbers()), order_evenly(np.array([3, 1])), eos=1)  # type: ignore[arg-type]
    stream = [(int(mixed.order[n % 4]), *mixed(n)) for n in range(12)]
    assert [number for text, number in stream if text == 0] == list(range(9))
    assert [number for text, number in stream if text == 1] == list(range(3))


def test_samples_of_a_small_text_repeat_to_reach_its_weight(make_spec: MakeSpec, texts: dict[str, Any]) -> None:
    spec = make_spec("mixture", weighted(texts, a=1, c=3), batch={"micro": 4})
    assert count_letters(spec, 200) == {"a": 50, "c": 150}  # each of the ten samples of `c` appears fifteen times


def test_share_of_a_text_without_weights_is_its_share_of_samples(make_spec: MakeSpec, texts: dict[str, Any]) -> None:
    assert count_letters(make_spec("mixture", {"sources": texts}), 150) == {"a": 100, "b": 40, "c": 10}


def test_ranks_divide_the_samples_of_one_stream(make_spec: MakeSpec, texts: dict[str, Any]) -> None:
    options = weighted(texts, a=2, b=1)
    alone, *pair = (
        next(iter(data.load("mixture").micro_batches(spec, rank)))
        for spec, rank in (
            (make_spec("mixture", options, batch={"micro": 4}), 0),
            (make_spec("mixture", options, devices_per_node=2), 0),
            (make_spec("mixture", options, devices_per_node=2), 1),
        )
    )
    assert torch.equal(torch.cat([half.tensors["labels"] for half in pair]), alone.tensors["labels"])


def test_description_has_each_text_and_its_share(make_spec: MakeSpec, texts: dict[str, Any]) -> None:
    facts = data.load("mixture").describe(make_spec("mixture", {"sources": texts, "temperature": 2}))
    roots = {"a": 10, "b": 40**0.5, "c": 10**0.5}
    for name, root in roots.items():
        assert facts["sources"][name]["share"] == pytest.approx(root / sum(roots.values()), abs=0.001)
        assert facts["sources"][name]["corpus"]["name"] == texts[name]["files"][0]
    assert facts["tokenizer"] == {"name": "byt5", "vocabulary": 384}


def test_refusals_of_a_mixture_name_the_text(make_spec: MakeSpec, texts: dict[str, Any], tmp_path: Path) -> None:
    source = data.load("mixture")

    def refusal(options: dict[str, Any]) -> str:
        with pytest.raises(UserError) as error:
            source.check(source.Options(**options), make_spec("mixture"))
        return str(error.value)

    source.check(source.Options(sources=texts), make_spec("mixture"))
    assert refusal({}).startswith("data.sources of 0: a mixture needs 1 to 1000 texts")
    mixed = refusal({"sources": {"a": texts["a"] | {"weight": 1}, "b": texts["b"]}})
    assert mixed.startswith("data.sources.b: has no weight, and a has one; ")
    gone = refusal({"sources": {"a": texts["a"], "b": {"files": [str(tmp_path / "gone.txt")]}}})
    assert gone.startswith(f"data.sources.b.files={tmp_path}/gone.txt: no such file; ")
