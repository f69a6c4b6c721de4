"""What a product of matrices takes on a GPU beyond its FLOPs: tiles that are not full, waves of tiles that are not, and
what begins and ends each tile.

A library divides the result into tiles, one for each multiprocessor at a time (NVIDIA, Matrix Multiplication
Background User's Guide: tile and wave quantization). It chooses the tile, and whether to divide k as well, for the
shortest time; so does this.
"""

import math
from functools import lru_cache

from bench.predict.work import Matmul

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
range as BESIDE of `rates` was."""
ALIGNMENT_BYTES = 16
"""A row of each operand starts at a multiple of these, or else tensor cores are fed element by element."""
UNALIGNED = 3.0
"""Times as long where it does not: 2 to 4 by the guide's figures for 16-bit operands."""


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
