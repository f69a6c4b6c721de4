"""Measure a study on a new Slurm testbed, and write its report: `make testbed-study`, as root.

The program starts a testbed with four nodes, measures every point at each link rate in turn, and
writes the report. The testbed is always removed at the end. Points that already have a result are
not measured again.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

TESTBED = Path(__file__).with_name("testbed")
RATES = "400mbit,100mbit"  # each rate has a file in conf/machine
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BEGAN_AT = time.monotonic()


def main() -> int:
    """Measure the study at every rate and write the report. Return 0 if every point of the study has a result and the
    report was written, otherwise a nonzero number."""
    args = _build_parser().parse_args()
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    os.environ["SLURM_CONF"] = f"/tmp/zeroscale-testbed-{args.name}/slurm.conf"
    # The ranks inherit this variable. A node of the testbed has one core, and further threads would only wait for this
    # core.
    os.environ["OMP_NUM_THREADS"] = "1"
    shape = ("--nodes", "4", "--rate", args.rates[0], "--subnet", args.subnet)
    failed = 0
    try:
        failed = _testbed("up", args.name, *shape)
        return failed or _study(args)
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # If `up` failed, it has printed the reason and removed the testbed.
        if not failed:
            _testbed("down", args.name)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", default="testbed", help="file of conf/study (%(default)s)")
    help_text = "rates of the links, one after the other (%(default)s)"
    parser.add_argument("--rates", type=_parse_rates, default=RATES, help=help_text)
    parser.add_argument("--name", default="zsstudy", help="name of the testbed (%(default)s)")
    parser.add_argument("--subnet", default="10.78.0.0/24", help="subnet of the testbed (%(default)s)")
    parser.add_argument("--results", type=Path, help="(results/runs/STUDY)")
    parser.add_argument("--report", type=Path, help="(results/reports/STUDY)")
    return parser


def _parse_rates(text: str) -> list[str]:
    """Return the link rates in the option `--rates`. Refuse a rate without a file testbed_RATE.yaml in conf/machine."""
    machines = Path(__file__).parents[1] / "conf/machine"
    known = sorted(path.stem.removeprefix("testbed_") for path in machines.glob("testbed_*.yaml"))
    rates = text.split(",")
    if unknown := [rate for rate in rates if rate not in known]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r}: no machine testbed_{unknown[0]}; choose from {', '.join(known)}"
        )
    return rates


def _study(args: argparse.Namespace) -> int:
    results = args.results or Path("results/runs", args.study)
    report = args.report or Path("results/reports", args.study)
    answered = [_measure(args.study, rate, args.name, results / rate) for rate in args.rates]
    folders = [str(results / rate) for rate in args.rates]
    reported = _zeroscale("report", *folders, "--out", str(report)) == 0
    return 0 if reported and all(answered) else 1


def _measure(study: str, rate: str, bed: str, results: Path) -> bool:
    """Measure the study with all links of the testbed `bed` at `rate`. Return True if every point of the study has a
    result.

    Each rate has its own results folder. The command `resume` starts all unfinished points (configurations to measure)
    in a folder, so the folder must not contain points of another rate.
    """
    folder, words = str(results / study), (f"study={study}", f"machine=testbed_{rate}", "--results", str(results))
    if _testbed("link", bed, "all", "--rate", rate) or _zeroscale("sweep", *words):
        return False
    if _zeroscale("status", folder, "--wait") == 0:
        return True
    _zeroscale("resume", folder)
    return _zeroscale("status", folder, "--wait") == 0


def _testbed(command: str, name: str, *words: str) -> int:
    return _call(sys.executable, str(TESTBED), command, "--name", name, *words)


def _zeroscale(*words: str) -> int:
    return _call(sys.executable, "-m", "bench.cli", *words)


def _call(*command: str) -> int:
    """Print a command, run it, and return its exit code.

    The command runs in its own session, so a Ctrl-C in the terminal does not reach it. This program forwards the
    signal, so the command receives it exactly once.
    """
    minutes, seconds = divmod(round(time.monotonic() - _BEGAN_AT), 60)
    shown = " ".join(command[1:]).replace("-m bench.cli", "zeroscale")
    print(f"{minutes}:{seconds:02} {shown}", flush=True)
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise


def _interrupt(number: int, _: FrameType | None) -> None:
    # This raises an exception, so that the testbed is removed.
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
