"""All results that a report shows about a set of runs. They are computed once, and used for the page and for the tables
in files next to the page."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from analysis.formats import MISSING
from analysis.metrics.cost import add_prices
from analysis.observed import find_job
from analysis.questions import QUESTION, add_lengths, describe_choice, tell_apart
from analysis.results import Results
from analysis.scaling.best import Best, best
from analysis.scaling.crossover import Crossover, find_crossovers
from analysis.scaling.curves import ScalingCurve, build_curves
from analysis.stats.change_points import Drift, measure_drift
from analysis.summary import Row
from analysis.table import group_by, list_rows, list_values
from bench.core.machine import Machine
from bench.core.record import Circumstance, Environment
from bench.core.store import Unreadable

_MOST = 8  # values of one fact up to which all are written


class ControlPointDrift(NamedTuple):
    """Drift of a control point, which is a configuration that ran several times in one allocation. Drift is the change
    of the step time over these runs."""

    allocation: str
    configuration: str
    drift: Drift


class ProvenanceFact(NamedTuple):
    """One row of the provenance table: a fact, such as a version, with its values in each environment class."""

    name: str
    values: tuple[str, ...]  # by class, in the order of `Provenance.classes`
    differs: bool
    decides: bool  # True if the fact is part of the environment class, so that runs that differ in it are not pooled


class Provenance(NamedTuple):
    """Provenance of a set of runs: their environment classes (hashes of device and software versions) and their
    machines."""

    classes: tuple[str, ...]  # environment_id
    facts: tuple[ProvenanceFact, ...]
    machines: tuple[Machine, ...]
    unlike: tuple[ProvenanceFact, ...]  # fields in which the machines differ, with values in the order of `machines`
    unknown: int  # runs that ended before their environment was recorded

    @property
    def differences(self) -> tuple[ProvenanceFact, ...]:
        """Facts, such as versions, that differ between the environment classes. Because of these differences, runs of
        different classes must not be pooled."""
        return tuple(fact for fact in self.facts if fact.differs and fact.decides)


class ReportFindings(NamedTuple):
    """Everything that a report shows about a set of runs. `rows` are the rows of `table` as dicts."""

    results: Results
    table: pd.DataFrame
    summary: pd.DataFrame
    rows: Sequence[Row]
    best: Sequence[Best]
    curves: Sequence[ScalingCurve]
    crossovers: Sequence[Crossover]
    drifts: Sequence[ControlPointDrift]
    origin: Provenance
    questions: tuple[str, ...]  # questions of the studies, as their files state them

    @property
    def answers(self) -> list[Best]:
        """The best configurations of each question. A question is a group of configurations that do the same work on
        equal hardware. Questions in which no configuration has a time come last."""
        return sorted(self.best, key=lambda one: one.fastest is None)

    def list_configurations(self, most: int) -> list[Row]:
        """Return the first `most` rows of the summary, with a column `protocol`. If several rows would have the same
        name, this column distinguishes them by the settings of their measurement protocol."""

        def name(row: Row) -> tuple[Any, ...]:
            return *map(add_lengths(row).get, QUESTION), describe_choice(row)

        return tell_apart(list_rows(self.summary[:most]), self.results.specs, name)


def compute_findings(results: Results, price: float | None = None) -> ReportFindings:
    """Compute what a report shows about a set of runs. `price` is the price per device and hour, in any currency."""
    table, summary = results.table, results.summary
    if price is not None:
        table, summary = add_prices(table, price), add_prices(summary, price)
    around = list(_read_circumstances(results))
    return ReportFindings(
        results=results,
        table=table,
        summary=summary,
        rows=list_rows(table),
        best=best(results),
        curves=build_curves(results),
        crossovers=find_crossovers(results),
        drifts=find_drifts(results),
        origin=build_provenance(results, [one.machine for one in around]),
        questions=tuple(dict.fromkeys(one.question for one in around if one.question)),
    )


def _read_circumstances(results: Results) -> Iterable[Circumstance]:
    """Yield the circumstance (how and where a run was started) of the first run of every study, machine and environment
    class."""
    # Every record is a file to read. One record per group suffices, since all its runs have the same circumstance.
    firsts = ~results.table.duplicated(["study", "machine", "environment_id"])
    for place in firsts.to_numpy().nonzero()[0]:
        try:
            yield results.record(int(place)).circumstance
        except (OSError, Unreadable):  # its file is gone
            continue


def find_drifts(results: Results) -> list[ControlPointDrift]:
    """Return the drifts of step times. There is one for each configuration and allocation (scheduler job) with at least
    two runs of this configuration that ended ok."""
    drifts, allocations = [], list_values(results.table["allocation"])
    for row in list_rows(results.summary):
        # n counts allocations. Only if there are more runs than allocations can an allocation have several runs.
        timed = results.list_timed(row) if row["runs"] > row["n"] else []
        together = group_by((place for place in timed if allocations[place] is not None), allocations.__getitem__)
        for allocation, places in together.items():
            if found := measure_drift([steps for place in places if (steps := results.window(place))]):
                drifts.append(ControlPointDrift(allocation, describe_choice(row), found))
    return drifts


def build_provenance(results: Results, machines: Iterable[Machine]) -> Provenance:
    """Return environments and machines of a set of runs. `machines` may contain duplicates."""
    environments = map(Environment.model_validate_json, results.list_environments())
    by_class = group_by(environments, lambda one: one.environment_id)
    nodes = tuple({machine.model_dump_json(): machine for machine in machines}.values())
    return Provenance(
        classes=tuple(by_class),
        facts=tuple(_list_facts(list(by_class.values()))),
        machines=nodes,
        unlike=tuple(_list_machine_differences(nodes)),
        unknown=int(results.table["environment_id"].isna().sum()),
    )


def _list_facts(classes: Sequence[Sequence[Environment]]) -> Iterable[ProvenanceFact]:
    listed = [[_list_decisive_facts(one) | _list_other_facts(one) for one in members] for members in classes]
    decisive = {name for members in classes for one in members for name in _list_decisive_facts(one)}
    names = dict.fromkeys(name for members in listed for facts in members for name in facts)
    # Environment variables that no run has set are omitted. Versions and devices are listed even if unknown.
    for name in names:
        values = tuple(_join_values(facts.get(name) for facts in members) for members in listed)
        if name in decisive or set(values) != {MISSING}:
            yield ProvenanceFact(name, values, len(set(values)) > 1, name in decisive)


def _list_machine_differences(machines: Sequence[Machine]) -> Iterable[ProvenanceFact]:
    """Yield the fields in which the machines differ, except the name."""
    for name in Machine.model_fields:
        values = tuple(_join_values([_format_machine_value(getattr(machine, name))]) for machine in machines)
        if name != "name" and len(set(values)) > 1:
            yield ProvenanceFact(_label_machine_field(name), values, differs=True, decides=False)


def _label_machine_field(name: str) -> str:
    """Return the name of a field of a machine for readers, such as "inter-node bandwidth" for
    `inter_node_bytes_per_s`."""
    return name.replace("_node_", "-node ").replace("bytes_per_s", "bandwidth").replace("_", " ")


def _format_machine_value(value: Any) -> Any:
    """Return a field of a machine in a form for readers; None if it is empty."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:g}" for name, number in value.items()) or None
    return ", ".join(value) or None if isinstance(value, tuple) else value or None


def _list_decisive_facts(environment: Environment) -> dict[str, Any]:
    known = environment.classification
    hardware = {"device": known.device, "devices per node": known.devices_per_node}
    return {**hardware, "container": known.container, **known.versions}


def _list_other_facts(environment: Environment) -> dict[str, Any]:
    git, around, decisive = environment.git or {}, find_job(environment), _list_decisive_facts(environment)
    return {
        **{name: version for name, version in environment.versions.items() if name not in decisive},
        "commit": f"{git['commit'][:10]}{' with changes' if git.get('dirty') else ''}" if git.get("commit") else None,
        "hosts": ", ".join(environment.hosts) or None,
        "processor": environment.cpus.get("model"),
        "Slurm job" if "SLURM_JOB_ID" in environment.slurm else "job": around.job_id if around else None,
        **environment.variables,
    }


def _join_values(values: Iterable[Any]) -> str:
    listed = list(dict.fromkeys(MISSING if value is None else str(value) for value in values))
    return "; ".join([*listed[:_MOST], *([f"… and {len(listed) - _MOST:,} more"] if len(listed) > _MOST else [])])
