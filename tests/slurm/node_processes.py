"""Processes of zeroscale on the nodes of a testbed. The nodes are network namespaces of this machine."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from slurm_testbed import wait_for

from bench.measure.channel import RankProgress, SharedHeartbeat

_NAMESPACES = Path("/run/netns")


class Rank(NamedTuple):
    """A rank process: its process id, and the last heartbeat that was read."""

    pid: int
    beat: RankProgress


def ours(bed_name: str, folder: Path) -> list[str]:
    """Return the command lines of the running processes of a study.

    All zeroscale processes on the nodes of the testbed are included, because the command lines of ranks and fork
    servers do not contain the study's folder. A process outside of the nodes is included if its command line contains
    the folder. Zombies are not included, because they have no command line.
    """
    nodes = {namespace.stat().st_ino for namespace in _NAMESPACES.glob(f"{bed_name}[0-9]*")}
    found = []
    for process, words in _processes():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            on_a_node = (process / "ns/net").stat().st_ino in nodes
            if str(folder) in words or (on_a_node and " bench." in words):
                found.append(f"{process.name}: {words}")
    return found


def on_node(node: str) -> list[str]:
    """Return the command lines of the zeroscale processes on one node."""
    namespace = (_NAMESPACES / node).stat().st_ino
    found = []
    for process, words in _processes():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if " bench." in words and (process / "ns/net").stat().st_ino == namespace:
                found.append(f"{process.name}: {words}")
    return found


def stepping(node: str, after: Rank | None = None) -> Rank:
    """Wait until a rank on a node is making steps, and return this rank. The rank `after` is skipped: it belongs to an
    earlier attempt (try at the run) and may still be ending."""
    found: list[Rank] = []

    def steps() -> bool:
        found.extend(rank for rank in _ranks(node) if rank.beat.step >= 0 and (not after or rank.pid != after.pid))
        return bool(found)

    wait_for(steps)
    return found[0]


def _ranks(node: str) -> Iterator[Rank]:
    """Yield the ranks on a node.

    The progress of a rank is read from the memory that the rank shares with its supervisor. The file heartbeat.json is
    updated less often.
    """
    namespace = (_NAMESPACES / node).stat().st_ino
    for process, words in _processes():
        with contextlib.suppress(OSError):
            if "bench.runtime.fork_server" in words and (process / "ns/net").stat().st_ino == namespace:
                for descriptor in (process / "fd").iterdir():
                    if "zeroscale-pulse" in str(descriptor.readlink()):
                        with descriptor.open("r+b") as shared:
                            yield Rank(int(process.name), SharedHeartbeat(shared.fileno(), 1).read(0))


def _processes() -> Iterator[tuple[Path, str]]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield process, (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
