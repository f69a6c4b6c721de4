"""Plan a sweep, a single run or a rehearsal (one rank of a larger run, alone). Every point (configuration) is decoded
and checked before anything starts."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench import engines, launchers
from bench.config import compose
from bench.config.compose import Expansion, StudyPoint
from bench.config.decode import Request, check, check_rank, decode_model
from bench.core.errors import NoPrediction, UserError
from bench.core.formatting import describe_point, format_count
from bench.core.point_fields import is_shown
from bench.core.record import Circumstance, Limits
from bench.core.scheduling import SchedulingOptions
from bench.core.spec import Device, config_id
from bench.core.steps import count_evaluation_steps
from bench.core.study import Overrides, Pair, Study, list_control_pairs, order_runs
from bench.measure import devices
from bench.measure.control_group import read_number
from bench.measure.environment import count_local_devices
from bench.measure.failures import InjectedFault
from bench.predict.memory import predict_memory
from bench.sweep import forecast, inputs
from bench.sweep.definition import RequestedRun, SweepDefinition, SweepPoint, SweepRules
from bench.sweep.forecast import predict_forecast
from bench.sweep.inputs import GivenOverrides, find_study, format_overrides

_SHOWN = 8  # points that the `repr` of a plan lists
_GROUPS = {"model", "engine", "data", "machine", "launcher"}


class PlannedSweep(NamedTuple):
    """Definition of a sweep, and the choices made in planning it."""

    sweep: SweepDefinition
    expansion: Expansion  # the points, and the numbers of points that the study's rules exclude
    chosen: list[Pair]  # overrides that make the points small enough for this machine's CPU
    autopilot: bool  # submit the remaining points when jobs have ended

    def __repr__(self) -> str:
        shown = [point.line for point in self.sweep.points[:_SHOWN]]
        more = len(self.sweep.points) - len(shown)
        shown += [f"{more} more"] if more else []
        excluded = sum(self.expansion.excluded.values())
        counts = self.sweep.describe() + (f"; {format_count(excluded, 'point')} excluded by rules" if excluded else "")
        return "\n  ".join([f"<PlannedSweep {counts}", *shown]) + ">"

    @property
    def queues(self) -> bool:
        """Return whether the sweep's launcher submits points to a scheduler's queue."""
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
    """Return the planned sweep. `repeats` replaces the study's number of repeats unless it is None. `prune` allows that
    a point gets an outcome without being run, if predictions or other runs show that it does not fit into memory.
    `autopilot` requests a job that later submits the remaining points. `etiquette` holds options that limit the load on
    a scheduler's queue, by name: `max_queued`, `nice` and `begin`."""
    if repeats is not None and not (type(repeats) is int and repeats > 0):
        raise UserError(f"repeats={repeats!r}", "is not a positive integer", "set 1 or more")
    InjectedFault.read_environment()  # an invalid drill is refused before jobs are submitted
    planned_study, given = find_study(study, overrides, config_dir, "sweep")
    if planned_study.search and not planned_study.axes:
        raise UserError(f"study={planned_study.name}", "has a search section but no axes", "use `zeroscale search`")
    chosen = inputs.choose_small_base(planned_study, given, config_dir)
    update = {"base": planned_study.base | dict(chosen), "repeats": repeats or planned_study.repeats}
    planned_study = planned_study.model_copy(update=update)
    with inputs.mention_small(chosen):
        found = compose.compose_points(planned_study, given, config_dir, inputs.find_device, check_runnable)
    # All points are composed and checked by now: an error in the last one starts nothing.
    options = merge_options(found.points, etiquette, autopilot)
    distinguishing = _find_distinguishing([point.overrides for point in found.points])
    predict = planned_study.budget.attempts > 1
    controls = _build_controls(planned_study, given, found, config_dir)
    sweep = define_sweep(
        planned_study,
        [point.composed for point in found.points],
        options,
        SweepRules(budget=planned_study.budget, prune=prune),
        points=tuple(build_point(point, distinguishing, predict=predict) for point in found.points),
        order=tuple(order_runs([point.turn for point in found.points], planned_study)),
        controls=tuple(build_point(point, set(), predict=False) for point in controls),
    )
    return PlannedSweep(sweep, found, chosen, autopilot)


def check_runnable(composed: Request, device: str | None) -> None:
    """Raise UserError if a point breaks a rule of its configuration, or if its devices cannot run it.

    Only the first error is raised. For a run on this machine, the devices are checked first. A run with too many
    devices often breaks other rules, too, but the error about devices is the clearest. For a job, the launcher's
    options are checked first, because these options decide which devices the job gets.
    """
    if queues := launchers.load(composed.launcher).QUEUES:
        check(composed, device)
    inputs.check_devices(composed)
    if not queues:
        check(composed, device)


def define_sweep(
    study: Study, composed: Sequence[Request], options: Limits, rules: SweepRules, **given: Any
) -> SweepDefinition:
    """Return the definition of a sweep or search from the composed configurations of its points. The definition states
    the kind of device, such as "cuda", of each machine. For points that run on this machine, this is the kind of device
    found here. `given` are further fields of the definition."""
    scheduling = options if isinstance(options, SchedulingOptions) else SchedulingOptions()
    by_name = {one.machine.name: one for one in reversed(composed)}  # the first point with a name counts
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


def merge_options(found: Sequence[StudyPoint], etiquette: Mapping[str, Any], autopilot: bool) -> Limits:
    """Return the launcher options that all points share. The options in `etiquette`, which limit the load on a
    scheduler's queue, are added. `autopilot` requests a job that later submits the remaining points. Raise UserError if
    points differ in launcher or options, or if the launcher does not support an added option or the requested job."""
    ways = {(point.composed.launcher, point.composed.launcher_options.model_dump_json()) for point in found}
    if len(ways) != 1:
        raise UserError("launcher", "a sweep supports only one launcher", "run one sweep for each launcher")
    first = found[0].composed
    file = launchers.load(first.launcher)
    given = {key: value for key, value in etiquette.items() if value is not None}
    if (given or autopilot) and not file.QUEUES:
        flag = "--" + next(iter(given), "autopilot").replace("_", "-")
        rule = f"launcher={first.launcher_file} has no queue"
        raise UserError(flag, rule, f"remove it, or choose {launchers.format_queueing()}")
    scheduling = first.launcher_options
    if autopilot and isinstance(scheduling, SchedulingOptions) and not scheduling.has_dependencies:
        rule = f"jobs of launcher={first.launcher_file} cannot wait for other jobs"
        raise UserError("--autopilot", rule, "remove it, and run `zeroscale resume` when jobs have ended")
    plain = first.launcher_options.model_dump(mode="json")
    try:
        return decode_model(file.Options, plain | given, "launcher")
    except UserError as error:
        key, is_value, value = error.value.removeprefix("launcher.").partition("=")
        if is_value and key in given:  # name the option that the user wrote
            raise UserError(f"--{key.replace('_', '-')} {value}", error.rule, error.remedy) from error
        raise


def _build_controls(study: Study, overrides: Overrides, found: Expansion, config_dir: Path | None) -> list[StudyPoint]:
    """Return the control points (reference configurations that jobs repeat): one for each combination of node count and
    devices per node in the sweep. Empty if the study defines no control point."""
    pairs = list_control_pairs(study, overrides)
    shapes = dict.fromkeys((p.composed.spec.nodes, p.composed.spec.devices_per_node) for p in found.points)
    controls = []
    for nodes, devices_per_node in shapes if pairs else ():
        shaped = (*(pairs or ()), ("nodes", nodes), ("devices_per_node", devices_per_node))
        composed = compose.compose_request(shaped, config_dir)
        check(composed, inputs.find_device(composed))
        controls.append(StudyPoint(composed, shaped, config_id(composed.spec)))
    return controls


def build_point(made: StudyPoint, distinguishing: set[str], *, predict: bool) -> SweepPoint:
    """Return a point (configuration) with its forecast and time limit. Its line in listings shows the overrides in
    `distinguishing`.

    If `predict` is set, the time limit is derived from the forecast. Such a limit may be too short. The caller
    therefore sets `predict` only if the point is allowed a second attempt. The limit of a training is always derived
    from the forecast, because a second attempt would resume from a checkpoint. Raise UserError for a training with
    neither a given nor a predicted limit.
    """
    composed, texts = made.composed, tuple(f"{key}={value}" for key, value in made.overrides)
    predicted = predict_forecast(composed.spec, composed.machine, inputs.find_device(composed))
    options, protocol, bound_min = composed.launcher_options, composed.spec.measure, None
    limit_min, trains = options.time_limit_min, composed.spec.learning.tokens is not None
    if limit_min is None and isinstance(options, SchedulingOptions):
        step_s = predicted.step.high_s if predicted.step else None
        limit_min = bound_min = forecast.compute_bound_min(protocol, options.setup_min, step_s)
    # A predicted limit may be too short. It is used only if a second attempt, or a checkpoint, can make up for that.
    if isinstance(options, SchedulingOptions) and bound_min is not None and (predict or trains) and predicted.step:
        high_s, (_, evaluations) = predicted.step.high_s, count_evaluation_steps(composed.spec)
        limit_min = forecast.compute_limit_min(protocol, high_s, options.setup_min, bound_min, evaluations)
    elif trains and bound_min is not None:
        rule = "no time limit can be derived for a training, because its step time is not predicted on this machine"
        raise UserError("launcher.time_limit_min=null", rule, "set the maximum minutes of an attempt")
    shown = [text for text in texts if text in distinguishing]
    return SweepPoint(
        config_id=made.config_id,
        line="  ".join([describe_point(composed.spec, made.config_id), *shown]),
        machine=composed.machine.name,
        nodes=composed.spec.nodes,
        devices_per_node=composed.spec.devices_per_node,
        time_limit_min=limit_min,
        bound_min=bound_min if predict and not trains else None,
        forecast=predicted,
        overrides=texts,
        spec=composed.spec.model_dump(mode="json", by_alias=True),
    )


def _find_distinguishing(overrides: list[tuple[Pair, ...]]) -> set[str]:
    """Return the overrides, as `key=value`, that are added to a point's line in listings to distinguish the point. An
    override is added under two conditions: some points lack it, and the line would not show it otherwise."""
    shared = Counter(f"{key}={value}" for key, value in itertools.chain(*overrides) if not is_shown_in_line(key))
    return {text for text, count in shared.items() if count < len(overrides)}


def is_shown_in_line(key: str) -> bool:
    """Return whether the line that describes a point always shows this override."""
    return key in _GROUPS or (key.partition(".")[0] not in _GROUPS and is_shown(key))


class SingleRun(NamedTuple):
    """One run that has been checked and can start."""

    composed: Request
    requested: RequestedRun  # its repeat number is assigned when it starts
    chosen: list[Pair]  # overrides that make the run small enough for this machine's CPU

    def __repr__(self) -> str:
        return f"<SingleRun {describe_point(self.composed.spec, self.requested.config_id)}>"


def plan_point(overrides: GivenOverrides, study: str, config_dir: Path | None) -> SingleRun:
    """Return a run of one point (configuration) on this machine. Raise UserError if it cannot run here."""
    given = compose.parse_single(format_overrides(overrides))
    composed = compose.compose_request(given, config_dir)
    if launchers.load(composed.launcher).QUEUES:
        rule = "`zeroscale run` runs on this computer only"
        raise UserError(f"launcher={composed.launcher_file}", rule, "use `zeroscale sweep`")
    chosen = inputs.choose_small([(key, [value]) for key, value in given], composed)
    with inputs.mention_small(chosen):
        composed = compose.compose_request([*chosen, *given], config_dir)
        check_runnable(composed, inputs.find_device(composed))
    shown = (*(f"{key}={value}" for key, value in chosen), *format_overrides(overrides))
    return SingleRun(composed, _build_request(composed, study, shown), chosen)


def plan_rehearsal(
    overrides: GivenOverrides, rank: int, config_dir: Path | None, *, shapes_only: bool = False, study: str
) -> SingleRun:
    """Return a planned rehearsal, which runs one rank of a larger run on this machine without the other ranks. Raise
    UserError if that is impossible. With `shapes_only`, tensors have shapes but no data. A rank can then be rehearsed
    even if it needs more memory than this machine has."""
    composed = compose.compose_request(compose.parse_single(format_overrides(overrides)), config_dir)
    _check_rehearsed(composed, rank)
    device = inputs.find_predicted_device(composed)
    check_rank(composed, device)
    if launchers.load(composed.launcher).QUEUES:
        raise UserError(f"launcher={composed.launcher_file}", "a rehearsal runs on this machine", "remove the override")
    if shapes_only:
        _check_shapes_alone(composed, inputs.find_device(composed))
    else:
        _check_room(composed, device)
    rehearsed = {"rehearsed_rank": rank, "shapes_only": shapes_only}
    return SingleRun(composed, _build_request(composed, study, format_overrides(overrides), **rehearsed), [])


def _build_request(composed: Request, study: str, overrides: tuple[str, ...], **rehearsed: Any) -> RequestedRun:
    if study.endswith((".yaml", ".yml")):
        rule = "names a folder of results, not a study file"
        raise UserError(f"--study {study}", rule, f"use `zeroscale sweep study={study}`, or choose another name")
    inputs.check_name("--study", study)
    options = composed.launcher_options.model_dump(mode="json")
    circumstance = Circumstance(
        study=study,
        repeat=0,
        attempt=0,
        machine=composed.machine.on(inputs.find_device(composed)),  # the ranks use this device, or fail
        launcher={"name": composed.launcher, **options},
        limits=Limits(**{key: options[key] for key in Limits.model_fields if key in options}),
        overrides=overrides,
        **rehearsed,
    )
    return RequestedRun(spec=composed.spec, circumstance=circumstance, config_id=config_id(composed.spec))


def _check_rehearsed(composed: Request, rank: int) -> None:
    """Raise UserError if the run has no rank with this number, or if its engine does not support rehearsing that
    rank."""
    spec = composed.spec
    if not 0 <= rank < spec.world_size:
        raise UserError(f"--rank {rank}", f"the run has ranks 0 to {spec.world_size - 1}", "choose one of these ranks")
    can = engines.facts(spec).rehearsal
    if can.ranks == "none":
        raise UserError(f"engine={spec.engine.name}", f"cannot be rehearsed: {can.why}", "choose another engine")
    if rank and can.ranks == "first":
        raise UserError(f"--rank {rank}", can.why, "rehearse rank 0")


def _check_shapes_alone(composed: Request, device: str | None) -> None:
    """Raise UserError if a run cannot be rehearsed with tensors that have shapes but no data. This is so for compiled
    models, for flex attention, and for a GPU with offload to the host."""
    model = composed.spec.model
    if device == "cuda" and (option := engines.facts(composed.spec).offload):
        rule = "tensors on the host and on the GPU cannot be told apart without a GPU"
        raise UserError(f"engine.{option}", rule, "remove it, or remove --shapes-only")
    rule = "memory by shapes is counted operation by operation, but compiled code has no single operations"
    if model.compile != "none":
        raise UserError(f"model.compile={model.compile}", rule, "set model.compile=none, or remove --shapes-only")
    if model.attention == "flex":
        raise UserError("model.attention=flex", rule, "set model.attention=sdpa, or remove --shapes-only")


def _check_room(composed: Request, device: Device) -> None:
    """Raise UserError if even the smallest memory predicted for one rank is more than this machine has."""
    if device == "cuda":
        if count_local_devices(device) == 0:
            rule, remedy = "this computer has no GPU that torch can use", "add --shapes-only, or choose machine=cpu"
            raise UserError(f"machine={composed.machine.name}", rule, remedy)
        room: int | None = devices.query(0, "free_bytes")
    else:
        free = read_number(Path("/proc/meminfo"), "MemAvailable")  # without swapping
        room = None if free is None else 1024 * free
    try:
        needed, _ = predict_memory(composed.spec, device, room, rehearsed=True).device
    except NoPrediction:  # no prediction: the run itself will show whether its memory suffices
        return
    if room is not None and needed > room:
        rule = f"one rank needs at least {needed / 1e9:.1f} GB, but this computer has {room / 1e9:.1f} GB"
        remedy = "use more ranks, a higher ZeRO stage, a smaller batch.micro, or --shapes-only"
        raise UserError(composed.spec.model.name, rule, remedy)
