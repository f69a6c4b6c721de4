"""Measure two git revisions, or two Python environments, in turn on this machine, and compare them.

  zeroscale ab HEAD~1 HEAD
  zeroscale ab main . --rounds 8 --gate 2%
  zeroscale ab HEAD~1 HEAD model=mt5_base engine=zero3 machine=h200 devices_per_node=8 --format md --out comment.md
  zeroscale ab ~/torch2.12 ~/torch2.13 engine=zero2

A side is one of: a revision of the checkout around this folder; a folder with code, such as `.` with
its uncommitted changes; an environment, which is a folder with bin/python, or an interpreter, and
runs the code of this folder.

Overrides are those of `zeroscale run`. Other keys are those of a small point of the smoke study, on
two processes of the CPU. Outside of Slurm a round is the unit of comparison: fresh processes of both
sides on this machine, in alternating order. A verdict holds for this machine. `zeroscale compare`
compares the sides round by round, and its exit code is the exit code of this command. In addition to
time per sample and peak memory, the gate fails for any change of parameters, FLOPs by their closed
form, calls and bytes of every collective, or live memory. (On a CPU, 64 KiB of live memory belong to
the harness, and the peak depends on timing.) `--allow` names the quantities that may change.

A round on a busy machine (background load, steal, pressure) is measured again, at most twice. After
that both of its sides are kept, and the verdict has the number of such rounds.

With --most-rounds the sides are compared after 5, 10, 20, … rounds, until the gate passes or fails.
Each comparison is stricter, so that together they are wrong in at most 5 % of cases.

Under Slurm, submit it like any command: sbatch --wrap "zeroscale ab HEAD~1 HEAD". Its runs stay on
one node.
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path

from bench.cli import options
from bench.core.errors import UserError
from bench.core.formatting import describe_result, format_count
from bench.core.record import RunRecord
from bench.core.spec import OBJECTIVE, RunSpec
from bench.sweep.ab import ComparedSide, find_checkout, looks, open_sides, order_runs, run_rounds

_SMALL = {"engine": "zero2", "engine.reduce_bucket_size": 1_000_000, "devices_per_node": 2, "batch.micro": 4}
"""Values for the axes of the smoke study."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="REF_A", help="git revision, folder with code, or Python environment")
    parser.add_argument("b", metavar="REF_B", help="the same; it is compared with REF_A")
    options.add_overrides(parser, "point to measure, as for run")
    rounds, most = options.positive("--rounds"), options.positive("--most-rounds")
    parser.add_argument("--rounds", type=rounds, default=5, metavar="N", help="default: %(default)s")
    help_text = "double the rounds up to N while the gate is inconclusive"
    parser.add_argument("--most-rounds", type=most, metavar="N", help=help_text)
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="decides which side begins; default: %(default)s"
    )
    options.add_config_dir(parser)
    options.add_results(parser)
    from analysis.cli import compare

    compare.gate_arguments(parser, gate="3%")


def run(args: argparse.Namespace) -> int:
    """Return 1 if the gate fails, 3 if it is inconclusive."""
    from analysis.cli import compare

    words = [
        *_list_small_overrides(args.overrides, args.config_dir),
        *args.overrides,
        *(["--config-dir", str(args.config_dir)] if args.config_dir else []),
    ]
    with _raise_interrupt_on_sigterm(), open_sides(args.a, args.b, find_checkout(Path.cwd())) as (a, b):
        results = _create_folder(args.results, f"ab-{a.name}-{b.name}")
        # Revisions may decode the same overrides differently. Times of different protocols cannot be compared.
        across = [name for name in RunSpec.model_fields if name != "measure"]
        across += ["versions", "container"] if a.environment or b.environment else []
        stages = looks(args.rounds, args.most_rounds or args.rounds)
        turns = order_runs(stages[-1], args.seed)
        # The options of `compare`, with those that a comparison of two sides fixes.
        chosen = argparse.Namespace(**vars(args) | {
            "a": results / a.name, "b": results / b.name, "called": (a.called, b.called), "across": across,
            "exact": True, "paired": True, "keep_disturbed": True, "looks": len(stages),
        })  # fmt: skip
        busy = 0
        for done, until in zip([0, *stages], stages, strict=False):
            ended = run_rounds((a, b), turns[2 * done : 2 * until], words, results, _print_round)
            busy += len(ended.busy)
            if busy:
                shared = f", {busy} of {format_count(until, 'round')} on a busy machine"
                chosen.called = tuple(side.called + shared for side in (a, b))
            if not ended.well or until == stages[-1] or compare.judge(chosen).verdict != "INCONCLUSIVE":
                break
    print(results, file=sys.stderr)
    return compare.run(chosen)


def _list_small_overrides(overrides: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """Return the overrides of the small point that the user did not set. With another engine or model its options are
    left out, with another objective its lengths: `zeroscale run` has short defaults for each objective."""
    from bench.config import compose

    named = {word.lstrip("+~").partition("=")[0] for word in overrides}
    learnt = [word for word in overrides if word.startswith(("model=", "model.", "objective="))]
    with contextlib.suppress(UserError):  # the sides raise it again
        if compose.compose_request(compose.parse_single(learnt), config_dir).spec.objective != OBJECTIVE:
            named.add("sequence")
    small = compose.read_study("smoke").base | _SMALL
    return [f"{key}={value}" for key, value in small.items() if named.isdisjoint({key, key.partition(".")[0]})]


def _create_folder(parent: Path, name: str) -> Path:
    """Make a new folder for the results, with a number in its name if the name is taken."""
    # mkdir decides, so that two commands at the same time get two folders.
    for ending in chain([""], map(".{}".format, count(2))):
        folder = (parent / f"{name}{ending}").absolute()
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("count() does not end")


def _print_round(number: int, side: ComparedSide, record: RunRecord) -> None:
    print(f"round {number + 1}  {side.called}  {describe_result(record)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _raise_interrupt_on_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C: the run ends with a record, and the worktrees are removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
