"""Work of one pass over a model on one rank: products of matrices, attention, traffic to memory, operations started."""

from typing import NamedTuple, Self


class Matmul(NamedTuple):
    """Products of an m × k by a k × n matrix, `times` of them."""

    m: int
    k: int
    n: int
    times: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n * self.times

    @property
    def elements(self) -> int:
        """Elements read and written."""
        return (self.m * self.k + self.k * self.n + self.m * self.n) * self.times


class PassWork(NamedTuple):
    """What a pass over a model computes."""

    matmuls: tuple[Matmul, ...] = ()
    attention_flops: int = 0  # scores and weighted values; backward computes the scores again in fused kernels
    traffic_bytes: int = 0  # of element-wise work: every operand read and every result written
    operations: int = 0  # that the host starts, one after the other

    def plus(self, other: Self) -> Self:
        """Return both together."""
        return type(self)(
            self.matmuls + other.matmuls,
            self.attention_flops + other.attention_flops,
            self.traffic_bytes + other.traffic_bytes,
            self.operations + other.operations,
        )

    def times(self, number: int) -> Self:
        """Return `number` of this."""
        return type(self)(
            tuple(product._replace(times=product.times * number) for product in self.matmuls),
            self.attention_flops * number,
            self.traffic_bytes * number,
            self.operations * number,
        )

    @property
    def matmul_flops(self) -> int:
        return sum(product.flops for product in self.matmuls)


def compute_backward(forward: PassWork) -> PassWork:
    """Return the work of a pass back: two products, each as large, for every one of forward; twice the element-wise
    traffic, since every result's gradient is read and every operand's is written; twice the operations."""
    turned = tuple(
        product
        for m, k, n, times in forward.matmuls
        for product in (Matmul(m, n, k, times), Matmul(k, m, n, times))  # gradient of the input, of the weight
    )
    return PassWork(turned, 2 * forward.attention_flops, 2 * forward.traffic_bytes, 2 * forward.operations)
