"""Real text, from local files, a Hugging Face data set or Python's own sources, as an objective's kinds of tokens ask
for it: whole, or spans of it hidden in one kind and shown in another."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from bench import objectives
from bench.core.errors import UserError
from bench.core.spec import Frozen, RunSpec
from bench.data import MicroBatch, vocabulary
from bench.data.pipeline import corpus, tokenizer
from bench.data.pipeline.corpus import Corpus, divide
from bench.data.pipeline.spans import CorruptedText, PlainText, ShuffledPieces, SpanCorruption
from bench.data.pipeline.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_SPANS = ("kept", "hidden")
"""What kinds of tokens hold of a text of which spans are hidden."""


class SampleOptions(Frozen):
    """What is made of a text."""

    packing: bool = True
    noise_density: float = Field(0.15, gt=0, lt=1)
    mean_span_length: float = Field(3.0, ge=1)
    sentinels: Literal["own", "append"] = "own"


class Options(SampleOptions, corpus.CorpusSelection):
    """Which text, and what is made of it. Each field is explained in conf/data/text.yaml."""


class PreparedText(NamedTuple):
    """A corpus, its tokenizer, and the samples that an objective makes of it."""

    corpus: Corpus
    tokenizer: Tokenizer
    samples: CorruptedText | PlainText
    held_out: HeldOutText | None = None


class HeldOutText(NamedTuple):
    """What of a corpus nothing is learned from."""

    documents: int
    tokens: int
    samples: CorruptedText | PlainText


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError for a corpus that is not there, or that objective, model and sequence lengths do not fit."""
    if not (_is_plain(spec) or _corrupted(spec)):
        remedy = "choose data=synthetic, or an objective that says what of a text its kinds of tokens hold"
        raise UserError(f"data={spec.data.name}", f"makes no samples of text for objective={spec.objective}", remedy)
    if options.hub and options.files:
        raise UserError(f"data.hub={options.hub}", "data.files is given too", "give one of them")
    if options.hub_config and not options.hub:
        raise UserError(f"data.hub_config={options.hub_config}", "belongs to data.hub", "give data.hub too")
    if options.files:
        corpus.list_files(options)
    _compute_raw_length(options, spec)
    if options.tokenizer == tokenizer.BYT5:  # what another one holds is known once it is loaded
        _check_tokenizer(options, spec, tokenizer.BYT5_VOCABULARY, tokenizer.BYT5_SENTINELS)


def micro_batches(spec: RunSpec, data_rank: int, first: int = 0) -> Iterator[MicroBatch]:
    """Return the endless micro-batches of a data-parallel rank from number `first` on; raise UserError if corpus or
    tokenizer cannot be used. What is held out for evaluation is in none of them.

    Each pass over the corpus has its own order and its own corruption. With packing, corrupted inputs are shorter than
    their length only where the decoder's length is the one that limits a sample.
    """
    from bench.data.pipeline import loader

    return loader.micro_batches(_prepare(spec).samples, spec, data_rank, first)


def held_out_batches(spec: RunSpec, data_rank: int) -> list[MicroBatch]:
    """Return a data-parallel rank's micro-batches of the samples that a learning run is evaluated on; UserError where
    the held-out text makes fewer."""
    from bench.data.pipeline import loader

    held_out, wanted = _prepare(spec).held_out, spec.learning.evaluation_samples
    assert held_out is not None
    if wanted > (found := len(held_out.samples.pieces.bounds)):
        rule = f"the held-out text makes {found} samples"
        raise UserError(f"learning.evaluation_samples={wanted}", rule, "ask for fewer, or raise learning.held_out")
    return loader.list_first(held_out.samples, spec, data_rank, wanted)


def describe(spec: RunSpec) -> dict[str, Any]:
    """Return the facts for the record: the corpus and its hash, the tokenizer, what a sample is made of."""
    prepared = _prepare(spec)
    facts = {"source": "text", "tokenizer": describe_tokenizer(prepared), **describe_corpus(prepared)}
    if held_out := prepared.held_out:
        samples = len(held_out.samples.pieces.bounds)
        facts["held_out"] = {"documents": held_out.documents, "tokens": held_out.tokens, "samples": samples}
    return facts


def has_fixed_targets(spec: RunSpec) -> bool:
    """Whether every sample has the same number of target tokens: pieces of one length, whose number of hidden tokens
    and spans follows from that length. Packed documents with positions of their own have targets by document."""
    kinds = objectives.load(spec.objective).KINDS
    return bool(spec.data.options.get("packing", True)) and not any(kind.positions for kind in kinds)


def describe_corpus(prepared: PreparedText) -> dict[str, Any]:
    """Return what a record says of a corpus: its hash, its size, the samples that it makes."""
    import numpy as np

    text, bounds = prepared.corpus, prepared.samples.pieces.bounds
    return {
        "corpus": {
            "name": text.name,
            "bytes": text.bytes,
            "documents": text.documents,
            "tokens": len(text.tokens),
            "sha256": text.sha256,
        },
        "raw_tokens_per_sample": int(np.diff(bounds).max()),
        "samples_per_epoch": len(bounds),
    }


def describe_tokenizer(prepared: PreparedText) -> dict[str, Any]:
    """Return what a record says of a tokenizer."""
    return {"name": prepared.tokenizer.name, "vocabulary": prepared.tokenizer.vocabulary}


def _prepare(spec: RunSpec) -> PreparedText:
    return prepare(Options(**spec.data.options), spec, (spec.seed,))


def prepare(options: Options, spec: RunSpec, seed: tuple[int, ...]) -> PreparedText:
    """Read and tokenise a text and cut it into samples; raise UserError if corpus or tokenizer cannot be used."""
    length = _compute_raw_length(options, spec)
    words = tokenizer.load(options.tokenizer)
    if options.sentinels == "append":
        words = words.with_sentinels()
    _check_tokenizer(options, spec, words.vocabulary, len(words.sentinels))
    text = corpus.load(options)
    if spec.learning.tokens is None:
        return PreparedText(text, words, _build_samples(options, spec, words, text, length, seed))
    learning = spec.learning
    parts = divide(text, learning.held_out, learning.held_out_seed)
    samples, other = (
        _build_samples(options, spec, words, part, length, own)
        for part, own in zip(parts, (seed, (learning.held_out_seed,)), strict=True)
    )
    kept = parts.held_out
    return PreparedText(text, words, samples, HeldOutText(len(kept.ends), len(kept.tokens), other))


def _build_samples(
    options: Options, spec: RunSpec, words: Tokenizer, text: Corpus, length: int, seed: tuple[int, ...]
) -> CorruptedText | PlainText:
    """Return the samples of a text, of so many of its tokens each."""
    import numpy as np

    bounds = _cut_packed(text, length) if options.packing else _cut_documents(text, length)
    if not len(bounds):
        raise UserError(
            f"data corpus {text.name}",
            f"{len(text.tokens)} tokens make no sample of {length}",
            f"give more text or shorten sequence.{next(iter(spec.sequence))}",
        )
    pieces = ShuffledPieces(text.tokens, bounds, seed)
    if _is_plain(spec):
        padded, end = (list(spec.sequence), [words.eos]) if not options.packing else ([], [])
        return PlainText(pieces, np.array(end, np.int32), frozenset(padded), words.eos)
    noise = _build_noise(options)
    (inputs, length), (targets, _) = spec.sequence.items()
    full = options.packing and noise.lengths(_compute_raw_length(options, spec))[0] == length
    padded = [targets] if full else [inputs, targets]
    return CorruptedText(pieces, noise, words.sentinels, words.eos, frozenset(padded))


def _cut_packed(text: Corpus, length: int) -> NDArray[np.int64]:
    """Return the pieces of the whole stream; what is left at its end is dropped."""

    import numpy as np

    begins = np.arange(len(text.tokens) // length) * length
    return np.stack([begins, begins + length], axis=1)


def _cut_documents(text: Corpus, length: int) -> NDArray[np.int64]:
    """Return the first piece of each document, without its EOS; one token alone cannot be corrupted."""

    import numpy as np

    begins = np.concatenate([[0], text.ends[:-1]])
    ends = np.minimum(text.ends - 1, begins + length)
    long_enough = ends - begins >= 2
    return np.stack([begins[long_enough], ends[long_enough]], axis=1)


def _build_noise(options: SampleOptions) -> SpanCorruption:
    return SpanCorruption(options.noise_density, options.mean_span_length)


def _holds(spec: RunSpec) -> tuple[str | None, ...]:
    """Return what the objective's kinds of tokens hold of a text."""
    return tuple(kind.text for kind in objectives.load(spec.objective).KINDS)


def _is_plain(spec: RunSpec) -> bool:
    """Whether a sample is a piece of the text as it is."""
    return _holds(spec) == ("whole",)


def _corrupted(spec: RunSpec) -> bool:
    """Whether a sample is a piece of the text with spans hidden, and the spans."""
    return _holds(spec) == _SPANS


def _compute_raw_length(options: SampleOptions, spec: RunSpec) -> int:
    """Return the tokens of the corpus that a sample is made of."""
    sequence = spec.sequence
    if _is_plain(spec):
        (length,) = sequence.values()
        return length if options.packing else length - 1  # EOS closes a document
    length = _build_noise(options).raw_length(*sequence.values())
    if not length:
        raise UserError(
            " ".join(f"sequence.{kind}={tokens}" for kind, tokens in sequence.items()),
            "no corrupted text is as short as that",
            "give at least 3 tokens to each",
        )
    return length


def _check_tokenizer(options: Options, spec: RunSpec, known: int, sentinels: int) -> None:
    model = vocabulary(spec)
    if model < known:
        raise UserError(
            f"model.shape.vocab={model}",
            f"tokenizer {options.tokenizer} has {known} tokens",
            "give the model a larger vocabulary",
        )
    if not _corrupted(spec):
        return
    if not sentinels:
        raise UserError(
            f"data.tokenizer={options.tokenizer}",
            "has no sentinels (<extra_id_0> …), which stand for hidden spans",
            "set data.sentinels=append, which puts 100 behind its vocabulary, or objective=causal_lm for a decoder",
        )
    needed = _count_spans(_build_noise(options), spec)
    if needed > sentinels:
        enough = next(
            n for n in count(2) if _count_spans(_build_noise(options)._replace(mean_length=n), spec) <= sentinels
        )
        raise UserError(
            f"data.mean_span_length={options.mean_span_length}",
            f"a sample needs {needed} sentinels, tokenizer {options.tokenizer} has {sentinels}",
            f"raise it to {enough} or shorten the sequence",
        )


def _count_spans(noise: SpanCorruption, spec: RunSpec) -> int:
    return noise.counts(noise.raw_length(*spec.sequence.values()))[1]
