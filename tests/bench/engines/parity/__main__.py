"""Train a covering set of tiny runs on up to 8 ranks over gloo, and the same runs in one process:
`make parity`.

Each run prints one line: the largest relative deviations of losses, gradient norms and weights over
five clipped steps, and of the losses of evaluations between these steps. The exit code is 1 if a
run deviates too much: by more than 1e-6 in fp32, 1e-5 in fp32 with sliced matrices, or 5 % in bf16.

Three things must be bitwise equal. First, the run and the single process start with equal weights. Second, if several
ranks hold the same parameter, its final values are equal on these ranks. Third, losses, gradient norms and weights of
the run are the same with and without evaluations.

The single process applies dropout to the samples of each rank with the seed of this rank. Evaluations have no dropout
and draw no random numbers. With padded samples, some micro-batches have no target token.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from pipeline_runs import Ranks, compare_to_one_process, run_jobs

from parity.covering import Case, choose_cases

AT_ONCE = 10
"""Number of cases whose ranks are started together."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the covering set (%(default)s)")
    parser.add_argument("--first", type=int, help="run so many of its cases alone")
    parser.add_argument("--dry-run", action="store_true", help="say what is run, and run nothing")
    args = parser.parse_args(argv)
    cases = choose_cases(args.seed)[: args.first]
    if args.dry_run:
        print("\n".join(map(format_case, cases)), f"{len(cases)} runs", sep="\n")
        return 0
    cases, wrong = sorted(cases, key=lambda case: case.ranks), 0
    torch.set_num_threads(1)  # for such small models, more threads wait for each other longer than they compute
    print(" losses    norms  weights  evaluations")
    for begin in range(0, len(cases), AT_ONCE):
        some = cases[begin : begin + AT_ONCE]
        with tempfile.TemporaryDirectory() as folder:
            seen = run_jobs({format_case(case): case.build_spec() for case in some}, Path(folder))
        wrong += sum(print_differences(case, seen[format_case(case)]) for case in some)
    print(f"{len(cases)} runs by seed {args.seed}, {wrong} of them off")
    return 1 if wrong else 0


def print_differences(case: Case, ranks: Ranks) -> bool:
    """Print the deviations between a run and the same training in one process. Return True if one of them is too
    large."""
    differences = compare_to_one_process(case.build_spec(), ranks)
    limit = 5e-2 if case.precision == "bf16" else 1e-6 if case.slices == "whole" else 1e-5
    *shares, unequal = differences
    is_off = max(shares) > limit or bool(unequal)
    words = "  ".join(f"{share:7.1e}" for share in shares)
    print(f"{words}  {'OFF ' if is_off else '    '}{format_case(case)}", *unequal, flush=True)
    return is_off


def format_case(case: Case) -> str:
    """Return a case as text."""
    engine = case.engine if case.engine != "pipeline" else f"pipeline ({case.placement}, {case.sharding})"
    words = engine, f"{case.copies} copies", f"slices: {case.slices}", case.family, case.precision, case.samples
    return ", ".join(words + ("dropout",) * (case.dropout != "none"))


if __name__ == "__main__":
    sys.exit(main())
