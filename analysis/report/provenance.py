"""Where the runs of a set come from: by environment class, what ran there and what differs between the classes."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from analysis.numbers import MISSING
from bench.machine import Machine
from bench.record import Environment, RunRecord


class Fact(NamedTuple):
    """One line of the provenance: what each environment class says, all that its runs say joined."""

    name: str
    values: tuple[str, ...]  # by class, in the order of `Provenance.classes`
    differs: bool
    decides: bool  # part of the environment class itself


class Provenance(NamedTuple):
    """The environments of a set of runs."""

    classes: tuple[str, ...]  # environment_id
    facts: tuple[Fact, ...]
    machines: tuple[Machine, ...]
    started: tuple[str, str] | None  # first and last, ISO 8601
    unknown: int  # runs that ended before their environment was looked at


def provenance(records: Sequence[RunRecord]) -> Provenance:
    """Return the provenance of `records`."""
    by_class: dict[str, list[Environment]] = {}
    for record in records:
        if record.environment:
            by_class.setdefault(record.environment.environment_id, []).append(record.environment)
    started = sorted(record.circumstance.started_at for record in records if record.circumstance.started_at)
    machines = {record.circumstance.machine.model_dump_json(): record.circumstance.machine for record in records}
    return Provenance(
        classes=tuple(by_class),
        facts=tuple(_facts(list(by_class.values()))),
        machines=tuple(machines.values()),
        started=(started[0], started[-1]) if started else None,
        unknown=sum(record.environment is None for record in records),
    )


def _facts(classes: Sequence[Sequence[Environment]]) -> Iterable[Fact]:
    told = [[{**_decisive(one), **_others(one)} for one in members] for members in classes]
    decisive = {name for members in classes for one in members for name in _decisive(one)}
    names = dict.fromkeys(name for members in told for facts in members for name in facts)
    for name in names:
        values = tuple(_joined(facts.get(name) for facts in members) for members in told)
        if name in decisive or set(values) != {MISSING}:
            yield Fact(name, values, len(set(values)) > 1, name in decisive)


def _decisive(environment: Environment) -> dict[str, Any]:
    known = environment.classification
    return {
        "device": known.device,
        "devices per node": known.devices_per_node,
        "container": known.container,
        **known.versions,
    }


def _others(environment: Environment) -> dict[str, Any]:
    git = environment.git or {}
    return {
        **{name: version for name, version in environment.versions.items() if name not in _decisive(environment)},
        "commit": f"{git['commit'][:10]}{' with changes' if git.get('dirty') else ''}" if git.get("commit") else None,
        "hosts": ", ".join(environment.hosts) or None,
        "processor": environment.cpus.get("model"),
        "Slurm job": environment.slurm.get("SLURM_JOB_ID"),
        **environment.variables,
    }


def _joined(values: Iterable[Any]) -> str:
    return "; ".join(dict.fromkeys(MISSING if value is None else str(value) for value in values))
