"""Data source of real text, from local files, a Hugging Face data set or Python's standard library.

The objective determines the content of a sample. It is either a whole piece of text, or a piece with hidden spans as
encoder input and the text of the hidden spans as decoder target.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from bench import objectives
from bench.core.errors import UserError
from bench.core.spec import Frozen, RunSpec
from bench.data import MicroBatch, check_held_out, check_once, check_own_tokenizer, check_vocabulary
from bench.data.pipeline import corpus
from bench.data.pipeline.corpus import Corpus, Tokenizer
from bench.data.pipeline.spans import CorruptedText, PlainText, ShuffledPieces, SpanCorruption

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class SampleOptions(Frozen):
    """Options that determine how samples are made from a text."""

    packing: bool = True
    noise_density: float = Field(0.15, gt=0, lt=1)
    mean_span_length: float = Field(3.0, ge=1)
    sentinels: Literal["own", "append"] = "own"


class Options(SampleOptions, corpus.CorpusSelection):
    """Options of the source: the text, and how samples are made from it. conf/data/text.yaml explains each field."""


class PreparedText(NamedTuple):
    """A corpus, its tokenizer, and the samples made from it for an objective."""

    corpus: Corpus
    tokenizer: Tokenizer
    samples: CorruptedText | PlainText
    held_out: PreparedText | None = None  # the part of the corpus that is held out from training


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError if a file is missing, if two options exclude each other, or if an option does not suit the
    objective, the model or the sequence lengths. Also read the beginning of local files (`corpus.read_beginning`).
    Raise UserError if this beginning has content with which a run would fail."""
    if not (_is_plain(spec) or _is_corrupted(spec)):
        remedy = "choose data=synthetic, or an objective whose kinds of tokens come from one text"
        raise UserError(f"data={spec.data.name}", f"has no samples for objective={spec.objective}", remedy)
    if options.hub and options.files:
        raise UserError(f"data.hub={options.hub}", "data.files is given too", "give one of them")
    if options.hub_config and not options.hub:
        raise UserError(f"data.hub_config={options.hub_config}", "belongs to data.hub", "give data.hub too")
    paths = corpus.list_files(options) if options.files else []
    _compute_raw_length(options, spec)
    if options.tokenizer == corpus.BYT5:  # other tokenizers have to be loaded before their vocabulary is known
        check_own_tokenizer(spec)
        _check_tokenizer(options, spec, corpus.BYT5_VOCABULARY, corpus.BYT5_SENTINELS)
    if paths:
        stamps = corpus.read_stamps(paths, options.tokenizer)
        check_once(spec, stamps, options, partial(_check_beginning, options, spec))


def _check_beginning(options: Options, spec: RunSpec) -> None:
    """Read the beginning of the files. Raise UserError if this beginning is unusable. If the beginning is already the
    whole text, also raise UserError if the text makes too few samples."""
    found, is_whole = corpus.read_beginning(options)
    # Other tokenizers make fewer tokens, and have to be loaded before their number is known.
    if found is not None and is_whole and options.tokenizer == corpus.BYT5:
        words = corpus.load_tokenizer(options.tokenizer)
        prepared = _divide(options, spec, words, found, (spec.seed,))
        if prepared.held_out:
            check_held_out(spec, len(prepared.held_out.samples.pieces.bounds), "sample")


def micro_batches(spec: RunSpec, data_rank: int, first: int = 0) -> Iterator[MicroBatch]:
    """Return the endless stream of micro-batches of a data-parallel rank, from the micro-batch with index `first`.
    Held-out text is excluded. Raise UserError for an unusable corpus or tokenizer.

    Each epoch has its own order of samples and its own hidden spans. With packing, a sample is as long as the sequence
    lengths of encoder and decoder permit. If the decoder's length is the tighter limit, encoder inputs are padded.
    Otherwise encoder inputs need no padding.
    """
    # Imported here, like numpy: torch is slow to import, and `check` needs neither.
    from bench.data.pipeline import loader

    return loader.micro_batches(_prepare(spec).samples, spec, data_rank, first)


def held_out_batches(spec: RunSpec, data_rank: int) -> list[MicroBatch]:
    """Return the micro-batches of held-out samples for evaluation on a data-parallel rank. Raise UserError if there are
    too few held-out samples."""
    from bench.data.pipeline import loader

    held_out = _prepare(spec).held_out
    assert held_out is not None
    check_held_out(spec, len(held_out.samples.pieces.bounds), "sample")
    return loader.list_first(held_out.samples, spec, data_rank, spec.learning.evaluation_samples)


def describe(spec: RunSpec) -> dict[str, Any]:
    """Return the facts about the data for the record: corpus, tokenizer, number of samples, and held-out text."""
    prepared = _prepare(spec)
    facts = {"source": "text", "tokenizer": describe_tokenizer(prepared), **describe_corpus(prepared)}
    if held_out := prepared.held_out:
        kept, samples = held_out.corpus, len(held_out.samples.pieces.bounds)
        facts["held_out"] = {"documents": kept.documents, "tokens": len(kept.tokens), "samples": samples}
    return facts


def has_fixed_targets(spec: RunSpec) -> bool:
    """Return True if every sample has the same number of target tokens.

    This holds for packed text. All of its pieces have the same length, which determines the number of hidden tokens and
    spans. The exception is an objective that does not predict the first token of each document. In that case, the
    number of target tokens depends on the number of documents in a sample.
    """
    kinds = objectives.load(spec.objective).KINDS
    return bool(spec.data.options.get("packing", True)) and not any(kind.positions for kind in kinds)


def describe_corpus(prepared: PreparedText) -> dict[str, Any]:
    """Return the facts about a corpus for the record: name, size, hash and number of samples."""
    import numpy as np

    text, bounds = prepared.corpus, prepared.samples.pieces.bounds
    facts = {"name": text.name, "bytes": text.bytes, "documents": text.documents, "tokens": len(text.tokens)}
    return {
        "corpus": {**facts, "sha256": text.sha256},
        "raw_tokens_per_sample": int(np.diff(bounds).max()),
        "samples_per_epoch": len(bounds),
    }


def describe_tokenizer(prepared: PreparedText) -> dict[str, Any]:
    """Return the facts about a tokenizer for the record: name and vocabulary size."""
    return {"name": prepared.tokenizer.name, "vocabulary": prepared.tokenizer.vocabulary}


def _prepare(spec: RunSpec) -> PreparedText:
    return prepare(Options(**spec.data.options), spec, (spec.seed,))


def prepare(options: Options, spec: RunSpec, seed: tuple[int, ...]) -> PreparedText:
    """Read and tokenise a text, and divide it into samples. Raise UserError for an unusable corpus or tokenizer."""
    words = corpus.load_tokenizer(options.tokenizer)
    if options.sentinels == "append":
        words = words.with_sentinels()
    _check_tokenizer(options, spec, words.vocabulary, len(words.sentinels))
    return _divide(options, spec, words, corpus.load(options), seed)


def _divide(options: Options, spec: RunSpec, words: Tokenizer, text: Corpus, seed: tuple[int, ...]) -> PreparedText:
    """Return the samples of a text. If `learning.tokens` is set, part of the text is held out from training; the
    samples of this part are separate (`held_out`). Raise UserError for a text that is too short."""
    length, learning = _compute_raw_length(options, spec), spec.learning
    if learning.tokens is None:
        return PreparedText(text, words, _build_samples(options, spec, words, text, length, seed))
    learned, kept = corpus.divide(text, learning.held_out, learning.held_out_seed)
    samples = _build_samples(options, spec, words, learned, length, seed, "tokens outside the held-out documents")
    # This seed does not depend on `seed`, so runs with different seeds are evaluated on equal samples.
    other = _build_samples(options, spec, words, kept, length, (learning.held_out_seed,), "held-out tokens")
    return PreparedText(text, words, samples, PreparedText(kept, words, other))


def _build_samples(
    options: Options,
    spec: RunSpec,
    words: Tokenizer,
    text: Corpus,
    length: int,
    seed: tuple[int, ...],
    counted: str = "tokens",
) -> CorruptedText | PlainText:
    """Return the stream of samples of a text. Each sample is made from `length` tokens of the text, or fewer for a
    short document. If the text is too short for a sample, raise UserError. In the error message, `counted` is the name
    of the text's tokens, for example "held-out tokens"."""
    import numpy as np

    bounds = _cut(text, length, packing=options.packing)
    if not len(bounds):
        rule = f"its {len(text.tokens)} {counted} are fewer than the {length} of one sample"
        share = "" if counted == "tokens" else "change learning.held_out, "
        remedy = f"give more text, raise data.max_bytes, {share}or shorten sequence.{next(iter(spec.sequence))}"
        raise UserError(f"data corpus {text.name}", rule, remedy)
    pieces = ShuffledPieces(text.tokens, bounds, seed)
    if _is_plain(spec):
        padded, end = ([], []) if options.packing else (list(spec.sequence), [words.eos])
        return PlainText(pieces, np.array(end, np.int32), frozenset(padded), words.eos)
    noise = _build_noise(options)
    (inputs, input_length), (targets, _) = spec.sequence.items()
    is_full = options.packing and noise.lengths(length)[0] == input_length
    padded = [targets] if is_full else [inputs, targets]
    return CorruptedText(pieces, noise, words.sentinels, words.eos, frozenset(padded))


def _cut(text: Corpus, length: int, *, packing: bool) -> NDArray[np.int64]:
    """Return the pieces of a corpus, shape (pieces, 2): for each piece, its start and end index in `text.tokens`.

    With packing, the whole token stream is cut into pieces of `length`, and an incomplete last piece is dropped.
    Without packing, a piece is the beginning of a document, at most `length` tokens; the document's EOS is not part of
    it. Pieces of a single token are excluded, since no span in them can be hidden.
    """
    import numpy as np

    if packing:
        begins = np.arange(len(text.tokens) // length) * length
        return np.stack([begins, begins + length], axis=1)
    begins = np.concatenate([[0], text.ends[:-1]])
    ends = np.minimum(text.ends - 1, begins + length)
    return np.stack([begins, ends], axis=1)[ends - begins >= 2]


def _build_noise(options: SampleOptions) -> SpanCorruption:
    return SpanCorruption(options.noise_density, options.mean_span_length)


def _list_contents(spec: RunSpec) -> tuple[str | None, ...]:
    return tuple(kind.text for kind in objectives.load(spec.objective).KINDS)


def _is_plain(spec: RunSpec) -> bool:
    """Return True if the objective uses an unchanged piece of text as a sample."""
    return _list_contents(spec) == ("whole",)


def _is_corrupted(spec: RunSpec) -> bool:
    """Return True if the objective uses span corruption: the encoder reads a piece of text with hidden spans, and the
    decoder predicts these spans."""
    return _list_contents(spec) == ("kept", "hidden")


def _compute_raw_length(options: SampleOptions, spec: RunSpec) -> int:
    """Return the number of corpus tokens from which a sample is made. Raise UserError if the sequence lengths are too
    short for any sample."""
    sequence = spec.sequence
    if _is_plain(spec):
        (length,) = sequence.values()
        return length if options.packing else length - 1  # one position is needed for EOS
    length = _build_noise(options).raw_length(*sequence.values())
    if not length:
        given = " ".join(f"sequence.{kind}={tokens}" for kind, tokens in sequence.items())
        raise UserError(given, "too short for corrupted text", "give at least 3 tokens to each")
    return length


def _check_tokenizer(options: Options, spec: RunSpec, known: int, sentinels: int) -> None:
    """Raise UserError if a tokenizer does not fit the run. `known` is its number of tokens, which must not exceed the
    model's vocabulary. `sentinels` is its number of sentinels (tokens that stand for hidden spans), which must suffice
    for a sample."""
    check_vocabulary(options.tokenizer, known, spec)
    if not _is_corrupted(spec):
        return
    if not sentinels:
        rule = "has no sentinels (<extra_id_0> …), which stand for hidden spans"
        remedy = "set data.sentinels=append, which adds 100 after its vocabulary, or objective=causal_lm for a decoder"
        raise UserError(f"data.tokenizer={options.tokenizer}", rule, remedy)

    def count_spans(mean_length: float) -> int:
        noise = SpanCorruption(options.noise_density, mean_length)
        return noise.counts(noise.raw_length(*spec.sequence.values()))[1]

    needed = count_spans(options.mean_span_length)
    if needed > sentinels:
        enough = next(length for length in count(2) if count_spans(length) <= sentinels)
        rule = f"a sample needs {needed} sentinels, tokenizer {options.tokenizer} has {sentinels}"
        remedy = f"raise it to {enough} or shorten the sequence"
        raise UserError(f"data.mean_span_length={options.mean_span_length}", rule, remedy)
