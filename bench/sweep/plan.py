"""Plan what is asked for: a sweep, or a single run; every point is decoded and checked before anything starts."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from bench import engines, launchers
from bench.config import compose
from bench.config.compose import Expansion, Request, StudyPoint
from bench.config.decode import check_rank, decode_model
from bench.core.errors import NoPrediction, UserError
from bench.core.formatting import describe_point
from bench.core.point_fields import is_shown
from bench.core.record import Circumstance, Limits
from bench.core.scheduling import SchedulingOptions
from bench.core.spec import Device, config_id
from bench.core.study import Overrides, Pair, Study, expand_study, list_control_pairs, order_runs
from bench.measure import devices
from bench.predict.memory import predict_memory
from bench.sweep import forecast, inputs
from bench.sweep.definition import RequestedRun, SweepDefinition, SweepPoint, SweepRules
from bench.sweep.forecast import predict_forecast
from bench.sweep.inputs import GivenOverrides, find_study, format_overrides

_GROUPS = {"model", "engine", "data", "machine", "launcher"}


class PlannedSweep(NamedTuple):
    """A sweep that is planned and not started."""

    sweep: SweepDefinition
    expansion: Expansion  # its points, and what the study's rules left out
    chosen: list[Pair]  # what makes points small that start on the CPU that is here
    autopilot: bool  # whether it is to go on by itself

    @property
    def queues(self) -> bool:
        """Whether its points start by a queue, and not here and now."""
        return bool(launchers.load(str(self.sweep.launcher["name"])).QUEUES)


def plan_sweep(
    study: Study | str | Path | None,
    overrides: GivenOverrides,
    config_dir: Path | None,
    *,
    repeats: int | None,
    prune: bool,
    autopilot: bool,
    etiquette: Mapping[str, Any],
) -> PlannedSweep:
    """Return everything that was asked for, and what the study's rules left out; `etiquette` are options of a launcher
    with a queue."""
    planned_study, given = find_study(study, overrides, config_dir, "sweep")
    if planned_study.search and not planned_study.axes:
        raise UserError(f"study={planned_study.name}", "has a search and no axes", "use `zeroscale search`")
    chosen = [] if planned_study.base else _choose_small(planned_study, given, config_dir)
    update = {"base": planned_study.base | dict(chosen), "repeats": repeats or planned_study.repeats}
    planned_study = planned_study.model_copy(update=update)
    found = compose.compose_points(planned_study, given, config_dir, inputs.find_device)
    for made in found.points:
        inputs.check_devices(made.composed)
    options = merge_options(found.points, etiquette, autopilot)
    distinguishing = _find_distinguishing([point.overrides for point in found.points])
    controls = [
        build_point(made, set(), predict=False) for made in _build_controls(planned_study, given, found, config_dir)
    ]
    sweep = define_sweep(
        planned_study,
        [point.composed for point in found.points],
        options,
        SweepRules(budget=planned_study.budget, prune=prune),
        points=tuple(
            build_point(point, distinguishing, predict=planned_study.budget.attempts > 1) for point in found.points
        ),
        order=tuple(order_runs([point.turn for point in found.points], planned_study)),
        controls=tuple(controls),
    )
    return PlannedSweep(sweep, found, chosen, autopilot)


def define_sweep(
    study: Study, composed: Sequence[Request], options: Limits, rules: SweepRules, **given: Any
) -> SweepDefinition:
    """Return what is written down of a sweep or a search; where points run here, machines have the device that is
    here."""
    scheduling = options if isinstance(options, SchedulingOptions) else SchedulingOptions()
    by_name = {one.machine.name: one for one in reversed(composed)}  # of two of a name the first
    return SweepDefinition(
        study=study.name,
        question=study.question,
        asked_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machines={name: one.machine.on(inputs.find_device(one)) for name, one in by_name.items()},
        launcher={"name": composed[0].launcher, **options.model_dump(mode="json")},
        limits=Limits(**{key: getattr(options, key) for key in Limits.model_fields}),
        network=scheduling.network,
        rules=rules.model_copy(update={"max_queued": scheduling.max_queued}),
        **given,
    )


def _choose_small(study: Study, overrides: Overrides, config_dir: Path | None) -> list[Pair]:
    """Return what makes the points of comma lists small, where the first of them starts on the CPU that is here; no
    lengths where models differ in the tokens that they read."""
    first, *others = expand_study(study, overrides)
    composed = compose.compose_request(first, config_dir)
    chosen = inputs.choose_small(overrides, composed)
    learners = {tuple(pair for pair in pairs if pair[0] in ("model", "objective")): pairs for pairs in others}
    for pairs in learners.values():
        with contextlib.suppress(UserError):  # told, or left out by a rule, when all points are decoded
            if compose.compose_request(pairs, config_dir).spec.sequence.keys() != composed.spec.sequence.keys():
                return [(key, value) for key, value in chosen if not key.startswith("sequence.")]
    return chosen


def merge_options(found: Sequence[StudyPoint], etiquette: Mapping[str, Any], autopilot: bool) -> Limits:
    """Return the options of the one launcher that starts all points, with those given beside the overrides."""
    ways = {(point.composed.launcher, point.composed.launcher_options.model_dump_json()) for point in found}
    if len(ways) != 1:
        raise UserError("launcher", "a sweep has one launcher", "call sweep once for each")
    first = found[0].composed
    name, file = first.launcher, launchers.load(first.launcher)
    given = {key: value for key, value in etiquette.items() if value is not None}
    if (given or autopilot) and not file.QUEUES:
        flag = "--" + next(iter(given), "autopilot").replace("_", "-")
        raise UserError(flag, f"launcher={name} has no queue", f"leave it out, or choose {launchers.format_queueing()}")
    plain = first.launcher_options.model_dump(mode="json")
    options: Limits = decode_model(file.Options, plain | given, "launcher")
    return options


def _build_controls(
    study: Study, overrides: Overrides, found: Expansion, config_dir: Path | None
) -> list[compose.StudyPoint]:
    """Return the control point for every shape of allocation that the sweep needs."""
    pairs = list_control_pairs(study, overrides)
    shapes = dict.fromkeys((p.composed.spec.nodes, p.composed.spec.devices_per_node) for p in found.points)
    controls = []
    for nodes, devices_per_node in shapes if pairs else ():
        shaped = (*(pairs or ()), ("nodes", nodes), ("devices_per_node", devices_per_node))
        composed = compose.compose_request(shaped, config_dir)
        compose.check(composed, inputs.find_device(composed))
        controls.append(compose.StudyPoint(composed, shaped, config_id(composed.spec)))
    return controls


def build_point(made: compose.StudyPoint, distinguishing: set[str], *, predict: bool) -> SweepPoint:
    """Return a point as it is asked; `predict` its time limit too, which needs a second attempt to fall back on. A
    training falls back on its checkpoint; UserError for one that nobody says the limit of."""
    composed, texts = made.composed, tuple(f"{key}={value}" for key, value in made.overrides)
    predicted = predict_forecast(composed.spec, composed.machine, inputs.find_device(composed))
    options, (given_min, bound_min) = composed.launcher_options, _find_limits_min(composed)
    limit_min = given_min if given_min is not None else bound_min
    trains = composed.spec.learning.tokens is not None
    if isinstance(options, SchedulingOptions) and bound_min is not None and (predict or trains) and predicted.step:
        limit_min = forecast.compute_limit_min(
            composed.spec.measure, predicted.step.high_s, options.setup_min, bound_min
        )
    elif trains and bound_min is not None:
        rule = "a training has no longest window to follow from, and the time of its steps is not predicted here"
        raise UserError("launcher.time_limit_min=null", rule, "give the minutes that an attempt may take")
    return SweepPoint(
        config_id=made.config_id,
        line="  ".join(
            [describe_point(composed.spec, made.config_id), *(text for text in texts if text in distinguishing)]
        ),
        machine=composed.machine.name,
        nodes=composed.spec.nodes,
        devices_per_node=composed.spec.devices_per_node,
        time_limit_min=limit_min,
        bound_min=bound_min if predict and not trains else None,
        forecast=predicted,
        overrides=texts,
        spec=composed.spec.model_dump(mode="json", by_alias=True),
    )


def _find_limits_min(composed: Request) -> tuple[float | None, float | None]:
    """Return the limit that was asked for and, where none was and a queue wants one, the longest that it gets."""
    options = composed.launcher_options
    if options.time_limit_min is not None or not isinstance(options, SchedulingOptions):
        return options.time_limit_min, None
    return None, forecast.compute_bound_min(composed.spec.measure, options.setup_min)


def _find_distinguishing(overrides: list[tuple[Pair, ...]]) -> set[str]:
    """Return what tells points apart and is not in their lines anyhow."""
    hidden = [(key, value) for key, value in itertools.chain(*overrides) if not is_shown_in_line(key)]
    shared = Counter(f"{key}={value}" for key, value in hidden)
    return {text for text, count in shared.items() if count < len(overrides)}


def is_shown_in_line(key: str) -> bool:
    """Whether a point's one line shows an override already."""
    return key in _GROUPS or (key.partition(".")[0] not in _GROUPS and is_shown(key))


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
    chosen = inputs.choose_small([(key, [value]) for key, value in given], composed)
    composed = compose.compose_request([*chosen, *given], config_dir)
    compose.check(composed, inputs.find_device(composed))
    inputs.check_devices(composed)
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
    device = inputs.find_predicted_device(composed)
    check_rank(composed, device)
    if launchers.load(composed.launcher).QUEUES:
        raise UserError(f"launcher={composed.launcher}", "a rehearsal runs here and now", "leave it out")
    if shapes_only:
        _check_shapes_alone(composed, inputs.find_device(composed))
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
        machine=composed.machine.on(inputs.find_device(composed)),  # the ranks obey, or refuse
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
