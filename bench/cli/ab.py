"""Measure two git revisions or two Python environments in alternation on this machine, and compare
them.

  zeroscale ab HEAD~1 HEAD
  zeroscale ab main . --rounds 8 --gate 2%
  zeroscale ab HEAD~1 HEAD model=mt5_base engine=zero3 machine=h200 devices_per_node=8 --format md --out comment.md
  zeroscale ab ~/torch2.12 ~/torch2.13 engine=zero2

Each side is a git revision, a folder with code, or a Python environment. A revision is checked out
from the repository around this folder. A folder such as `.` is measured with its uncommitted
changes. An environment is an interpreter or a folder with bin/python, and it runs the code of this
folder.

Overrides are those of `zeroscale run`. Keys without an override have the values of a small point of
the smoke study on two CPU processes. Each round starts new processes for both sides on this
machine, in alternating order. At the end, `zeroscale compare` compares the sides round by round.
The verdict holds for this machine.

The comparison has a gate, which passes, fails or is inconclusive. Its exit code becomes the exit
code of this command. The gate checks that time per sample and peak memory do not grow by more than
`--gate` (default: 3%). The gate also fails for any change of the number of parameters, the FLOPs by
formula, the calls and bytes of a collective, or live memory. `--allow` names quantities that may
change. (On a CPU, 64 KiB of live memory belong to the harness, and peak memory depends on timing.)

A round on a busy machine (background load, steal time, pressure) is measured again, at most twice.
If the machine is still busy, both sides of the round are kept, and the verdict reports the number
of such rounds. If one side had more background load than the other, times decide nothing.

With --most-rounds the sides are compared after 5, 10, 20, … rounds, until the gate passes or fails.
Each comparison uses a stricter threshold, so that the probability of any wrong verdict stays below
5 %.

Under Slurm, submit the command as a job: sbatch --wrap "zeroscale ab HEAD~1 HEAD". Its runs stay on
one node.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path

from bench.cli import options
from bench.core import store
from bench.core.errors import Interrupted, UserError
from bench.core.formatting import describe_result, format_count
from bench.core.processes import interrupt_on_sigterm
from bench.core.quantities import was_busy
from bench.core.record import RunRecord
from bench.core.spec import OBJECTIVE, RunSpec
from bench.sweep.ab import MOST_AGAIN, ComparedSide, find_checkout, looks, open_sides, order_runs, run_rounds

_SMALL = {"engine": "zero2", "engine.reduce_bucket_size": 1_000_000, "devices_per_node": 2, "batch.micro": 4}
"""Overrides that select a single small point of the smoke study: values for the keys that the study varies."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="REF_A", help="git revision, folder with code, or Python environment")
    help_text = "git revision, folder with code, or Python environment to compare with REF_A"
    parser.add_argument("b", metavar="REF_B", help=help_text)
    options.add_overrides(parser, "setting of the configuration to measure, as for `zeroscale run`")
    rounds, most = options.positive("--rounds"), options.positive("--most-rounds")
    help_text = "number of rounds, each with a run of both sides; default: %(default)s"
    parser.add_argument("--rounds", type=rounds, default=5, metavar="N", help=help_text)
    help_text = "double the number of rounds while the gate is inconclusive, up to N rounds"
    parser.add_argument("--most-rounds", type=most, metavar="N", help=help_text)
    help_text = "random seed for the side that begins each round; default: %(default)s"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=help_text)
    options.add_config_dir(parser)
    options.add_results(parser)
    from analysis.cli import compare

    compare.gate_arguments(parser, gate="3%")


def run(args: argparse.Namespace) -> int:
    """Measure both sides in turn, and compare them with the gate: the check that no quantity gets worse by more than
    the user allows. Return the exit code: 0 if the gate passes, 1 if it fails, 3 if it is inconclusive."""
    from analysis.cli import compare

    # An unknown quantity and a file that cannot be written are refused before the first round.
    compare.read_allowed(args)
    compare.check_out(args.out)
    if args.most_rounds and args.most_rounds < args.rounds:
        rule = f"must be at least the number of rounds, {args.rounds}"
        raise UserError(f"--most-rounds {args.most_rounds}", rule, "raise it, or set a lower --rounds")
    words = [
        *_list_small_overrides(args.overrides, args.config_dir),
        *args.overrides,
        *(["--config-dir", str(args.config_dir)] if args.config_dir else []),
    ]
    with interrupt_on_sigterm(), open_sides(args.a, args.b, find_checkout(Path.cwd())) as (a, b):
        results = _create_folder(args.results, f"ab-{a.name}-{b.name}")
        # Two revisions may decode the same overrides into different specs, so all fields may differ between the sides.
        # The measurement protocol is the exception: times of different protocols cannot be compared.
        across = [name for name in RunSpec.model_fields if name != "measure"]
        across += ["versions", "container"] if a.environment or b.environment else []
        stages = looks(args.rounds, args.most_rounds or args.rounds)
        turns = order_runs(stages[-1], args.seed)
        # The user's options of `compare`, and the options that are fixed for a comparison of two sides.
        chosen = argparse.Namespace(**vars(args) | {
            "a": results / a.name, "b": results / b.name, "called": (a.called, b.called), "across": across,
            "exact": True, "paired": True, "keep_disturbed": True, "looks": len(stages),
        })  # fmt: skip
        busy = 0
        for done, until in zip([0, *stages], stages, strict=False):
            with _pointing_at(results, args, across):
                well, busy_rounds = run_rounds((a, b), turns[2 * done : 2 * until], words, results, _print_round)
            busy += len(busy_rounds)
            if busy:
                shared = f", {busy} of {format_count(until, 'round')} on a busy machine"
                chosen.called = tuple(side.called + shared for side in (a, b))
            if not well or until == stages[-1] or compare.judge(chosen).verdict != "INCONCLUSIVE":
                break
    print(results, file=sys.stderr)
    return compare.run(chosen)


@contextlib.contextmanager
def _pointing_at(results: Path, args: argparse.Namespace, across: Sequence[str]) -> Iterator[None]:
    """Context that names the results of finished rounds if the rounds are interrupted. If there are no results, it
    removes their empty folder."""
    try:
        yield
    except BaseException as error:
        sides = sorted(path for path in results.iterdir() if path.name[:2] in ("a-", "b-"))
        if not any(results.rglob(store.RECORD)):
            with contextlib.suppress(OSError):
                for folder in (*sides, results):
                    folder.rmdir()
        elif isinstance(error, KeyboardInterrupt) and len(sides) == 2:
            gate = f"{100 * args.gate:g}%"
            allowed = [word for field in across for word in ("--across", field)]
            words = ["zeroscale", "compare", *map(str, sides), "--paired", "--exact", "--gate", gate, *allowed]
            words += [*(["--allow", args.allow] if args.allow else []), *["--strict"] * args.strict]
            print("zeroscale: interrupted", file=sys.stderr)
            print(options.format_next("compare the finished rounds without background load", words), file=sys.stderr)
            raise Interrupted(results) from error
        raise


def _list_small_overrides(overrides: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """Return the overrides of a small point (configuration) of the smoke study, for keys that the user did not set.

    If the user chose an engine or a model, all overrides of the engine or the model are omitted. If the user chose
    another objective, the sequence lengths are omitted: `zeroscale run` has short default lengths for each objective.
    """
    from bench.config import compose

    named = {word.lstrip("+~").partition("=")[0] for word in overrides}
    learnt = [word for word in overrides if word.startswith(("model=", "model.", "objective="))]
    with contextlib.suppress(UserError):  # both sides report this error again
        if compose.compose_request(compose.parse_single(learnt), config_dir).spec.objective != OBJECTIVE:
            named.add("sequence")
    small = compose.read_study("smoke").base | _SMALL
    return [f"{key}={value}" for key, value in small.items() if named.isdisjoint({key, key.partition(".")[0]})]


def _create_folder(parent: Path, name: str) -> Path:
    """Create a new folder for the results and return its path. If a folder `name` exists, a number is appended to the
    name."""
    # mkdir fails if the folder exists, so two commands at the same time get different folders.
    for ending in chain([""], map(".{}".format, count(2))):
        folder = (parent / f"{name}{ending}").absolute()
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("count() does not end")


def _print_round(number: int, side: ComparedSide, record: RunRecord) -> None:
    busy = f"; the machine was busy (such a round is repeated, at most {MOST_AGAIN} times)" if was_busy(record) else ""
    print(f"round {number + 1}  {side.called}  {describe_result(record)}{busy}", file=sys.stderr, flush=True)
