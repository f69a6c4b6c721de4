"""A study from nothing to a report, on a testbed of its own: `make testbed-study`, as root.

Four nodes are brought up, every point is measured at one link rate after the other, the report is written, and the
testbed is taken down whatever happens. What has its answer already is not measured again.
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
RATES = "400mbit,100mbit"  # each a file of conf/machine
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BEGAN_AT = time.monotonic()


def main() -> int:
    """Return 0 if every point has its answer at every rate and the report is written."""
    args = _parser().parse_args()
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    os.environ["SLURM_CONF"] = f"/tmp/zeroscale-testbed-{args.name}/slurm.conf"
    os.environ["OMP_NUM_THREADS"] = "1"  # reaches the ranks; a node here is one core, and more threads only wait
    shape = ("--nodes", "4", "--rate", args.rates[0], "--subnet", args.subnet)
    failed = 0
    try:
        failed = _testbed("up", args.name, *shape)
        return failed or _study(args)
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if not failed:  # else it has said why, and left nothing
            _testbed("down", args.name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", default="testbed", help="a file of conf/study (%(default)s)")
    parser.add_argument(
        "--rates", type=_read_rates, default=RATES, help="of the links, one after the other (%(default)s)"
    )
    parser.add_argument("--name", default="zsstudy", help="of the testbed (%(default)s)")
    parser.add_argument("--subnet", default="10.78.0.0/24", help="of the testbed (%(default)s)")
    parser.add_argument("--results", type=Path, help="(results/runs/STUDY)")
    parser.add_argument("--report", type=Path, help="(results/reports/STUDY)")
    return parser


def _read_rates(text: str) -> list[str]:
    """Read what `--rates` was given; a rate that no file describes is refused before anything is brought up."""
    machines = Path(__file__).parents[1] / "conf/machine"
    known = sorted(path.stem.removeprefix("testbed_") for path in machines.glob("testbed_*.yaml"))
    rates = text.split(",")
    if unknown := [rate for rate in rates if rate not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: no machine testbed_{unknown[0]}; name of {', '.join(known)}")
    return rates


def _study(args: argparse.Namespace) -> int:
    results = args.results or Path("results/runs", args.study)
    report = args.report or Path("results/reports", args.study)
    answered = [_measure(args.study, rate, args.name, results / rate) for rate in args.rates]
    folders = [str(results / rate) for rate in args.rates]
    reported = _zeroscale("report", *folders, "--out", str(report)) == 0
    return 0 if reported and all(answered) else 1


def _measure(study: str, rate: str, bed: str, results: Path) -> bool:
    """Measure the study with every link of the testbed `bed` at `rate`; return whether every point has its answer.

    Each rate has a results folder of its own: whatever goes on with a sweep starts all that is left in its folder, and
    what was asked of one rate must not run at another.
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
    """Say what is done and do it. It is in a session of its own, so that it hears of Ctrl-C from us, and once."""
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
    sys.exit(128 + number)  # as an exception, so that the testbed is taken down


if __name__ == "__main__":
    sys.exit(main())
