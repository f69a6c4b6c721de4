"""Which colour and marker an engine has: the same in every figure and every report."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

_ENGINES: Mapping[str, int] = {
    "ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3, "zero3": 4, "zero0": 5, "fsdp_hybrid": 6, "fsdp_no_reshard": 31,
    "pipeline": 7, "interleaved": 8, "modular": 9, "lga": 11,
}  # fmt: skip
_COLOURS = 7  # a look's number modulo this is its colour, and what is left over moves on to other markers
_LOOKS = _COLOURS**2


def number_looks(labels: Iterable[str]) -> dict[str, int]:
    """Return the number of the look of every series by its name, which begins with its engine. Series of one engine
    have its colour and differ in their markers; the engine alone always has its own."""
    numbers: dict[str, int] = {}
    others: Counter[str] = Counter()
    for label in sorted(labels):
        engine = label.split(" ")[0]
        others[engine] += label != engine
        numbers[label] = (_number_engine(engine) + _COLOURS * (others[engine] if label != engine else 0)) % _LOOKS
    return numbers


def _number_engine(engine: str) -> int:
    """Return a fixed number; of an engine that is not named here the one that its name gives."""
    if engine in _ENGINES:
        return _ENGINES[engine]
    return int.from_bytes(hashlib.sha256(engine.encode()).digest()[:4]) % _LOOKS
