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

from bench.data import MicroBatch
from bench.spec import RunSpec

PAD = 0  # of every T5 family
IGNORED = -100  # as a label: no loss here


class Samples(Protocol):
    """Sample `index` of an endless stream: (encoder tokens, decoder tokens), 1-d, at most as long as the spec says."""

    @property
    def pads_encoder(self) -> bool:
        """Whether encoder tokens may be fewer than sequence.encoder, so that a model needs an attention mask."""
        ...

    def __call__(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]: ...


class _MicroBatches(Dataset[MicroBatch]):
    """Item n is the n-th micro-batch of one rank.

    The micro-batches of all ranks, taken in turns, cut the stream into runs of `batch.micro` samples; so optimizer
    step s uses samples s × global … (s + 1) × global − 1, however these are spread over ranks and micro-steps.
    """

    def __init__(self, samples: Samples, spec: RunSpec, rank: int) -> None:
        self.samples, self.spec, self.rank = samples, spec, rank

    def __getitem__(self, number: int) -> MicroBatch:
        micro, sequence = self.spec.batch.micro, self.spec.sequence
        first = (number * self.spec.world_size + self.rank) * micro
        inputs, targets = zip(*map(self.samples, range(first, first + micro)), strict=True)
        tensors = {
            "input_ids": _padded(inputs, sequence.encoder, PAD),
            "labels": _padded(targets, sequence.decoder, IGNORED),
        }
        if self.samples.pads_encoder:
            # labels need no mask: their padding comes last, where a causal decoder's real tokens do not look
            tensors["attention_mask"] = _padded([np.ones_like(row) for row in inputs], sequence.encoder, 0)
        return MicroBatch(
            tensors,
            encoder_padding=micro * sequence.encoder - sum(map(len, inputs)),
            decoder_padding=micro * sequence.decoder - sum(map(len, targets)),
        )


def micro_batches(samples: Samples, spec: RunSpec, rank: int) -> Iterator[MicroBatch]:
    """Return the endless micro-batches of `rank`, loaded as spec.data asks."""
    data = spec.data
    return iter(
        DataLoader(
            _MicroBatches(samples, spec, rank),
            batch_size=None,  # an item is a batch already
            sampler=itertools.count(),  # without an end no worker is ever started anew: nothing to keep persistent
            num_workers=data.workers,
            prefetch_factor=data.prefetch if data.workers else None,
            pin_memory=data.pin_memory,
            multiprocessing_context=_worker_context() if data.workers else None,
            worker_init_fn=_end_with_rank,
            generator=torch.Generator(),  # its own: the loader's draw must not move the model's dropout
        )
    )


def _worker_context() -> Any:
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


def _padded(rows: Any, length: int, filler: int) -> torch.Tensor:
    batch = np.full((len(rows), length), filler, dtype=np.int64)
    for line, row in zip(batch, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(batch)
