"""Seconds that one rank computes in a step, pass by pass: from its work and the machine's rates, or a rehearsal."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from bench.core.machine import Machine
from bench.core.network import Stacks
from bench.core.spec import FULL, WIDTH, Device, Precision, RunSpec
from bench.predict.step_time.rates import DeviceRates, read_rates
from bench.predict.work import PassWork, compute_backward, compute_forward, compute_recomputed
from bench.predict.workload import OWN, Software, Workload, build_workload, get_network

ADAMW_PASSES = {"torch": 20, "fused": 7, "native": 7}
"""fp32 values read and written per element by AdamW. A fused kernel reads gradient, weight and two moments and writes
three; torch's own makes a decay, a lerp, a product, a square root, a quotient, a sum and the update, one after the
other, each with operands and result in memory."""
UPDATE_PASSES = 4
"""The same beside AdamW: the gradient's norm is read, its scaling read and written, the weights copied."""
UNCALIBRATED = OWN.interval
"""Computing time over its prediction where nothing was calibrated and the class of software is unknown. It held 89 to
90 % of the published steps of decoders, each source predicted by constants of the others. The predicted time is the
median. Sources differ more than steps of one source: of a single source all steps may lie outside
(analysis.validation.published_steps)."""
CALIBRATED = (0.8, 1.6)
"""The same from calibrated rates alone, which know nothing of what an engine does on the host: on one node of the
testbed steps took 0.87 to 1.57 times what was predicted, the latter at stage 3 (results/predictions)."""
REHEARSED = (0.9, 1.1)
"""The same from a rehearsal: one node's steps took 0.94 to 1.06 times what was predicted (as above)."""


class ComputeTime(NamedTuple):
    """Seconds of one rank in one step, all micro-steps together."""

    forward: float
    recomputation: float
    backward: float
    optimizer: float
    bound: str  # what most of it is
    doubt: tuple[float, float] = UNCALIBRATED  # factors, low and high

    @property
    def total(self) -> float:
        return self.forward + self.recomputation + self.backward + self.optimizer

    def scaled(self, factor: float) -> "ComputeTime":
        """Return this `factor` times as long."""
        return self._replace(
            forward=factor * self.forward,
            recomputation=factor * self.recomputation,
            backward=factor * self.backward,
            optimizer=factor * self.optimizer,
        )


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """A point and what its step is predicted from. Derived values are computed once."""

    spec: RunSpec
    machine: Machine
    device: Device
    software: Software = OWN
    rehearsed_s: float | None = None  # computing time of the first rank in a step, by a rehearsal on this machine

    @functools.cached_property
    def machine_json(self) -> str:
        """The machine as a key for caches."""
        return self.machine.model_dump_json()

    @functools.cached_property
    def rates(self) -> DeviceRates:
        """The device's rates; UserError for a rate that is needed and unknown."""
        return read_rates(self.machine_json, self.spec.precision, self.device, self.software)

    @functools.cached_property
    def load(self) -> Workload:
        """The work of one rank in a micro-step."""
        return build_workload(self.spec, self.device, self.software)

    @property
    def doubt(self) -> tuple[float, float]:
        """Computing time over its prediction, low and high."""
        if self.rehearsed_s is not None:
            return REHEARSED
        return self.software.interval if self.rates.shapes is None else CALIBRATED

    @property
    def contention(self) -> float:
        """Factor by which ranks that share a processor compute longer; 1 if that was not calibrated."""
        slowdown = self.machine.calibration.slowdown if self.machine.calibration else ()
        if self.device == "cuda" or not slowdown:
            return 1.0
        sharing = self.spec.world_size if self.machine.nodes_share_processor else self.spec.devices_per_node
        if sharing <= len(slowdown):
            return slowdown[sharing - 1]
        return slowdown[-1] * sharing / len(slowdown)  # all processors are busy: the time grows with the ranks


def predict_compute_time(context: StepContext, updated: int) -> ComputeTime:
    """Return the computing time of one rank, which updates so many elements. A rehearsed time is divided among the
    passes in proportion to their predicted times. Raises UserError for a rate that is needed and unknown."""
    found = _compute_by_rates(context, updated)._replace(doubt=context.doubt)
    if context.rehearsed_s is not None:
        found = found.scaled(context.rehearsed_s / found.total)
    return found.scaled(context.contention)


class PassTimes(NamedTuple):
    """Seconds of a micro-step on one device."""

    forward: float
    recomputation: float
    backward: float
    kinds: dict[str, float]  # what they would take alone


def _compute_by_rates(context: StepContext, updated: int) -> ComputeTime:
    spec = context.spec
    found = _compute_passes(get_network(spec), context.load, context.machine_json, spec.precision)
    updating = compute_update_s(spec, updated, context.rates)
    kinds = found.kinds | {"memory traffic of the optimizer": updating / spec.accumulation}
    bound = max(kinds, key=lambda name: kinds[name])
    passes = found.forward, found.recomputation, found.backward
    forward, recomputation, backward_ = (spec.accumulation * seconds for seconds in passes)
    return ComputeTime(forward, recomputation, backward_, updating, bound)


@functools.lru_cache(maxsize=1024)  # points of a sweep that differ in engine or ranks share it
def _compute_passes(network: Stacks, load: Workload, machine_json: str, precision: Precision) -> PassTimes:
    there, again = compute_forward(network, load), compute_recomputed(network, load)
    return time_passes(there, again, machine_json, precision, load.device, load.software)


def time_passes(
    there: PassWork, again: PassWork, machine_json: str, precision: Precision, device: Device, software: Software = OWN
) -> PassTimes:
    """Return the seconds of a forward pass, of what of it is computed `again`, and of the pass back."""
    known, back = read_rates(machine_json, precision, device, software), compute_backward(there)
    work = there.plus(again).plus(back)
    kinds = {
        "matrix products": known.products_s(work),
        "memory traffic of element-wise work": work.traffic_bytes / known.memory,
        "starting operations": work.operations * known.start_s,
    }
    return PassTimes(known.pass_s(there), known.pass_s(again), known.pass_s(back), kinds)


def compute_update_s(spec: RunSpec, elements: int, known: DeviceRates) -> float:
    """Seconds of the optimizer's step on so many elements; every pass goes over all of them in memory."""
    width = WIDTH[spec.precision]
    copies = (width + FULL) if width < FULL else 0  # the gradient made fp32, the weight narrow again
    moved = FULL * (ADAMW_PASSES[spec.optimizer.implementation] + UPDATE_PASSES) + 2 * copies
    return moved * elements / known.memory
