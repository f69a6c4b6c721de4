"""What DistributedDataParallel costs beside a pass: every rank has everything, and gradients are all-reduced."""

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
    sum_bytes,
)
from bench.core.spec import FULL, WIDTH, Device, OptimizerSpec, RunSpec
from bench.engines.ddp.options import decode_options
from bench.engines.precision.optimizer import count_adamw_bytes

MIB = 2**20


class DdpMemory(NamedTuple):
    """DDP's part of a rank's memory: an `EngineMemory`."""

    model: ModelSizes
    width: int  # bytes per element of weights and gradients
    view: bool  # gradients lie in their buckets
    optimizer: OptimizerSpec
    device: Device

    def resident(self) -> Terms:
        states = FULL * self.model.elements
        return {
            "weights": self._narrow,
            "master weights": states if self.width < FULL else 0,
            "optimizer moments": 2 * states,
            "gradients": self._narrow,
        }

    def kept_buckets(self) -> int:
        return 0  # counted as gradients

    def initialisation(self, thrown_away: int) -> Terms:
        built = {"weights": self._narrow, "thrown away": self.width * thrown_away}
        return max(built, self.resident() | {"optimizer moments": 0}, key=sum_bytes)

    def forward(self, segments: int) -> SegmentBytes:
        none = np.zeros(segments, np.int64)
        return SegmentBytes(none, none, none)

    def backward(self, work: BackwardWork) -> SegmentBytes:
        """A gradient lies beside its bucket until it is copied, and stays there where it is not a view of it."""
        none = np.zeros_like(work.parameters)
        fresh = self.width * (np.minimum(work.largest, self.model.largest) + work.transposed)
        done = np.cumsum(work.parameters[::-1])[::-1]  # from the end up to and with this segment
        return SegmentBytes(fresh if self.view else fresh + self.width * done, none, none)

    def after_backward(self) -> int:
        return 0

    def update(self) -> Terms:
        copy = FULL * self.model.elements if self.width < FULL else 0  # gradients in fp32
        working = copy + count_adamw_bytes(self.optimizer, self.device, self.model.tensors)
        return self.resident() | {"working memory": working}

    def host(self) -> dict[str, ByteRange]:
        return {}

    @property
    def _narrow(self) -> int:
        """Bytes of the weights, and of their gradients."""
        return self.width * self.model.elements


def predict_memory(spec: RunSpec, model: ModelSizes, device: Device) -> DdpMemory:
    """Return DDP's part of a rank's memory."""
    view = decode_options(spec).gradient_as_bucket_view
    return DdpMemory(model, WIDTH[spec.precision], view, spec.optimizer, device)


def predict_step(spec: RunSpec, model: ModelSizes) -> EngineStep:
    """Return the update of all weights, and the all-reduce of their gradients while backward goes on, at the last
    micro-step; nothing is moved where the rank is alone."""
    if spec.data_parallel == 1:
        return EngineStep(model.elements, [])
    width = WIDTH[spec.precision]
    gradients, last = width * model.elements, width * model.largest  # the embedding's gradient is complete last
    calls = max(1, round(gradients / (decode_options(spec).bucket_cap_mb * MIB)))
    reduced = Transfer("all_reduce", "backward", gradients, calls, 1, True, spec.data_parallel, last)
    return EngineStep(model.elements, [reduced])
