"""Helpers for tests that need sweeps and results folders. They build sweeps, and write the files of attempts without
running anything."""

from pathlib import Path
from typing import Any

from ended_well import observed

from bench.config import compose
from bench.core import store
from bench.core.machine import Machine
from bench.core.record import Circumstance, NodeLoad, Outcome, OutcomeKind, RunRecord
from bench.core.scheduling import JobState
from bench.core.spec import RunSpec, config_id
from bench.core.study import Budget
from bench.launchers.slurm.states import find_phase
from bench.sweep.definition import SweepDefinition, SweepPoint, SweepRules


def spec(**overrides: Any) -> RunSpec:
    return compose.compose_request(
        [("model", "tiny"), ("devices_per_node", 2), *((k.replace("__", "."), v) for k, v in overrides.items())]
    ).spec


def point(made: RunSpec, limit_min: float = 10, machine: str = "cpu") -> SweepPoint:
    return SweepPoint(
        config_id=config_id(made),
        line=f"micro {made.batch.micro}",
        machine=machine,
        nodes=made.nodes,
        devices_per_node=made.devices_per_node,
        time_limit_min=limit_min,
        overrides=(),
        spec=made.model_dump(mode="json", by_alias=True),
    )


def sweep(
    points: list[SweepPoint], repeats: int = 1, control: SweepPoint | None = None, **rules: Any
) -> SweepDefinition:
    return SweepDefinition(
        study="s",
        asked_at="2026-11-21T12:00:00+00:00",
        machines={made.machine: Machine(name=made.machine, device="cpu") for made in points},
        launcher={"name": "slurm"},
        rules=SweepRules(budget=Budget(attempts=2), **rules),
        points=tuple(points),
        order=tuple((repeat, index) for repeat in range(repeats) for index in range(len(points))),
        controls=(control,) if control else (),
    )


def attempt(
    folder: Path, made: RunSpec, kind: OutcomeKind | None, repeat: int = 0, machine: str = "cpu", *,
    busy: bool = False, **launcher: Any,
) -> Path:  # fmt: skip
    """Write the files of an attempt at measuring `made`, and return its folder. `kind` is the outcome in its record. If
    `kind` is None, the attempt has no record, as if it still ran. If `busy`, the record shows background load."""
    circumstance = Circumstance(
        study="s", repeat=repeat, attempt=0, machine=Machine(name=machine), launcher={"name": "slurm", **launcher}
    )
    opened = store.open_attempt(folder / config_id(made), made, circumstance).folder
    if kind:
        load = (NodeLoad(node=0, others_share=0.3),) if busy else None
        record = RunRecord(
            config_id=config_id(made),
            spec=made,
            circumstance=circumstance,
            outcome=Outcome(kind=kind, reason=f"it was {kind}"),
            observations=observed().model_copy(update={"load": load}) if kind == "ok" else None,
        )
        store.write_reserved(opened / store.RECORD, store.to_json(record))
        store.release_reserved(opened)
    return opened


def queued(state: str = "RUNNING", reason: str = "None", restarts: int = 0) -> JobState:
    """Return the state of a job as squeue reports it."""
    return JobState("1", "s", None, find_phase(state), state, reason, restarts=restarts, words="1|s", source="squeue")
