"""Slurm accounting of a testbed: a private database and slurmdbd, with one account and two qualities of service (QOS).

Both daemons run in the network namespace of the controller, and write only into the testbed's folder.
"""

import os
import socket
import subprocess
from pathlib import Path
from string import Template

import daemons
from layout import Problem
from ledger import Ledger

PROGRAMS = {  # Debian package of each program
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
    daemons.start(ledger, "mariadbd", ["mariadbd", "--no-defaults", "--user=root", *files, *open_to_all, *small])
    daemons.wait(ledger, ["mariadbd"], lambda: _answers(socket_file), _START_S, "the database does not answer")
    _write_configuration(ledger)
    daemons.start(ledger, "slurmdbd", ["slurmdbd", "-D"])
    watched = ["mariadbd", "slurmdbd"]
    daemons.wait(ledger, watched, lambda: _is_listening(ledger), _START_S, "slurmdbd does not answer")
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
    done = daemons.call(ledger, ["sacctmgr", "--noheader", "show", "cluster"])
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
        done = daemons.call(ledger, ["sacctmgr", "--immediate", *words], _START_S)
        if done is None or done.returncode:
            answer = done.stdout + done.stderr if done else "no answer"
            raise Problem(f"sacctmgr {' '.join(words)}", answer.strip())
