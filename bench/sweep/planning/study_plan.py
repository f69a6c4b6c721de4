"""From what a user asks to a Sweep: every point decoded, checked and with its time limit, before anything starts."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench import launchers
from bench.config import compose
from bench.config.compose import Expansion, Request, StudyPoint
from bench.config.decode import decode_model
from bench.errors import UserError
from bench.formatting import describe_point
from bench.point_fields import is_shown
from bench.record import Limits
from bench.scheduling import SchedulingOptions
from bench.spec import config_id
from bench.study import Overrides, Pair, Study, expand_study, list_control_pairs, order_runs
from bench.sweep import duration
from bench.sweep.definition import SweepDefinition, SweepPoint, SweepRules
from bench.sweep.forecast import predict_forecast
from bench.sweep.planning import present, target
from bench.sweep.planning.overrides import GivenOverrides, find_study

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
    found = compose.compose_points(planned_study, given, config_dir, target.find_device)
    for made in found.points:
        present.check_devices(made.composed)
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
        machines={name: one.machine.on(target.find_device(one)) for name, one in by_name.items()},
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
    chosen = present.choose_small([key for key, _ in overrides], composed)
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
        compose.check(composed, target.find_device(composed))
        controls.append(compose.StudyPoint(composed, shaped, config_id(composed.spec)))
    return controls


def build_point(made: compose.StudyPoint, distinguishing: set[str], *, predict: bool) -> SweepPoint:
    """Return a point as it is asked; `predict` its time limit too, which needs a second attempt to fall back on. A
    training falls back on its checkpoint; UserError for one that nobody says the limit of."""
    composed, texts = made.composed, tuple(f"{key}={value}" for key, value in made.overrides)
    predicted = predict_forecast(composed.spec, composed.machine, target.find_device(composed))
    options, (given_min, bound_min) = composed.launcher_options, _find_limits_min(composed)
    limit_min = given_min if given_min is not None else bound_min
    trains = composed.spec.learning.tokens is not None
    if isinstance(options, SchedulingOptions) and bound_min is not None and (predict or trains) and predicted.step:
        limit_min = duration.compute_limit_min(
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
    return None, duration.compute_bound_min(composed.spec.measure, options.setup_min)


def _find_distinguishing(overrides: list[tuple[Pair, ...]]) -> set[str]:
    """Return what tells points apart and is not in their lines anyhow."""
    hidden = [(key, value) for key, value in itertools.chain(*overrides) if not is_shown_in_line(key)]
    shared = Counter(f"{key}={value}" for key, value in hidden)
    return {text for text, count in shared.items() if count < len(overrides)}


def is_shown_in_line(key: str) -> bool:
    """Whether a point's one line shows an override already."""
    return key in _GROUPS or (key.partition(".")[0] not in _GROUPS and is_shown(key))
