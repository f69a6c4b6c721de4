"""Say which configurations are faster, slower or the same in B, seen from A, and break a gate.

  zeroscale compare results/runs/before results/runs/after
  zeroscale compare before after --gate 3% --format md --out comment.md
  zeroscale compare torch2.12 torch2.13 --across versions.torch
  zeroscale compare smoke smoke --across engine=zero2:zero3

Two configurations are compared, by time per sample over the whole window, where they measured the same by the same
protocol, on the same machine, with the same versions. What differs is named and not compared, unless --across says that
it is the question: a field of the spec (engine, engine.options.reduce_bucket_size, measure, …), machine,
versions.torch, … or all below it.

The gate says PASS, FAIL or INCONCLUSIVE, with exit code 0, 1 or 3. It fails where the whole interval of B's slowdown
lies above the gate (all configurations taken together wrong in at most 5 %); where each of its runs has a peak of
memory higher than all of A's by more than that; where it failed and A ran; and where there is nothing to compare. It
passes where a slowdown past the gate is excluded everywhere. Else it is inconclusive, as it is for configurations that
are not comparable or missing in B, and for fewer than three runs of a side whose machine was not busy: there are too
few repeats to tell then, for two runs of the same differ by more than their steps show. The output says the
smallest slowdown that could have been seen, and how many repeats are missing. --strict fails in all these cases.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.cli import records
from bench.core import store
from bench.core.errors import UserError, suggest_nearest

if TYPE_CHECKING:
    from analysis.compare import ComparisonSetup, SetComparison
    from analysis.results import Results

FORMATS = ("text", "md", "json", "csv", "junit")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="results to compare with")
    parser.add_argument("b", type=Path, metavar="B", help="results to compare")
    parser.add_argument(
        "--across", action="append", default=[], metavar="FIELD[=A:B]", help="this difference is the question; also a,b"
    )
    parser.add_argument("--exact", action="store_true", help="any change of what does not vary breaks the gate as well")
    parser.add_argument(
        "--paired", action="store_true", help="repeat n of A and of B were made one after the other, as `ab` does"
    )
    parser.add_argument("--called", nargs=2, metavar=("A", "B"), help="names of the two; default: their paths")
    gate_arguments(parser)


def gate_arguments(parser: argparse.ArgumentParser, gate: str | None = None) -> None:
    """Add what `ab` takes as well."""
    help_text = "exit code 1 where B is slower, or needs more memory, by more than this"
    default = gate and percentage(gate)
    parser.add_argument(
        "--gate",
        type=percentage,
        metavar="PERCENT",
        default=default,
        help=f"{help_text}; default: {gate or 'none'}".replace("%", "%%"),
    )
    parser.add_argument("--strict", action="store_true", help="what is inconclusive fails")
    parser.add_argument(
        "--allow", default="", metavar="NAME,…", help="counts and bytes that may change, such as resident_bytes"
    )
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there; the outcome still goes to the terminal")


def percentage(text: str) -> float:
    """Return 0.03 for `3%`; UserError for what is no percentage."""
    number = text.removesuffix("%").strip()
    if text.endswith("%") and number.replace(".", "", 1).isdecimal():
        return float(number) / 100
    raise UserError(f"--gate {text}", "not a percentage", "write it as in 3%")


def run(args: argparse.Namespace) -> int:
    """Return 1 if the gate fails, 3 if nobody can say whether it does."""
    from analysis.compare import EXIT_CODES, output
    from analysis.compare.phrases import format_headline

    compared = judge(args)
    written = {
        "text": output.to_text, "md": output.to_markdown, "json": output.to_json, "csv": output.to_csv,
        "junit": output.to_junit,
    }[args.format](compared)  # fmt: skip
    if args.out:
        try:
            store.write_atomically(args.out, written.encode())
        except OSError as error:
            remedy = "choose another file"
            raise UserError(f"--out {args.out}", f"cannot be written ({error.strerror})", remedy) from error
        print(format_headline(compared))
        print(args.out)
    else:
        sys.stdout.write(written)
    return EXIT_CODES[compared.verdict]


def judge(args: argparse.Namespace) -> "SetComparison":
    """Return what the two sets of results say."""
    from analysis.compare import compare

    return compare(_read(args.a), _read(args.b), _question(args))


def _read(path: Path) -> "Results":
    return records.read([path])


def _question(args: argparse.Namespace) -> "ComparisonSetup":
    from analysis.compare import ComparisonSetup
    from analysis.compare.fields import parse_across
    from analysis.compare.judging import Gate

    looks = getattr(args, "looks", 1)  # of `ab`
    gate = (
        Gate(args.gate, args.exact, args.strict, looks, _allowed(args)) if args.exact or args.gate is not None else None
    )
    across = tuple(one for text in args.across for one in parse_across(text))
    if args.across and not across:
        raise UserError(f"--across {','.join(args.across)}", "names no field", "give one, such as versions.torch")
    called = tuple(args.called or (str(args.a), str(args.b)))
    keep_disturbed = getattr(args, "keep_disturbed", False)  # of `ab`
    return ComparisonSetup(called, across, gate, args.paired, keep_disturbed)


def _allowed(args: argparse.Namespace) -> frozenset[str]:
    """Return the quantities that may change; UserError for what is none."""
    from analysis.compare.judging import FIXED, is_quantity

    names = frozenset(name.strip() for name in args.allow.split(",")) if args.allow else frozenset()
    for name in names:
        if not is_quantity(name):
            rule = "not a count or an amount of bytes that should not change"
            raise UserError(f"--allow {name}", rule, suggest_nearest(name, FIXED))
    return names
