"""Run one rank of a job that may be far larger than this machine, with real steps and simulated
collectives.

  zeroscale rehearse model=mt5_xxl engine=zero3 nodes=64 devices_per_node=8 machine=h200
  zeroscale rehearse model=tiny engine=zero2 nodes=4 devices_per_node=8 --rank 31
  zeroscale rehearse model=gpt_22b engine=pipeline parallel.pipeline=8 devices_per_node=8 --shapes-only
  zeroscale rehearse model=mt5_large engine=fsdp machine=h200 devices_per_node=8 --shapes-only

The record is marked as `rehearsed` instead of `measured`. It contains memory by phase, the compute
time of a step, and the bytes that each collective would have moved. Losses and communication times
are unknown and stay empty. With `--shapes-only`, the rank may need more memory than this machine
has. Then no step is computed, and tensors are counted without allocating memory for them. If
`machine` has GPUs, the tensors are counted as on a GPU, although no GPU is needed. The memory that
torch's allocator would reserve is then printed, too.
"""

import argparse
import statistics
from pathlib import Path

from bench import api
from bench.cli import options
from bench.core import terminal
from bench.core.engine_costs import CUBLAS_BYTES, CUDA_BASE_BYTES
from bench.core.errors import UserError
from bench.core.machine import Machine
from bench.core.record import RankMemory, RunRecord
from bench.predict.memory import format_gigabytes
from bench.sweep import definition

STUDY = "rehearsals"
"""Default folder of rehearsals (runs of one rank alone). A sweep's folder is refused, because the sweep would count a
rehearsal as a real run."""


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_points(parser)
    help_text = "rank to run; default: %(default)s; some engines support only rank 0"
    parser.add_argument("--rank", type=int, default=0, metavar="R", help=help_text)
    options.add_study_name(parser, STUDY)
    help_text = (
        "count memory by shapes of tensors, without computing; for a rank that needs more memory than this machine has"
    )
    parser.add_argument("--shapes-only", action="store_true", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 if the rehearsal (a run of one rank alone) ended `ok`."""
    made = api.rehearsal(
        args.overrides, rank=args.rank, shapes_only=args.shapes_only, study=args.study, config_dir=args.config_dir
    )
    line, ranks = options.format_compact_point(made.composed), made.composed.spec.world_size
    if any((args.results / args.study / definition.FOLDER).glob("*.json")):
        rule = "this folder belongs to a sweep, which would count the rehearsal as a run"
        raise UserError(f"--study {args.study}", rule, "choose another name")
    if args.dry_run:
        print(options.format_point_json(made.composed) if args.json else line)
        return 0
    if not args.json:
        print(f"{line}\nrank {args.rank} of {ranks}; all other ranks are simulated", flush=True)
    with terminal.progress(quiet=args.json) as follow:
        folder, record = api.measure(made, results=args.results, follow=follow)
    print(record.model_dump_json(indent=1, by_alias=True) if args.json else _format_rehearsal(record, folder))
    return 0 if record.outcome.kind == "ok" else 1


def _list_reserved(own: RankMemory) -> list[tuple[str, int | None]]:
    """Return rows on the memory that the caching allocator of a GPU reserves; empty if no GPU is imitated."""
    if own.least_reserved_bytes is None:
        return []
    peaks = own.init_reserved_bytes, own.warmup_reserved_bytes, own.peak_reserved_bytes
    return [
        ("most that the allocator reserves", max(peak for peak in peaks if peak is not None)),
        ("least with which it works", own.least_reserved_bytes),
    ]


def _describe_fit(least: int, machine: Machine) -> str:
    """Return whether the GPU of a machine has enough memory, as text. `least` is the least number of bytes that the
    caching allocator can reserve."""
    low, high = (least - CUBLAS_BYTES + base for base in CUDA_BASE_BYTES)
    text = f"With CUDA and its libraries, a GPU needs at least {format_gigabytes(low)} to {format_gigabytes(high)} GB"
    if machine.memory_bytes is None:
        return f"{text}."
    verdict = "fits" if high <= machine.memory_bytes else "does not fit" if low > machine.memory_bytes else "may fit"
    return f"{text}. {machine.name} has {format_gigabytes(machine.memory_bytes)} GB: {verdict}."


def _format_rehearsal(record: RunRecord, folder: Path) -> str:
    """Return the result of a rehearsal as text: compute time of a step in seconds, memory in GB by phase, and GB that
    each kind of collective moves per step."""
    if record.outcome.kind != "ok" or record.observations is None:
        return f"{record.outcome.kind}: {record.outcome.reason}\n{folder}"
    seen = record.observations
    (own,) = seen.memory  # the memory of the only real rank
    rows = [
        ("peak of initialisation", own.init_peak_bytes),
        ("between steps", own.resident_bytes),
        ("peak of steps", own.peak_allocated_bytes),
        *_list_reserved(own),
        *((f"{name}, {c.calls} calls a step", c.payload_bytes) for name, c in (seen.collectives or {}).items()),
    ]
    cells = [(name, "unknown" if size is None else f"{size / 1e9:.4f} GB") for name, size in rows]
    if seen.trainable_parameters not in (None, seen.parameters):
        cells += [
            ("parameters, trained", f"{seen.trainable_parameters:,}"),
            ("parameters, all", f"{seen.parameters:,}"),
        ]
    table = terminal.align(cells, right={1}, least=(36, 14), gap=0, indent=2)
    head = "ok: memory counted from shapes, nothing computed"
    if own.least_reserved_bytes is not None:
        head = "ok: memory of a GPU counted from shapes, nothing computed"
        table = f"{table}\n{terminal.wrap(_describe_fit(own.least_reserved_bytes, record.circumstance.machine))}"
    if not record.circumstance.shapes_only:
        typical = f"{statistics.median(seen.compute_s):.4g} s" if seen.compute_s else "unknown time"
        head = f"ok: computing time of a step {typical}, without communication, n = {len(seen.compute_s)}"
    return f"{head}\n{table}\n{folder}"
