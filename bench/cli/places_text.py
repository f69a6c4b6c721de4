"""Text and JSON of a comparison of places (own machines, and rented or spot nodes of a provider), which `zeroscale
advise where=…` prints."""

import json
from typing import Any

from bench.cli.advice_text import describe_large_batch, list_lines
from bench.core import terminal
from bench.core.formatting import describe_lengths, format_interval, format_number, list_layout, list_overrides
from bench.predict.advice import format_hours, format_hours_interval
from bench.sweep.advise.places import PlaceRow, PlaceTable, describe_method, describe_price

_DEADLINES = {True: "met", None: "perhaps", False: "missed"}


def format_text(table: PlaceTable) -> str:
    """Return the text of a comparison of places (own, rented or spot nodes): the best place, the table of places, the
    excluded places, the prices and the caveats."""
    first, question = table.rows[0], table.question
    spec = first.choice.spec
    length = f"{question.tokens:g} tokens, " if question.tokens else ""
    length = f"loss {question.need.loss:g}, " if question.need else length
    within = f", done in {format_hours(question.deadline_h)}" if question.deadline_h is not None else ""
    head = [
        f"{spec.model.name}, {spec.precision}, {describe_lengths(spec)}",
        f"question: {length}the least cost{within}; each method of each place at its best",
    ]
    large = describe_large_batch(first.answer.query.question, first.choice)
    prices = {row.place.name: describe_price(row.place) for row in table.rows}
    parts = [
        [terminal.wrap(line) for line in head],
        [terminal.wrap(f"→ {'; '.join(filter(None, [_describe_best(table), large]))}")],
        _list_rows(table),
        ["excluded", *(terminal.wrap(f"{what}: {why}", 2) for what, why in table.left_out)] if table.left_out else [],
        ["prices", *(terminal.wrap(f"{name}: {text}", 2) for name, text in prices.items())],
        ["how sure", *(terminal.wrap(line, 2) for line in list_caveats(table))],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _describe_best(table: PlaceTable) -> str:
    first = table.rows[0]
    name = f"{first.place.name}, {describe_method(first.method)}"
    deadline = table.question.deadline_h and format_hours(table.question.deadline_h)
    if deadline and first.doubt == 2:
        return f"no place meets the deadline of {deadline}; the least cost: {name}"
    within = f" within the deadline of {deadline}" if deadline else ""
    sure = ", at the likely time only" if first.kept is None else ""
    if not first.cost:
        return f"{name}: the shortest time{within}{sure}; no price is known"
    tied = f"; costs overlap with {_join_names(table.ties)}" if table.ties else ""
    return f"{name}: the least cost{within}{sure}{tied}"


def _join_names(rows: list[PlaceRow]) -> str:
    return "; ".join(f"{row.place.name}, {describe_method(row.method)}" for row in rows)


def _list_rows(table: PlaceTable) -> list[str]:
    """Return the lines of the table of places. The last column has the layout (engine, batch and checkpointing). If a
    row would be too wide, the layout is on a line below the row."""
    head = ["place", "devices", "method", "time", "cost"]
    head += ["deadline"] if table.question.deadline_h is not None else []
    cells = [head, *(_build_cells(row, table) for row in table.rows)]
    (head_line, *_), *rows = list_lines(cells, ["layout", *(_describe_layout(row) for row in table.rows)])
    return [head_line, *(line for lines in rows for line in lines)]


def _describe_layout(row: PlaceRow) -> str:
    spec = row.choice.spec
    layout = [spec.engine.name, *list_layout(spec), f"micro-batch {spec.batch.micro}"]
    layout += [f"accumulation {spec.accumulation}"] if spec.accumulation > 1 else []
    layout += ["checkpointing"] if spec.activation_checkpointing else []
    return ", ".join([*layout, *(["may not fit"] if row.choice.candidate.fits is None else [])])


def _build_cells(row: PlaceRow, table: PlaceTable) -> list[str]:
    spec = row.choice.spec
    return [
        row.place.name,
        f"{spec.nodes} × {spec.devices_per_node} {row.place.machine}",
        "full" if row.method == "none" else row.method,
        format_hours_interval(*row.hours),
        "unknown" if row.cost is None else f"{format_interval(*row.cost)} {row.place.currency}".rstrip(),
        *([_DEADLINES[row.kept]] if table.question.deadline_h is not None else []),
    ]


def list_caveats(table: PlaceTable) -> list[str]:
    """Return sentences on the limits of the comparison: how certain its hours and costs are, and what the hours and
    costs do not include."""
    rows, lines = table.rows, []
    if all(row.choice.estimate.evidence == "predicted" for row in rows):
        lines.append("All times are predicted; nothing was measured.")
    if any(row.kept is None for row in rows):
        lines.append("Deadline `perhaps`: the likely time meets it, the slow end of the interval does not.")
    lines.append("Intervals are those of the step time. Hours begin at the first step: start of nodes is not included.")
    if any(row.place.kind == "spot" for row in rows):
        lines.append("A provider may take back a spot node at any time. Repeated steps and waits are not included.")
    if table.question.failures is None:
        lines.append("Failures are not included: set storage=2e9, in bytes per second, to include them.")
    if any(row.place.kind != "own" for row in rows):
        lines.append("Published prices change: check them before you rent. Disks, network traffic and taxes are extra.")
    links = {
        f"{row.place.machine}: {format_number(speed / 1e9)} GB/s"
        for row in rows
        if row.place.offer
        and row.choice.spec.nodes > 1
        and (speed := row.answer.request.machine.inter_node_bytes_per_s)
    }
    if links:
        known = "; ".join(sorted(links))
        lines.append(
            f"Between rented nodes, the bandwidth of the machine's file is assumed ({known} per node). The provider's "
            "links may be slower: set machine.inter_node_bytes_per_s to their bandwidth."
        )
    currencies = {row.place.currency for row in rows if row.cost}
    if len(currencies) > 1:
        known = ", ".join(sorted(filter(None, currencies)))
        lines.append(f"Costs are compared as plain numbers: give your own price in the same currency ({known}).")
    if len(table.query.adapters) > 1:
        lines.append("How much each method learns per token is not predicted: only memory and time are.")
    return lines


def format_json(table: PlaceTable) -> str:
    """Return the table as JSON."""
    plain = {
        "tokens": table.question.tokens,
        "deadline_h": table.question.deadline_h,
        "rows": [_build_plain(row) for row in table.rows],
        "left_out": [{"what": what, "why": why} for what, why in table.left_out],
        "doubts": list_caveats(table),
    }
    return json.dumps(plain, indent=1)


def _build_plain(row: PlaceRow) -> dict[str, Any]:
    spec, place = row.choice.spec, row.place
    overrides = [f"machine={place.machine}", f"devices_per_node={place.devices}", f"adapter={row.method}"]
    return {
        "place": place.name,
        "kind": place.kind,
        "machine": place.machine,
        "nodes": spec.nodes,
        "devices_per_node": spec.devices_per_node,
        "method": row.method,
        "overrides": [*overrides, f"engine={spec.engine.name}", *list_overrides(spec)],
        "step": row.choice.estimate._asdict(),
        "hours": row.hours._asdict(),
        "cost": row.cost and row.cost._asdict(),
        "currency": place.currency or None,
        "price_per_hour": place.price_per_hour,
        "price": describe_price(place),
        "meets_deadline": row.kept,
        "fits": row.choice.candidate.fits,
    }
