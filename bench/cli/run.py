"""Measure one point here and now, with real processes.

  zeroscale run
  zeroscale run model=mt5_small engine=zero3 batch.micro=2

It uses the GPUs that are here or, without any, two processes of the CPU; devices_per_node says another number. On a CPU
precision, sequence lengths and window are those of the smoke study, so that there is an answer within a minute: give a
key of precision, sequence or measure, and its section is that of conf/config.yaml.
"""

import argparse
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench import api, engines
from bench.cli import options
from bench.core import store, terminal
from bench.core.formatting import describe_result
from bench.core.record import RunRecord
from bench.core.spec import Parallel, RunSpec

STUDY = "adhoc"


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_points(parser)
    parser.add_argument("--study", default=STUDY, metavar="NAME", help="folder of the results; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Return 0 if the run ended `ok`."""
    made = api.point(args.overrides, study=args.study, config_dir=args.config_dir)
    if args.dry_run:
        print(options.format_point_json(made.composed) if args.json else options.format_point(made.composed))
        return 0
    if not args.json:
        options.print_chosen(made.chosen)
        print(options.format_point(made.composed), flush=True)
    with terminal.progress(quiet=args.json) as follow:
        folder, record = api.measure(made, results=args.results, follow=follow)
    given = [*options.list_given_folders(args), *([] if args.study == STUDY else ["--study", args.study])]
    if args.json:
        print(record.model_dump_json(indent=1, by_alias=True))
    else:
        print("\n".join([describe_result(record), *format_answer(record, folder, args.overrides, given)]))
    return 0 if record.outcome.kind == "ok" else 1


def format_answer(record: RunRecord, folder: Path, overrides: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return what to print of a run whose folder is `folder` and that was asked for with `overrides` and `options`,
    such as --config-dir DIR."""
    if record.outcome.kind != "ok":
        log = folder / store.LOG
        return [str(folder), *([f"next: look into {log}"] if log.exists() else [])]
    from analysis import flags
    from analysis.metrics.throughput import compute_tokens_per_s

    rate = compute_tokens_per_s(record)
    of = record.spec.sequence
    kinds = f", of {' and '.join(of)}" if len(of) > 1 else ""
    raised, notes = flags.list_flags(record), flags.list_notes(record)
    return [
        *([f"{rate:,.0f} tokens per second{kinds}, padding included"] if rate else []),
        *_describe_parts(record),
        *([f"flags: {', '.join(raised)}"] if raised else []),
        *(f"  {name}: the run {flags.FLAGS[name].meaning}" for name in raised),
        *([f"notes: {', '.join(notes)}"] if notes else []),
        *(f"  {name}: the run {flags.NOTES[name].meaning}" for name in notes),
        *([f"  the longest step: {_describe_longest_step(record)}"] if "stall" in notes else []),
        str(folder),
        *_list_next_commands(record, folder.parents[1], overrides, options),
    ]


def _describe_longest_step(record: RunRecord) -> str:
    """Return which step of a window was the longest, and its seconds."""
    from analysis.metrics import step_time

    step, seconds = step_time.find_longest_step(record), step_time.compute_step_s_max(record)
    return f"number {step}, {seconds:.4g} s"


def _describe_parts(record: RunRecord) -> list[str]:
    """Return how long the ranks with each part of the layers were idle in a step, on average, and the peak memory of
    the one that needs most; nothing where every rank has all layers."""
    from analysis.metrics.waiting import list_idle_shares

    observed, parts = record.observations, record.spec.parallel.pipeline
    idle = list_idle_shares(record)
    if observed is None or parts == 1 or not idle:
        return []
    ranks = record.spec.world_size // parts
    groups = [range(part * ranks, (part + 1) * ranks) for part in range(parts)]
    shares = ", ".join(f"{100 * statistics.mean(idle[rank] for rank in group):.0f}" for group in groups)
    lines = [f"idle: {100 * statistics.mean(idle):.0f} % of a step; by part of the layers: {shares} %"]
    peaks = [rank.peak_allocated_bytes for rank in observed.memory]
    if len(peaks) == record.spec.world_size and None not in peaks:
        most = ", ".join(f"{max(peaks[rank] or 0 for rank in group) / 2**20:.1f}" for group in groups)
        lines.append(f"peak memory by part of the layers: {most} MiB")
    return lines


def _list_next_commands(record: RunRecord, study: Path, overrides: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the commands that go on from here."""
    page = Path("results/reports") / study.name
    commands = [(shlex.join(["zeroscale", "report", str(study), "--out", str(page)]), "all runs of this folder")]
    known = engines.find_facts(record.spec)
    kept = _list_reference_overrides(record.spec, overrides)
    if (known is None or not known.is_reference) and kept is not None:
        reference = ["zeroscale", "run", f"engine={engines.REFERENCE}", *kept, *options]
        commands.insert(0, (shlex.join(reference), "the reference that losses are compared with"))
    rows = [("" if number else "next:", command, f" # {what}") for number, (command, what) in enumerate(commands)]
    return terminal.align(rows, gap=1).splitlines()


def _list_reference_overrides(spec: RunSpec, overrides: Sequence[str]) -> list[str] | None:
    """Return those of `overrides` that the reference is asked for with. Where ranks share a copy of the model there,
    they do not here, and make the same micro-batches of a step with fewer each; None where these do not divide."""
    kept = [text for text in overrides if not text.startswith(("engine=", "engine."))]
    if spec.parallel == Parallel():
        return kept
    if spec.global_batch % (spec.batch.micro * spec.world_size):
        return None
    other = ("parallel.", "batch.accumulation=", "batch.global=")
    return [*(text for text in kept if not text.startswith(other)), f"batch.global={spec.global_batch}"]
