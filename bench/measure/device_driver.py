"""What a driver's library can be asked of its devices, whoever makes them."""

from typing import Any, Literal, Protocol

Question = Literal[
    "name",
    "free_bytes",  # of its memory
    "energy_j",  # used since its driver was loaded
    "processes",  # a list of (process number, bytes, None where the driver does not tell) that compute on it
    "throttled",  # counts that grow while it is held back, by reason: power, thermal; and `all`, which always grows
    "sm_clock_mhz",
    "memory_clock_mhz",
    "power_cap_w",
    "temperature_c",
    "throttle_reasons",  # bits, as the maker numbers them
]
STATE: tuple[Question, ...] = (
    "name", "sm_clock_mhz", "memory_clock_mhz", "power_cap_w", "temperature_c", "throttle_reasons",
)  # fmt: skip
"""What a record keeps of every device."""


class DeviceDriver(Protocol):
    """A maker's devices here, as the library of their driver tells of them."""

    def count(self) -> int:
        """Return how many there are."""

    def version(self) -> str | None:
        """Return the driver's version."""

    def ask(self, device: int | str, question: Question) -> Any:
        """Return the answer about a device, known by the driver's number or by a name of its own; None where there is
        no such device, or it does not tell."""
