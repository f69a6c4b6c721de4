"""Data source of prompts with answers, or of chats, from JSON lines. Only the tokens of answers have a loss.

An encoder-decoder model reads the prompt and predicts the answer. A decoder-only model reads both in one sequence.
Without files, the samples are a small generated task: the answer is the prompt in reverse order.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bench import objectives
from bench.core.errors import UserError
from bench.core.spec import RunSpec
from bench.data import MicroBatch, Prompts, Row, check_held_out, check_once, check_own_tokenizer, check_vocabulary
from bench.data.pipeline import corpus
from bench.data.pipeline.corpus import BYT5, Corpus, Tokenizer
from bench.data.pipeline.json_lines import Fields, generate_lines, list_segments, read_lines
from bench.data.pipeline.spans import ShuffledPieces

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LAYOUT = 1  # part of the cache key: raise it when the output of `_list_samples` changes


class Options(Fields):
    """Options of the source: its files and their fields. conf/data/instructions.yaml explains each field."""

    files: tuple[str, ...] = ()
    tokenizer: str = BYT5
    packing: bool = False
    too_long: Literal["refuse", "skip"] = "refuse"


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError if a file is missing, if two options exclude each other, or if an option does not suit the
    objective or the model. Also read the beginning of the files, at most `corpus.FIRST_BYTES` bytes and
    `corpus.FIRST_DOCUMENTS` samples. Raise UserError if this beginning has content with which a run would fail."""
    if not (_is_joined(spec) or _is_pair(spec)):
        remedy = "choose objective=seq2seq for an encoder-decoder model, or causal_lm for a decoder-only model"
        raise UserError(f"data={spec.data.name}", f"has no samples for objective={spec.objective}", remedy)
    if options.packing and not any(kind.positions for kind in objectives.load(spec.objective).KINDS):
        rule = f"with objective={spec.objective}, attention would cross the samples of a sequence"
        raise UserError("data.packing=true", rule, "choose objective=causal_lm_documents, or remove it")
    if options.messages and not options.files:
        rule = "names a field of files, and data.files is empty"
        raise UserError(f"data.messages={options.messages}", rule, "give data.files too")
    paths = corpus.find_files(options.files)
    if options.tokenizer == BYT5:  # other tokenizers have to be loaded before their vocabulary is known
        check_own_tokenizer(spec)
        check_vocabulary(BYT5, corpus.BYT5_VOCABULARY, spec)
    if paths:
        stamps = corpus.read_stamps(paths, options.tokenizer)
        check_once(spec, stamps, options, partial(_check_beginning, options, spec))


def _check_beginning(options: Options, spec: RunSpec) -> None:
    """Read the first samples of the files. Raise UserError if a file cannot be read, or if one of these samples is
    invalid or longer than allowed. If these samples are all samples of the files, also raise UserError if they are too
    few for training and evaluation."""
    request = _build_request(options.model_copy(update={"tokenizer": BYT5}), spec)
    rows, is_whole = list[dict[str, Any]](), True
    for row in _list_samples(request):
        if len(rows) == corpus.FIRST_DOCUMENTS or row["bytes"] > corpus.FIRST_BYTES:
            is_whole = False
            break
        rows.append(row)
    # Other tokenizers make fewer tokens, and have to be loaded before their number is known.
    if options.tokenizer != BYT5 or not rows or not (is_whole or options.too_long == "refuse"):
        return
    text, too_long = _select_fitting(options, spec, _collect_rows(rows))
    if is_whole:
        prepared = _divide(options, spec, text, too_long)
        if prepared.held_out:
            check_held_out(spec, len(prepared.held_out.sequences.pieces.bounds), "sequence")


def micro_batches(spec: RunSpec, data_rank: int, first: int = 0) -> Iterator[MicroBatch]:
    """Return the endless stream of micro-batches of a data-parallel rank, from the micro-batch with index `first`.
    Held-out samples are excluded. Each epoch has its own order of samples. Raise UserError for unusable files or an
    unusable tokenizer."""
    from bench.data.pipeline import loader  # imported here: torch is slow to import, and `check` does not need it

    return loader.micro_batches(_prepare(spec).learned.sequences, spec, data_rank, first)


def held_out_batches(spec: RunSpec, data_rank: int) -> list[MicroBatch]:
    """Return the micro-batches of held-out samples for evaluation on a data-parallel rank. Raise UserError if there are
    too few held-out samples."""
    from bench.data.pipeline import loader

    return loader.list_first(_get_held_out(spec).sequences, spec, data_rank, spec.learning.evaluation_samples)


def held_out_prompts(spec: RunSpec, data_rank: int) -> Prompts:
    """Return the prompts that a data-parallel rank answers: its share of the first `learning.evaluation_samples`
    held-out samples."""
    from bench.data.pipeline import loader

    part, words, wanted = _get_held_out(spec), _load_tokenizer(spec), spec.learning.evaluation_samples
    questions = [_split_question(part.samples(number), words) for number in range(wanted)]
    limit = spec.learning.answer_tokens or max(len(answer) for _, answer in questions)
    if _is_joined(spec):
        [room] = spec.sequence.values()
        width = min(max(len(prompt) for prompt, _ in questions) + limit, room)
    else:
        width, room = spec.sequence.values()
        limit = min(limit, room)

    def read(number: int) -> tuple[NDArray[Any], str]:
        prompt, answer = questions[number]
        return prompt, words.decode(answer.tolist())

    return Prompts(loader.list_prompts(read, spec, data_rank, width), limit, words.eos, words.decode)


def describe(spec: RunSpec) -> dict[str, Any]:
    """Return the facts about the data for the record: files, tokenizer, number of samples, and held-out samples."""
    prepared, words = _prepare(spec), _load_tokenizer(spec)
    text = prepared.corpus

    def count(part: Part) -> dict[str, int]:
        return {"samples": len(part.samples.bounds), "sequences": len(part.sequences.pieces.bounds)}

    size = {"bytes": text.bytes, "samples": text.documents, "tokens": len(text.tokens)}
    facts = {
        "source": "instructions",
        "tokenizer": {"name": words.name, "vocabulary": words.vocabulary},
        "corpus": {"name": text.name, **size, "sha256": text.sha256},
        "too_long": prepared.too_long,
        **count(prepared.learned),
    }
    if prepared.held_out:
        facts["held_out"] = count(prepared.held_out)
    return facts


# ---------------------------------------- samples


@dataclass(frozen=True)
class Sequences:
    """An endless stream of sequences. A sequence contains one sample or, with packing, several samples."""

    pieces: ShuffledPieces  # its tokens have the fields that `_select_fitting` lists
    joined: bool  # True: prompt and answer are one kind of tokens
    padded: frozenset[str]

    def __call__(self, index: int) -> tuple[Row] | tuple[NDArray[np.int32], NDArray[np.int32]]:
        piece: Any = self.pieces(index)
        if self.joined:
            return (Row(piece["token"], piece["learned"], piece["place"]),)
        return piece["token"][~piece["learned"]], piece["token"][piece["learned"]]


class Part(NamedTuple):
    """Either the training samples or the held-out samples, in two forms: one sample at a time, and as sequences, each
    of which has one sample or several packed samples."""

    samples: ShuffledPieces  # without packing
    sequences: Sequences


class Prepared(NamedTuple):
    """All samples of the source, divided into training samples and held-out samples."""

    corpus: Corpus  # the samples as documents
    too_long: int  # number of samples that were skipped because they are longer than the sequence
    learned: Part
    held_out: Part | None


def _is_joined(spec: RunSpec) -> bool:
    """Return True if prompt and answer are one kind of tokens, as for decoder-only models."""
    kinds = objectives.load(spec.objective).KINDS
    return len(kinds) == 1 and {"input_ids", "labels"} <= kinds[0].arguments.keys() and not kinds[0].hidden


def _is_pair(spec: RunSpec) -> bool:
    """Return True if the encoder reads the prompt and the decoder predicts the answer."""
    kinds = objectives.load(spec.objective).KINDS
    return len(kinds) == 2 and "labels" in kinds[1].arguments and all(kind.text is None for kind in kinds)


def _load_tokenizer(spec: RunSpec) -> Tokenizer:
    words = corpus.load_tokenizer(spec.data.options.get("tokenizer", BYT5))
    check_vocabulary(words.name, words.vocabulary, spec)
    return words


def _prepare(spec: RunSpec) -> Prepared:
    """Read and tokenise the samples, and divide them into training samples and held-out samples."""
    options = Options(**spec.data.options)
    return _divide(options, spec, *_load(options, spec))


def _divide(options: Options, spec: RunSpec, text: Corpus, too_long: int) -> Prepared:
    learning = spec.learning
    if learning.tokens is None:
        return Prepared(text, too_long, _build_part(options, spec, text, spec.seed), None)
    learned, kept = corpus.divide(text, learning.held_out, learning.held_out_seed)
    # Runs with different seeds are evaluated on equal samples.
    held_out = _build_part(options, spec, kept, learning.held_out_seed)
    return Prepared(text, too_long, _build_part(options, spec, learned, spec.seed), held_out)


def _get_held_out(spec: RunSpec) -> Part:
    part = _prepare(spec).held_out
    assert part is not None
    check_held_out(spec, len(part.sequences.pieces.bounds), "sequence")
    return part


def _build_part(options: Options, spec: RunSpec, text: Corpus, seed: int) -> Part:
    import numpy as np

    bounds = np.stack([np.concatenate([[0], text.ends[:-1]]), text.ends], axis=1)  # (samples, 2)
    samples, joined = ShuffledPieces(text.tokens, bounds, (seed,)), _is_joined(spec)
    padded = frozenset(spec.sequence)
    if not options.packing:
        return Part(samples, Sequences(samples, joined, padded))
    [limit] = spec.sequence.values()
    packs = pack(np.diff(bounds)[:, 0].tolist(), limit)
    tokens = np.concatenate([text.tokens[slice(*bounds[one])] for samples in packs for one in samples])
    ends = np.cumsum([sum(int(np.diff(bounds[one])[0]) for one in samples) for samples in packs])
    packed = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
    return Part(samples, Sequences(ShuffledPieces(tokens, packed, (seed,)), joined, padded))


def pack(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Pack samples into sequences of at most `limit` tokens without dividing a sample. Return the indices of the
    samples in each sequence. `lengths` has the number of tokens of each sample.

    Samples are packed in order of length, the longest first. Each goes into the fullest sequence that has enough room
    (best-fit decreasing).
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # free tokens and index of each sequence, sorted
    for sample in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        place = bisect_left(rooms, (lengths[sample], -1))
        free, number = rooms.pop(place) if place < len(rooms) else (limit, len(packs))
        if number == len(packs):
            packs.append([])
        packs[number].append(sample)
        insort(rooms, (free - lengths[sample], number))
    return packs


def _split_question(sample: Any, words: Tokenizer) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the tokens of a sample's prompt and of its reference answer, EOS included. In a chat, the reference answer
    is the last answer, and the prompt is all tokens before this answer."""
    import numpy as np

    tokens, learned = sample["token"], sample["learned"]
    end = int(np.flatnonzero(learned)[-1]) + 1
    before = np.flatnonzero(~learned[:end])
    begin = int(before[-1]) + 1 if len(before) else 0
    answer = tokens[begin:end]
    stop = np.flatnonzero(answer == words.eos)
    return tokens[:begin], answer[: int(stop[0]) + 1] if len(stop) else answer


# ---------------------------------------- tokens


class Samples(NamedTuple):
    """Tokenised samples of the files, in their order."""

    ids: NDArray[np.int32]  # (tokens,): token ids of all samples
    learned: NDArray[np.bool_]  # (tokens,): True for tokens with a loss
    lengths: NDArray[np.int64]  # (samples,): number of tokens of each sample
    rows: Sequence[dict[str, Any]]  # of each sample: its file and line, and bytes and hash of all text up to its end


def _load(options: Options, spec: RunSpec) -> tuple[Corpus, int]:
    """Return two values: a corpus with the samples that fit the sequence lengths, and the number of samples that do not
    fit. Raise UserError for unusable files. Raise it also for a sample that does not fit, unless the option `too_long`
    allows skipping it."""
    import numpy as np

    _load_tokenizer(spec)
    columns: dict[str, str | list[str]] = {"ids": ["int32"], "learned": ["bool"], "file": "string", "line": "int64"}
    columns |= {"bytes": "int64", "sha256": "string"}
    table = corpus.load_table(_list_samples, _build_request(options, spec), columns)
    chunks = [table.data.column(name).chunks for name in ("ids", "learned")]
    ids, learned = (
        np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in of_column]) for of_column in chunks
    )
    lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks[0]]).astype(np.int64)
    return _select_fitting(options, spec, Samples(ids, learned, lengths, table))


def _build_request(options: Options, spec: RunSpec) -> dict[str, Any]:
    return {
        "options": options.model_dump(mode="json", exclude={"packing", "too_long"}),
        "stamps": corpus.read_stamps(corpus.find_files(options.files), options.tokenizer),
        "joined": _is_joined(spec),
        "layout": _LAYOUT,
    }


def _collect_rows(rows: Sequence[dict[str, Any]]) -> Samples:
    """Convert `rows`, which `_list_samples` yields (one row per sample), to arrays over all samples."""
    import numpy as np

    ids, learned = (np.concatenate([row[name] for row in rows]) for name in ("ids", "learned"))
    return Samples(ids, learned, np.array([len(row["ids"]) for row in rows], np.int64), rows)


def _select_fitting(options: Options, spec: RunSpec, samples: Samples) -> tuple[Corpus, int]:
    """Return two values: a corpus with the samples that fit the sequence lengths, and the number of samples that do not
    fit. Each token of the corpus has the fields `token` (its id), `learned` (True if it has a loss) and `place` (its
    position in its sample)."""
    import numpy as np

    ids, learned, lengths, rows = samples
    begins = np.cumsum(lengths) - lengths
    tokens = np.empty(len(ids), [("token", np.int32), ("learned", np.bool_), ("place", np.int32)])
    tokens["token"], tokens["learned"] = ids, learned
    tokens["place"] = np.arange(len(ids)) - np.repeat(begins, lengths)
    answers = np.add.reduceat(learned.astype(np.int64), begins)
    fits = _find_fitting(options, spec, rows, lengths, answers)
    kept, ends = tokens[np.repeat(fits, lengths)], np.cumsum(lengths[fits])
    name, last = ",".join(options.files) or "reversed letters", rows[-1]
    text = Corpus(name, len(ends), last["bytes"], last["sha256"], kept, ends)
    return text, int((~fits).sum())


def _find_fitting(
    options: Options,
    spec: RunSpec,
    rows: Sequence[dict[str, Any]],
    lengths: NDArray[np.int64],
    answers: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return a mask, shape (samples,), that is True for each sample that fits the sequence lengths in `spec`. `lengths`
    has the number of tokens of each sample. `answers` has the number of answer tokens of each sample. Raise UserError
    if no sample fits. Unless the option `too_long` allows skipping, raise UserError for any sample that does not
    fit."""
    import numpy as np

    fits = np.ones(len(lengths), np.bool_)
    parts = {"sample": lengths} if _is_joined(spec) else {"prompt": lengths - answers, "answer": answers}
    for (kind, limit), (part, counts) in zip(spec.sequence.items(), parts.items(), strict=True):
        fits &= counts <= limit
        if options.too_long == "refuse" and not fits.all():
            row = rows[int(np.argmin(fits))]
            found, longest = int(counts[np.argmin(fits)]), int(counts.max())
            answer = f", its answer {answers[np.argmin(fits)]}" if part == "sample" else ""
            rule = f"the {part} on line {row['line']} of {row['file'] or 'the task'} has {found} tokens{answer}"
            raise UserError(f"sequence.{kind}={limit}", rule, f"raise it to {longest}, or set data.too_long=skip")
    if not fits.any():
        given = " ".join(f"sequence.{kind}={limit}" for kind, limit in spec.sequence.items())
        raise UserError(given, "every sample is longer", "raise it")
    return fits


def _list_samples(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one row for each sample. `ids` are the sample's token ids, and `learned` is True for each token with a
    loss. `file` and `line` are the source of the sample. `bytes` and `sha256` are the size and the hash of all text
    from the first sample to this sample."""
    import numpy as np

    options, joined = Options(**request["options"]), bool(request["joined"])
    words = corpus.load_tokenizer(options.tokenizer)
    total, digest = 0, hashlib.sha256()
    lines = read_lines(corpus.find_files(options.files)) if options.files else generate_lines(options)
    while batch := list(islice(lines, 64)):  # fast tokenizers need batches of texts to be fast
        of_lines = [list_segments(options, words, line, joined=joined) for line in batch]
        encoded = iter(words.encode([segment.text for segments in of_lines for segment in segments]))
        for line, segments in zip(batch, of_lines, strict=True):
            parts = []
            for segment in segments:
                raw, ids = segment.text.encode(), next(encoded)
                # In an encoder's input, EOS ends the prompt. A chat template may end an answer with EOS itself.
                if (segment.is_answer or not joined) and words.eos not in ids:
                    ids = np.append(ids, np.int32(words.eos))
                parts.append(ids)
                total += len(raw)
                digest.update(raw + b"\0")
            learned = np.repeat([segment.is_answer for segment in segments], [len(ids) for ids in parts])
            place = {"file": line.file, "line": line.number, "bytes": total, "sha256": digest.hexdigest()}
            yield {"ids": np.concatenate(parts), "learned": learned, **place}
