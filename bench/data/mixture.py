"""Data source that mixes several texts of `data=text` into one stream, in which each text has a given share of the
samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from bench.core.errors import UserError
from bench.core.spec import RunSpec
from bench.data import MicroBatch, text
from bench.data.pipeline.corpus import BYT5, TextSelection
from bench.data.text import PreparedText, SampleOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bench.data.pipeline.loader import SampleStream

CYCLE = 1000
"""Number of samples after which the order of the texts repeats. Shares are multiples of 1 / CYCLE, or 0.1 %."""


def compute_shares(weights: Sequence[float], temperature: float) -> NDArray[np.float64]:
    """Return the share of each text, shape (texts,), which is proportional to its weight to the power of 1 /
    temperature.

    At temperature 1, shares are proportional to weights. A higher temperature makes shares more equal (Raffel et al.,
    JMLR 21 (2020), section 3.5.2).
    """
    import numpy as np

    # Logarithms, because powers of large weights would overflow.
    logarithms = np.log(np.asarray(weights, float)) / temperature
    powers = np.exp(logarithms - logarithms.max())
    shares: NDArray[np.float64] = powers / powers.sum()
    return shares


def round_shares(shares: NDArray[np.float64], total: int = CYCLE) -> NDArray[np.int64]:
    """Return how many of `total` samples each text gets. Shares are rounded by the method of largest remainders. Every
    text gets at least one sample."""
    import numpy as np

    wanted = shares * total
    counts = np.maximum(np.floor(wanted), 1).astype(np.int64)
    # After rounding down, less than one sample per text is left, so the loop is short.
    while (left := total - int(counts.sum())) != 0:
        apart = wanted - counts
        if left > 0:
            counts[np.argmax(apart)] += 1
        else:  # the minimum of one exceeds many texts' shares: reduce the largest excess
            counts[np.argmin(np.where(counts > 1, apart, np.inf))] -= 1
    return counts


def order_evenly(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the text from which each sample of a cycle comes, shape (samples,). Text t gives `counts[t]`
    samples.

    After n samples, the number of samples from each text differs by less than one from n times its share. The algorithm
    is that of R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980). For each sample, texts that
    would get too far ahead of their share are excluded. Every other text has a deadline: the last position in the cycle
    at which it must give its next sample to keep its share. The text with the earliest deadline gives the sample.
    """
    import numpy as np

    if len(counts) == 1:
        return np.zeros(counts[0], np.int64)
    places, parts = int(counts.sum()), 2 * len(counts) - 2
    given, order = np.zeros_like(counts), np.empty(places, np.int64)
    for place in range(places):
        due = (place + 1) * counts - given * places  # multiplied by `places`, to compute with integers
        latest = (given + 1 - 1 / parts) / counts
        order[place] = np.argmin(np.where(due * parts >= places, latest, np.inf))
        given[order[place]] += 1
    return order


@dataclass(frozen=True)
class Interleaving:
    """Several streams of samples, combined into one stream. Sample i of the combined stream comes from stream `order[i
    % len(order)]`: it is the next sample of that stream that has not been used yet."""

    streams: tuple[SampleStream, ...]
    order: NDArray[np.int64]  # (samples of a cycle,): index of the stream that gives each sample
    eos: int

    @property
    def padded(self) -> frozenset[str]:
        return frozenset().union(*(stream.padded for stream in self.streams))

    def __call__(self, index: int) -> tuple[NDArray[Any], ...]:
        cycle, place = divmod(index, len(self.order))
        stream = self.order[place]
        # Number of samples that this stream gives before `place` in the cycle, and in a whole cycle.
        given, each = int((self.order[:place] == stream).sum()), int((self.order == stream).sum())
        sample: tuple[NDArray[Any], ...] = self.streams[stream](cycle * each + given)
        return sample


class MixedText(TextSelection):
    """Options of one text of a mixture: its files or data set, and its weight."""

    weight: float | None = Field(None, gt=0, allow_inf_nan=False)


class Options(SampleOptions):
    """Options of a mixture: its texts, their shares, and how samples are made. conf/data/mixture.yaml explains each
    field."""

    sources: dict[str, MixedText] = {}
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    tokenizer: str = BYT5


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError for a mixture that is empty or in which only some texts have a weight, and for a text that
    `data=text` does not support. Raise it also for more than CYCLE texts: the order of texts repeats after CYCLE
    samples, and each text needs one of these samples."""
    if not 1 <= len(options.sources) <= CYCLE:
        rule = f"a mixture needs 1 to {CYCLE} texts, each with a name"
        raise UserError(f"data.sources of {len(options.sources)}", rule, "data.sources='{NAME: {files: [PATH]}, …}'")
    weighted = [name for name, source in options.sources.items() if source.weight is not None]
    if weighted and len(weighted) < len(options.sources):
        without = next(name for name in options.sources if name not in weighted)
        rule = f"has no weight, and {weighted[0]} has one"
        remedy = "give a weight to every text, or to no text: then their sizes decide"
        raise UserError(f"data.sources.{without}", rule, remedy)
    for name in options.sources:
        with _name_source(name):
            text.check(_select(options, name), spec)


def micro_batches(spec: RunSpec, data_rank: int) -> Iterator[MicroBatch]:
    """Return the endless stream of micro-batches of a data-parallel rank. Raise UserError for an unusable text or
    tokenizer.

    Epochs are counted for each text separately. A small text with a large share therefore repeats more often than the
    other texts.
    """
    from bench.data.pipeline import loader

    prepared, counts = _prepare(spec)
    samples = tuple(one.samples for one in prepared.values())
    mixed = Interleaving(samples, order_evenly(counts), samples[0].eos)
    return loader.micro_batches(mixed, spec, data_rank)


def describe(spec: RunSpec) -> dict[str, Any]:
    """Return the facts about the data for the record: the tokenizer, and the hash, size and share of each text."""
    prepared, counts = _prepare(spec)
    return {
        "source": "mixture",
        "tokenizer": text.describe_tokenizer(next(iter(prepared.values()))),
        "sources": {
            name: {"share": int(count) / CYCLE, **text.describe_corpus(one)}
            for (name, one), count in zip(prepared.items(), counts, strict=True)
        },
    }


# All texts of a mixture are divided into samples by the same rules as a single text.
has_fixed_targets = text.has_fixed_targets


def _prepare(spec: RunSpec) -> tuple[dict[str, PreparedText], NDArray[np.int64]]:
    """Return the prepared texts by name, and the number of samples that each text gives in a cycle, shape (texts,).

    Shares follow from the weights of the texts. Without weights, they follow from the number of samples per epoch of
    each text.
    """
    options = Options(**spec.data.options)
    prepared = {}
    for number, name in enumerate(options.sources):
        with _name_source(name):  # the number is part of the seed: texts of equal length must differ in order
            prepared[name] = text.prepare(_select(options, name), spec, (spec.seed, number))
    sizes = [len(one.samples.pieces.bounds) for one in prepared.values()]
    weights = [source.weight or size for source, size in zip(options.sources.values(), sizes, strict=True)]
    return prepared, round_shares(compute_shares(weights, options.temperature))


def _select(options: Options, name: str) -> text.Options:
    """Return the options with which `data=text` reads the text `name` of the mixture."""
    common = options.model_dump(exclude={"sources", "temperature"})
    return text.Options(**options.sources[name].model_dump(exclude={"weight"}), **common)


@contextmanager
def _name_source(name: str) -> Iterator[None]:
    """Return a context in which an error names an option of the text `name` as the mixture does:
    data.sources.NAME.files instead of data.files."""
    try:
        yield
    except UserError as error:
        key, dot, field = error.value.partition("=")[0].partition(".")
        if key != "data" or not dot or field not in TextSelection.model_fields:
            raise
        raise UserError(f"data.sources.{name}.{error.value.removeprefix('data.')}", error.rule, error.remedy) from error
