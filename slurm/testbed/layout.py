"""Options of a testbed, names and addresses derived from them, and errors of a testbed. There are no side effects."""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any


class Problem(Exception):
    """Error of a testbed command. Its message is one line with three parts: the cause (such as a wrong option), a
    description of the error, and usually a remedy. All changes that the command made have been undone.

    It resembles `UserError` in `bench.core.errors`. That class is not available here, because a testbed runs as root
    with the system's Python, in which zeroscale is not installed.
    """

    exit_code = 1

    def __init__(self, value: str, rule: str, remedy: str = "", *, detail: str = "") -> None:
        super().__init__(f"{value}: {rule}" + (f"; {remedy}" if remedy else ""))
        # Lines that are printed before the message, such as the end of a log.
        self.detail = detail


class RefusedCommand(Problem):
    """Error for a command that cannot be executed. Nothing was changed."""

    exit_code = 2


def _option(default: Any, help: str, within: tuple[int, int] | None = None) -> Any:
    """Return a dataclass field that is also an option of the command `up`. `within` has the lowest and the highest
    value of a number."""
    return field(default=default, metadata={"help": help, "within": within})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Options of the command `up`. Machine 0 is Slurm's controller. Its network namespace also contains the switch that
    connects the nodes."""

    name: str = "zs"
    nodes: int = _option(4, "number of nodes", (1, 64))
    rate: str = _option("400mbit", "rate of each node's link each way, such as 1gbit, or none for unshaped")
    burst: str = _option("512k", "bytes that a link passes at once; a small burst lowers the rate")
    cpus: int = _option(2, "CPUs that each node reports", (1, 1024))
    memory_mb: int = _option(4096, "memory that each node reports", (1, 10**8))
    subnet: str = _option("10.77.0.0/24", "private addresses, one subnet for each testbed")
    max_time: str = _option("INFINITE", "longest time limit of the partition, as Slurm writes it")
    max_array_size: int = _option(1001, "MaxArraySize: one more than the highest index of a job array", (2, 4000001))
    max_jobs: int = _option(
        10000, "MaxJobCount: one more than the jobs that are accepted, remembered ones included", (2, 10**6)
    )
    min_job_age_s: int = _option(300, "seconds for which the controller remembers an ended job", (2, 10**6))
    slurmd_timeout_s: int = _option(10, "seconds without an answer after which a node is down", (2, 65533))
    kill_wait_s: int = _option(5, "seconds between SIGTERM and SIGKILL at a job's time limit", (1, 65533))
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
        """Names of all network namespaces, which are also the host names of the machines."""
        return [self.controller, *self.workers]

    @property
    def login_interface(self) -> str:
        """Name of the network interface by which the host reaches the testbed. The host is the machine on which the
        testbed runs. It is also the login node: jobs are submitted on it."""
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
        """Return the IP address of a machine.

        Node zs7 has the seventh address of the subnet, and the controller has the last address.
        """
        number = self.machines.index(machine)
        return str(self._network[number or -2])

    def hosts(self) -> str:
        """Return the text of /etc/hosts, which is the same for every machine of the testbed."""
        return "127.0.0.1 localhost\n" + "".join(f"{self.address(name)} {name}\n" for name in self.machines)

    def check(self) -> None:
        """Raise `RefusedCommand` for the first option with an invalid value."""
        check_name(self.name)
        check_shape(self.rate, self.burst)
        for option in fields(self):
            value, within = getattr(self, option.name), option.metadata.get("within")
            if within and not within[0] <= value <= within[1]:
                flag = f"--{option.name.replace('_', '-')} {value}"
                raise RefusedCommand(flag, f"must be from {within[0]} to {within[1]}")
        if not re.fullmatch(r"INFINITE|[0-9]+([:-][0-9]+)*", self.max_time):
            raise RefusedCommand(f"--max-time {self.max_time}", "must be minutes, [DAYS-]HH:MM:SS or INFINITE")
        for line in self.conf:
            if not re.fullmatch(r"[A-Za-z]+=[^\n]+", line):
                raise RefusedCommand(f"--conf {line!r}", "must be one line of slurm.conf, KEY=VALUE")
        try:
            network = self._network
        except ValueError as error:
            raise RefusedCommand(f"--subnet {self.subnet}", str(error), "for example 10.77.0.0/24") from None
        if not network.is_private or network.num_addresses < self.nodes + 4:
            rule = f"must be private, with addresses for {self.nodes + 2} machines"
            raise RefusedCommand(f"--subnet {self.subnet}", rule)


def check_name(name: str) -> None:
    """Raise `RefusedCommand` if the testbed's name is too long, or could conflict with the names of another testbed.

    The names of machines and interfaces are the testbed's name and a number. The testbed's name therefore must end with
    a letter. The kernel allows 15 characters for an interface, and 64 nodes need two digits.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9]{0,11}[a-z])?", name):
        raise RefusedCommand(f"--name {name}", "must be 1 to 13 lower-case letters and digits, first and last a letter")


def check_folder(folder: Path) -> None:
    """Raise `RefusedCommand` if the path of the testbed's folder is unsuitable for slurm.conf or for sockets.

    The path of a socket may have at most 108 characters.
    """
    if not re.fullmatch(r"[A-Za-z0-9_./+-]{1,80}", str(folder)):
        raise RefusedCommand(f"--dir {folder}", "must be at most 80 letters, digits and any of _ . / + -")


def check_shape(rate: str, burst: str) -> None:
    """Raise `RefusedCommand` if the kernel would not accept this rate and burst size of a link. The rate `none` means
    no limit."""
    if rate != "none" and not re.fullmatch(r"[1-9][0-9]*(\.[0-9]+)?[kmg]bit", rate):
        rule = "must be a number with kbit, mbit or gbit, or none"
        raise RefusedCommand(f"--rate {rate}", rule, "for example 400mbit")
    if not re.fullmatch(r"[1-9][0-9]*[km]", burst) or burst == "1k":
        rule = "must be bytes with k or m, at least 2k (one packet)"
        raise RefusedCommand(f"--burst {burst}", rule, "for example 512k")
