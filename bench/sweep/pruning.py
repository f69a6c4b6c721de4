"""Points that need not run: where one ran out of memory, those that can only need more. Pure, and open to audit."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.record import Outcome
from bench.spec import Frozen
from bench.store import RunAttempt

if TYPE_CHECKING:
    from bench.sweep.definition import RunKey

CONFIRMED = 2
"""So many runs out of memory, and no other answer, before anything is concluded from them."""

Tried = Callable[[str], Sequence[RunAttempt]]
"""The attempts at a configuration, by its config_id."""


class Sibling(Frozen):
    """A configuration that differs from others of its family in the micro-batch alone (and so in the global batch)."""

    config_id: str
    micro: int
    repeats: tuple[int, ...]  # that were asked for


class Siblings(Frozen):
    """A configuration on a machine, and those of its family that were asked for too, the smallest first."""

    machine: str
    itself: Sibling
    smaller: tuple[Sibling, ...] = ()
    larger: tuple[Sibling, ...] = ()


def find_siblings(wanted: Iterable[tuple["RunKey", Mapping[str, Any]]]) -> dict[tuple[str, str], Siblings]:
    """Return the kin of every configuration on every machine, from what is wanted and its spec in plain types."""
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
    """Return why a point need not run, or None."""
    for smaller in kin.smaller:
        if shown_by := _find_proof(smaller, kin.machine, tried):
            run = f"{smaller.config_id}/{shown_by.folder.name}"
            reason = f"micro-batch {smaller.micro} ran out of memory in run {run}, and this asks for {kin.itself.micro}"
            return Outcome(kind="pruned", reason=reason, evidence={"run": run, "micro": smaller.micro})
    return None


def _find_proof(relative: Sibling, machine: str, tried: Tried) -> RunAttempt | None:
    """Return the run that shows that a configuration does not fit a machine: every repeat asked ran out of memory, and
    at least two runs did."""
    on_machine = [attempt for attempt in tried(relative.config_id) if attempt.machine == machine and attempt.outcome]
    out = [attempt for attempt in on_machine if attempt.outcome == "oom"]
    contrary = any(attempt.outcome in ("ok", "invalid") for attempt in on_machine)
    enough = len(out) >= CONFIRMED and {attempt.repeat for attempt in out} >= set(relative.repeats)
    return out[-1] if enough and not contrary else None


def is_to_confirm(kin: Siblings, tried: Tried) -> bool:
    """Whether a point that ran out of memory is to run once more, so that larger ones need not run at all."""
    kinds = _list_outcomes(kin.itself, kin.machine, tried)
    is_first = kinds.count("oom") == 1 and set(kinds) == {"oom"} and len(set(kin.itself.repeats)) == 1
    return is_first and not all(_list_outcomes(larger, kin.machine, tried) for larger in kin.larger)


def _list_outcomes(relative: Sibling, machine: str, tried: Tried) -> list[str]:
    return [a.outcome for a in tried(relative.config_id) if a.machine == machine and a.outcome]
