"""Computing time of one rank in a step, pass by pass, from its work and the machine's rates, or from a rehearsal.

Rates were calibrated on the machine; without a calibration, published rates of the machine are used. Matrix products,
attention, element-wise work and the optimizer run one after the other. If the rate of a product was not calibrated, two
times are computed: the time of its tiles and the time of its memory traffic. The longer of the two times is used (the
roofline model, doi 10.1145/1498765.1498785). On a GPU the host starts operations while earlier operations run, so a
pass takes about as long as the longer of host time and device time. On a CPU, the time to start operations is added to
the pass.

A product on a GPU takes longer than its FLOPs divided by the best rate. Tiles and waves of tiles may be partly empty,
and the start and end of each tile take time. A library divides the result into tiles, and a multiprocessor computes one
tile at a time (NVIDIA, Matrix Multiplication Background User's Guide: tile and wave quantization). The library chooses
the size of the tiles and the number of slices of the inner dimension k. Like the library, this module makes the choice
with the shortest time.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from bench.core.errors import UserError
from bench.core.machine import Machine, MatmulRate, ProductKind
from bench.core.network import Attention, Stacks, list_tensors
from bench.core.spec import FULL, WIDTH, Device, Precision, RunSpec
from bench.engines import find_facts
from bench.predict.work import Matmul, PassWork, compute_backward, compute_forward, compute_recomputed
from bench.predict.workload import OWN, Software, Workload, build_workload, get_network

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of a tile of the result: the sizes that NVIDIA's guide lists."""
DIVISIONS = (1, 2, 4, 8)
"""Numbers of slices into which a library may divide the inner dimension k of a product."""
NEEDED_INTENSITY = 43.0
"""FLOPs per loaded byte below which a tile waits for memory. It is the ratio of two rates of an A100: 221,184 FLOPs per
clock in 16 bits, and 5,120 bytes per clock from its L2 cache (NVIDIA, A100 white paper)."""
STARTED_K = 160
"""Time for the start and end of a tile, in which the tile loads its operands from memory and writes its result back.
The unit is elements of the inner dimension k: start and end take as long as computing this many elements of k.

With this value, a product of k = 1024 loses 14 % of its rate. Values of 64 to 256 are plausible; they correspond to 1.5
to 6 µs for the largest tile of an A100. The value was chosen in that range together with the constant BESIDE.
"""
ALIGNMENT_BYTES = 16
"""Row alignment in bytes that tensor cores need to load whole vectors of the operands."""
UNALIGNED = 3.0
"""Factor on the time of unaligned products. NVIDIA's guide shows 2 to 4 for 16-bit operands."""
NEIGHBOURS = 4
"""Number of calibrated shapes from which a rate is interpolated. Weights are the inverse squared distance in log space.
"""
CEILING_OF_PEAK: dict[Precision, float] = {"fp32": 0.93, "bf16": 0.8, "fp16": 0.8}
"""Rate of the best matrix product as a share of the device's peak. Used if the rate of the best product is not
published.

Measured shares in 16 bits are A100 0.87, H100 and H200 0.80, B200 0.78, MI300X 0.51 (ml-engineering @744d01e,
accelerator benchmarks). fp32 needs far less memory bandwidth and power per FLOP: V100 reaches 14.4 of 15.7 TFLOP/s, a
share of 0.92 (arXiv 1804.06826 has 0.92 to 0.94).
"""
ATTENTION_OF_MATMUL = 0.5
"""Rate of a fused attention kernel as a share of the best matrix product's rate. Used if the rate of the kernel was not
calibrated. Fused kernels reach 0.3 to 0.5 of the peak for head width 64 (arXiv 2307.08691, figures 4 and 5, kernels
that accept a bias). The best product reaches 0.87 of the peak."""
MEMORY_OF_PEAK = 0.88
"""Memory rate that element-wise work reaches, as a share of the published rate. Device copies reach 0.88 on V100, 0.87
on A100 and 0.90 on H200 (the last in ml-engineering @744d01e)."""
SUSTAINED_OF_BURST = 0.775
"""Sustained rate of large products in training as a share of the best product, for GPUs in 16 bits. Used if the
sustained rate is not published. The value was derived from published step times on A100 (conf/machine/a100_80.yaml)."""
BESIDE = 3.0
"""Order p of the norm that combines host time and device time of a pass, (host^p + device^p)^(1/p).

p = ∞ would mean full overlap (the pass takes the longer of the two times). p = 1 would mean no overlap (the pass takes
their sum). The value lies between, because each pass has two kinds of operations: during large products the host runs
ahead of the device, whereas small operations wait for the host. The value was chosen on two thirds of the published
traces of GPT; the other traces were held out (analysis.validation.published_times).
"""
BETWEEN_S = 1.5e-6
"""Seconds between two operations on a GPU whose queue is never empty, from the end of one to the start of the next.
NVIDIA reports 1 to 2 µs (Getting Started with CUDA Graphs)."""
MODULE_OF_KERNEL = 2.7
"""Host's time for an operation of a Python module on a GPU, divided by the calibrated time to start one operation. On
an H200's host, the calibrated time is 8.3 µs, and the default of 22 µs predicts the steps of mt5_large."""
ADAMW_PASSES = {"torch": 20, "fused": 7, "native": 7}
"""fp32 values that AdamW reads and writes per parameter, by implementation.

A fused kernel reads gradient, weight and two moments, and writes weight and moments. torch's unfused implementation
runs a decay, a lerp, a product, a square root, a quotient, a sum and the update one after the other. Each of these
operations reads its operands from memory and writes its result.
"""
OTHER_PASSES = {
    ("adamw_8bit", "cuda"): 4,
    ("adamw_8bit", "cpu"): 27,
    ("adafactor", "cuda"): 23,
    ("adafactor", "cpu"): 23,
}
"""fp32 values that other optimizers read and write per parameter, by optimizer and device. These numbers have not been
compared with measurements. bitsandbytes' kernel for GPUs reads and writes weight, gradient and a byte of each moment.
bitsandbytes' code for CPUs and transformers' Adafactor run operation by operation, so they read and write more."""
UPDATE_PASSES = 4
"""fp32 values read and written per parameter by the rest of the update. The gradient is read for its norm, then read
and written for its scaling, and the weights are copied."""
UNCALIBRATED = OWN.interval
"""Low and high ratio of true to predicted computing time, without a calibration and for unknown software.

The interval contained 89 to 90 % of the published step times of decoders. For this test, the steps of each publication
were predicted with constants that had been chosen on the other publications only. Ratios vary more between publications
than within a publication, so all steps of one publication may lie outside the interval
(analysis.validation.published_steps).
"""
CALIBRATED = (0.8, 1.6)
"""Low and high ratio of true to predicted computing time, for predictions from calibrated rates. The high ratio is far
above 1, since calibrated rates exclude an engine's work on the host. On one node of the testbed (a cluster of CPU nodes
within one machine), steps took 0.87 to 1.57 times their prediction. ZeRO stage 3 had the largest factor
(results/predictions)."""
HOST_WORK = f"its work on the host depends on the processor (on CPUs, steps took up to {CALIBRATED[1]} times as long)"
"""Text on the work of an engine on the host. On a CPU, predictions do not contain it. On a GPU, they contain the work
that was measured on one host. The text uses the high end of CALIBRATED."""
REHEARSED = (0.9, 1.1)
"""Low and high ratio of true to predicted computing time if the prediction uses a rehearsal (one real rank, the other
ranks simulated). Steps on one node took 0.94 to 1.06 times their prediction (results/predictions)."""


# -- rates


@functools.lru_cache(maxsize=65536)  # points of a sweep share it
def count_tiled_flops(product: Matmul, width: int, multiprocessors: int | None) -> float:
    """Return the number of FLOPs that the device could do at its best rate in the time of `product`. This number
    exceeds the product's own FLOPs, since tiles may be partly empty and the start and end of each tile take time.
    `width` is the number of bytes per element.

    If `multiprocessors` is None, all waves of tiles are assumed to be full.
    """
    m, k, n, times = product[:4]
    divisions = DIVISIONS if multiprocessors else (1,)
    best = min(_count_with_tile(m, k, n, tile, parts, width, multiprocessors) for tile in TILES for parts in divisions)
    # fp32 products without TF32 use no tensor cores, so alignment and intensity do not matter to them
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
    """Shapes of the calibrated products of one kind with their rates, one row per product."""

    sizes: NDArray[np.float64]  # log2 of m, k, n
    rates: NDArray[np.float64]  # log2 of FLOP/s

    def interpolate_s(self, products: Sequence[Matmul]) -> float:
        """Return the total seconds of `products`, whose rates are interpolated from the nearest calibrated shapes."""
        wanted = np.log2([product[:3] for product in products])
        distance = ((wanted[:, None, :] - self.sizes) ** 2).sum(axis=2)  # (products, shapes)
        nearest = distance.argsort(axis=1)[:, :NEIGHBOURS]
        weights = 1 / np.maximum(np.take_along_axis(distance, nearest, 1), 1e-6)  # an equal shape outweighs the rest
        rates = 2 ** ((self.rates[nearest] * weights).sum(axis=1) / weights.sum(axis=1))
        return float(([product.flops for product in products] / rates).sum())


@dataclass(frozen=True, eq=False)  # compared by identity, because it is a key of caches
class DeviceRates:
    """Speeds of matrix products, memory and attention of a device in one precision, calibrated or published."""

    device: Device
    width: int  # bytes per element
    ceiling: float  # FLOP/s of the best product
    memory: float  # bytes/s
    attention: float  # FLOP/s
    start_s: float  # host's seconds to start one operation of the model
    engine_start_s: float  # seconds of one operation of the engine's work on the host
    shapes: dict[ProductKind, CalibratedShapes] | None
    calibrated_attention: bool
    multiprocessors: int | None
    pace: float = 1.0  # ratio of the time of a pass to the time of its work at these rates

    def products_s(self, work: PassWork) -> float:
        """Return the seconds of all matrix products of a pass, including those of attention."""
        if self.calibrated_attention or self.device == "cpu":
            attention_s = work.attention_flops / self.attention
        else:  # the many batched products fill a device, so there is no wave quantization
            written_out = sum(self._product_s(p, None) for p in work.batched)
            attention_s = work.fused_flops / self.attention + written_out
        if self.shapes is not None:
            return attention_s + self._interpolate_s(self.shapes, work.matmuls)
        return attention_s + sum(self._product_s(p, self.multiprocessors) for p in work.matmuls)

    @staticmethod
    def _interpolate_s(shapes: dict[ProductKind, CalibratedShapes], products: Sequence[Matmul]) -> float:
        """Return the total seconds of `products`. If a calibration has no products of some kind, those of forward are
        used in their place."""
        total_s = 0.0
        for kind in get_args(ProductKind):
            if of_kind := [product for product in products if product.kind == kind]:
                found = shapes.get(kind) or shapes["forward"]
                total_s += found.interpolate_s(of_kind)
        return total_s

    def _product_s(self, product: Matmul, multiprocessors: int | None) -> float:
        moved = product.elements * self.width / self.memory
        if self.device == "cpu":
            return max(product.flops / self.ceiling, moved)
        return max(count_tiled_flops(product, self.width, multiprocessors) / self.ceiling, moved)

    def pass_s(self, work: PassWork, host_operations: float = 0.0) -> float:
        """Return the seconds of one pass, including the host's time to start its operations. `host_operations` is the
        additional work of the engine on the host, as a number of operations."""
        between = work.operations * BETWEEN_S if self.device == "cuda" else 0.0
        running = self.products_s(work) + work.moved_bytes / self.memory + between
        starting, of_engine = work.operations * self.start_s, host_operations * self.engine_start_s
        if self.device == "cpu":  # the host is the device, so nothing overlaps
            return running + starting + of_engine
        # The engine's work does not depend on the class of the model's kernels, so neither does its time.
        starting += of_engine / self.pace
        return self.pace * float((running**BESIDE + starting**BESIDE) ** (1 / BESIDE))


@functools.lru_cache(maxsize=64)  # points of a sweep share it
def read_rates(
    machine_json: str, precision: Precision, device: Device, software: Software = OWN, *, biased: bool = True
) -> DeviceRates:
    """Return the rates of a machine. The machine is given as JSON text, so that calls can be cached. Raise UserError if
    a rate is unknown.

    `biased` is True for a model whose attention adds a position bias, as T5's. On a GPU, only such models use the
    calibrated rate of attention, because other models run other kernels, which are several times as fast.

    `software` describes how much the kernels of the training software are optimised. If the machine was calibrated, two
    values of `software` are not used: the host's time to start an operation, and the factor on predicted times
    (`pace`).
    """
    machine = Machine.model_validate_json(machine_json)
    found, memory = machine.calibration, machine.memory_bytes_per_s
    products = [p for p in found.matmul if p.precision == precision] if found else []
    missing = None if memory else "memory_bytes_per_s"
    if not products and precision not in {**machine.peak_tflops, **machine.matmul_ceiling_tflops}:
        missing = f"peak_tflops.{precision}"
    if missing or memory is None:
        rule = f"machine={machine.name} has no {missing}"
        raise UserError("", rule, "measure it with zeroscale calibrate, or choose another machine")
    if "sustained_tflops" in machine.calibrated and (limit := machine.sustained_tflops.get(precision)):
        # products are calibrated in bursts, in which a GPU may use more power than it can for long
        products = [p.model_copy(update={"tflops": min(p.tflops, limit)}) for p in products]
    shapes = _group_by_kind(products)
    best = max((p.tflops for p in products), default=0.0)
    ceiling = 1e12 * (best or _find_sustained(machine, precision, device))
    attention = found.attention_tflops.get(precision) if found and (biased or device == "cpu") else None
    # a calibrated memory rate is that of a copy already; a CPU's published rate is used unchanged
    published = device == "cuda" and "memory_bytes_per_s" not in machine.calibrated
    start_s, engine_start_s = (software.start_s, OWN.start_s) if device == "cuda" else (0.0, 0.0)
    if found and found.kernel_s:
        start_s = engine_start_s = found.kernel_s * (MODULE_OF_KERNEL if device == "cuda" else 1.0)
    share = machine.attention_of_matmul or ATTENTION_OF_MATMUL
    # calibrated products include the software's effects
    pace = software.pace if device == "cuda" and not shapes else 1.0
    return DeviceRates(
        device, WIDTH[precision], ceiling, memory * (MEMORY_OF_PEAK if published else 1.0),
        1e12 * attention if attention else share * ceiling, start_s, engine_start_s, shapes or None,
        attention is not None, machine.multiprocessors, pace,
    )  # fmt: skip


def _group_by_kind(products: Sequence[MatmulRate]) -> dict[ProductKind, CalibratedShapes]:
    """Return the calibrated products by kind, without kinds that were not calibrated. If only gradients were
    calibrated, they also count as forward."""
    found = dict[ProductKind, CalibratedShapes]()
    for kind in get_args(ProductKind):
        rows = [p for p in products if p.kind == kind] or (products if kind == "forward" else [])
        if rows:
            table = np.log2([(p.m, p.k, p.n, p.tflops) for p in rows])
            found[kind] = CalibratedShapes(table[:, :3], table[:, 3] + np.log2(1e12))
    return found


def _find_sustained(machine: Machine, precision: Precision, device: Device) -> float:
    """Return the rate of large products in training, in TFLOP/s.

    The machine file may have two rates, the sustained rate and the rate of the best product; the lower of them is
    returned. If the file has neither, the returned rate is a share of the device's peak.
    """
    if known := _list_product_rates(machine, precision):
        return min(known)
    return _find_share_of_peak(precision, device) * machine.peak_tflops.get(precision, 0.0)


def _list_product_rates(machine: Machine, precision: Precision) -> list[float]:
    """Return the published rates of large products in TFLOP/s. Empty if the machine file has none."""
    rates = machine.sustained_tflops.get(precision), machine.matmul_ceiling_tflops.get(precision)
    return [rate for rate in rates if rate]


def _find_share_of_peak(precision: Precision, device: Device) -> float:
    """Return the assumed rate of large products in training as a share of the device's peak."""
    kept = SUSTAINED_OF_BURST if device == "cuda" and precision != "fp32" else 1.0
    return kept * CEILING_OF_PEAK[precision]


def describe_assumed_rate(machine: Machine, precision: Precision, device: Device) -> str:
    """Return a sentence if the rate of matrix products is assumed to be a share of the device's peak. Empty if the rate
    was calibrated or published."""
    calibrated = machine.calibration.matmul if machine.calibration else ()
    if any(product.precision == precision for product in calibrated) or _list_product_rates(machine, precision):
        return ""
    missing = f"neither sustained_tflops.{precision} nor matmul_ceiling_tflops.{precision}"
    share = f"{_find_share_of_peak(precision, device):.3g} × peak_tflops.{precision}"
    return f"machine={machine.name} has {missing}: the rate of matrix products is assumed to be {share}."


# -- passes of a step


class ComputeTime(NamedTuple):
    """Computing seconds of one rank in one step, for all micro-steps together."""

    forward: float
    recomputation: float
    backward: float
    optimizer: float
    bound: str  # name of the largest kind of work
    doubt: tuple[float, float] = UNCALIBRATED  # low and high ratio of true to predicted time

    @property
    def total(self) -> float:
        return self.forward + self.recomputation + self.backward + self.optimizer

    def scaled(self, factor: float) -> "ComputeTime":
        """Return this time with all its seconds multiplied by `factor`."""
        forward, recomputation, backward, optimizer = (factor * seconds for seconds in self[:4])
        return ComputeTime(forward, recomputation, backward, optimizer, self.bound, self.doubt)


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """A configuration with all inputs of its step-time prediction. Derived values are computed once."""

    spec: RunSpec
    machine: Machine
    device: Device
    software: Software = OWN
    rehearsed_s: float | None = None  # computing seconds of the first rank in a step, from a rehearsal

    @functools.cached_property
    def rates(self) -> DeviceRates:
        """Rates of the device; raises UserError if a rate is unknown."""
        biased = any(
            isinstance(p, Attention) and p.position_bias for s in get_network(self.spec).stacks for p in s.block
        )
        text = self.machine.model_dump_json()
        return read_rates(text, self.spec.precision, self.device, self.software, biased=biased)

    @functools.cached_property
    def load(self) -> Workload:
        """Workload of one rank in a micro-step."""
        return build_workload(self.spec, self.device, self.software)

    @property
    def doubt(self) -> tuple[float, float]:
        """Low and high ratio of true to predicted computing time."""
        if self.rehearsed_s is not None:
            return REHEARSED
        return self.software.interval if self.rates.shapes is None else CALIBRATED

    @property
    def contention(self) -> float:
        """Factor by which computing takes longer because several ranks share a processor. It is 1 on a GPU, and also if
        the calibration did not measure it."""
        slowdown = self.machine.calibration.slowdown if self.machine.calibration else ()
        if self.device == "cuda" or not slowdown:
            return 1.0
        sharing = self.spec.world_size if self.machine.nodes_share_processor else self.spec.devices_per_node
        if sharing <= len(slowdown):
            return slowdown[sharing - 1]
        # all processors are busy, so the time grows in proportion to the ranks
        return slowdown[-1] * sharing / len(slowdown)


class PassTimes(NamedTuple):
    """Seconds of each pass of one micro-step on one device."""

    forward: float
    recomputation: float
    backward: float
    kinds: dict[str, float]  # seconds that each kind of work would take alone


def predict_compute_time(context: StepContext, updated: int) -> ComputeTime:
    """Return the computing time of one rank in a step. The rank's optimizer updates `updated` elements. If the total
    time was measured in a rehearsal (one real rank, the other ranks simulated), this total is divided among the passes
    in proportion to their predicted times. Raise UserError if a rate is unknown."""
    spec, steps = context.spec, context.spec.accumulation
    network = get_network(spec)
    passes = _compute_engine_passes(context, network)
    updating = compute_update_s(spec, updated, context.rates)
    found = build_compute_time([passes], updating, steps)._replace(doubt=context.doubt)
    # a rehearsal runs one rank alone, so it contains no contention
    if context.rehearsed_s is not None:
        found = found.scaled(context.rehearsed_s / found.total)
    return found.scaled(context.contention)


def build_compute_time(passes: list[PassTimes], updating: float, micro_steps: int) -> ComputeTime:
    """Return the computing time of a rank in a step. `passes` has the times of one micro-step for each pipeline stage
    of the rank. `updating` is the seconds of the optimizer's update."""
    kinds = {name: sum(one.kinds[name] for one in passes) for name in passes[0].kinds}
    kinds["memory traffic of the optimizer"] = updating / micro_steps
    forward, recomputation, backward = (
        micro_steps * sum(float(getattr(one, name)) for one in passes)
        for name in ("forward", "recomputation", "backward")
    )
    return ComputeTime(forward, recomputation, backward, updating, max(kinds, key=lambda name: kinds[name]))


@functools.lru_cache(maxsize=1024)  # points of a sweep that differ in engine or ranks share it
def _compute_passes(network: Stacks, load: Workload, known: DeviceRates, host_operations: float) -> PassTimes:
    forward, again = compute_forward(network, load), compute_recomputed(network, load)
    return time_passes(forward, again, known, host_operations)


def _compute_engine_passes(context: StepContext, network: Stacks) -> PassTimes:
    """Return the mean times of the passes of a step's micro-steps. On a GPU, they include the engine's work on the
    host."""
    facts, steps = find_facts(context.spec), context.spec.accumulation
    if facts is None or context.device == "cpu":
        return _compute_passes(network, context.load, context.rates, 0.0)
    tensors = sum(tensors.number for tensors in list_tensors(network))
    each, once = facts.host_operations * tensors, facts.host_operations_of_update * tensors
    usual, last = (_compute_passes(network, context.load, context.rates, count) for count in (each, each + once))
    kinds = {name: ((steps - 1) * usual.kinds[name] + last.kinds[name]) / steps for name in usual.kinds}
    return usual._replace(backward=((steps - 1) * usual.backward + last.backward) / steps, kinds=kinds)


def time_passes(forward: PassWork, again: PassWork, known: DeviceRates, host_operations: float = 0.0) -> PassTimes:
    """Return the seconds of a forward pass, of the recomputation, and of the backward pass. `forward` is the work of
    the forward pass, and `again` the work of the recomputation. `host_operations` is the engine's work on the host,
    which is mostly done in the backward pass."""
    backward = compute_backward(forward)
    work = forward.plus(again).plus(backward)
    kinds = {
        "matrix products": known.products_s(work),
        "memory traffic of element-wise work": work.moved_bytes / known.memory,
        "starting operations": work.operations * known.start_s + host_operations * known.engine_start_s,
    }
    backward_s = known.pass_s(backward, host_operations)
    return PassTimes(known.pass_s(forward), known.pass_s(again), backward_s, kinds)


def compute_update_s(spec: RunSpec, elements: int, known: DeviceRates) -> float:
    """Return the seconds of an optimizer update of `elements` parameters: the bytes read and written, divided by the
    memory rate. Caches are assumed to have no effect."""
    copies = (
        (known.width + FULL) if known.width < FULL else 0
    )  # the gradient converted to fp32, the weight converted back
    other = OTHER_PASSES.get((spec.optimizer.name, known.device), ADAMW_PASSES[spec.optimizer.implementation])
    moved = FULL * (other + UPDATE_PASSES) + 2 * copies
    return moved * elements / known.memory
