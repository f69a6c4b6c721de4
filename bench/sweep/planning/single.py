"""One run that is asked for by itself: a point to be measured, or one rank of it to be rehearsed."""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from bench import engines, launchers
from bench.config import compose
from bench.config.compose import Request
from bench.config.decode import check_rank
from bench.errors import NoPrediction, UserError
from bench.measure import devices
from bench.predict.memory import predict_memory
from bench.record import Circumstance, Limits
from bench.spec import Device, config_id
from bench.study import Pair, Study
from bench.sweep.definition import RequestedRun
from bench.sweep.planning import present, target
from bench.sweep.planning.overrides import GivenOverrides, format_overrides


class SingleRun(NamedTuple):
    """One run, checked and ready to start."""

    composed: Request
    requested: RequestedRun  # its repeat is found when it starts
    chosen: list[Pair]  # what makes it small where it starts on the CPU that is here


def plan_point(overrides: GivenOverrides, study: str, config_dir: Path | None) -> SingleRun:
    """Return a point that is to be measured here; UserError for one that cannot."""
    given = compose.parse_single(format_overrides(overrides))
    composed = compose.compose_request(given, config_dir)
    if launchers.load(composed.launcher).QUEUES:
        raise UserError(f"launcher={composed.launcher}", "run measures here and now", "use `zeroscale sweep`")
    chosen = present.choose_small([key for key, _ in given], composed)
    composed = compose.compose_request([*chosen, *given], config_dir)
    compose.check(composed, target.find_device(composed))
    present.check_devices(composed)
    _check_name(study)
    shown = (*(f"{key}={value}" for key, value in chosen), *format_overrides(overrides))
    return SingleRun(composed, _build_request(composed, study, shown), chosen)


def plan_rehearsal(
    overrides: GivenOverrides,
    rank: int,
    config_dir: Path | None,
    *,
    shapes_only: bool = False,
    study: str,
) -> SingleRun:
    """Return the rehearsal of one rank; UserError for one that cannot be rehearsed here."""
    composed = compose.compose_request(compose.parse_single(format_overrides(overrides)), config_dir)
    _check_rehearsed(composed, rank)
    _check_name(study)
    device = target.find_predicted_device(composed)
    check_rank(composed, device)
    if launchers.load(composed.launcher).QUEUES:
        raise UserError(f"launcher={composed.launcher}", "a rehearsal runs here and now", "leave it out")
    if shapes_only:
        _check_shapes_alone(composed, target.find_device(composed))
    else:
        _check_room(composed, device)
    rehearsed = {"rehearsed_rank": rank, "shapes_only": shapes_only}
    return SingleRun(composed, _build_request(composed, study, format_overrides(overrides), **rehearsed), [])


def _build_request(composed: Request, study: str, overrides: tuple[str, ...], **rehearsed: Any) -> RequestedRun:
    options = composed.launcher_options.model_dump(mode="json")
    circumstance = Circumstance(
        study=study,
        repeat=0,
        attempt=0,
        machine=composed.machine.on(target.find_device(composed)),  # the ranks obey, or refuse
        launcher={"name": composed.launcher, **options},
        limits=Limits(**{key: options[key] for key in Limits.model_fields if key in options}),
        overrides=overrides,
        **rehearsed,
    )
    return RequestedRun(spec=composed.spec, circumstance=circumstance, config_id=config_id(composed.spec))


def _check_name(study: str) -> None:
    try:
        Study(name=study)
    except ValidationError as error:
        rule = "a name is made of letters, digits, '.', '_' and '-', and begins with a letter or digit"
        raise UserError(f"--study {study}", rule, "choose another") from error


def _check_rehearsed(composed: Request, rank: int) -> None:
    """Raise UserError for a rank that cannot be rehearsed."""
    spec = composed.spec
    if not 0 <= rank < spec.world_size:
        raise UserError(f"--rank {rank}", f"the run has ranks 0 to {spec.world_size - 1}", "choose one of them")
    can = engines.facts(spec).rehearsal
    if can.ranks == "none":
        raise UserError(f"engine={spec.engine.name}", f"cannot be rehearsed: {can.why}", "choose another engine")
    if rank and can.ranks == "first":
        raise UserError(f"--rank {rank}", can.why, "rehearse rank 0")


def _check_shapes_alone(composed: Request, device: str | None) -> None:
    """Raise UserError for what cannot be rehearsed by its shapes alone."""
    if device != "cpu":
        raise UserError("--shapes-only", "a GPU's memory cannot be counted without being used", "add machine=cpu")
    model, rule = composed.spec.model, "what is compiled is not seen one operation at a time"
    if model.compile != "none":
        raise UserError(f"model.compile={model.compile}", rule, "model.compile=none, or leave out --shapes-only")
    if model.attention == "flex":
        raise UserError("model.attention=flex", rule, "model.attention=sdpa, or leave out --shapes-only")


def _check_room(composed: Request, device: Device) -> None:
    """Raise UserError for a rank that surely needs more memory than there is here."""
    room = devices.read_memory_bytes() if device == "cuda" else _read_free_bytes()
    try:
        needed, _ = predict_memory(composed.spec, device, room, rehearsed=True).device
    except NoPrediction:  # then trying shows it
        return
    if room is not None and needed > room:
        rule = f"one rank needs {needed / 1e9:.1f} GB at least, and {room / 1e9:.1f} GB are here"
        raise UserError(
            composed.spec.model.name, rule, "more ranks, a higher stage, a smaller batch.micro, or --shapes-only"
        )


def _read_free_bytes() -> int | None:
    """Return what this host could give a new process, without swapping."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
