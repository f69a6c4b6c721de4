"""Which colour and marker a series has: the same in every figure and every report."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7F7F7F")
"""Okabe and Ito's palette, told apart by colour-blind readers; without its yellow, too faint for a line on paper."""

_ENGINES: Mapping[str, int] = {
    "ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3, "zero3": 4, "zero0": 5, "fsdp_hybrid": 6, "fsdp_no_reshard": 31,
    "pipeline": 7, "interleaved": 8, "modular": 9, "lga": 11,
}  # fmt: skip
_LOOKS = len(COLOURS) ** 2  # a look's number modulo the colours is its colour, and what is left over moves its marker


def number_looks(labels: Iterable[str]) -> dict[str, int]:
    """Return the number of the look of every series by its name, which begins with its engine. Series of one engine
    have its colour and differ in their markers; the engine alone always has its own."""
    numbers: dict[str, int] = {}
    others: Counter[str] = Counter()
    for label in sorted(labels):
        engine = label.split(" ")[0]
        others[engine] += label != engine
        turns = others[engine] if label != engine else 0
        numbers[label] = (_number_engine(engine) + len(COLOURS) * turns) % _LOOKS
    return numbers


def choose_colour(index: int) -> str:
    """Return the colour of series number `index`; they repeat, with other markers beside them."""
    return COLOURS[index % len(COLOURS)]


def choose_marker(index: int) -> int:
    """Return the number of the marker of series number `index`, of as many as there are colours."""
    turn, place = divmod(index, len(COLOURS))
    return (place + turn) % len(COLOURS)


def _number_engine(engine: str) -> int:
    """Return a fixed number; of an engine that is not named here the one that its name gives."""
    if engine in _ENGINES:
        return _ENGINES[engine]
    return int.from_bytes(hashlib.sha256(engine.encode()).digest()[:4]) % _LOOKS
