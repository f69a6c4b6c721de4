"""From what a user asks to a Sweep: every point decoded, checked and with its time limit, before anything starts."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench import config, launchers
from bench.config import Expansion, Request
from bench.decode import model
from bench.errors import UserError
from bench.machine import Machine
from bench.planning import present, target
from bench.planning.overrides import Given, study_of
from bench.point_fields import is_shown
from bench.record import Limits
from bench.scheduling import SchedulingOptions
from bench.spec import config_id
from bench.study import Overrides, Pair, Study, control_pairs, expand, order
from bench.sweep import duration
from bench.sweep.asked import Point, Rules, Sweep
from bench.sweep.forecast import forecast
from bench.wording import describe

_GROUPS = {"model", "engine", "data", "machine", "launcher"}


class Plan(NamedTuple):
    """A sweep that is planned and not started."""

    sweep: Sweep
    expansion: Expansion  # its points, and what the study's rules left out
    chosen: list[Pair]  # what makes points small that start on the CPU that is here
    autopilot: bool  # whether it is to go on by itself

    @property
    def queues(self) -> bool:
        """Whether its points start by a queue, and not here and now."""
        return bool(launchers.load(str(self.sweep.launcher["name"])).QUEUES)


def plan(
    study: Study | str | Path | None,
    overrides: Given,
    config_dir: Path | None,
    *,
    prune: bool,
    autopilot: bool,
    etiquette: Mapping[str, Any],
) -> Plan:
    """Return everything that was asked for, and what the study's rules left out; `etiquette` are options of a launcher
    with a queue."""
    asked_study, given = study_of(study, overrides, config_dir, "sweep")
    chosen = [] if asked_study.base else _chosen(asked_study, given, config_dir)
    asked_study = asked_study.model_copy(update={"base": asked_study.base | dict(chosen)})
    found = config.points(asked_study, given, config_dir, target.device)
    for made in found.points:
        present.check(made.asked)
    first = found.points[0].asked
    options = _options(found, etiquette, autopilot)
    scheduling = options if isinstance(options, SchedulingOptions) else SchedulingOptions()
    apart = _apart([point.overrides for point in found.points])
    controls = [_point(made, set(), predict=False) for made in _controls(asked_study, given, found, config_dir)]
    sweep = Sweep(
        study=asked_study.name,
        question=asked_study.question,
        asked_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machines={asked.machine.name: _machine(asked) for asked in _one_per_machine(found)},
        launcher={"name": first.launcher, **options.model_dump(mode="json")},
        limits=Limits(**{key: getattr(options, key) for key in Limits.model_fields}),
        network=scheduling.network,
        rules=Rules(budget=asked_study.budget, prune=prune, max_queued=scheduling.max_queued),
        points=tuple(_point(point, apart, predict=asked_study.budget.attempts > 1) for point in found.points),
        order=tuple(order([point.turn for point in found.points], asked_study)),
        controls=tuple(controls),
    )
    return Plan(sweep, found, chosen, autopilot)


def _chosen(study: Study, overrides: Overrides, config_dir: Path | None) -> list[Pair]:
    """Return what makes the points of comma lists small, where the first of them starts on the CPU that is here; no
    lengths where models differ in the tokens that they read."""
    first, *others = expand(study, overrides)
    asked = config.request(first, config_dir)
    chosen = present.small([key for key, _ in overrides], asked)
    learners = {tuple(pair for pair in pairs if pair[0] in ("model", "objective")): pairs for pairs in others}
    for pairs in learners.values():
        with contextlib.suppress(UserError):  # told, or left out by a rule, when all points are decoded
            if config.request(pairs, config_dir).spec.sequence.keys() != asked.spec.sequence.keys():
                return [(key, value) for key, value in chosen if not key.startswith("sequence.")]
    return chosen


def _options(found: Expansion, etiquette: Mapping[str, Any], autopilot: bool) -> Limits:
    """Return the options of the one launcher that starts all points, with those given beside the overrides."""
    ways = {(point.asked.launcher, point.asked.launcher_options.model_dump_json()) for point in found.points}
    if len(ways) != 1:
        raise UserError("launcher", "a sweep has one launcher", "call sweep once for each")
    name, file = found.points[0].asked.launcher, launchers.load(found.points[0].asked.launcher)
    given = {key: value for key, value in etiquette.items() if value is not None}
    if (given or autopilot) and not file.QUEUES:
        flag = "--" + next(iter(given), "autopilot").replace("_", "-")
        raise UserError(flag, f"launcher={name} has no queue", f"leave it out, or choose {launchers.with_queue()}")
    plain = found.points[0].asked.launcher_options.model_dump(mode="json")
    options: Limits = model(file.Options, plain | given, "launcher")
    return options


def _controls(study: Study, overrides: Overrides, found: Expansion, config_dir: Path | None) -> list[config.Point]:
    """Return the control point for every shape of allocation that the sweep needs."""
    pairs = control_pairs(study, overrides)
    shapes = dict.fromkeys((p.asked.spec.nodes, p.asked.spec.devices_per_node) for p in found.points)
    controls = []
    for nodes, devices in shapes if pairs else ():
        shaped = (*(pairs or ()), ("nodes", nodes), ("devices_per_node", devices))
        asked = config.request(shaped, config_dir)
        config.check(asked, target.device(asked))
        controls.append(config.Point(asked, shaped, config_id(asked.spec)))
    return controls


def _point(made: config.Point, apart: set[str], *, predict: bool) -> Point:
    """Return a point as it is asked; `predict` its time limit too, which needs a second attempt to fall back on."""
    asked, texts = made.asked, tuple(f"{key}={value}" for key, value in made.overrides)
    told = forecast(asked.spec, asked.machine, target.device(asked))
    options, (asked_min, bound_min) = asked.launcher_options, _limits_min(asked)
    limit_min = asked_min if asked_min is not None else bound_min
    if isinstance(options, SchedulingOptions) and bound_min is not None and predict and told.step:
        limit_min = duration.limit_min(asked.spec.measure, told.step.high_s, options.setup_min, bound_min)
    return Point(
        config_id=made.config_id,
        line="  ".join([describe(asked.spec, made.config_id), *(text for text in texts if text in apart)]),
        machine=asked.machine.name,
        nodes=asked.spec.nodes,
        devices_per_node=asked.spec.devices_per_node,
        time_limit_min=limit_min,
        bound_min=bound_min if predict else None,
        forecast=told,
        overrides=texts,
        spec=asked.spec.model_dump(mode="json", by_alias=True),
    )


def _limits_min(asked: Request) -> tuple[float | None, float | None]:
    """Return the limit that was asked for and, where none was and a queue wants one, the longest that it gets."""
    options = asked.launcher_options
    if options.time_limit_min is not None or not isinstance(options, SchedulingOptions):
        return options.time_limit_min, None
    return None, duration.bound_min(asked.spec.measure, options.setup_min)


def _one_per_machine(found: Expansion) -> list[Request]:
    return list({point.asked.machine.name: point.asked for point in reversed(found.points)}.values())


def _machine(asked: Request) -> Machine:
    """Return the machine; where points are run here, with the kind of device that is here."""
    return asked.machine.on(target.device(asked))


def _apart(overrides: list[tuple[Pair, ...]]) -> set[str]:
    """Return what tells points apart and is not in their lines anyhow."""
    hidden = [(key, value) for key, value in itertools.chain(*overrides) if not _shown(key)]
    shared = Counter(f"{key}={value}" for key, value in hidden)
    return {text for text, count in shared.items() if count < len(overrides)}


def _shown(key: str) -> bool:
    """Whether a point's one line shows an override already."""
    return key in _GROUPS or (key.partition(".")[0] not in _GROUPS and is_shown(key))
