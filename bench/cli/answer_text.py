"""What one run answers, beside its step time: tokens per second, what weakens the numbers, and what to do next."""

import importlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from bench import engines, store, terminal
from bench.record import RunRecord


def format_answer(record: RunRecord, folder: Path, overrides: Sequence[str]) -> list[str]:
    """Return what to print of a run whose folder is `folder` and that was asked for with `overrides`."""
    if record.outcome.kind != "ok":
        log = folder / store.LOG
        return [str(folder), *([f"next: look into {log}"] if log.exists() else [])]
    # By their names, for nothing here knows the analysis.
    rate = importlib.import_module("analysis.metrics.throughput").compute_tokens_per_s(record)
    of = record.spec.sequence
    kinds = f", of {' and '.join(of)}" if len(of) > 1 else ""
    flags = importlib.import_module("analysis.flags")
    raised, notes = flags.list_flags(record), flags.list_notes(record)
    return [
        *([f"{rate:,.0f} tokens per second{kinds}, padding included"] if rate else []),
        *([f"flags: {', '.join(raised)}"] if raised else []),
        *(f"  {name}: the run {flags.FLAGS[name].meaning}" for name in raised),
        *([f"notes: {', '.join(notes)}"] if notes else []),
        *(f"  {name}: the run {flags.NOTES[name].meaning}" for name in notes),
        str(folder),
        *_list_next_commands(record, folder.parents[1], overrides),
    ]


def _list_next_commands(record: RunRecord, study: Path, overrides: Sequence[str]) -> list[str]:
    """Return the commands that go on from here."""
    page = Path("results/reports") / study.name
    commands = [(shlex.join(["zeroscale", "report", str(study), "--out", str(page)]), "all runs of this folder")]
    known = engines.find_facts(record.spec)
    if known is None or not known.is_reference:
        kept = [text for text in overrides if not text.startswith(("engine=", "engine."))]
        reference = ["zeroscale", "run", f"engine={engines.REFERENCE}", *kept]
        commands.insert(0, (shlex.join(reference), "the reference that losses are compared with"))
    rows = [("" if number else "next:", command, f" # {what}") for number, (command, what) in enumerate(commands)]
    return terminal.align(rows, gap=1).splitlines()
