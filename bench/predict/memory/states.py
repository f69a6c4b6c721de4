"""Model states by ZeRO's own arithmetic: what its paper says, beside what engines really allocate."""

from bench.spec import FULL, WIDTH, Precision


def model_states(elements: int, ranks: int, stage: int, precision: Precision = "bf16") -> int:
    """Return weights, gradients and AdamW's state of one rank in bytes, as Table 1 of ZeRO (arXiv 1910.02054) counts
    them: 2 + 2 + 12 bytes per parameter below fp32, of which a stage divides the last 12, the last 14 or all."""
    width = WIDTH[precision]
    optimizer = 2 * FULL + (FULL if width < FULL else 0)
    whole = [width * (stage < 3), width * (stage < 2), optimizer * (stage < 1)]
    divided = [width * (stage >= 3), width * (stage >= 2), optimizer * (stage >= 1)]
    return sum(whole) * elements + sum(divided) * elements // ranks
