"""Write the report's figures as files for print.

  zeroscale figures results/runs/smoke
  zeroscale figures results/runs/smoke --format svg --only throughput,memory --out paper

A figure is not written if these runs lack the data for it. Standard error then has a line with the
name of the figure and the runs that it needs. If no figure is written, the exit code is 2.
"""

import argparse
import sys
from pathlib import Path

from analysis.cli import add_out, add_paths, choose_out, read_records, reporting_unwritable

_FIGURES = Path("results/figures")


def arguments(parser: argparse.ArgumentParser) -> None:
    add_paths(parser)
    add_out(parser, _FIGURES)
    forms = "file formats: any of pdf, png and svg; default: pdf,png"
    parser.add_argument("--format", default="pdf,png", metavar="F,…", help=forms)
    parser.add_argument("--only", metavar="NAME,…", help="write only these figures; default: every figure with data")


def run(args: argparse.Namespace) -> int:
    """Return exit code 0 once the figures are written. Print the path of each file. Raise UserError if no figure can be
    drawn."""
    from analysis.drawing import compose
    from analysis.drawing.svg import FORMATS, save
    from analysis.figures import list_figures, skipping
    from bench.core import terminal
    from bench.core.errors import UserError, suggest_nearest

    forms, names = args.format.split(","), [one.name for one in list_figures()]
    only = args.only.split(",") if args.only else names
    for option, what, given, known in (("format", "format", forms, FORMATS), ("only", "figure", only, names)):
        for one in given:
            if one not in known:
                raise UserError(f"--{option} {one}", f"no such {what}", suggest_nearest(one, known))
    with terminal.progress(quiet=False) as follow:
        follow("reading records")
        found = read_records(args.paths, follow)
    out = choose_out(args.out, _FIGURES, found)
    pictures = {}
    for figure in (one for one in list_figures() if one.name in only):
        with skipping(figure):
            if (picture := figure.build(found)).panels:
                pictures[figure] = picture
            else:
                print(f"not drawn: {figure.name}, which needs {figure.needs}", file=sys.stderr)
    if not pictures:
        raise UserError(" ".join(map(str, args.paths)), "no figure can be drawn from these runs", "give other runs")
    with reporting_unwritable(out):
        out.mkdir(parents=True, exist_ok=True)
        for figure, picture in pictures.items():
            with skipping(figure):
                for form in forms:
                    path = out / f"{figure.name}.{form}"
                    path.write_bytes(save(compose(picture), form, figure.name))
                    print(path)
    return 0
