"""Processes of one round of faults, on any node of the testbed. The processes are found by an environment variable that
they inherit. They are classified by their command lines."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.measure.channel import SharedHeartbeat

MARK = "ZEROSCALE_CHAOS"
_NAMESPACES = Path("/run/netns")


class Process(NamedTuple):
    """Running process of a round."""

    pid: int
    role: str  # rank, coordinator, member agent, fork server, srun, command, or other
    node: str  # node of the testbed; empty for this machine
    job: str  # Slurm's job id; empty outside of a job
    words: str


def list_processes(mark: str) -> list[Process]:
    """Return the running processes whose environment variable ZEROSCALE_CHAOS has the value `mark`, on this machine and
    all nodes."""
    nodes = {path.stat().st_ino: path.name for path in _NAMESPACES.glob("*")}
    return [found for entry in Path("/proc").glob("[0-9]*") if (found := _read(entry, mark, nodes))]


def _read(entry: Path, mark: str, nodes: dict[int, str]) -> Process | None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        pairs = (pair.partition("=") for pair in (entry / "environ").read_bytes().decode(errors="replace").split("\0"))
        environment = {name: value for name, _, value in pairs}
        if environment.get(MARK) != mark:
            return None
        words = _read_words(entry)
        if not words:  # a zombie
            return None
        node = nodes.get((entry / "ns/net").stat().st_ino, "")
        role = _find_role(entry, words, environment)
        return Process(int(entry.name), role, node, environment.get("SLURM_JOB_ID", ""), words)
    return None


def _find_role(entry: Path, words: str, environment: dict[str, str]) -> str:
    if "bench.runtime.fork_server" in words:
        return "rank" if _is_forked(entry) else "fork server"
    if "bench.runtime.worker" in words:
        return "rank"
    if "bench.sweep.allocation" in words and not words.startswith("srun"):
        return "coordinator" if environment.get("SLURM_PROCID", "0") == "0" else "member agent"
    if "-m bench.runtime " in words:
        return "coordinator"
    if words.startswith("srun"):
        # An srun has a helper process with the same command line.
        return "other" if _read_words(_find_parent(entry)).startswith("srun") else "srun"
    return "command" if "bench.cli" in words else "other"


def _read_words(entry: Path) -> str:
    return (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()


def _find_parent(entry: Path) -> Path:
    return Path("/proc") / (entry / "stat").read_text().rpartition(")")[2].split()[1]


def _is_forked(entry: Path) -> bool:
    """Return True if a process is a rank that was forked from a fork server. Such a rank still has the command line of
    the fork server. But only ranks have an open heartbeat file. `entry` is the process's folder in /proc."""
    return any("zeroscale-pulse" in str(link.readlink()) for link in (entry / "fd").iterdir())


def is_stepping(process: Process) -> bool:
    """Return True if a rank is making steps. This is read from the rank's heartbeat, which is shared memory."""
    return any(step >= 0 for step in _read_steps(process.pid))


def is_stopped(process: Process) -> bool:
    """Return True if a process is stopped by a signal, or has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return True  # it has ended


def _read_steps(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if "zeroscale-pulse" in str(descriptor.readlink()):
                with descriptor.open("r+b") as shared:
                    yield SharedHeartbeat(shared.fileno(), 1).read(0).step
