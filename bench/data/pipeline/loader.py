"""Micro-batches from samples through torch's DataLoader, in the same order for any number of workers."""

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
    """An endless stream of samples."""

    @property
    def padded(self) -> frozenset[str]:
        """Kinds whose rows may be shorter than in the spec, so that a model may need a mask of them."""

    def __call__(self, index: int) -> tuple[NDArray[Any], ...]:
        """Return a sample: its tokens by kind, in the objective's order, 1-d, each at most as long as in the spec."""


class _MicroBatches(Dataset[MicroBatch]):
    """A data set whose item n is the n-th micro-batch of one data-parallel rank.

    The ranks take consecutive runs of `batch.micro` samples in turn. So optimizer step s uses samples s × global …
    (s + 1) × global − 1 for any number of ranks and micro-steps.
    """

    def __init__(self, samples: SampleStream, spec: RunSpec, data_rank: int) -> None:
        self.samples, self.spec, self.data_rank = samples, spec, data_rank
        self.kinds = objectives.load(spec.objective).KINDS

    def __getitem__(self, number: int) -> MicroBatch:
        micro, sequence = self.spec.batch.micro, self.spec.sequence
        # Micro-batch `number` of all ranks together is one contiguous run of the stream.
        first = (number * self.spec.data_parallel + self.data_rank) * micro
        rows = list(zip(*map(self.samples, range(first, first + micro)), strict=True))
        tensors, masks, padding = {}, {}, {}
        for kind, of_kind in zip(self.kinds, rows, strict=True):
            length = sequence[kind.name]
            # Inputs and labels hold the same tokens and differ in their padding value.
            for argument, filler in kind.arguments.items():
                tensors[argument] = _fill_rows(of_kind, length, filler, kind.hidden.get(argument, 0.0))
            if kind.positions:
                eos = getattr(self.samples, "eos", None)  # only in streams that pack documents into samples
                tensors |= _by_document(of_kind, length, eos, kind, tensors)
            if kind.mask and kind.name in self.samples.padded:
                masks[kind.mask] = _fill_rows([np.ones_like(row) for row in of_kind], length, 0)
            padding[kind.name] = micro * length - sum(map(len, of_kind))
        return MicroBatch(tensors | masks, padding)


def micro_batches(samples: SampleStream, spec: RunSpec, data_rank: int, first: int = 0) -> Iterator[MicroBatch]:
    """Return the endless micro-batches of a data-parallel rank from number `first` on, loaded as in spec.data."""
    data = spec.data
    return iter(
        DataLoader(
            _MicroBatches(samples, spec, data_rank),
            batch_size=None,  # an item is a batch already
            sampler=itertools.count(first),  # endless, so that workers start once, without persistent_workers
            num_workers=data.workers,
            prefetch_factor=data.prefetch if data.workers else None,
            pin_memory=data.pin_memory,
            multiprocessing_context=_create_worker_context() if data.workers else None,
            worker_init_fn=_end_with_rank,
            generator=torch.Generator(),  # its own: the loader draws a seed, which must not change the model's dropout
        )
    )


def list_first(samples: SampleStream, spec: RunSpec, data_rank: int, count: int) -> list[MicroBatch]:
    """Return this data-parallel rank's micro-batches of the stream's first `count` samples."""
    batches = _MicroBatches(samples, spec, data_rank)
    return [batches[number] for number in range(count // (spec.batch.micro * spec.data_parallel))]


def _create_worker_context() -> Any:
    """Return the context in which workers start: by a fork server that imports torch once for all workers of the rank.

    Workers do not fork from the rank: it has threads of gloo, NCCL, CUDA and OpenMP, and a lock that a thread holds at
    the fork would stay locked in the child for ever. With spawn, each worker would import torch.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _end_with_rank(_worker: int) -> None:
    """End this worker when its rank dies for any reason.

    torch's own watchdog checks the parent process. Here this is the fork server, which lives as long as its workers, so
    that a killed rank would leave all of them behind.
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
    """Return each token's place in its document, and labels without the first token of each document: the previous
    document would predict it."""
    assert kind.positions
    places = [_places(row, eos) for row in rows]
    # Padding counts as a beginning too: its labels are ignored anyway.
    begins = _fill_rows(places, length, 0) == 0
    labels = {name: tensors[name].masked_fill(begins, filler) for name, filler in kind.arguments.items() if filler < 0}
    return {kind.positions: _fill_rows(places, length, 0), **labels}


def _places(row: NDArray[Any], eos: int | None) -> NDArray[np.int64]:
    """Return 0, 1, 2 … within each document of a row, up to its EOS; shape (tokens,)."""
    places = np.arange(len(row))
    begins = np.concatenate([[0], np.flatnonzero(row == eos) + 1]) if eos is not None else np.zeros(1, np.int64)
    return places - begins[np.searchsorted(begins, places, side="right") - 1]


def _fill_rows(rows: Any, length: int, filler: int, hidden: float = 0.0) -> torch.Tensor:
    """Return rows as one tensor of (rows, length). `filler` pads short rows and replaces the first `hidden` share."""
    batch = np.full((len(rows), length), filler, dtype=np.int64)  # (rows, length)
    for line, row in zip(batch, rows, strict=True):
        begin = int(hidden * len(row))
        line[begin : len(row)] = row[begin:]
    return torch.from_numpy(batch)
