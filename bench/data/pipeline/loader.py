"""Loading of micro-batches from a stream of samples with torch's DataLoader. The order of samples does not depend on
the number of workers."""

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from bench import objectives
from bench.core.errors import UserError
from bench.core.network import PAD, TokenKind
from bench.core.spec import RunSpec
from bench.data import MicroBatch, PromptBatch, Row


class SampleStream(Protocol):
    """An endless stream of samples, which are accessed by index."""

    @property
    def padded(self) -> frozenset[str]:
        """Names of the kinds of tokens (such as encoder tokens) that may need padding, because a sample may be shorter
        than the sequence length. For these kinds, the model may need a mask."""

    def __call__(self, index: int) -> tuple[NDArray[Any] | Row, ...]:
        """Return the sample at `index`, with one entry for each kind of tokens of the objective (such as encoder
        tokens), in order. An entry is a 1-d array of tokens. It is a `Row` if some tokens have no loss, or if several
        samples are packed into it. No entry is longer than the sequence."""


class _MicroBatches(Dataset[MicroBatch]):
    """A data set whose item n is the n-th micro-batch of one data-parallel rank.

    Ranks take turns: each gets the next `batch.micro` samples of the stream. With a global batch of G samples,
    optimizer step s therefore uses samples s × G to (s + 1) × G − 1, for any number of ranks and micro-steps.
    """

    def __init__(self, samples: SampleStream, spec: RunSpec, data_rank: int) -> None:
        self.samples, self.spec, self.data_rank = samples, spec, data_rank
        self.kinds = objectives.load(spec.objective).KINDS

    def __getitem__(self, number: int) -> MicroBatch:
        micro, sequence = self.spec.batch.micro, self.spec.sequence
        # The samples of micro-batch `number` on all ranks are consecutive in the stream.
        first = (number * self.spec.data_parallel + self.data_rank) * micro
        rows = list(zip(*map(self._get_sample, range(first, first + micro)), strict=True))
        tensors, masks, padding = {}, {}, {}
        eos = getattr(self.samples, "eos", None)  # only streams that pack documents into samples have `eos`
        for kind, given in zip(self.kinds, rows, strict=True):
            length, marked = sequence[kind.name], [one for one in given if isinstance(one, Row)]
            of_kind = [one.tokens for one in marked] if marked else given
            # Inputs and labels may contain the same tokens, with different padding values.
            for argument, filler in kind.arguments.items():
                tensors[argument] = _fill_rows(of_kind, length, filler, kind.hidden.get(argument, 0.0))
                if marked and filler < 0:  # the padding value of labels
                    learned = _fill_rows([one.learned for one in marked], length, 0) == 1
                    tensors[argument] = tensors[argument].where(learned, filler)
            if kind.positions:
                places = [one.places for one in marked] if marked else [_places(row, eos) for row in of_kind]
                tensors |= _by_document(places, length, kind, tensors)
            if kind.mask and kind.name in self.samples.padded:
                masks[kind.mask] = _fill_rows([np.ones_like(row) for row in of_kind], length, 0)
            padding[kind.name] = micro * length - sum(map(len, of_kind))
        return MicroBatch(tensors | masks, padding)

    def _get_sample(self, index: int) -> tuple[NDArray[Any] | Row, ...]:
        """Return a sample. Raise UserError if it does not fit the objective."""
        sample, value = self.samples(index), f"data={self.spec.data.name}"
        if len(sample) != len(self.kinds):
            rule = f"sample {index} has {len(sample)} rows"
            raise UserError(
                value, rule, f"give a row for each kind of tokens: {', '.join(one.name for one in self.kinds)}"
            )
        for kind, row in zip(self.kinds, sample, strict=True):
            found = len(row.tokens if isinstance(row, Row) else row)
            if found > (most := self.spec.sequence[kind.name]):
                rule = f"sample {index} has {found} {kind.name} tokens"
                raise UserError(value, rule, f"give at most sequence.{kind.name}={most} tokens")
        return sample


def micro_batches(samples: SampleStream, spec: RunSpec, data_rank: int, first: int = 0) -> Iterator[MicroBatch]:
    """Return the endless stream of micro-batches of a data-parallel rank, from the micro-batch with index `first`.
    `spec.data` has the loader's settings."""
    data = spec.data
    return iter(
        DataLoader(
            _MicroBatches(samples, spec, data_rank),
            batch_size=None,  # each item of the data set is already a batch
            sampler=itertools.count(first),  # endless, so workers start only once, without persistent_workers
            num_workers=data.workers,
            prefetch_factor=data.prefetch if data.workers else None,
            pin_memory=data.pin_memory,
            multiprocessing_context=_create_worker_context() if data.workers else None,
            worker_init_fn=_end_with_rank,
            generator=torch.Generator(),  # the loader draws a seed; the model's dropout must not depend on it
        )
    )


def list_first(samples: SampleStream, spec: RunSpec, data_rank: int, count: int) -> list[MicroBatch]:
    """Return the micro-batches that one data-parallel rank gets from the first `count` samples of the stream."""
    batches = _MicroBatches(samples, spec, data_rank)
    return [batches[number] for number in range(count // (spec.batch.micro * spec.data_parallel))]


def _create_worker_context() -> Any:
    """Return the multiprocessing context that starts worker processes with a fork server. The server imports torch once
    for all workers of the rank.

    A fork of the rank itself is unsafe, because the rank has threads of gloo, NCCL, CUDA and OpenMP. A lock that a
    thread holds during the fork would never be released in the child. With spawn, each worker would import torch again.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _end_with_rank(_worker: int) -> None:
    """Make this worker end when its rank ends for any reason.

    torch's own watchdog checks the worker's parent process. With a fork server, the parent is the server, which lives
    as long as its workers. A killed rank would therefore leave all of its workers running.
    """

    def watch() -> None:
        rank = multiprocessing.parent_process()
        assert rank is not None
        rank.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def list_prompts(
    samples: Callable[[int], tuple[NDArray[Any], str]], spec: RunSpec, data_rank: int, width: int
) -> list[PromptBatch]:
    """Return the micro-batches of prompts of one data-parallel rank. `samples(n)` returns the tokens of prompt n and
    its reference answer. Each prompt is padded to `width` tokens."""
    micro, ranks, kinds = spec.batch.micro, spec.data_parallel, objectives.load(spec.objective).KINDS
    argument, batches = next(iter(kinds[0].arguments)), []
    for number in range(spec.learning.evaluation_samples // (micro * ranks)):
        first = (number * ranks + data_rank) * micro
        numbers = list(range(first, first + micro))
        rows, references = zip(*map(samples, numbers), strict=True)
        tensors = {argument: _fill_rows(rows, width, PAD)}
        if kinds[0].mask:
            tensors[kinds[0].mask] = _fill_rows([np.ones_like(row) for row in rows], width, 0)
        ends = torch.tensor([len(row) for row in rows])
        batches.append(PromptBatch(tensors, ends, numbers, list(references)))
    return batches


def _by_document(
    places: Sequence[NDArray[Any]], length: int, kind: TokenKind, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the position of each token in its document, and labels in which the first token of each document is
    ignored. If it had a loss, the model would have to predict it from the previous document."""
    assert kind.positions
    # Padding also counts as the first token of a document, since its labels are ignored anyway.
    begins = _fill_rows(places, length, 0) == 0
    labels = {name: tensors[name].masked_fill(begins, filler) for name, filler in kind.arguments.items() if filler < 0}
    return {kind.positions: _fill_rows(places, length, 0), **labels}


def _places(row: NDArray[Any], eos: int | None) -> NDArray[np.int64]:
    """Return the position of each token of a row in its document, counted from 0, shape (tokens,). A document ends with
    EOS."""
    places = np.arange(len(row))
    begins = np.concatenate([[0], np.flatnonzero(row == eos) + 1]) if eos is not None else np.zeros(1, np.int64)
    return places - begins[np.searchsorted(begins, places, side="right") - 1]


def _fill_rows(rows: Any, length: int, filler: int, hidden: float = 0.0) -> torch.Tensor:
    """Return `rows`, arrays of tokens, as one tensor of shape (rows, length). The token id `filler` pads short rows at
    their end. `filler` also replaces the first tokens of each row; `hidden` is the replaced share of the row."""
    batch = np.full((len(rows), length), filler, dtype=np.int64)  # (rows, length)
    for line, row in zip(batch, rows, strict=True):
        begin = int(hidden * len(row))
        line[begin : len(row)] = row[begin:]
    return torch.from_numpy(batch)
