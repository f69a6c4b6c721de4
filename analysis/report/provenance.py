"""Provenance of a set of runs: the facts of each environment class, and the differences between classes."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from analysis.formats import MISSING
from analysis.observed import find_job
from analysis.results import Results
from bench.core.machine import Machine
from bench.core.record import Environment

_MOST = 8  # values of one fact up to which all are written


class ProvenanceFact(NamedTuple):
    """One line of the provenance: a fact, with the joined values of each environment class."""

    name: str
    values: tuple[str, ...]  # by class, in the order of `Provenance.classes`
    differs: bool
    decides: bool  # whether it is part of the environment class


class Provenance(NamedTuple):
    """The environments of a set of runs."""

    classes: tuple[str, ...]  # environment_id
    facts: tuple[ProvenanceFact, ...]
    machines: tuple[Machine, ...]
    unlike: tuple[ProvenanceFact, ...]  # differences between the machines, in their order
    unknown: int  # runs that ended before their environment was recorded

    @property
    def differences(self) -> tuple[ProvenanceFact, ...]:
        """The differing facts that forbid to pool numbers."""
        return tuple(fact for fact in self.facts if fact.differs and fact.decides)


def build_provenance(results: Results, machines: Iterable[Machine]) -> Provenance:
    """Return the provenance of a set of runs on these machines."""
    by_class: dict[str, list[Environment]] = {}
    for text in results.list_environments():
        environment = Environment.model_validate_json(text)
        by_class.setdefault(environment.environment_id, []).append(environment)
    nodes = tuple({machine.model_dump_json(): machine for machine in machines}.values())
    return Provenance(
        classes=tuple(by_class),
        facts=tuple(_list_facts(list(by_class.values()))),
        machines=nodes,
        unlike=tuple(_list_machine_differences(nodes)),
        unknown=int(results.table["environment_id"].isna().sum()),
    )


def _list_facts(classes: Sequence[Sequence[Environment]]) -> Iterable[ProvenanceFact]:
    listed = [[{**_list_decisive_facts(one), **_list_other_facts(one)} for one in members] for members in classes]
    decisive = {name for members in classes for one in members for name in _list_decisive_facts(one)}
    names = dict.fromkeys(name for members in listed for facts in members for name in facts)
    for name in names:
        values = tuple(_join_values(facts.get(name) for facts in members) for members in listed)
        if name in decisive or set(values) != {MISSING}:
            yield ProvenanceFact(name, values, len(set(values)) > 1, name in decisive)


def _list_machine_differences(machines: Sequence[Machine]) -> Iterable[ProvenanceFact]:
    """Yield the differing fields of the machines, except the name."""
    for name in Machine.model_fields:
        values = tuple(_join_values([_format_machine_value(getattr(machine, name))]) for machine in machines)
        if name != "name" and len(set(values)) > 1:
            yield ProvenanceFact(name.replace("_", " "), values, differs=True, decides=False)


def _format_machine_value(value: Any) -> Any:
    """Return a field of a machine for readers; None if it is empty."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:g}" for name, number in value.items()) or None
    return ", ".join(value) or None if isinstance(value, tuple) else value or None


def _list_decisive_facts(environment: Environment) -> dict[str, Any]:
    known = environment.classification
    return {
        "device": known.device,
        "devices per node": known.devices_per_node,
        "container": known.container,
        **known.versions,
    }


def _list_other_facts(environment: Environment) -> dict[str, Any]:
    git, around = environment.git or {}, find_job(environment)
    return {
        **{
            name: version
            for name, version in environment.versions.items()
            if name not in _list_decisive_facts(environment)
        },
        "commit": f"{git['commit'][:10]}{' with changes' if git.get('dirty') else ''}" if git.get("commit") else None,
        "hosts": ", ".join(environment.hosts) or None,
        "processor": environment.cpus.get("model"),
        "Slurm job" if "SLURM_JOB_ID" in environment.slurm else "job": around.job_id if around else None,
        **environment.variables,
    }


def _join_values(values: Iterable[Any]) -> str:
    listed = list(dict.fromkeys(MISSING if value is None else str(value) for value in values))
    return "; ".join([*listed[:_MOST], *([f"… and {len(listed) - _MOST:,} more"] if len(listed) > _MOST else [])])
