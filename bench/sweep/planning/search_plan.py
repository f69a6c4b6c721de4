"""From what a user asks to a search: its definition, and the points of its space by their values."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import launchers
from bench.config import compose
from bench.config.compose import GROUPS, StudyPoint
from bench.config.decode import decode_model
from bench.config.rule_fields import list_field_names
from bench.errors import UserError, suggest_nearest
from bench.record import Limits
from bench.scheduling import SchedulingOptions
from bench.search_section import Dimension, SearchSection
from bench.study import Pair, Study
from bench.sweep.definition import SearchRequest, SweepDefinition, SweepPoint, SweepRules
from bench.sweep.planning import present, study_plan, target
from bench.sweep.planning.overrides import GivenOverrides, find_study, format_overrides

_SECTION = "search."
_ONE_OF = ("machine", "launcher")  # for all trials: what differs by these is not compared


class SearchPoints:
    """The points of a search's space: each composed and checked when its values are asked for."""

    def __init__(
        self, study: Study, overrides: tuple[str, ...], config_dir: Path | None, machine: str | None = None
    ) -> None:
        """UserError for a study without a search, for several values of a key, and for a field that is none. `machine`
        is that of a search that goes on: the one that conf/config.yaml names may be another by now."""
        if study.search is None:
            rule = "has no `search` section"
            raise UserError(f"study={study.name}", rule, "give one with a space and an objective, or use `sweep`")
        self.overrides, self.config_dir = overrides, config_dir
        given = compose.parse_single(overrides)
        self._pinned = [(key, value) for key, value in given if not key.startswith(_SECTION)]
        section = _change_section(study.search, [(key, value) for key, value in given if key.startswith(_SECTION)])
        space = {key: one for key, one in section.space.items() if key not in dict(self._pinned)}
        if not space:
            raise UserError("search.space", "every field of it was given a value", "leave one of these out")
        for key, dimension in space.items():
            _check_fields(key, dimension)
        if section.rungs and "learning.stop_after" in {*study.base, *dict(self._pinned)}:
            rule = "a search with rungs says where its trainings stop"
            raise UserError("learning.stop_after", rule, "leave it out, or search.rungs")
        self.section = section.model_copy(update={"space": space})
        base = study.base if machine is None else {"machine": machine} | study.base
        self.study = study.model_copy(update={"search": self.section, "base": base})

    def build(self, values: Mapping[str, Any]) -> StudyPoint:
        """Return the point with these values of the space; UserError for one that is left out or cannot run."""
        pinned = [(key, [value]) for key, value in self._pinned]
        study = self.study.model_copy(update={"base": self.study.base | dict(list_pairs(values)), "axes": {}})
        found = compose.compose_points(study, pinned, self.config_dir, target.find_device).points[0]
        present.check_devices(found.composed)
        if self.section.objective == "validation_loss" and found.composed.spec.learning.tokens is None:
            rule = "is of a training to its end, and there is none"
            raise UserError("search.objective=validation_loss", rule, "give learning.tokens in base")
        return found

    def build_sweep_point(self, values: Mapping[str, Any]) -> SweepPoint:
        """Return the same as it is asked for, with what is predicted of it."""
        varied = {f"{key}={value}" for key, value in list_pairs(values) if not study_plan.is_shown_in_line(key)}
        return study_plan.build_point(self.build(values), varied, predict=self.study.budget.attempts > 1)


def plan_search(study: Study | str | Path | None, overrides: GivenOverrides, config_dir: Path | None) -> SearchPoints:
    """Return the space of the search that is asked for; UserError where there is none."""
    found, _ = find_study(study, overrides, config_dir, "search")
    texts = tuple(text for text in format_overrides(overrides) if not text.startswith("study="))
    return SearchPoints(found, texts, config_dir)


def define_search(points: SearchPoints, first: StudyPoint, etiquette: Mapping[str, Any]) -> SweepDefinition:
    """Return what is written down of a search, whose trials are added later; `first` is any of its points."""
    options = study_plan.merge_options([first], etiquette, False)
    scheduling = options if isinstance(options, SchedulingOptions) else SchedulingOptions()
    study, composed = points.study, first.composed
    request = SearchRequest(
        study=study, overrides=points.overrides, config_dir=str(points.config_dir) if points.config_dir else None
    )
    budget = study.budget.model_copy(update={"node_hours": points.section.node_hours or study.budget.node_hours})
    return SweepDefinition(
        study=study.name,
        question=study.question,
        asked_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machines={composed.machine.name: study_plan.build_machine(composed)},
        launcher={"name": composed.launcher, **options.model_dump(mode="json")},
        limits=Limits(**{key: getattr(options, key) for key in Limits.model_fields}),
        network=scheduling.network,
        rules=SweepRules(budget=budget, max_queued=scheduling.max_queued),
        points=(),
        order=(),
        search=request,
    )


def queues(sweep: SweepDefinition) -> bool:
    """Whether trials start by a queue, and not here and now."""
    return bool(launchers.load(str(sweep.launcher["name"])).QUEUES)


def list_pairs(values: Mapping[str, Any]) -> list[Pair]:
    """Return the overrides that values of a space stand for; a mapping stands for several."""
    return [pair for key, value in values.items() for pair in _list_pairs_of(key, value)]


def _list_pairs_of(key: str, value: Any) -> Iterable[Pair]:
    return value.items() if isinstance(value, Mapping) else [(key, value)]


def _change_section(section: SearchSection, given: Sequence[Pair]) -> SearchSection:
    """Return the section with what was given beside it, such as search.sampler=random."""
    if not given:
        return section
    plain = section.model_dump(by_alias=True, exclude_defaults=True)
    plain |= {key.removeprefix(_SECTION): value for key, value in given}
    decoded: SearchSection = decode_model(SearchSection, plain, "search")
    return decoded


def _check_fields(key: str, dimension: Dimension) -> None:
    """Raise UserError for what is no field of a point."""
    names = {
        name
        for value in ((None,) if dimension.values is None else dimension.values)
        for name in (value if isinstance(value, Mapping) else (key,))
    }
    known = list_field_names()
    for name in sorted(names):
        if name.partition(".")[0] in _ONE_OF:
            raise UserError(f"search.space.{name}", "a search has one machine and one launcher", "give it in base")
        if name not in known and name not in GROUPS:
            close = suggest_nearest(name, known, "see conf/config.yaml and the files of its groups")
            raise UserError(f"search.space.{name}", "no field of a point", close)
