"""Points that need not run: where one ran out of memory, those that can only need more. Pure, and open to audit."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bench.record import Outcome
from bench.spec import RunSpec, canonical
from bench.store import Attempt
from bench.sweep.asked import Key

CONFIRMED = 2
"""So many runs out of memory, and no other answer, before anything is concluded from them."""


class Candidate(NamedTuple):
    """A configuration on a machine, and what is known of it."""

    config_id: str
    machine: str
    spec: RunSpec


def family(spec: RunSpec) -> str:
    """Return what is the same in all points that differ in the micro-batch alone (and so in the global batch)."""
    plain = spec.model_copy(update={"batch": spec.batch.model_copy(update={"micro": 1, "global_": None})})
    return canonical(plain)


def proof(tried: Sequence[Attempt], machine: str, repeats: Iterable[int]) -> Attempt | None:
    """Return the run that shows that a configuration does not fit a machine: every repeat asked ran out of memory, and
    at least two runs did."""
    here = [attempt for attempt in tried if attempt.machine == machine and attempt.outcome]
    out = [attempt for attempt in here if attempt.outcome == "oom"]
    repeats_out = {attempt.repeat for attempt in out}
    contrary = any(attempt.outcome in ("ok", "invalid") for attempt in here)
    enough = len(out) >= CONFIRMED and repeats_out >= set(repeats)
    return out[-1] if enough and not contrary else None


def pruned(larger: RunSpec, smaller: RunSpec, shown_by: Attempt) -> Outcome:
    """Return the answer of a point that need not run."""
    run = f"{shown_by.folder.parent.name}/{shown_by.folder.name}"
    reason = f"micro-batch {smaller.batch.micro} ran out of memory in run {run}, and this asks for {larger.batch.micro}"
    return Outcome(kind="pruned", reason=reason, evidence={"run": run, "micro": smaller.batch.micro})


class Pruning:
    """Which points of a sweep are related, worked out once."""

    def __init__(self, wanted: Mapping[Key, RunSpec]) -> None:
        self._repeats: dict[tuple[str, str], set[int]] = {}
        self._specs: dict[tuple[str, str], RunSpec] = {}
        self._families: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for key, spec in wanted.items():
            place = key.config_id, key.machine
            self._repeats.setdefault(place, set()).add(key.repeat)
            self._specs[place] = spec
        for place, spec in self._specs.items():
            self._families.setdefault((family(spec), place[1]), []).append(place)
        for places in self._families.values():
            places.sort(key=lambda place: self._specs[place].batch.micro)

    def by(self, key: Key, tried: Mapping[str, Sequence[Attempt]]) -> Outcome | None:
        """Return why a point need not run, or None."""
        for smaller in self._relatives(key, larger=False):
            if shown_by := proof(tried.get(smaller[0], ()), smaller[1], self._repeats[smaller]):
                return pruned(self._specs[key.config_id, key.machine], self._specs[smaller], shown_by)
        return None

    def to_confirm(self, key: Key, tried: Mapping[str, Sequence[Attempt]]) -> bool:
        """Whether a point that ran out of memory is to run once more, so that larger ones need not run at all."""
        here = [attempt for attempt in tried.get(key.config_id, ()) if attempt.machine == key.machine]
        kinds = [attempt.outcome for attempt in here if attempt.outcome]
        asked = self._repeats[key.config_id, key.machine]
        only_once = kinds.count("oom") == 1 and set(kinds) == {"oom"} and len(asked) == 1
        return only_once and any(
            not any(attempt.machine == key.machine and attempt.outcome for attempt in tried.get(larger[0], ()))
            for larger in self._relatives(key, larger=True)
        )

    def _relatives(self, key: Key, *, larger: bool) -> list[tuple[str, str]]:
        """Return the points of the same family with a smaller or larger micro-batch, the smallest first."""
        place = key.config_id, key.machine
        places = self._families[family(self._specs[place]), key.machine]
        index = places.index(place)
        return places[index + 1 :] if larger else places[:index]
