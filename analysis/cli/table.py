"""Show one row per run, those that failed too.

  zeroscale table results/runs/smoke
  zeroscale table results/runs --format csv > runs.csv
  zeroscale table results/runs/smoke --columns engine,world_size,micro,tokens_per_s,flags
  zeroscale table results/runs/paper --price 2.5

Text shows the columns that fit a terminal; Markdown, CSV and JSON show all of them. CSV and JSON are exact. The report
says what each column means.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from analysis.cli import records
from bench.core.errors import UserError, make_printable, suggest_nearest

if TYPE_CHECKING:
    from pandas import DataFrame


def arguments(parser: argparse.ArgumentParser) -> None:
    records.arguments(parser)
    parser.add_argument("--format", choices=("text", "md", "csv", "json"), default="text", help="default: %(default)s")
    parser.add_argument("--columns", metavar="A,B,…", help="only these, in this order")
    parser.add_argument(
        "--price", type=float, metavar="P", help="of a device per hour, in your currency; fills cost_per_million_tokens"
    )


def run(args: argparse.Namespace) -> int:
    """Return 0; what is no record is named on standard error."""
    from analysis import formats
    from analysis.metrics import cost

    found = records.read(args.paths)
    priced = found.table if args.price is None else cost.add_prices(found.table, args.price)
    frame = _chosen(priced, args.columns)
    if args.format == "text":
        _print(frame if args.columns else _readable(frame))
    else:
        written = {"md": formats.to_markdown, "csv": formats.to_csv, "json": formats.to_json}[args.format](frame)
        sys.stdout.write(written)
    return 0


def _chosen(frame: "DataFrame", listed: str | None) -> "DataFrame":
    if listed is None:
        return frame
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for name in names or [listed]:
        if name not in frame.columns:
            raise UserError(f"--columns {name}", "no such column", suggest_nearest(name, map(str, frame.columns)))
    return frame[names]


def _readable(frame: "DataFrame") -> "DataFrame":
    from analysis.columns import SHOWN, SHOWN_WHERE_DIFFERENT

    has_value = frame.notna() & (frame.astype("string") != "")
    has_value["evidence"] = bool((frame["evidence"] != "measured").any())  # said where not all of it is measured
    for name in SHOWN_WHERE_DIFFERENT:
        has_value[name] = frame[name].nunique(dropna=False) > 1
    return frame[[name for name in (*SHOWN, "reason") if name in has_value and has_value[name].any()]]


def _print(frame: "DataFrame") -> None:
    """Print a table as wide as the terminal, or as wide as it is where the output goes elsewhere."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from analysis.columns import list_all_columns
    from analysis.formats import format_cell
    from analysis.table import list_rows

    known = list_all_columns()
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in map(str, frame.columns):
        right = known[name].kind in ("integer", "number")
        shown.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    for row in list_rows(frame):
        shown.add_row(*(Text(make_printable(format_cell(known[name], value))) for name, value in row.items()))
    console = Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)
    console.print(shown)
