"""Daemons of a testbed: munged and slurmctld on the controller, and slurmd on every node.

With accounting, a private database and slurmdbd run on the controller, too. The accounting has one account and two
qualities of service (QOS). All daemons write only into the testbed's folder.
"""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

import processes
from layout import Problem
from ledger import Ledger

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_POLL_S = 0.25
# Maximum seconds for one of Slurm's programs. If the controller does not run, sinfo would try again for much longer
# without this limit.
_ANSWER_S = 5.0
_MUNGE_S = 10.0
# Seconds that slurmctld gets to end. Before it ends, it saves the state of its jobs.
ORDERLY_S = 10.0
_TAIL_LINES = 15


def _build_environment(ledger: Ledger) -> dict[str, str]:
    """Return the environment variables of the daemons. Jobs inherit these variables.

    SLURM_CONF is an absolute path. With a relative path, scontrol in a job would hang.
    """
    return {"PATH": PATH, "LANG": "C.UTF-8", "SLURM_CONF": str(ledger.slurm_conf)}


def start_munge(ledger: Ledger) -> None:
    """Start a munged with its own key and socket, independent of the system's munged.

    It runs as root, like all daemons of the testbed. The option --force is necessary, because munged otherwise refuses
    a key in a private folder, and the testbed's folder (--dir) may be private. Only this testbed trusts the key.
    """
    folder = ledger.folder / "munge"
    folder.mkdir()
    key, socket_file = folder / "key", folder / "socket"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    files = [f"--key-file={key}", f"--socket={socket_file}", f"--pid-file={folder}/pid", f"--seed-file={folder}/seed"]
    start(ledger, "munged", ["munged", "--foreground", "--force", *files])
    wait(ledger, ["munged"], socket_file.exists, _MUNGE_S, "munged made no socket")


def start_controller(ledger: Ledger) -> None:
    start(ledger, "slurmctld", ["slurmctld", "-D"])


def start_slurmd(ledger: Ledger, node: str) -> None:
    start(ledger, f"slurmd.{node}", ["slurmd", "-D"], node)


def is_running(ledger: Ledger, daemon: str) -> bool:
    return daemon in ledger.processes and ledger.processes[daemon].alive


def start(ledger: Ledger, daemon: str, command: list[str], machine: str | None = None) -> None:
    """Start a daemon on a machine of the testbed, by default on the controller. Do nothing if it is already running."""
    if not is_running(ledger, daemon):
        processes.start(
            processes.inside(machine or ledger.layout.controller, command),
            _build_environment(ledger),
            _get_output(ledger, daemon),
            lambda process: ledger.record(daemon, process),
        )


def read_node_states(ledger: Ledger) -> dict[str, str]:
    """Return the Slurm state of each node, such as `idle` or `down*`; empty if the controller does not answer."""
    if not is_running(ledger, "slurmctld"):
        return {}
    done = call(ledger, ["sinfo", "--noheader", "--Node", "--format=%N %T"])
    return dict(line.split() for line in done.stdout.splitlines()) if done and done.returncode == 0 else {}


def call(ledger: Ledger, command: list[str], limit_s: float = _ANSWER_S) -> subprocess.CompletedProcess[str] | None:
    """Run one of Slurm's programs on the host of the testbed. Return None if it does not finish within `limit_s`
    seconds."""
    try:
        environment = _build_environment(ledger)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None


def wait_until_idle(ledger: Ledger, nodes: Sequence[str], limit_s: float) -> None:
    def are_idle() -> bool:
        states = read_node_states(ledger)
        return all(states.get(node) == "idle" for node in nodes)

    watched = ["munged", "slurmctld", *(f"slurmd.{node}" for node in nodes)]
    wait(ledger, watched, are_idle, limit_s, "not all nodes became idle")


def wait(ledger: Ledger, watched: Sequence[str], is_ready: Callable[[], bool], limit_s: float, rule: str) -> None:
    """Wait until `is_ready` returns True. `watched` are the names of daemons that must stay alive meanwhile.

    Raise `Problem` if a watched daemon ends, or if `is_ready` has not returned True after `limit_s` seconds. The error
    has the last lines of the daemons' logs. Its message contains `rule`, a description of the failure, such as "munged
    made no socket".
    """
    deadline = time.monotonic() + limit_s
    while True:
        # Sleep before the first check. A daemon that cannot start ends within this time, and is then noticed.
        time.sleep(_POLL_S)
        dead = [daemon for daemon in watched if not is_running(ledger, daemon)]
        if not dead and is_ready():
            return
        if dead or time.monotonic() > deadline:
            event = f"{', '.join(dead)} ended" if dead else f"after {limit_s:g} s"
            outputs = [path for daemon in dead or watched if (path := _get_output(ledger, daemon)).exists()]
            tails = ("\n".join([f"--- {path}", *path.read_text().splitlines()[-_TAIL_LINES:]]) for path in outputs)
            raise Problem(event, rule, "the end of the log is above", detail="\n".join(tails))


def _get_output(ledger: Ledger, daemon: str) -> Path:
    """Return the file with the standard output of a daemon. It contains messages that the daemon prints before it opens
    its log."""
    return ledger.folder / "log" / f"{daemon}.out"


# ---------------------------------------- accounting

ACCOUNTING_PROGRAMS = {  # Debian package of each program
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "my_print_defaults": "mariadb-client-core",
}
ACCOUNT = "project"
URGENT = "urgent"
_TEMPLATE = Path(__file__).with_name("slurmdbd.conf.in")
_START_S = 60.0
_UNSYNCED = ("--debug-no-sync", "--innodb-flush-method=nosync")
"""Options with which the database does not wait until data is on the disk. These waits would take most of the time, and
the tables need not survive a crash."""


def start_accounting(ledger: Ledger) -> None:
    """Start the database and slurmdbd, and create the account and the QOS that jobs can use. Call this before slurmctld
    starts."""
    _make_database(ledger)
    socket_file = ledger.folder / "database" / "socket"
    # No grant tables are needed, because only root can reach the loopback interface of this namespace.
    open_to_all = ["--skip-grant-tables", "--bind-address=127.0.0.1", f"--socket={socket_file}"]
    small = ["--innodb-buffer-pool-size=64M", "--innodb-log-file-size=8M", *_UNSYNCED]
    files = [f"--pid-file={ledger.folder}/mariadbd.pid", f"--datadir={ledger.folder}/database"]
    start(ledger, "mariadbd", ["mariadbd", "--no-defaults", "--user=root", *files, *open_to_all, *small])
    wait(ledger, ["mariadbd"], lambda: _answers(socket_file), _START_S, "the database does not answer")
    _write_configuration(ledger)
    start(ledger, "slurmdbd", ["slurmdbd", "-D"])
    watched = ["mariadbd", "slurmdbd"]
    wait(ledger, watched, lambda: _is_listening(ledger), _START_S, "slurmdbd does not answer")
    _fill(ledger)


def _make_database(ledger: Ledger) -> None:
    """Create an empty database with the system tables that stored procedures need."""
    folder = ledger.folder / "database"
    folder.mkdir(mode=0o700)
    options = ["--no-defaults", "--user=root", f"--datadir={folder}", "--skip-test-db", *_UNSYNCED]
    done = subprocess.run(["mariadb-install-db", *options], capture_output=True, text=True)
    if done.returncode:
        raise Problem("mariadb-install-db", f"exit code {done.returncode}", detail=done.stdout + done.stderr)


def _answers(socket_file: Path) -> bool:
    """Return True if the database accepts connections. The socket file may exist before the database accepts them."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(socket_file)) == 0


def _write_configuration(ledger: Ledger) -> None:
    layout = ledger.layout
    values = {"folder": ledger.folder, "controller": layout.controller}
    text = Template(_TEMPLATE.read_text()).substitute(values, controller_address=layout.address(layout.controller))
    # Slurm looks for this file next to slurm.conf.
    path = ledger.folder / "slurmdbd.conf"
    # slurmdbd refuses a configuration file with other permissions.
    path.touch(0o600)
    path.write_text(text)


def _is_listening(ledger: Ledger) -> bool:
    done = call(ledger, ["sacctmgr", "--noheader", "show", "cluster"])
    return done is not None and done.returncode == 0


def _fill(ledger: Ledger) -> None:
    """Add the cluster, an account for the user who starts the testbed, and two QOS.

    Jobs of the QOS `urgent` preempt jobs of the QOS `normal`.
    """
    both = f"qos=normal,{URGENT}"
    users = ",".join(dict.fromkeys(["root", os.environ.get("SUDO_USER", "root")]))
    for words in (
        ["add", "qos", URGENT, "Preempt=normal", "Priority=10"],
        ["add", "cluster", ledger.layout.name, both],
        ["add", "account", ACCOUNT, f"Cluster={ledger.layout.name}"],
        ["add", "user", users, f"Account={ACCOUNT}", f"Cluster={ledger.layout.name}", f"DefaultAccount={ACCOUNT}"],
        ["modify", "user", users, "set", f"DefaultAccount={ACCOUNT}"],
    ):
        done = call(ledger, ["sacctmgr", "--immediate", *words], _START_S)
        if done is None or done.returncode:
            answer = done.stdout + done.stderr if done else "no answer"
            raise Problem(f"sacctmgr {' '.join(words)}", answer.strip())
