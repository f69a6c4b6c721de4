"""Measure two git revisions, or two Python environments, in turn on this machine, and compare them.

  zeroscale ab HEAD~1 HEAD
  zeroscale ab main . --rounds 8 --gate 2%
  zeroscale ab HEAD~1 HEAD model=mt5_base engine=zero3 machine=h200 devices_per_node=8 --format md --out comment.md
  zeroscale ab ~/torch2.12 ~/torch2.13 engine=zero2

A side is a revision of the checkout around this folder, a folder with the code as it is (`.`, with what is not yet
committed), or an environment: a folder with bin/python, or an interpreter, which runs the code as it is here.

Overrides are those of `zeroscale run`; what they leave open is as in a small point of the smoke study, on two processes
of the CPU. Outside of Slurm the unit is a round of fresh processes on this machine: a verdict holds for it as it is. In
every round both sides run, by turns first; `zeroscale compare` then compares them round by round, and its exit code is
that of this command. Besides time per sample and peak of memory, whatever should not vary breaks the gate by any
change: parameters, FLOPs by their closed form, calls and bytes of every collective, live memory. (On a CPU 64 KiB of it
are the harness's own, and the peak depends on timing.) `--allow` names what is meant to change.

A round on a busy machine (background load, steal, pressure) is measured again, twice at most. After that both of its
sides stay in, and the verdict names how many such rounds there are.

With --most-rounds it looks after 5, 10, 20, … rounds and ends when the gate passes or fails; each look is stricter, so
that all of them together are wrong in at most 5 %.

Under Slurm it is a command like any other: sbatch --wrap "zeroscale ab HEAD~1 HEAD". Its runs stay on one node.
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from bench.cli import options
from bench.core.errors import UserError
from bench.core.formatting import describe_result, format_count
from bench.core.record import RunRecord
from bench.core.spec import OBJECTIVE, RunSpec
from bench.sweep.ab import ComparedSide, find_checkout, looks, open_sides, order_runs, run_rounds

_SMALL = {
    "engine": "zero2", "engine.reduce_bucket_size": 1_000_000, "devices_per_node": 2, "batch.micro": 4,
}  # fmt: skip
"""Of the smoke study, where nothing else is chosen for."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="REF_A", help="git revision, folder with code, or Python environment")
    parser.add_argument("b", metavar="REF_B", help="the same, to be compared with it")
    options.add_overrides(parser, "what is measured, as `run` takes it")
    parser.add_argument(
        "--rounds", type=options.positive("--rounds"), default=5, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--most-rounds", type=options.positive("--most-rounds"), metavar="N",
        help="double the rounds up to N as long as the gate stays open",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides who begins; default: %(default)s")
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
        # Whatever a revision makes of the same overrides is the question; by another protocol, times do not compare.
        across = [name for name in RunSpec.model_fields if name != "measure"]
        across += ["versions", "container"] if a.environment or b.environment else []
        stages = looks(args.rounds, args.most_rounds or args.rounds)
        turns = order_runs(stages[-1], args.seed)
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
    """Return the small point but for what is overridden; of another engine or model, none of its options, of another
    objective, none of its lengths: `zeroscale run` has short ones for each."""
    from bench.config import compose

    named = {word.lstrip("+~").partition("=")[0] for word in overrides}
    learnt = [word for word in overrides if word.startswith(("model=", "model.", "objective="))]
    with contextlib.suppress(UserError):  # it is the sides that say what is wrong
        if compose.compose_request(compose.parse_single(learnt), config_dir).spec.objective != OBJECTIVE:
            named.add("sequence")
    small = compose.read_study("smoke").base | _SMALL
    return [f"{key}={value}" for key, value in small.items() if named.isdisjoint({key, key.partition(".")[0]})]


def _create_folder(parent: Path, name: str) -> Path:
    """Make a new folder for the results; what is there stays as it is."""
    for number in count(1):
        folder = (parent / (name if number == 1 else f"{name}.{number}")).absolute()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("there is always another number")


def _print_round(number: int, side: ComparedSide, record: RunRecord) -> None:
    print(f"round {number + 1}  {side.called}  {describe_result(record)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _raise_interrupt_on_sigterm() -> Iterator[None]:
    """Take a polite request to end for a Ctrl-C: a run is ended in good order, and nothing stays behind."""
    before = signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
