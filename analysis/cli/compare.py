"""Compare two sets of results: which configurations are faster, slower or equal in B; optionally with a gate.

  zeroscale compare results/runs/before results/runs/after
  zeroscale compare before after --gate 3% --format md --out comment.md
  zeroscale compare torch2.12 torch2.13 --across versions.torch
  zeroscale compare smoke smoke --across engine=zero2:zero3

Two configurations are compared if they have the same spec, protocol, machine and versions. The
compared quantity is the time per sample over the whole window. Other pairs are listed with their
differences. --across allows a difference in a field of the spec (engine, measure,
engine.options.reduce_bucket_size, …), in machine, in versions.torch, …, and in all fields below it.

A gate prints PASS, FAIL or INCONCLUSIVE, with exit code 0, 1 or 3. Without a gate, the exit code is 0, or
3 if no configuration can be compared.

PASS: a slowdown above the gate is excluded for every configuration.

FAIL: one of four conditions holds. (1) The whole interval of B's slowdown lies above the gate. All
configurations are tested together, with a probability of error of at most 5 %. (2) The peak memory of
every run of B exceeds that of every run of A by more than the gate. (3) A configuration failed in B
and ended ok in A. Runs that were preempted, cancelled or lost their node do not count here. (4) There
is nothing to compare.

INCONCLUSIVE: neither PASS nor FAIL. For example, a configuration is not comparable, is missing in B,
has a larger share of failed runs in B, or has fewer than three runs in A or B. Three runs are needed
to see how much runs of the same configuration differ; the steps of one run do not show this. The
output then has the smallest slowdown that could be detected, and the number of missing repeats. With
--strict, INCONCLUSIVE becomes FAIL.

Runs on a busy machine are excluded.

Text fits 100 columns or the terminal; --wide shows all columns, with one line per configuration.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.cli import add_format, read_records, reporting_unwritable
from bench.core import store
from bench.core.errors import UserError, suggest_nearest

if TYPE_CHECKING:
    from analysis.compare import ComparisonSetup, SetComparison

FORMATS = ("text", "md", "json", "csv", "junit")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="results folder A, the baseline")
    parser.add_argument("b", type=Path, metavar="B", help="results folder B, which is compared with A")
    across = "allow a difference in this field; several fields: a,b"
    parser.add_argument("--across", action="append", default=[], metavar="FIELD[=A:B]", help=across)
    exact = "changed counts, such as FLOPs or bytes, also break the gate"
    parser.add_argument("--exact", action="store_true", help=exact)
    paired = "compare run n of A with run n of B, if one ran directly after the other, as in `ab`"
    parser.add_argument("--paired", action="store_true", help=paired)
    parser.add_argument("--called", nargs=2, metavar=("A", "B"), help="display names of A and B; default: their paths")
    gate_arguments(parser)


def gate_arguments(parser: argparse.ArgumentParser, gate: str | None = None) -> None:
    """Add the options that the commands `compare` and `ab` have in common."""
    # argparse applies % formatting to help texts, so a percent sign is written twice
    shown, default = (gate or "none").replace("%", "%%"), gate and percentage(gate)
    limit = f"fail if B takes more time or memory than A by this percentage; default: {shown}"
    parser.add_argument("--gate", type=percentage, metavar="PERCENT", default=default, help=limit)
    parser.add_argument("--strict", action="store_true", help="an inconclusive gate counts as failed")
    allow = "quantities that may change without breaking the gate, e.g. resident_bytes"
    parser.add_argument("--allow", default="", metavar="NAME,…", help=allow)
    add_format(parser, FORMATS)
    wide = "text format: print all columns, one line per configuration"
    parser.add_argument("--wide", action="store_true", help=wide)
    out = "write the comparison to this file, and print only a summary"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)


def check_out(out: Path | None) -> None:
    """Raise UserError if a comparison could not be written to the file `out`. Nothing is written."""
    if out and out.is_dir():
        raise UserError(f"--out {out}", "is a folder", "name a file in this folder")
    if out and not out.parent.is_dir():
        raise UserError(f"--out {out}", f"the folder {out.parent} does not exist", "create it, or choose another --out")


def percentage(text: str) -> float:
    """Return a percentage as a fraction: 0.03 for the text `3%`. Raise UserError for any other form."""
    number = text.removesuffix("%").strip()
    if text.endswith("%") and number.replace(".", "", 1).isdecimal():
        return float(number) / 100
    remedy = f"write {number}%" if number.replace(".", "", 1).isdecimal() else "write it like 3%"
    raise UserError(f"--gate {text}", "must be a percentage", remedy)


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 1 if the gate fails, 3 if it is inconclusive or if nothing can be compared, else 0."""
    from analysis.compare import output
    from analysis.compare.phrases import format_headline

    compared = judge(args)
    forms = {"md": output.to_markdown, "json": output.to_json, "csv": output.to_csv, "junit": output.to_junit}
    written = forms[args.format](compared) if args.format in forms else output.to_text(compared, wide=args.wide)
    if args.out:
        with reporting_unwritable(args.out):
            store.write_atomically(args.out, written.encode())
        print(format_headline(compared))
        print(args.out)
    else:
        sys.stdout.write(written)
    return compared.exit_code


def judge(args: argparse.Namespace) -> "SetComparison":
    """Return the comparison of result sets A and B."""
    from analysis.compare import compare

    return compare(read_records([args.a]), read_records([args.b]), _question(args))


def _question(args: argparse.Namespace) -> "ComparisonSetup":
    from analysis.compare import ComparisonSetup
    from analysis.compare.fields import parse_across
    from analysis.compare.judging import Gate

    gate, looks = None, getattr(args, "looks", 1)  # an option of `ab`
    given = [option for option, value in (("--strict", args.strict), ("--allow", args.allow)) if value]
    if given and not args.exact and args.gate is None:
        raise UserError(given[0], "has no meaning without --gate or --exact", "add --gate 3%")
    if args.exact or args.gate is not None:
        gate = Gate(args.gate, args.exact, args.strict, looks, read_allowed(args))
    across = tuple(one for text in args.across for one in parse_across(text))
    if args.across and not across:
        raise UserError(f"--across {','.join(args.across)}", "names no field", "give a field, e.g. versions.torch")
    called = tuple(args.called or (str(args.a), str(args.b)))
    keep_disturbed = getattr(args, "keep_disturbed", False)  # an option of `ab`
    return ComparisonSetup(called, across, gate, args.paired, keep_disturbed)


def read_allowed(args: argparse.Namespace) -> frozenset[str]:
    """Return the quantities that may change without breaking the gate (`--allow`). Raise UserError for an unknown
    quantity."""
    from analysis.compare.judging import FIXED, is_quantity

    names = frozenset(name.strip() for name in args.allow.split(",")) if args.allow else frozenset()
    for name in names:
        if not is_quantity(name):
            rule = "must be a count or a number of bytes"
            raise UserError(f"--allow {name}", rule, suggest_nearest(name, FIXED))
    return names
