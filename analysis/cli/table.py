"""Show one row per run, failed runs included.

  zeroscale table results/runs/smoke
  zeroscale table results/runs --format csv > runs.csv
  zeroscale table results/runs/smoke --columns engine,world_size,micro,tokens_per_s,flags
  zeroscale table results/runs/paper --price 2.5
  zeroscale table results/runs/learning --costs --price 2.5 --loss 2.5

--costs shows a row per configuration instead, with the cost of all its attempts: per run, per million
tokens and, with --loss, until a held-out loss is reached. Start-up and failed attempts are included.

If runs are trainings, the table has their held-out losses and the quality of their answers before and
after the training.

In the text format, the table has the main columns that fit the width of the terminal (in a file: 100
characters). Columns with equal values are omitted first. If two configurations would then look equal,
the table has the column config_id. A long reason is cut after eight lines. --wide adds the other main
columns, with one line per row and whole reasons. Markdown, CSV and JSON have all columns of the
table; CSV and JSON have exact numbers. `zeroscale explain COLUMN` explains a column.
"""

import argparse
import itertools
import sys
import textwrap
from typing import TYPE_CHECKING, NamedTuple

from analysis.cli import add_format, add_paths, read_records
from bench.core import terminal
from bench.core.errors import UserError, suggest_nearest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pandas import DataFrame

    from analysis.results import Results
    from analysis.summary import Row

_FOLDED = {"options": 24, "adapter": 24, "flags": 12, "reason": 24}
"""Columns whose texts may be wrapped, each with its least width in characters."""
_NARROW = 12
"""Least width of the columns in `_FOLDED` if the table does not fit otherwise."""
_ELLIPSIS = " …"
_CUT, _MOST_LINES = "reason", 8
"""Column whose texts are cut after this number of lines. The reason of a failure may be a whole page."""
_OMITTED_FIRST = (
    "options", "compute_s", "sample_s", "precision", "decoder_length", "encoder_length", "evidence", "mfu",
    "tokens_trained", "token_f1_before", "model", "config_id", "cost_per_million_tokens", "peak_allocated_bytes",
    "tokens_per_s", "token_f1",
)  # fmt: skip
"""Columns that may be omitted to make a table narrower, in the order in which they are omitted. Columns with the same
value in all rows are omitted before columns whose values differ."""
_OMITTED_IF_TRAINED = ("step_s", "world_size")
_OMITTED_IF_EQUAL = ("learning_rate", "micro", "outcome")
_OMITTED_LAST = ("exact_match_before", "exact_match", "validation_loss")
"""Further columns that may be omitted if the table has held-out losses, which need the room. Columns of
_OMITTED_IF_EQUAL are omitted only if they have the same value in all rows. Columns of _OMITTED_LAST are omitted after
all others."""
_IN_CONFIG_ID = ("seed", "learning_rate", "world_size", "adapter", "micro", "engine")
"""Settings that may be omitted if the table shows config_id, which also identifies the rows. They are omitted after
other columns. In a table with held-out losses, the engine may be omitted in any case."""
_IDENTIFYING = (*_IN_CONFIG_ID, "model", "options", "precision", "encoder_length", "decoder_length")
_NAMED = 3
"""Number of omitted columns that are named if more than one other column is omitted, too."""


def arguments(parser: argparse.ArgumentParser) -> None:
    add_paths(parser)
    add_format(parser)
    parser.add_argument("--columns", metavar="A,B,…", help="show only these columns, in this order")
    parser.add_argument("--wide", action="store_true", help="text format: show all main columns, one line per row")
    price = "price per device and hour, in any currency, for the column cost_per_million_tokens"
    parser.add_argument("--price", type=float, metavar="P", help=price)
    costs = "show a row per configuration with the costs of all its attempts"
    parser.add_argument("--costs", action="store_true", help=costs)
    loss = "with --costs: also show the cost until this held-out loss is reached"
    parser.add_argument("--loss", type=float, metavar="L", help=loss)


def run(args: argparse.Namespace) -> int:
    """Return exit code 0. Files that are not records are named on standard error."""
    from analysis import formats
    from analysis.columns import list_all_columns
    from analysis.metrics import cost

    if args.loss is not None and not args.costs:
        raise UserError(f"--loss {args.loss:g}", "has no meaning without --costs", "add --costs")
    cost.check_price(args.price)
    cost.check_loss(args.loss)
    found = read_records(args.paths)
    frame = found.table if args.price is None else cost.add_prices(found.table, args.price)
    if args.costs:
        return _show_costs(found, args)
    names = [name.strip() for name in (args.columns or "").split(",") if name.strip()]
    for name in names or [args.columns] * (args.columns is not None):
        if name not in frame.columns:
            if name in list_all_columns():
                raise UserError(f"--columns {name}", "optional column, of which no run here has a value", "remove it")
            raise UserError(f"--columns {name}", "no such column", suggest_nearest(name, map(str, frame.columns)))
    frame = frame[names] if names else frame
    if args.format == "text":
        _print(frame, wide=args.wide, chosen=bool(names))
    else:
        written = {"md": formats.to_markdown, "csv": formats.to_csv, "json": formats.to_json}[args.format](frame)
        sys.stdout.write(written)
    return 0


def _show_costs(found: "Results", args: argparse.Namespace) -> int:
    """Write the costs of each configuration. In the format `text`, remarks on what the costs include are written below
    the table."""
    from analysis import costs, formats

    costs.check_held_out(args.loss, found.table)
    frame = costs.tabulate_costs(found, args.price, args.loss)
    if args.columns is not None:
        rule = "the table of --costs has fixed columns"
        raise UserError(f"--columns {args.columns}", rule, "remove --columns or --costs")
    if args.format == "md":
        sys.stdout.write(formats.format_markdown_table(*costs.build_text_cells(frame)))
    elif args.format == "text":
        head, rows, right = costs.build_text_cells(frame)
        width = None if args.wide else formats.find_width()
        # the longest word of a column of texts is its least width
        texts = [name for name, number in zip(head, right, strict=True) if not number]
        least = {name: max(len(word) for row in rows for word in row[head.index(name)].split()) for name in texts}
        _write_text(_TextTable(head, rows, right, least), width, costs.list_omitted_first(head))
        allocated = costs.compute_allocated_time(found.get_file(place) for place in range(len(found.table)))
        once = 0 if args.loss is None else costs.count_evaluated_once(found)
        print("\n".join(map(terminal.wrap, costs.list_remarks(frame, allocated, args.price, once))))
    else:
        sys.stdout.write((formats.to_csv if args.format == "csv" else formats.to_json)(frame))
    return 0


def _print(frame: "DataFrame", *, wide: bool, chosen: bool) -> None:
    """Print a table.

    If `wide` is set, or if chosen columns are written to a file, each run has one line of any length. Otherwise the
    table is fitted to the width of the terminal. If the table is too wide, the reasons of failures are printed below it
    in a second table.
    """
    from analysis.columns import list_all_columns
    from analysis.formats import find_width, format_cell
    from analysis.table import list_rows

    known, names = list_all_columns(), list(map(str, frame.columns)) if chosen else _list_main_columns(frame)
    shown = list_rows(frame) if chosen else _shorten_adapters(list_rows(frame))
    rows = [[format_cell(known[name], row[name]) for name in names] for row in shown]
    width = None if wide or (chosen and not sys.stdout.isatty()) else find_width()
    right = [known[name].kind in ("integer", "number") for name in names]
    omitted_first = list(() if chosen else _OMITTED_FIRST)
    if "validation_loss" in names and not chosen:
        equal = [name for name in _OMITTED_IF_EQUAL if frame[name].nunique(dropna=False) == 1]
        omitted_first += [*_OMITTED_IF_TRAINED, *equal, "engine", *_OMITTED_LAST]
        if frame["tokens_trained"][frame["validation_loss"].notna()].nunique() > 1:  # losses of different trainings
            omitted_first.remove("tokens_trained")
            omitted_first.append("tokens_trained")
    table = _TextTable(names, rows, right, _FOLDED)
    natural = table.list_widths()
    if chosen or width is None or _CUT not in names or sum(natural.values()) + 2 * (len(names) - 1) <= width:
        _write_text(table, width, omitted_first)
        return
    omitted = _write_text(table.drop([_CUT]), width, omitted_first)
    key = [name for name in _IDENTIFYING if name not in omitted] if "config_id" in omitted else ["config_id"]
    failed = [row for row in rows if row[names.index(_CUT)]]
    print()
    reasons = table._replace(rows=failed).drop([name for name in names if name not in (*key, "outcome", _CUT)])
    _write_text(reasons, width, ())


def _shorten_adapters(rows: "Sequence[Row]") -> "Sequence[Row]":
    """Return the rows with the first word of each adapter, such as `lora`, if this word distinguishes all adapters."""
    adapters = {row["adapter"] for row in rows if "adapter" in row}
    short = {adapter: adapter.split()[0] for adapter in adapters}
    if len(set(short.values())) < len(short):
        return rows
    return [row | {"adapter": short[row["adapter"]]} if "adapter" in row else row for row in rows]


class _TextTable(NamedTuple):
    """A table as text. `right` is True for each column of numbers. `least` holds the smallest width of each column
    whose texts may be wrapped."""

    names: "Sequence[str]"
    rows: "Sequence[Sequence[str]]"
    right: "Sequence[bool]"
    least: "Mapping[str, int]"

    def drop(self, omitted: "Sequence[str]") -> "_TextTable":
        """Return the table without the columns `omitted`."""
        kept = [name not in omitted for name in self.names]
        names, *rows = ([*itertools.compress(row, kept)] for row in (self.names, *self.rows))
        return self._replace(names=names, rows=rows, right=[*itertools.compress(self.right, kept)])

    def list_widths(self) -> dict[str, int]:
        return {name: max(map(len, (name, *column))) for name, *column in zip(self.names, *self.rows, strict=True)}

    def list_narrowest(self) -> dict[str, int]:
        """Return the smallest width of each column at which headings and numbers stay whole. Only words of more than
        `_NARROW` characters may be broken."""
        natural, lowest = self.list_widths(), dict[str, int]()
        for name, number, *column in zip(self.names, self.right, *self.rows, strict=True):
            word = max((len(word) for cell in column for word in cell.split()), default=0)
            lowest[name] = natural[name] if number else min(_NARROW, word) if name in _FOLDED else word
        return _list_least_widths(natural, lowest)


def _write_text(table: _TextTable, width: int | None, omitted_first: "Sequence[str]") -> list[str]:
    """Write a table that is at most `width` characters wide, and return the omitted columns. Columns that do not fit
    are omitted. Their number and the names of the most important ones are printed on standard error.

    `omitted_first` lists the columns that may be omitted, in this order.
    """
    from analysis.formats import join_words, render_text_table

    omitted = [] if width is None else _choose_omitted(table, width, omitted_first)
    shown = table.drop(omitted)
    wrapped = shown.rows if width is None else _wrap_texts(shown, width)
    sys.stdout.write(render_text_table(shown.names, wrapped, shown.right, None))
    pairs = zip(itertools.chain(*wrapped), itertools.chain(*shown.rows), strict=True)
    if any(one != cell and one.endswith(_ELLIPSIS) for one, cell in pairs):
        print(f"{_CUT}: long texts are cut; for the full texts, add --wide or --format csv", file=sys.stderr)
    if omitted:
        more = len(omitted) - _NAMED
        named = omitted if more <= 1 else [*omitted[: -_NAMED - 1 : -1], f"{more} more"]
        rule = f"because {width} characters are too narrow: {join_words(named)}"
        print(f"columns not shown, {rule}; add --wide", file=sys.stderr)
    return omitted


def _list_main_columns(frame: "DataFrame") -> list[str]:
    """Return the main columns that have a value in at least one row. Some main columns are listed only if the rows
    differ in them."""
    from analysis.columns import SHOWN, SHOWN_WHERE_DIFFERENT

    is_shown = dict((frame.notna() & (frame.astype("string") != "")).any())
    is_shown["evidence"] = bool((frame["evidence"] != "measured").any())  # only if not all is measured
    is_shown |= {name: frame[name].nunique(dropna=False) > 1 for name in SHOWN_WHERE_DIFFERENT}
    return [name for name in (*SHOWN, "reason") if is_shown.get(name)]


def _choose_omitted(table: _TextTable, width: int, omitted_first: "Sequence[str]") -> list[str]:
    """Return the columns to omit so that the other columns fit `width` characters, in the order in which they are
    omitted.

    In two cases, the column `config_id` is kept, and columns of settings may be omitted instead. In the first case, the
    other columns cannot distinguish all configurations. In the second case, columns of held-out losses would be
    omitted.
    """
    omitted = _omit(table, width, omitted_first)
    if "config_id" not in omitted:
        return omitted
    place = table.names.index("config_id")
    is_kept = [name in _IDENTIFYING and name not in omitted for name in table.names]
    settings = {(tuple(itertools.compress(row, is_kept)), row[place]) for row in table.rows}
    is_ambiguous = len(dict(settings)) < len(settings)
    if not is_ambiguous and set(omitted).isdisjoint(_OMITTED_LAST):
        return omitted
    rest = dict.fromkeys((*omitted_first, *_IN_CONFIG_ID))
    return _omit(table, width, [name for name in rest if name != "config_id"])


def _omit(table: _TextTable, width: int, candidates: "Sequence[str]") -> list[str]:
    """Return the columns to omit so that the other columns fit `width` characters. Only `candidates` may be omitted.

    Before a setting or a held-out loss is omitted, columns of texts are made narrower than in `table.least`.
    """
    natural, narrow = table.list_widths(), table.list_narrowest()
    usual = _list_least_widths(natural, table.least)
    # A column with the same value in all rows does not help to distinguish rows.
    several = {name for name, *column in zip(table.names, *table.rows, strict=True) if len(set(column)) > 1}
    late = {name for name in _IN_CONFIG_ID if name in several or name == "engine"}
    omitted: list[str] = []
    for name in sorted(candidates, key=lambda name: (name in _OMITTED_LAST, name in late, name in several)):
        needed = narrow if name in late or name in _OMITTED_LAST else usual
        kept = [needed[one] for one in table.names if one not in omitted]
        if name in natural and sum(kept) + 2 * (len(kept) - 1) > width:
            omitted.append(name)
    return omitted


def _wrap_texts(table: _TextTable, width: int) -> list[list[str]]:
    """Return the cells, with texts wrapped so that the columns fit `width` characters.

    A column becomes narrower than its least width only if the table would not fit otherwise. Headings, numbers and
    words of up to `_NARROW` characters are never broken, even if the table then exceeds `width`.
    """
    natural, narrowest = table.list_widths(), table.list_narrowest()
    widths, texts = dict(natural), [name for name, number in zip(table.names, table.right, strict=True) if not number]
    for floors in (_list_least_widths(natural, narrowest | dict(table.least)), narrowest):
        while sum(widths.values()) + 2 * (len(widths) - 1) > width:
            wide = [name for name in texts if widths[name] > floors[name]]
            if not wide:
                break
            widths[max(wide, key=lambda name: widths[name])] -= 1
    narrow = {place: widths[name] for place, name in enumerate(table.names) if widths[name] < natural[name]}
    most = {place: _MOST_LINES for place, name in enumerate(table.names) if name == _CUT}
    return [
        [_wrap(cell, narrow[place], most.get(place)) if place in narrow else cell for place, cell in enumerate(row)]
        for row in table.rows
    ]


def _wrap(text: str, width: int, most: int | None) -> str:
    """Return a text wrapped at `width` characters, and cut after `most` lines if that is not None."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width, break_on_hyphens=False)]
    if most is not None and len(lines) > most:
        lines[most - 1 :] = [textwrap.wrap(lines[most - 1], width - len(_ELLIPSIS))[0] + _ELLIPSIS]
    return "\n".join(lines)


def _list_least_widths(widths: "Mapping[str, int]", least: "Mapping[str, int]") -> dict[str, int]:
    return {name: min(number, max(least.get(name, number), len(name))) for name, number in widths.items()}
