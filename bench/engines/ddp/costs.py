"""Memory and transfers that DistributedDataParallel adds to those of the forward and backward passes. Every rank holds
all weights, gradients and optimizer state, and gradients are all-reduced. Frozen weights have neither gradients nor
optimizer state."""

from typing import NamedTuple

import numpy as np

from bench.core.engine_costs import (
    BackwardWork,
    ByteRange,
    EngineStep,
    ModelSizes,
    SegmentBytes,
    Terms,
    Transfer,
    count_elements,
    sum_bytes,
)
from bench.core.spec import FULL, WIDTH, Device, RunSpec
from bench.engines.ddp.options import Options
from bench.engines.precision import count_model_moment_bytes, count_update_bytes

MIB = 2**20
BROADCAST_BYTES = 250 * MIB
"""Size of the flat tensor in which DDP broadcasts the weights of the first rank when DDP wraps the model."""


class DdpMemory(NamedTuple):
    """Memory of a rank for DDP: weights, gradients, optimizer state and buckets, without activations. Implements the
    interface `bench.core.engine_costs.EngineMemory`."""

    spec: RunSpec
    model: ModelSizes
    device: Device

    @property
    def width(self) -> int:
        """Bytes per element of weights and gradients."""
        return WIDTH[self.spec.precision]

    def resident(self) -> Terms:
        states, narrow = FULL * self.model.elements, self.width * self.model.elements
        return {
            "weights": narrow + self.model.count_frozen_bytes(self.width),
            "master weights": states if self.width < FULL else 0,
            "optimizer moments": count_model_moment_bytes(self.spec.optimizer, self.model),
            "gradients": narrow,
        }

    def kept_buckets(self) -> int:
        return 0  # buckets are already counted as gradients

    def initialisation(self, discarded: int) -> Terms:
        elements = count_elements(self.model.all_tensors)  # frozen matrices are quantised after they were built
        built = {"weights": self.width * elements, "thrown away": self.width * discarded}
        weights = self.resident()["weights"]
        synchronised = {"weights": weights, "working memory": min(weights, BROADCAST_BYTES)}
        return max(built, self.resident() | {"optimizer moments": 0}, synchronised, key=sum_bytes)

    def forward(self, segments: int) -> SegmentBytes:
        none = np.zeros(segments, np.int64)
        return SegmentBytes(none, none, none)

    def backward(self, work: BackwardWork) -> SegmentBytes:
        """Return the bytes of gradients while each segment of the model runs its backward. A new gradient is a tensor
        of its own until it is copied into its bucket. Without `gradient_as_bucket_view`, this tensor stays allocated
        after the copy."""
        none = np.zeros_like(work.parameters)
        fresh = self.width * (np.minimum(work.largest, self.model.largest) + work.transposed)  # (segments,)
        done = np.cumsum(work.parameters[::-1])[::-1]  # (segments,): summed from the last segment to this one
        view = Options.of(self.spec).gradient_as_bucket_view
        return SegmentBytes(fresh if view else fresh + self.width * done, none, none)

    def after_backward(self) -> int:
        return 0

    def update(self) -> Terms:
        copy = FULL * self.model.elements if self.width < FULL else 0  # gradients in fp32
        working = copy + count_update_bytes(self.spec.optimizer, self.device, self.model.tensors)
        return self.resident() | {"working memory": working}

    def host(self) -> dict[str, ByteRange]:
        return {}


def predict_step(spec: RunSpec, model: ModelSizes) -> EngineStep:
    """Return the costs of an optimizer step: the update of trained weights, and the all-reduce of their gradients. The
    all-reduce overlaps with the backward pass of the last micro-step. A single rank has no transfer."""
    if spec.data_parallel == 1:
        return EngineStep(model.elements, [])
    width = WIDTH[spec.precision]
    gradients, last = width * model.elements, width * model.largest  # the embedding's gradient is complete last
    calls = max(1, round(gradients / (Options.of(spec).bucket_cap_mb * MIB)))
    reduced = Transfer("all_reduce", "backward", gradients, calls, 1, True, spec.data_parallel, last)
    return EngineStep(model.elements, [reduced])
