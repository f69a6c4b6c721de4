"""A machine's operators, measured into the tables that predictions read.

The package itself holds what is to be measured, and what was: the two values that a calibration's processes exchange
through its folder.
"""

from typing import Literal

from pydantic import Field

from bench.core.machine import Calibration, Machine
from bench.core.record import Network
from bench.core.spec import Frozen, Positive

REQUEST, MEASURED, FAILURE, DOING = "asked.json", "measured.json", "failure.txt", "doing.txt"

Part = Literal["matmul", "attention", "memory", "launches", "host_link", "contention", "collectives"]

SHARES: dict[Part, float] = {
    "matmul": 0.33,
    "attention": 0.04,
    "memory": 0.03,
    "launches": 0.02,
    "host_link": 0.03,
    "contention": 0.1,
    "collectives": 0.45,
}
"""What each part may take of the time asked for. Only `matmul`, `contention` and `collectives` have enough to do to use
up their share; the others are done when they are done."""

ELSEWHERE: dict[str, Part] = {"cpu": "host_link", "cuda": "contention"}
"""What is not measured on a kind of device: a processor has no link to itself, and GPUs do not share one."""


class CalibrationRequest(Frozen):
    """One calibration: on which machine, by how many processes, and how long."""

    machine: Machine
    device: Literal["cpu", "cuda"]
    nodes: Positive
    ranks_per_node: Positive
    seconds: float = Field(gt=0)
    parts: tuple[Part, ...]
    products: tuple[tuple[int, int], ...] = ()  # (k, n) of the matrices that a model multiplies with
    network: Network = Network()

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def seconds_for(self, part: Part) -> float:
        """Return a part's share of the time among those that are measured."""
        return self.seconds * SHARES[part] / sum(SHARES[other] for other in self.parts)


class CalibrationResult(Frozen):
    """What came out. What was not asked for is empty or None."""

    device_name: str
    calibration: Calibration
    memory_bytes_per_s: float | None = None
    host_link_bytes_per_s: float | None = None
