"""Run one rank of a job that may be far larger than this machine: real steps, its collectives only pretended.

  zeroscale rehearse model=mt5_xxl engine=zero3 nodes=64 devices_per_node=8 machine=h200
  zeroscale rehearse model=tiny engine=zero2 nodes=4 devices_per_node=8 --rank 31

It leaves a record with the evidence `rehearsed`: memory by phase, the time that a step computes, and the bytes that
each collective would have moved. Losses and the time of communication cannot be known here and stay empty.
"""

import argparse
import contextlib
import statistics
from pathlib import Path

from bench import config, engines, launchers
from bench.cli import asking, live, point
from bench.config import Request
from bench.decode import check_rank
from bench.errors import NoPrediction, UserError
from bench.measure import devices
from bench.predict.memory import memory
from bench.record import Circumstance, Limits, RunRecord
from bench.spec import Device, config_id
from bench.sweep.asked import Todo

STUDY = "rehearsals"
"""Their own folder: a sweep must not take one for the answer to its point."""


def arguments(parser: argparse.ArgumentParser) -> None:
    asking.arguments(parser)
    told = "which rank, default 0; some engines allow no other"
    parser.add_argument("--rank", type=int, default=0, metavar="R", help=told)


def run(args: argparse.Namespace) -> int:
    """Return 0 if the rehearsal ended `ok`."""
    asked = config.request(config.single(args.overrides), args.config_dir)
    todo = _todo(asked, args.rank, tuple(args.overrides))
    device = asking.kind(asked)
    check_rank(asked, device)
    if launchers.load(asked.launcher).QUEUES:
        raise UserError(f"launcher={asked.launcher}", "a rehearsal runs here and now", "leave it out")
    _check_room(asked, device)
    if args.dry_run:
        print(asking.as_json(asked) if args.json else asking.line(asked))
        return 0
    if not args.json:
        print(f"{asking.line(asked)}\nrank {args.rank} of {asked.spec.world_size}, the others pretended", flush=True)
    with live.line(quiet=args.json) as follow:
        folder, record = point.measure(todo, args.results / STUDY, follow, new_repeat=True)
    print(record.model_dump_json(indent=1, by_alias=True) if args.json else _told(record, folder))
    return 0 if record.outcome.kind == "ok" else 1


def _todo(asked: Request, rank: int, overrides: tuple[str, ...]) -> Todo:
    """Return the rehearsal; UserError for a rank that cannot be rehearsed."""
    spec = asked.spec
    if not 0 <= rank < spec.world_size:
        raise UserError(f"--rank {rank}", f"the run has ranks 0 to {spec.world_size - 1}", "choose one of them")
    can = engines.facts(spec).rehearsal
    if can.ranks == "none":
        raise UserError(f"engine={spec.engine.name}", f"cannot be rehearsed: {can.why}", "choose another engine")
    if rank and can.ranks == "first":
        raise UserError(f"--rank {rank}", can.why, "rehearse rank 0")
    options = asked.launcher_options.model_dump(mode="json")
    circumstance = Circumstance(
        study=STUDY,
        repeat=0,
        attempt=0,
        machine=asked.machine.on(asking.device(asked)),
        launcher={"name": asked.launcher, **options},
        limits=Limits(**{key: options[key] for key in Limits.model_fields if key in options}),
        rehearsed_rank=rank,
        overrides=overrides,
    )
    return Todo(spec=spec, circumstance=circumstance, config_id=config_id(spec))


def _check_room(asked: Request, device: Device) -> None:
    """Raise UserError for a rank that surely needs more memory than there is here."""
    room = devices.memory_bytes() if device == "cuda" else _free_bytes()
    try:
        needed, _ = memory(asked.spec, device, room, rehearsed=True).device
    except NoPrediction:  # then trying shows it
        return
    if room is not None and needed > room:
        rule = f"one rank needs {needed / 1e9:.1f} GB at least, and {room / 1e9:.1f} GB are here"
        raise UserError(asking.line(asked).split()[1], rule, "more ranks, a higher stage, or a smaller batch.micro")


def _free_bytes() -> int | None:
    """Return what this host could give a new process, without swapping."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _told(record: RunRecord, folder: Path) -> str:
    """Return what the rehearsal showed, for a reader."""
    if record.outcome.kind != "ok" or record.observations is None:
        return f"{record.outcome.kind}: {record.outcome.reason}\n{folder}"
    seen = record.observations
    (own,) = seen.memory
    rows = [
        ("initialisation, peak", own.init_peak_bytes),
        ("between steps", own.resident_bytes),
        ("steps, peak", own.peak_allocated_bytes),
        *((f"{name}, {c.calls} calls a step", c.payload_bytes) for name, c in (seen.collectives or {}).items()),
    ]
    typical = f"{statistics.median(seen.compute_s):.4g} s" if seen.compute_s else "unknown"
    compute = f"a step computes {typical}, communication absent, n = {len(seen.compute_s)}"
    told = [f"  {name:<36}{'unknown' if size is None else f'{size / 1e9:.4f} GB':>14}" for name, size in rows]
    return "\n".join([f"ok: {compute}", *told, str(folder)])
