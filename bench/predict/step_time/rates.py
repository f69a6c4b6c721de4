"""Seconds of work on one device: from rates that were calibrated on the machine, else from its published ceilings.

Products, attention, element-wise work and the optimizer run one after the other. Where shapes were not calibrated, a
product takes the time of its FLOPs or of its traffic, whichever is longer (the roofline model,
doi 10.1145/1498765.1498785). On a GPU the host starts operations while others run, so a pass takes the longer of the
two; on a CPU starting them is part of it.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.errors import UserError
from bench.machine import Machine
from bench.predict.work import Matmul, PassWork
from bench.spec import WIDTH, Device, Precision

NEIGHBOURS = 4
"""Calibrated shapes that a rate is interpolated from, weighted by inverse squared distance in log space."""
CEILING_OF_PEAK = 0.8
"""Best matmul as a share of the peak, where nobody published it: A100 0.87, H100 and H200 0.80, B200 0.78, MI300X 0.51
(ml-engineering @744d01e, accelerator benchmarks)."""
ATTENTION_OF_MATMUL = 0.5
"""Rate of attention with a bias as a share of a product's, where it was not calibrated: assumed, without a source.
Attention is 2 to 7 % of the FLOPs of the published models at 512 and 128 tokens."""


class CalibratedShapes(NamedTuple):
    """Calibrated products, one row each."""

    sizes: NDArray[np.float64]  # log2 of m, k, n
    rates: NDArray[np.float64]  # log2 of FLOP/s


class DeviceRates(NamedTuple):
    """What a device does per second in one precision."""

    device: Device
    width: int  # bytes per element
    ceiling: float  # FLOP/s of the best product
    memory: float  # bytes/s
    attention: float  # FLOP/s
    start_s: float  # to start one operation; 0 where that is unknown
    shapes: CalibratedShapes | None

    def products_s(self, work: PassWork) -> float:
        """Return the seconds of all matrix products, those of attention included."""
        attention = work.attention_flops / self.attention
        if self.shapes is None:
            moved = self.width / self.memory
            return attention + sum(max(p.flops / self.ceiling, p.elements * moved) for p in work.matmuls)
        return attention + _interpolate(self.shapes, work.matmuls)

    def running_s(self, work: PassWork) -> float:
        """Return the seconds that the device computes."""
        return self.products_s(work) + work.traffic_bytes / self.memory

    def pass_s(self, work: PassWork) -> float:
        """Return the seconds of one pass, the host's included."""
        running, starting = self.running_s(work), work.operations * self.start_s
        return running + starting if self.device == "cpu" else max(running, starting)


def _interpolate(shapes: CalibratedShapes, products: tuple[Matmul, ...]) -> float:
    """Return the seconds of `products` at the rates of their nearest calibrated shapes, all at once."""
    if not products:
        return 0.0
    wanted = np.log2([product[:3] for product in products])
    distance = ((wanted[:, None, :] - shapes.sizes) ** 2).sum(axis=2)
    nearest = distance.argsort(axis=1)[:, :NEIGHBOURS]
    weights = 1 / np.maximum(np.take_along_axis(distance, nearest, 1), 1e-6)  # a calibrated shape outweighs others
    rates = 2 ** ((shapes.rates[nearest] * weights).sum(axis=1) / weights.sum(axis=1))
    return float(([product.flops for product in products] / rates).sum())


def find_lacking(machine: Machine, precision: Precision) -> str | None:
    """Return the name of the number without which no time can be told on `machine`, or None."""
    measured = machine.calibration and any(product.precision == precision for product in machine.calibration.matmul)
    if not measured and precision not in {**machine.peak_tflops, **machine.matmul_ceiling_tflops}:
        return f"peak_tflops.{precision}"
    return None if machine.memory_bytes_per_s else "memory_bytes_per_s"


@lru_cache(maxsize=64)  # points of a sweep share it
def read_rates(machine_json: str, precision: Precision, device: Device) -> DeviceRates:
    """Return what `machine` (as JSON, which can be cached by) does per second; UserError where it is not known."""
    machine = Machine.model_validate_json(machine_json)
    if missing := find_lacking(machine, precision):
        rule = f"machine={machine.name} does not say {missing}"
        raise UserError("", rule, "measure it with zeroscale calibrate, or name a machine that does")
    memory = machine.memory_bytes_per_s
    assert memory is not None
    found = machine.calibration
    products = [p for p in found.matmul if p.precision == precision] if found else []
    shapes = _build_shapes([(p.m, p.k, p.n, p.tflops) for p in products]) if products else None
    best = max((p.tflops for p in products), default=0.0)
    peak = machine.peak_tflops.get(precision, 0.0)
    ceiling = 1e12 * (best or machine.matmul_ceiling_tflops.get(precision) or CEILING_OF_PEAK * peak)
    attention = found.attention_tflops.get(precision) if found else None
    return DeviceRates(
        device, WIDTH[precision], ceiling, memory, 1e12 * attention if attention else ATTENTION_OF_MATMUL * ceiling,
        (found.kernel_s if found else None) or 0.0, shapes,
    )  # fmt: skip


def _build_shapes(rows: list[tuple[int, int, int, float]]) -> CalibratedShapes:
    table = np.log2(np.array(rows))
    return CalibratedShapes(table[:, :3], table[:, 3] + np.log2(1e12))
