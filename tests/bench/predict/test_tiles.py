"""Tests of the time of a matrix product by its shape, compared with hand calculations for a device with 108
multiprocessors. A product is divided into tiles. In each wave, every multiprocessor computes one tile. Products with
unaligned sizes take longer."""

import pytest

from bench.predict.step_time.compute import NEEDED_INTENSITY, STARTED_K, UNALIGNED, count_tiled_flops
from bench.predict.work import Matmul


def find_share(product: Matmul, width: int = 2, multiprocessors: int | None = 108) -> float:
    """Return the rate of a product divided by the best possible rate. `width` is the number of bytes of an element."""
    return product.flops / count_tiled_flops(product, width, multiprocessors)


def test_full_waves_of_full_tiles_lose_only_the_start_and_end_of_each_tile() -> None:
    product = Matmul(256 * 9, 8192, 128 * 12)  # 108 tiles of 256 × 128
    assert find_share(product) == pytest.approx(8192 / (8192 + STARTED_K))


def test_one_tile_more_than_a_wave_needs_a_second_wave() -> None:
    one_wave, two_waves = Matmul(256 * 108, 8192, 128), Matmul(256 * 109, 8192, 128)
    assert 0.5 < find_share(two_waves) / find_share(one_wave) < 0.9  # smaller tiles reduce the loss
    assert find_share(two_waves, multiprocessors=None) == pytest.approx(find_share(one_wave, multiprocessors=None))


def test_small_tile_is_limited_by_loads_in_16_bits_and_not_in_fp32() -> None:
    one_tile = Matmul(64, 4096, 64)
    started = 4096 / (4096 + STARTED_K)
    assert find_share(one_tile, multiprocessors=None) == pytest.approx(started * 32 / NEEDED_INTENSITY)
    assert find_share(one_tile, width=4, multiprocessors=None) == pytest.approx(started)


def test_small_products_have_a_lower_share_of_the_best_rate() -> None:
    shares = [find_share(Matmul(size, size, size)) for size in (256, 512, 1024, 2048, 8192)]
    assert shares == sorted(shares)
    assert shares[0] < 0.15 and shares[-1] > 0.9


def test_product_with_few_tiles_is_divided_along_k() -> None:
    whole = 2 * 256 * 128 * (65536 + STARTED_K) * 108  # one tile, on one of 108 multiprocessors
    assert count_tiled_flops(Matmul(256, 65536, 128), 2, 108) < whole / 4


def test_rows_not_aligned_to_16_bytes_take_longer() -> None:
    aligned, odd = Matmul(1024, 1024, 50256), Matmul(1024, 1024, 50257)
    ratio = count_tiled_flops(odd, 2, 108) / count_tiled_flops(aligned, 2, 108)
    assert ratio == pytest.approx(UNALIGNED)
    assert count_tiled_flops(odd, 4, 108) == pytest.approx(count_tiled_flops(aligned, 4, 108))


def test_repeated_product_takes_a_multiple_of_its_time() -> None:
    assert count_tiled_flops(Matmul(512, 512, 512, 7), 2, 108) == 7 * count_tiled_flops(Matmul(512, 512, 512), 2, 108)
