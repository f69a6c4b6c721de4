"""One run that is asked for by itself: a point to be measured, or one rank of it to be rehearsed."""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from bench import config, engines, launchers
from bench.config import Pair, Request
from bench.decode import check_rank
from bench.errors import NoPrediction, UserError
from bench.measure import devices
from bench.planning import present, target
from bench.planning.overrides import Given, texts
from bench.predict.memory import memory
from bench.record import Circumstance, Limits
from bench.spec import Device, config_id
from bench.study import Study
from bench.sweep.asked import Todo

REHEARSALS = "rehearsals"
"""A folder of their own: a sweep must not take one for the answer to its point."""


class SingleRun(NamedTuple):
    """One run, checked and ready to start."""

    asked: Request
    todo: Todo  # its repeat is found when it starts
    chosen: list[Pair]  # what makes it small where it starts on the CPU that is here


def point(overrides: Given, study: str, config_dir: Path | None) -> SingleRun:
    """Return a point that is to be measured here; UserError for one that cannot."""
    given = config.single(texts(overrides))
    asked = config.request(given, config_dir)
    if launchers.load(asked.launcher).QUEUES:
        raise UserError(f"launcher={asked.launcher}", "run measures here and now", "use `zeroscale sweep`")
    chosen = present.small([key for key, _ in given], asked)
    asked = config.request([*chosen, *given], config_dir)
    config.check(asked, target.device(asked))
    present.check(asked)
    _check_name(study)
    shown = (*(f"{key}={value}" for key, value in chosen), *texts(overrides))
    return SingleRun(asked, _todo(asked, study, shown), chosen)


def rehearsal(overrides: Given, rank: int, config_dir: Path | None) -> SingleRun:
    """Return the rehearsal of one rank; UserError for one that cannot be rehearsed here."""
    asked = config.request(config.single(texts(overrides)), config_dir)
    _check_rehearsed(asked, rank)
    device = target.kind(asked)
    check_rank(asked, device)
    if launchers.load(asked.launcher).QUEUES:
        raise UserError(f"launcher={asked.launcher}", "a rehearsal runs here and now", "leave it out")
    _check_room(asked, device)
    return SingleRun(asked, _todo(asked, REHEARSALS, texts(overrides), rehearsed_rank=rank), [])


def _todo(asked: Request, study: str, overrides: tuple[str, ...], **rehearsed: Any) -> Todo:
    options = asked.launcher_options.model_dump(mode="json")
    circumstance = Circumstance(
        study=study,
        repeat=0,
        attempt=0,
        machine=asked.machine.on(target.device(asked)),  # the ranks obey, or refuse
        launcher={"name": asked.launcher, **options},
        limits=Limits(**{key: options[key] for key in Limits.model_fields if key in options}),
        overrides=overrides,
        **rehearsed,
    )
    return Todo(spec=asked.spec, circumstance=circumstance, config_id=config_id(asked.spec))


def _check_name(study: str) -> None:
    try:
        Study(name=study)
    except ValidationError as error:
        rule = "a name is made of letters, digits, '.', '_' and '-', and begins with a letter or digit"
        raise UserError(f"--study {study}", rule, "choose another") from error


def _check_rehearsed(asked: Request, rank: int) -> None:
    """Raise UserError for a rank that cannot be rehearsed."""
    spec = asked.spec
    if not 0 <= rank < spec.world_size:
        raise UserError(f"--rank {rank}", f"the run has ranks 0 to {spec.world_size - 1}", "choose one of them")
    can = engines.facts(spec).rehearsal
    if can.ranks == "none":
        raise UserError(f"engine={spec.engine.name}", f"cannot be rehearsed: {can.why}", "choose another engine")
    if rank and can.ranks == "first":
        raise UserError(f"--rank {rank}", can.why, "rehearse rank 0")


def _check_room(asked: Request, device: Device) -> None:
    """Raise UserError for a rank that surely needs more memory than there is here."""
    room = devices.memory_bytes() if device == "cuda" else _free_bytes()
    try:
        needed, _ = memory(asked.spec, device, room, rehearsed=True).device
    except NoPrediction:  # then trying shows it
        return
    if room is not None and needed > room:
        rule = f"one rank needs {needed / 1e9:.1f} GB at least, and {room / 1e9:.1f} GB are here"
        raise UserError(asked.spec.model.name, rule, "more ranks, a higher stage, or a smaller batch.micro")


def _free_bytes() -> int | None:
    """Return what this host could give a new process, without swapping."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
