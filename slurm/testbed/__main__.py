"""Testbed: a real Slurm on one machine, with several emulated nodes, for tests.

  sudo python slurm/testbed up         start it as root
  sudo python slurm/testbed down       remove it

Every node is a network namespace with its own address, host name and rate-limited link. Tests can
run sweeps on these nodes instead of a cluster, and can produce failures of a cluster on demand.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType

import commands
import daemons
from layout import Layout, Problem, RefusedCommand, check_folder, check_name

_WAIT_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of the testbed. Return its exit code: 0 if it succeeded, 1 if it failed, 2 if it was refused."""
    args = _build_parser().parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{daemons.PATH}"  # with `su`, PATH lacks /usr/sbin
    try:
        if os.geteuid() != 0:
            rule = "a testbed makes network namespaces, which needs root"
            raise RefusedCommand(f"uid {os.geteuid()}", rule, "use sudo")
        check_name(args.name)
        # Job scripts are executed in this folder, so it is not in /run, which many systems mount as noexec.
        args.dir = (args.dir or Path(f"/tmp/zeroscale-testbed-{args.name}")).resolve()
        check_folder(args.dir)
        code: int = args.run(args)
        return code
    except Problem as problem:
        if problem.detail:
            print(problem.detail, file=sys.stderr)
        print(f"testbed: {problem}", file=sys.stderr)
        return problem.exit_code
    except KeyboardInterrupt:
        print("testbed: interrupted", file=sys.stderr)
        return 130


def _exit(number: int, _: FrameType | None) -> None:
    # This raises an exception, so that an incomplete testbed is removed.
    sys.exit(128 + number)


def _build_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("testbed", description=__doc__, formatter_class=raw)
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(run: commands.Command, summary: str) -> argparse.ArgumentParser:
        sub = parsers.add_parser(run.__name__, help=summary, description=summary)
        sub.set_defaults(run=run)
        sub.add_argument("--name", default="zs", help="of the testbed, and of all that it makes (%(default)s)")
        sub.add_argument("--dir", type=Path, help="its folder (/tmp/zeroscale-testbed-NAME)")
        sub.add_argument("--wait", type=float, default=_WAIT_S, help="seconds to wait for Slurm (%(default)g)")
        return sub

    up = add(commands.up, "start a testbed")
    for option in fields(Layout):
        if help := option.metadata.get("help"):
            flag = f"--{option.name.replace('_', '-')}"
            if option.default is False:
                up.add_argument(flag, action="store_true", help=help)
            else:
                up.add_argument(flag, type=type(option.default), default=option.default, help=f"{help} (%(default)s)")
    help_text = "another line of slurm.conf, as in your site's file"
    up.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help=help_text)
    add(commands.down, "take a testbed down with all that runs on it, or the rest of a broken one")
    status = add(commands.status, "print controller, nodes and links")
    status.add_argument("--json", action="store_true")
    link = add(commands.link, "change the links of nodes: their rate, or disconnect or connect their cables")
    link.add_argument("nodes", nargs="+", metavar="NODE", help="or `all`")
    link.add_argument("--rate", help="such as 40mbit, or none")
    link.add_argument("--burst", help="(that of `up`)")
    link.add_argument("--down", action="store_const", const="down", dest="plug", help="disconnect the cable")
    link.add_argument("--up", action="store_const", const="up", dest="plug", help="connect it again")
    slurmd = add(commands.slurmd, "kill a node's slurmd as a crash would, or all that runs there, or start it again")
    slurmd.add_argument("node", metavar="NODE")
    slurmd.add_argument("action", choices=("stop", "crash", "start"))
    controller = add(commands.controller, "stop the controller in an orderly way, start it, or both")
    controller.add_argument("action", choices=("stop", "start", "restart"))
    inside = add(commands.exec, "run a command on a node, or on the controller")
    inside.add_argument("node", metavar="NODE")
    inside.add_argument("words", nargs="+", metavar="COMMAND", help="after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
