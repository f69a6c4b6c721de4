"""What FSDP2 costs beside a pass: the memory of its states and of what it gathers, and what a step moves.

Imports no torch. Formulas follow what torch 2.13 allocates and begins; nothing here is fitted to a measurement.
"""

from typing import NamedTuple

from bench.engine_costs import BackwardWork, ByteRange, EngineStep, ModelSizes, SegmentBytes, Terms, sum_bytes
from bench.engines.fsdp.costs import passes
from bench.engines.fsdp.costs.fsdp_run import FsdpRun, fsdp_run, state_bytes
from bench.engines.fsdp.costs.transfers import transfers
from bench.engines.fsdp.options import Options
from bench.engines.precision.costs import count_adamw_bytes
from bench.errors import UserError
from bench.spec import FULL, Device, RunSpec

DRAWN_AT_ONCE = 2**24
"""Elements that are drawn in fp32 at a time when a model is initialised (bench.models.modules.weights)."""


class FsdpMemory(NamedTuple):
    """FSDP2's part of a rank's memory: an `EngineMemory`."""

    run: FsdpRun

    def resident(self) -> Terms:
        return {} if self.run.offloaded else state_bytes(self.run)

    def kept_buckets(self) -> int:
        return 0

    def initialisation(self, thrown_away: int) -> Terms:
        """A tensor is made whole to be drawn, the largest, the head, beside the parts of the others; all parts are made
        fp32 one after the other."""
        run, largest = self.run, self.run.model.largest
        drawn = run.width * largest + FULL * min(largest, DRAWN_AT_ONCE)
        built = {"weights": run.width * (run.part - largest // run.ranks), "working memory": drawn}
        ready = {"weights": FULL * run.part, "working memory": run.width * largest // run.ranks}
        return built if run.offloaded else max(built, ready, key=sum_bytes)

    def forward(self, segments: int) -> SegmentBytes:
        return passes.forward(self.run)

    def backward(self, work: BackwardWork) -> SegmentBytes:
        return passes.backward(self.run, work)

    def after_backward(self) -> int:
        return passes.after_backward(self.run)

    def update(self) -> Terms:
        if self.run.offloaded:
            return {}
        working = count_adamw_bytes(self.run.optimizer, self.run.device, self.run.sizes.shards)
        return self.resident() | {"gradients": FULL * self.run.part, "working memory": working}

    def host(self) -> dict[str, ByteRange]:
        if not self.run.offloaded:
            return {}
        terms = state_bytes(self.run) | {"gradients": FULL * self.run.part}
        return {name: (size, size) for name, size in terms.items()}


def memory(options: Options, spec: RunSpec, model: ModelSizes, device: Device, rehearsed: bool) -> FsdpMemory:
    """Return FSDP2's part of a rank's memory."""
    return FsdpMemory(fsdp_run(options, spec, model, device, rehearsed=rehearsed))


def step(options: Options, spec: RunSpec, model: ModelSizes, device: Device) -> EngineStep:
    """Return what FSDP2 adds to a step; UserError for what is not predicted."""
    run = fsdp_run(options, spec, model, device)
    if run.offloaded:
        rule = "what moves between device and host, and AdamW on the host, are not predicted"
        raise UserError("time with offload", rule, "measure it")
    return EngineStep(run.part, transfers(run))
