"""Seconds of work on one device: from rates that were calibrated on the machine, else from its published ones.

Products, attention, element-wise work and the optimizer run one after the other. Where shapes were not calibrated, a
product takes the time of its tiles or of its traffic, whichever is longer (the roofline model,
doi 10.1145/1498765.1498785). On a GPU the host starts operations while others run, so a pass takes the longer of the
two; on a CPU starting them is part of it.

A product on a GPU takes more than its FLOPs: tiles that are not full, waves of tiles that are not, and what begins and
ends each tile. A library divides the result into tiles, one for each multiprocessor at a time (NVIDIA, Matrix
Multiplication Background User's Guide: tile and wave quantization). It chooses the tile, and whether to divide k as
well, for the shortest time; so does this.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.core.errors import UserError
from bench.core.machine import Machine
from bench.core.spec import WIDTH, Device, Precision
from bench.predict.work import Matmul, PassWork
from bench.predict.workload import OWN, Software

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of the result: the sizes that the guide lists."""
DIVISIONS = (1, 2, 4, 8)
"""Parts that k is divided into."""
NEEDED_INTENSITY = 43.0
"""FLOPs that a tile must do for each byte that it loads, or it waits: an A100 does 221,184 in 16 bits per clock, and
its L2 gives 5,120 bytes (NVIDIA, A100 white paper)."""
STARTED_K = 160
"""Elements of k in whose time a tile is begun and ended, of which a product of k = 1024 loses 14 %: its operands come
from memory, its result goes back. 64 to 256 are plausible: 1.5 to 6 µs for the largest tile of an A100. Chosen in that
range as BESIDE was."""
ALIGNMENT_BYTES = 16
"""A row of each operand starts at a multiple of these, or else tensor cores are fed element by element."""
UNALIGNED = 3.0
"""Times as long where it does not: 2 to 4 by the guide's figures for 16-bit operands."""
NEIGHBOURS = 4
"""Calibrated shapes that a rate is interpolated from, weighted by inverse squared distance in log space."""
CEILING_OF_PEAK: dict[Precision, float] = {"fp32": 0.93, "bf16": 0.8, "fp16": 0.8}
"""Best matmul as a share of the peak, where nobody published it. 16 bits: A100 0.87, H100 and H200 0.80, B200 0.78,
MI300X 0.51 (ml-engineering @744d01e, accelerator benchmarks). fp32 needs far less from memory and power per FLOP: V100
14.4 of 15.7, which is 0.92 (arXiv 1804.06826 has 0.92 to 0.94)."""
ATTENTION_OF_MATMUL = 0.5
"""Rate of attention in one kernel as a share of a product's, where it was not calibrated: 0.3 to 0.5 of the peak where
head width is 64 (arXiv 2307.08691, figures 4 and 5, kernels that take a bias among them), the best product 0.87."""
MEMORY_OF_PEAK = 0.88
"""Bytes that element-wise work moves per second as a share of the memory's published rate: V100 0.88, A100 0.87, H200
0.90 (device copies; ml-engineering @744d01e has the last)."""
SUSTAINED_OF_BURST = 0.775
"""Rate that large products keep up in a training as a share of the best product, on a GPU in 16 bits of which nobody
published it: A100's by published steps (conf/machine/a100_80.yaml)."""
BESIDE = 3.0
"""How host and device share a pass: its time is the norm of this order of both. Of two that always overlap it would be
infinite (the longer one), of two that never do 1. Large products let the host run ahead, small operations wait for it,
and each pass has both. Chosen on two thirds of the traces of GPT (analysis.validation.published_times)."""
BETWEEN_S = 1.5e-6
"""Seconds from the end of an operation to the begin of the next on a GPU whose queue is never empty: 1 to 2 µs (NVIDIA,
Getting Started with CUDA Graphs)."""


@lru_cache(maxsize=65536)  # points of a sweep share it
def count_tiled_flops(product: Matmul, width: int, multiprocessors: int | None) -> float:
    """Return FLOPs that take as long at the rate of the best product; `width` in bytes per element.

    Without `multiprocessors`, waves are taken to be full.
    """
    m, k, n, times = product
    best = min(
        _count_with_tile(m, k, n, tile, parts, width, multiprocessors)
        for tile in TILES
        for parts in (DIVISIONS if multiprocessors else (1,))
    )
    aligned = width >= 4 or not (k * width % ALIGNMENT_BYTES or n * width % ALIGNMENT_BYTES)
    return times * best * (1.0 if aligned else UNALIGNED)


def _count_with_tile(
    m: int, k: int, n: int, tile: tuple[int, int], parts: int, width: int, multiprocessors: int | None
) -> float:
    rows, columns = tile
    tiles: float = math.ceil(m / rows) * math.ceil(n / columns) * parts
    if multiprocessors:
        tiles = math.ceil(tiles / multiprocessors) * multiprocessors
    reached = min(1.0, rows * columns / (rows + columns) / NEEDED_INTENSITY) if width < 4 else 1.0
    return tiles * 2 * rows * columns * (k / parts + STARTED_K) / reached


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
    start_s: float  # to start one operation
    shapes: CalibratedShapes | None
    calibrated_attention: bool
    multiprocessors: int | None
    pace: float = 1.0  # time of a pass over that of its work at these rates

    def products_s(self, work: PassWork) -> float:
        """Return the seconds of all matrix products, those of attention included."""
        if self.shapes is not None:
            return self._attention_s(work) + _interpolate(self.shapes, work.matmuls)
        return self._attention_s(work) + sum(self._product_s(p, self.multiprocessors) for p in work.matmuls)

    def _attention_s(self, work: PassWork) -> float:
        if self.calibrated_attention or self.device == "cpu":
            return work.attention_flops / self.attention
        written_out = sum(self._product_s(p, None) for p in work.batched)  # so many at once that they fill a device
        return work.fused_flops / self.attention + written_out

    def _product_s(self, product: Matmul, multiprocessors: int | None) -> float:
        moved = product.elements * self.width / self.memory
        if self.device == "cpu":
            return max(product.flops / self.ceiling, moved)
        return max(count_tiled_flops(product, self.width, multiprocessors) / self.ceiling, moved)

    def running_s(self, work: PassWork) -> float:
        """Return the seconds that the device computes."""
        between = work.operations * BETWEEN_S if self.device == "cuda" else 0.0
        return self.products_s(work) + work.traffic_bytes / self.memory + between

    def pass_s(self, work: PassWork) -> float:
        """Return the seconds of one pass, the host's included."""
        running, starting = self.running_s(work), work.operations * self.start_s
        if self.device == "cpu":
            return running + starting
        return self.pace * float((running**BESIDE + starting**BESIDE) ** (1 / BESIDE))


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
def read_rates(machine_json: str, precision: Precision, device: Device, software: Software = OWN) -> DeviceRates:
    """Return the rates of the machine in `machine_json` (JSON, to cache calls); UserError for an unknown rate. A
    calibration on the machine replaces what is known of the class of software."""
    machine = Machine.model_validate_json(machine_json)
    if missing := find_lacking(machine, precision):
        rule = f"machine={machine.name} does not say {missing}"
        raise UserError("", rule, "measure it with zeroscale calibrate, or name a machine that does")
    memory = machine.memory_bytes_per_s
    assert memory is not None
    found = machine.calibration
    products = [p for p in found.matmul if p.precision == precision] if found else []
    table = np.log2([(p.m, p.k, p.n, p.tflops) for p in products])
    shapes = CalibratedShapes(table[:, :3], table[:, 3] + np.log2(1e12)) if products else None
    best = max((p.tflops for p in products), default=0.0)
    ceiling = 1e12 * (best or _find_sustained(machine, precision, device))
    attention = found.attention_tflops.get(precision) if found else None
    published = device == "cuda" and "memory_bytes_per_s" not in machine.calibrated
    start_s = (found.kernel_s if found else None) or (software.start_s if device == "cuda" else 0.0)
    share = machine.attention_of_matmul or ATTENTION_OF_MATMUL
    pace = software.pace if device == "cuda" and shapes is None else 1.0
    return DeviceRates(
        device, WIDTH[precision], ceiling, memory * (MEMORY_OF_PEAK if published else 1.0),
        1e12 * attention if attention else share * ceiling, start_s, shapes,
        attention is not None, machine.multiprocessors, pace,
    )  # fmt: skip


def _find_sustained(machine: Machine, precision: Precision, device: Device) -> float:
    """Return the rate in TFLOP/s that large products keep up. A file that says nothing but the best product is taken
    as stated, and so is a best product below the sustained rate, which a user's machine file may have."""
    sustained, burst = machine.sustained_tflops.get(precision), machine.matmul_ceiling_tflops.get(precision)
    if known := [rate for rate in (sustained, burst) if rate]:
        return min(known)
    kept = SUSTAINED_OF_BURST if device == "cuda" and precision != "fp32" else 1.0
    return kept * CEILING_OF_PEAK[precision] * machine.peak_tflops.get(precision, 0.0)
