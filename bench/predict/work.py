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
    attention_flops: int = 0  # scores and weighted values of all pairs, masked or not: what model FLOPs count
    traffic_bytes: int = 0  # of element-wise work: every operand read and every result written
    operations: int = 0  # that the host starts, one after the other
    fused_flops: int = 0  # of attention in one kernel, which leaves out what a causal mask hides
    batched: tuple[Matmul, ...] = ()  # attention's products, where scores are written out; one for each sample and head

    def plus(self, other: Self) -> Self:
        """Return both together."""
        return type(self)(
            self.matmuls + other.matmuls,
            self.attention_flops + other.attention_flops,
            self.traffic_bytes + other.traffic_bytes,
            self.operations + other.operations,
            self.fused_flops + other.fused_flops,
            self.batched + other.batched,
        )

    def times(self, number: int) -> Self:
        """Return `number` of this."""
        return type(self)(
            _repeat(self.matmuls, number),
            self.attention_flops * number,
            self.traffic_bytes * number,
            self.operations * number,
            self.fused_flops * number,
            _repeat(self.batched, number),
        )

    @property
    def matmul_flops(self) -> int:
        return sum(product.flops for product in self.matmuls)


def compute_backward(forward: PassWork) -> PassWork:
    """Return the work of a pass back: two products, each as large, for every one of forward, in a fused kernel of
    attention five for two, since it computes the scores again (arXiv 2307.08691, section 3.1); twice the element-wise
    traffic, since every result's gradient is read and every operand's is written; twice the operations."""
    return PassWork(
        _turn(forward.matmuls),
        2 * forward.attention_flops,
        2 * forward.traffic_bytes,
        2 * forward.operations,
        5 * forward.fused_flops // 2,
        _turn(forward.batched),
    )


def _turn(products: tuple[Matmul, ...]) -> tuple[Matmul, ...]:
    """Return the products that give the gradients of both factors."""
    return tuple(turned for m, k, n, times in products for turned in (Matmul(m, n, k, times), Matmul(k, m, n, times)))


def _repeat(products: tuple[Matmul, ...], number: int) -> tuple[Matmul, ...]:
    return tuple(product._replace(times=product.times * number) for product in products)
