"""Ledger of a testbed: a list of everything that the testbed creates, written *before* it is created.

Because of this order, a testbed can always be removed completely, even if `up` or `down` was killed.
"""

import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from layout import Layout, RefusedCommand
from processes import Process

_FILE = "state.json"
_VERSION = 1


def _boot_id() -> str:
    """Return the id of the current boot of the machine. A changed id shows that the machine was rebooted after the
    testbed was started. After a reboot, only the files of the testbed still exist."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(kw_only=True)
class Ledger:
    """List of the network namespaces, interfaces, folders and processes that one testbed creates."""

    folder: Path
    layout: Layout
    boot: str = field(default_factory=_boot_id)
    namespaces: list[str] = field(default_factory=list)
    interfaces: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "slurm.conf"

    def log(self, daemon: str) -> Path:
        return self.folder / "log" / f"{daemon}.log"

    def save(self) -> None:
        state = {"version": _VERSION, **dataclasses.asdict(self)}
        del state["folder"]  # the folder that contains the ledger
        new = self.folder / f"{_FILE}.new"
        new.write_text(json.dumps(state, indent=1) + "\n")
        new.replace(self.folder / _FILE)

    def record(self, daemon: str, process: Process) -> None:
        self.processes[daemon] = process
        self.save()


def create(folder: Path, layout: Layout) -> Ledger:
    """Create the testbed's folder with a ledger in it, in one atomic step. Raise `RefusedCommand` if the folder already
    exists."""
    staged = folder.with_name(f"{folder.name}.{os.getpid()}")
    staged.mkdir(parents=True, mode=0o755)
    Ledger(folder=staged, layout=layout).save()
    try:
        staged.rename(folder)
    except OSError:
        shutil.rmtree(staged)
        remedy = "take that testbed down, or choose another --name or --dir"
        raise RefusedCommand(str(folder), "already exists", remedy) from None
    return Ledger(folder=folder, layout=layout)


def read(folder: Path) -> Ledger:
    """Return the ledger in the folder of a testbed: the list of the network namespaces, interfaces, folders and
    processes that the testbed created. Raise `RefusedCommand` if there is no ledger, or if another user owns the
    folder."""
    try:
        # Another user could write a ledger into /tmp, and root kills the processes that are listed in a ledger.
        owner = folder.stat().st_uid
        state = json.loads((folder / _FILE).read_text())
    except FileNotFoundError:
        raise RefusedCommand(str(folder), "no testbed here", "start one with `up`") from None
    if owner != os.geteuid():
        raise RefusedCommand(str(folder), f"belongs to uid {owner}, not to root", "choose another --dir")
    if state.pop("version") != _VERSION:
        raise RefusedCommand(str(folder), "was made by another version of this program", "use that one")
    processes = {name: Process(**process) for name, process in state.pop("processes").items()}
    ledger = Ledger(**{**state, "folder": folder, "layout": Layout(**state["layout"]), "processes": processes})
    # After a reboot, other processes may have these process ids.
    if ledger.boot != _boot_id():
        ledger.namespaces, ledger.interfaces, ledger.processes = [], [], {}
    return ledger


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context in which a testbed is locked against other commands. The kernel also releases the lock if this process
    dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
