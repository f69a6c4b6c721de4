"""What a testbed is asked to be, and every name and address that follows from it. Touches nothing."""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from errors import RefusedCommand


def _option(default: Any, help: str, within: tuple[int, int] | None = None) -> Any:
    """Return a field that is also an option of `up`, with its help and, for a number, its bounds."""
    return field(default=default, metadata={"help": help, "within": within})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The options of `up`; machine 0 is the controller and holds the switch that the nodes are plugged into."""

    name: str = "zs"
    nodes: int = _option(4, "how many nodes", (1, 64))
    rate: str = _option("400mbit", "what each node's link carries each way, such as 1gbit, or none for unshaped")
    burst: str = _option("512k", "bytes a link passes at once; a small one costs rate")
    cpus: int = _option(2, "CPUs each node claims to have", (1, 1024))
    memory_mb: int = _option(4096, "memory each node claims to have", (1, 10**8))
    subnet: str = _option("10.77.0.0/24", "private addresses, one subnet for each testbed")
    max_time: str = _option("INFINITE", "longest time limit of the partition, as Slurm writes it")
    max_array_size: int = _option(1001, "MaxArraySize: one more than the highest index of a job array", (2, 4000001))
    max_jobs: int = _option(10000, "MaxJobCount: one more than the jobs taken, remembered ones included", (2, 10**6))
    min_job_age_s: int = _option(300, "how long the controller remembers an ended job", (2, 10**6))
    slurmd_timeout_s: int = _option(10, "how long a node may be silent before it is down", (2, 65533))
    kill_wait_s: int = _option(5, "between SIGTERM and SIGKILL for a job out of time", (1, 65533))
    accounting: bool = _option(
        False, "run slurmdbd on a database, so that accounts, QOS, preemption and sacct are real"
    )
    conf: Sequence[str] = ()  # lines of slurm.conf

    @property
    def controller(self) -> str:
        return f"{self.name}0"

    @property
    def workers(self) -> list[str]:
        return [f"{self.name}{number}" for number in range(1, self.nodes + 1)]

    @property
    def machines(self) -> list[str]:
        """Every namespace, and the name of the machine that lives in it."""
        return [self.controller, *self.workers]

    @property
    def login_interface(self) -> str:
        """This machine's own end of the network, from which jobs are submitted."""
        return f"{self.name}0"

    @property
    def login_address(self) -> str:
        return str(self._network[-3])

    @cached_property
    def _network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(self.subnet)

    @property
    def prefix_length(self) -> int:
        return self._network.prefixlen

    def address(self, machine: str) -> str:
        """Return a machine's address: zs7 is the seventh of the subnet, the controller the last."""
        number = self.machines.index(machine)
        return str(self._network[number or -2])

    def hosts(self) -> str:
        """Return the /etc/hosts that every machine of the testbed sees."""
        return "127.0.0.1 localhost\n" + "".join(f"{self.address(name)} {name}\n" for name in self.machines)

    def check(self) -> None:
        """Raise `RefusedCommand` for the first option that cannot work."""
        check_name(self.name)
        check_shape(self.rate, self.burst)
        for option in fields(self):
            value, within = getattr(self, option.name), option.metadata.get("within")
            if within and not within[0] <= value <= within[1]:
                raise RefusedCommand(
                    f"--{option.name.replace('_', '-')} {value}", f"must be from {within[0]} to {within[1]}"
                )
        if not re.fullmatch(r"INFINITE|[0-9]+([:-][0-9]+)*", self.max_time):
            raise RefusedCommand(f"--max-time {self.max_time}", "must be minutes, [DAYS-]HH:MM:SS or INFINITE")
        for line in self.conf:
            if not re.fullmatch(r"[A-Za-z]+=[^\n]+", line):
                raise RefusedCommand(f"--conf {line!r}", "must be one line of slurm.conf, KEY=VALUE")
        self._check_subnet()

    def _check_subnet(self) -> None:
        try:
            network = self._network
        except ValueError as error:
            raise RefusedCommand(f"--subnet {self.subnet}", str(error), "for example 10.77.0.0/24") from None
        if not network.is_private or network.num_addresses < self.nodes + 4:
            raise RefusedCommand(
                f"--subnet {self.subnet}", f"must be a private one with room for {self.nodes + 2} machines"
            )


def check_name(name: str) -> None:
    """Raise `RefusedCommand` for a name that could clash with another testbed's, or is too long.

    All names are made of this one, which ends with a letter, and a number; the kernel takes 15 characters for an
    interface, and 64 nodes need two digits.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9]{0,11}[a-z])?", name):
        raise RefusedCommand(f"--name {name}", "must be 1 to 13 lower-case letters and digits, first and last a letter")


def check_folder(folder: Path) -> None:
    """Raise `RefusedCommand` for a folder that slurm.conf or a path of 108 characters (a socket) cannot hold."""
    if not re.fullmatch(r"[A-Za-z0-9_./+-]{1,80}", str(folder)):
        raise RefusedCommand(f"--dir {folder}", "must be at most 80 letters, digits and any of _ . / + -")


def check_shape(rate: str, burst: str) -> None:
    """Raise `RefusedCommand` unless the kernel takes this rate and burst; the rate `none` shapes nothing."""
    if rate != "none" and not re.fullmatch(r"[1-9][0-9]*(\.[0-9]+)?[kmg]bit", rate):
        raise RefusedCommand(
            f"--rate {rate}", "must be a number with kbit, mbit or gbit, or none", "for example 400mbit"
        )
    if not re.fullmatch(r"[1-9][0-9]*[km]", burst) or burst == "1k":
        raise RefusedCommand(
            f"--burst {burst}", "must be bytes, 2k or more (one packet), with k or m", "for example 512k"
        )


def default_folder(name: str) -> Path:
    """Where a testbed keeps everything; not /run, which many systems mount noexec, and job scripts run from here."""
    return Path("/tmp") / f"zeroscale-testbed-{name}"
