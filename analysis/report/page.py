"""The page of the report: what the template shows, in plain values. Text from records is escaped by the template."""

import json
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from analysis.columns import SHOWN, Column, columns
from analysis.flags import FLAGS
from analysis.numbers import MISSING, cell, significant, size
from analysis.questions import choice, name
from analysis.reading import Reading
from analysis.report.analogue import HEAD, Analogue
from analysis.report.answer import Answer, answers
from analysis.report.doubts import doubts
from analysis.report.provenance import provenance
from analysis.summary import Row
from analysis.table import plain
from analysis.verify import Verdict


class Drawn(NamedTuple):
    """A figure: its title, its SVG as an element of the page, and its files by format."""

    title: str
    svg: str
    files: dict[str, str]


class Cell(NamedTuple):
    """A cell as it is read and as it is sorted; `key` None is missing, and sorted last."""

    text: str
    key: Any


def page(
    found: Reading,
    verdicts: Sequence[Verdict],
    table: pd.DataFrame,
    summary: pd.DataFrame,
    claims: Analogue | None,
    drawn: Sequence[Drawn],
) -> str:
    """Return the whole report as HTML."""
    rows, answered, origin = plain(table), answers(summary), provenance([verdict.record for verdict in verdicts])
    studies = sorted({row["study"] for row in rows})
    shown = [column for column in SHOWN if any(row[column] not in (None, "") for row in rows)]
    environment = Environment(
        loader=PackageLoader("analysis.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        studies=studies,
        asked=_asked(rows),
        answers=[_answer(answer, answered) for answer in answered],
        doubts=doubts(verdicts, plain(summary), origin),
        claims=claims,
        claims_head=HEAD,
        figures=[figure._replace(svg=Markup(figure.svg)) for figure in drawn],
        columns=[(column, column.name in shown) for column in columns().values()],
        runs=[_run(row, shown) for row in rows],
        failures=_failures(found, verdicts),
        origin=origin,
        flags=[(flag, FLAGS[flag].meaning, count) for flag, count in _raised(rows).items()],
        skipped=found.skipped,
        unfinished=found.unfinished,
        read=len(found.records) + len(found.skipped),
    )


def _asked(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what was varied and what was not: each part of the configurations with all its values."""
    parts = {
        "Model": "model", "Engine": "engine", "Nodes": "nodes", "Devices per node": "devices_per_node",
        "Micro-batch": "micro", "Accumulation": "accumulation", "Precision": "precision",
        "Activation checkpointing": "activation_checkpointing", "Data": "data", "Machine": "machine",
    }  # fmt: skip
    known = columns()
    values = [(label, sorted({row[column] for row in rows}), known[column]) for label, column in parts.items()]
    asked = [(label, ", ".join(cell(column, value) for value in found)) for label, found, column in values]
    ended = Counter(row["outcome"] for row in rows)
    configurations = len({row["config_id"] for row in rows})
    told = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in ended.most_common())
    return [*asked, ("Runs", f"{len(rows)} of {configurations} configurations: {told}")]


def _answer(answer: Answer, all_answers: Sequence[Answer]) -> dict[str, Any]:
    fastest, leanest = answer.fastest, answer.leanest
    return {
        "name": name(answer.question, [other.question for other in all_answers]),
        "fastest": choice(fastest) if fastest else "no run ended ok",
        "rate": significant(fastest["tokens_per_s"]) if fastest else MISSING,
        "interval": _interval(fastest) if fastest else MISSING,
        "flags": fastest["flags"] if fastest else "",
        "tied": ("; ".join(map(choice, answer.tied)) or "none") if fastest else MISSING,
        "leanest": choice(leanest) if leanest else MISSING,
        "peak": size(leanest["peak_allocated_bytes"]) if leanest else MISSING,
        "failed": answer.failed,
    }


def _interval(row: Row) -> str:
    n = f"n\u00a0=\u00a0{row['n']}"
    if row["interval_kind"] is None:
        return f"no interval, {n}"
    ends = f"{significant(row['tokens_per_s_low'])} to {significant(row['tokens_per_s_high'])}"
    return f"{ends} ({100 * row['interval_level']:.0f}\u00a0%, {row['interval_kind']}, {n})"


def _run(row: Row, shown: Collection[str]) -> list[tuple[Column, bool, Cell]]:
    return [
        (column, column.name in shown, Cell(cell(column, row[column.name]), row[column.name]))
        for column in columns().values()
    ]


def _failures(found: Reading, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the runs that did not end ok, each with the evidence that decided it."""
    return [
        {
            "record": verdict.record,
            "folder": file.parent,
            "evidence": _evidence(verdict.record.outcome.evidence),
        }
        for file, verdict in zip(found.records, verdicts, strict=True)
        if verdict.record.outcome.kind != "ok"
    ]


def _evidence(evidence: dict[str, Any]) -> list[tuple[str, str]]:
    """Return evidence as named texts: a traceback with its own lines, everything else as JSON."""
    texts: list[tuple[str, str]] = []
    for label, value in evidence.items():
        if isinstance(value, dict) and value and all(isinstance(part, str) for part in value.values()):
            texts += [(f"{label} {part}", text) for part, text in value.items()]
        else:
            texts.append((label, value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False)))
    return texts


def _raised(rows: Sequence[Row]) -> dict[str, int]:
    counts = Counter(flag for row in rows for flag in row["flags"].split())
    return {flag: counts[flag] for flag in FLAGS if counts[flag]}
