"""From samples to micro-batches through torch's DataLoader, in an order that no number of workers changes."""

import itertools
import multiprocessing
import os
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from bench import objectives
from bench.core.network import TokenKind
from bench.core.spec import RunSpec
from bench.data import MicroBatch


class SampleStream(Protocol):
    """Sample `index` of an endless stream: its tokens by kind, in the objective's order, 1-d, each at most as long as
    the spec says."""

    @property
    def padded(self) -> frozenset[str]:
        """The kinds whose tokens may be fewer than the spec says, so that a model may need a mask of them."""
        ...

    def __call__(self, index: int) -> tuple[NDArray[Any], ...]: ...


class _MicroBatches(Dataset[MicroBatch]):
    """Item n is the n-th micro-batch of one data-parallel rank.

    The micro-batches of all of them, taken in turns, cut the stream into runs of `batch.micro` samples; so optimizer
    step s uses samples s × global … (s + 1) × global − 1, however these are spread over ranks and micro-steps.
    """

    def __init__(self, samples: SampleStream, spec: RunSpec, data_rank: int) -> None:
        self.samples, self.spec, self.data_rank = samples, spec, data_rank
        self.kinds = objectives.load(spec.objective).KINDS

    def __getitem__(self, number: int) -> MicroBatch:
        micro, sequence = self.spec.batch.micro, self.spec.sequence
        first = (number * self.spec.data_parallel + self.data_rank) * micro
        rows = list(zip(*map(self.samples, range(first, first + micro)), strict=True))
        tensors, masks, padding = {}, {}, {}
        for kind, of_kind in zip(self.kinds, rows, strict=True):
            length = sequence[kind.name]
            for argument, filler in kind.arguments.items():
                tensors[argument] = _fill_rows(of_kind, length, filler, kind.hidden.get(argument, 0.0))
            if kind.positions:
                eos = getattr(self.samples, "eos", None)  # of a source that packs several documents into one sample
                tensors |= _by_document(of_kind, length, eos, kind, tensors)
            if kind.mask and kind.name in self.samples.padded:
                masks[kind.mask] = _fill_rows([np.ones_like(row) for row in of_kind], length, 0)
            padding[kind.name] = micro * length - sum(map(len, of_kind))
        return MicroBatch(tensors | masks, padding)


def micro_batches(samples: SampleStream, spec: RunSpec, data_rank: int, first: int = 0) -> Iterator[MicroBatch]:
    """Return the endless micro-batches of a data-parallel rank from number `first` on, loaded as spec.data asks."""
    data = spec.data
    return iter(
        DataLoader(
            _MicroBatches(samples, spec, data_rank),
            batch_size=None,  # an item is a batch already
            sampler=itertools.count(first),  # without an end no worker is ever started anew: nothing to keep persistent
            num_workers=data.workers,
            prefetch_factor=data.prefetch if data.workers else None,
            pin_memory=data.pin_memory,
            multiprocessing_context=_create_worker_context() if data.workers else None,
            worker_init_fn=_end_with_rank,
            generator=torch.Generator(),  # its own: the loader's draw must not move the model's dropout
        )
    )


def list_first(samples: SampleStream, spec: RunSpec, data_rank: int, count: int) -> list[MicroBatch]:
    """Return this data-parallel rank's micro-batches of the stream's first `count` samples."""
    batches = _MicroBatches(samples, spec, data_rank)
    return [batches[number] for number in range(count // (spec.batch.micro * spec.data_parallel))]


def _create_worker_context() -> Any:
    """Return how workers start. Not by fork: a rank has threads of gloo, NCCL, CUDA and OpenMP, and a lock that one of
    them holds at the fork stays locked in the child for ever. The fork server is a clean process that imports torch
    once for all workers of the rank; spawn would import it in each.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _end_with_rank(_worker: int) -> None:
    """End this worker when its rank dies, however it dies. torch's own watch looks at the parent process, which is the
    fork server here, and that lives as long as its workers: without this a killed rank leaves them all behind.
    """

    def watch() -> None:
        rank = multiprocessing.parent_process()
        assert rank is not None
        rank.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _by_document(
    rows: Any, length: int, eos: int | None, kind: TokenKind, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return each token's place in its document, and the labels without those that begin a document: they would be
    predicted from the one before."""
    assert kind.positions
    places = [_places(row, eos) for row in rows]
    begins = _fill_rows(places, length, 0) == 0
    labels = {name: tensors[name].masked_fill(begins, filler) for name, filler in kind.arguments.items() if filler < 0}
    return {kind.positions: _fill_rows(places, length, 0), **labels}


def _places(row: NDArray[Any], eos: int | None) -> NDArray[np.int64]:
    """Return 0, 1, 2 … for each document of a row, which ends with its EOS."""
    places = np.arange(len(row))
    begins = np.concatenate([[0], np.flatnonzero(row == eos) + 1]) if eos is not None else np.zeros(1, np.int64)
    return places - begins[np.searchsorted(begins, places, side="right") - 1]


def _fill_rows(rows: Any, length: int, filler: int, hidden: float = 0.0) -> torch.Tensor:
    """Return rows as one tensor; what they are shorter, and the `hidden` share of each, is `filler`."""
    batch = np.full((len(rows), length), filler, dtype=np.int64)
    for line, row in zip(batch, rows, strict=True):
        begin = int(hidden * len(row))
        line[begin : len(row)] = row[begin:]
    return torch.from_numpy(batch)
