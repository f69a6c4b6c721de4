"""Find points (configurations) that need not run: a smaller micro-batch ran out of memory, or the predicted memory far
exceeds the device's.

No side effects. Each decision is returned with its evidence.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import engines, predict
from bench.core.machine import Machine
from bench.core.record import Outcome
from bench.core.spec import Frozen, RunSpec
from bench.core.store import RunAttempt
from bench.predict.memory import PROCESS_BYTES, format_gigabytes, predict_memory
from bench.predict.neighbours import UNCORRECTED, Correction
from bench.sweep.forecast import FAR_OUT_FACTOR, MemoryForecast

if TYPE_CHECKING:
    from bench.sweep.definition import RunKey, SweepPoint

CONFIRMED = 2
"""Number of out-of-memory runs of a point, without any other result, after which larger micro-batches are skipped."""

Tried = Callable[[str], Sequence[RunAttempt]]
"""Returns the attempts at the configuration with a given config_id."""


class Sibling(Frozen):
    """One of several configurations that differ in the micro-batch alone, and hence also in the global batch size."""

    config_id: str
    micro: int
    repeats: tuple[int, ...]  # repeat numbers that sweeps request


class Siblings(Frozen):
    """A configuration on a machine (`itself`), and its siblings: configurations that differ from it in the micro-batch
    alone. `smaller` has the siblings with smaller micro-batches, and `larger` those with larger ones, both in
    increasing order."""

    machine: str
    itself: Sibling
    smaller: tuple[Sibling, ...] = ()
    larger: tuple[Sibling, ...] = ()


def find_siblings(wanted: Iterable[tuple["RunKey", Mapping[str, Any]]]) -> dict[tuple[str, str], Siblings]:
    """Return the siblings of every configuration on every machine, by config_id and machine. Siblings differ in the
    micro-batch alone.

    `wanted` yields the key of each requested run, and its spec as JSON.
    """
    repeats: dict[tuple[str, str], list[int]] = {}
    specs: dict[tuple[str, str], Mapping[str, Any]] = {}
    for key, spec in wanted:
        place = key.config_id, key.machine
        repeats.setdefault(place, []).append(key.repeat)
        specs[place] = spec
    families: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for place, spec in specs.items():
        family = {**spec, "batch": {"accumulation": spec["batch"]["accumulation"]}}
        families.setdefault((json.dumps(family, sort_keys=True), place[1]), []).append(place)
    found = {}
    for places in families.values():
        places.sort(key=lambda place: int(specs[place]["batch"]["micro"]))
        members = [
            Sibling(config_id=place[0], micro=specs[place]["batch"]["micro"], repeats=tuple(repeats[place]))
            for place in places
        ]
        for index, (place, itself) in enumerate(zip(places, members, strict=True)):
            smaller, larger = tuple(members[:index]), tuple(members[index + 1 :])
            found[place] = Siblings(machine=place[1], itself=itself, smaller=smaller, larger=larger)
    return found


def find_pruned_outcome(kin: Siblings, tried: Tried) -> Outcome | None:
    """Return the outcome `pruned` for a point (configuration) that need not run, because a smaller micro-batch is
    proven not to fit into memory. Return None if there is no such proof."""
    for smaller in kin.smaller:
        if shown_by := _find_proof(smaller, kin.machine, tried):
            run = f"{smaller.config_id}/{shown_by.folder.name}"
            failed = f"micro-batch {smaller.micro} ran out of memory in run {run}"
            reason = f"micro-batch {kin.itself.micro} cannot fit: {failed}"
            return Outcome(kind="pruned", reason=reason, evidence={"run": run, "micro": smaller.micro})
    return None


def _find_proof(relative: Sibling, machine: str, tried: Tried) -> RunAttempt | None:
    """Return the last out-of-memory run of the configuration `relative`, if runs prove that this configuration does not
    fit on a machine. None if there is no proof.

    A proof needs at least `CONFIRMED` out-of-memory runs of this configuration, and at least one such run for each
    requested repeat. A single run of this configuration with the outcome `ok` or `invalid` refutes the proof. `tried`
    returns the runs of a configuration.
    """
    on_machine = [attempt for attempt in tried(relative.config_id) if attempt.machine == machine and attempt.outcome]
    out = [attempt for attempt in on_machine if attempt.outcome == "oom"]
    contrary = any(attempt.outcome in ("ok", "invalid") for attempt in on_machine)
    enough = len(out) >= CONFIRMED and {attempt.repeat for attempt in out} >= set(relative.repeats)
    return out[-1] if enough and not contrary else None


def is_to_confirm(kin: Siblings, tried: Tried) -> bool:
    """Return whether a point (configuration) that ran out of memory has to run once more. The second run confirms the
    result, so that larger micro-batches can be skipped. It is not needed if all larger micro-batches have an outcome
    already."""
    kinds = _list_outcomes(kin.itself, kin.machine, tried)
    is_first = kinds.count("oom") == 1 and set(kinds) == {"oom"} and len(set(kin.itself.repeats)) == 1
    return is_first and not all(_list_outcomes(larger, kin.machine, tried) for larger in kin.larger)


def _list_outcomes(relative: Sibling, machine: str, tried: Tried) -> list[str]:
    return [a.outcome for a in tried(relative.config_id) if a.machine == machine and a.outcome]


def find_rank_memory_bytes(machine: Machine, ranks: int) -> int | None:
    """Return the bytes that the tensors of one rank may use, with `ranks` ranks on each node. On a GPU, this is the
    device's memory. On a CPU, the ranks share the host's memory, and each also needs memory for its process. None if
    the size of the memory is unknown."""
    if machine.memory_bytes is None and machine.device == "cpu" and machine.host_memory_bytes:
        return max(int(machine.host_memory_bytes / ranks - PROCESS_BYTES["cpu"][0]), 1)
    return machine.memory_bytes


def is_far_out_of_memory(point: "SweepPoint", machine: Machine, correction: Correction = UNCORRECTED) -> bool:
    """Return whether a point (configuration) is predicted to exceed the memory of a rank by a wide margin.

    `correction` comes from measured runs of similar points, and may raise or lower the prediction. If the uncorrected
    low estimate fits, or if the size of the memory is unknown, the result is always False.
    """
    room, there = _get_room(point), find_rank_memory_bytes(machine, point.devices_per_node)
    if room is None or there is None or room.low_bytes <= there:
        return False
    return room.corrected(correction.memory).low_bytes > FAR_OUT_FACTOR * there


def _get_room(point: "SweepPoint") -> MemoryForecast | None:
    return point.forecast.room if point.forecast else None


def find_infeasible_outcome(point: "SweepPoint", machine: Machine, correction: Correction) -> Outcome | None:
    """Return the outcome `infeasible`, with the prediction as evidence, if a point is predicted to far exceed the
    memory of a rank. None otherwise."""
    if not is_far_out_of_memory(point, machine, correction):
        return None
    predicted, there = _get_room(point), find_rank_memory_bytes(machine, point.devices_per_node)
    assert predicted and there
    room = predicted.corrected(correction.memory)
    needs, has = format_gigabytes(room.low_bytes), format_gigabytes(there)
    reason = f"predicted to need at least {needs} GB, but a device of {machine.name} has {has} GB"
    if machine.memory_bytes is None:
        reason = f"predicted to need at least {needs} GB per rank, but this machine has {has} GB per rank"
    return Outcome(kind="infeasible", reason=reason, evidence=_build_evidence(point.spec, room, machine, correction))


def _build_evidence(
    plain_spec: dict[str, Any], room: MemoryForecast, machine: Machine, correction: Correction
) -> dict[str, Any]:
    """Return the evidence for the outcome `infeasible`: a point's memory prediction, as a dict for a record. It has the
    corrected bytes (`room`), the uncorrected bytes of each phase of a step, the correction (a factor from measured runs
    of similar points), and the versions of the formulas. `plain_spec` is the point's spec as JSON."""
    spec = RunSpec.model_validate(plain_spec)
    needed = predict_memory(spec, "cpu" if machine.device == "cpu" else "cuda", machine.memory_bytes)
    return {
        "predicted": {
            "low_bytes": room.low_bytes,
            "high_bytes": room.high_bytes,
            "phases": {phase.name: phase.terms for phase in needed.phases},
            "base_bytes": needed.base,
            "reserve_bytes": needed.reserve,
        },
        "machine": {"name": machine.name, "memory_bytes": find_rank_memory_bytes(machine, spec.devices_per_node)},
        "far_out": FAR_OUT_FACTOR,
        "correction": {"memory": correction.memory, "runs": correction.runs},
        "formulas": read_formula_versions(),
    }


@functools.cache
def read_formula_versions() -> dict[str, str]:
    """Return the release of zeroscale, and a digest of the source code of each package with formulas. The keys are
    package names."""
    versions = {"zeroscale": metadata.version("zeroscale")}
    for package in (predict, engines):
        text = b"".join(path.read_bytes() for path in sorted(Path(package.__path__[0]).rglob("*.py")))
        versions[package.__name__] = hashlib.sha256(text).hexdigest()[:12]
    return versions
