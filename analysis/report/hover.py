"""What hovering over a configuration shows, and what stands where one has no number."""

import html

from analysis.charts import format_reason
from analysis.formats import MISSING, format_size
from analysis.questions import describe_choice, format_ranks
from analysis.report.headline import format_ends, format_interval, format_value
from analysis.summary import Row

_REASON_LETTERS = 120


def format_hover(row: Row) -> str:
    """Return the lines over a point, its texts escaped: plotly.js reads some HTML."""
    around = f"{format_ranks(row)}, {row['precision']}, {row['machine']}"
    lines = [
        f"{row['model']}: {describe_choice(row)}",
        around,
        *(_list_numbers(row) if row["n"] else [_format_failure(row)]),
    ]
    lines += [f"flags: {row['flags']}"] if row["flags"] else []
    lines += [f"notes: {row['notes']}"] if row.get("notes") else []
    bold, *rest = (html.escape(line, quote=False) for line in [*lines, f"configuration {row['config_id']}"])
    return "<br>".join([f"<b>{bold}</b>", *rest])


def _list_numbers(row: Row) -> list[str]:
    rate, step, peak = row["tokens_per_s"], row["step_s"], row["peak_allocated_bytes"]
    lines = []
    if row.get("efficiency") is not None:
        ends = format_ends(row, "efficiency") or "no interval"
        lines.append(f"efficiency {format_value(row, 'efficiency')}, {ends}")
    if row.get("idle_share") is not None:
        expected = row["predicted_idle_share"]
        schedule = "" if expected is None else f"; {100 * expected:.0f} % by its schedule"
        lines.append(f"idle {100 * row['idle_share']:.0f} % of a step{schedule}")
    if rate is not None:
        lines.append(f"{format_value(row, 'tokens_per_s')} tokens/s, {format_interval(row)}")
    if step is not None:
        lines.append(f"{format_value(row, 'step_s')} s per step, {format_ends(row, 'step_s') or 'no interval'}")
    return [*lines, f"peak {format_size(peak) if peak is not None else MISSING} per rank"]


def _format_failure(row: Row) -> str:
    why = str(row["reason"])
    shortened = why[:_REASON_LETTERS] + "…" * (len(why) > _REASON_LETTERS)
    return f"{format_reason(row)}: {shortened}" if shortened else format_reason(row)
