"""Tests of signs of defective nodes, which are found in the record of a run. An example is a device that is throttled
because of heat."""

import pytest

from bench.core.machine import Machine
from bench.core.record import (
    Circumstance,
    DeviceUse,
    Environment,
    EnvironmentClass,
    Observations,
    Outcome,
    RunRecord,
    Steps,
)
from bench.core.spec import RunSpec
from bench.sweep.allocation.leader import find_defects


def record(*throttled_s: float | None) -> RunRecord:
    """Return the record of a run with a window of 10 s on two nodes with two devices each. For each rank, `throttled_s`
    has the seconds in which its device was throttled because of heat, or None if they are unknown."""
    plain = {
        "model": {"name": "tiny", "family": "t5", "shape": {}},
        "engine": {"name": "ddp", "backend": "ddp"},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": 1},
        "nodes": 2,
        "devices_per_node": 2,
    }
    uses = tuple(DeviceUse(rank=rank, thermal_throttled_s=seconds) for rank, seconds in enumerate(throttled_s))
    steps = Steps(
        cut=0, steady=True, stopped="width", step_s=(10.0,), data_wait_s=(0.0,), loss=(1.0,), window_s=10.0
    )  # fmt: skip
    return RunRecord(
        config_id="0" * 10,
        spec=RunSpec.model_validate(plain),
        circumstance=Circumstance(study="s", repeat=0, attempt=0, machine=Machine(name="m")),
        environment=Environment(
            environment_id="e", classification=EnvironmentClass(device="D", devices_per_node=2), hosts=("a", "b")
        ),
        outcome=Outcome(kind="ok"),
        observations=Observations(parameters=1, engine_config={}, steps=steps, device_use=uses),
    )


@pytest.mark.parametrize(
    ("throttled_s", "hosts"),
    [((0.0, 0.2, None, 0.0), []), ((0.0, 0.0, 0.0, 0.3), ["b"]), ((0.3, 0.0, 5.0, 0.0), ["a", "b"])],
)
def test_overheated_device_excludes_its_host(throttled_s: tuple[float | None, ...], hosts: list[str]) -> None:
    assert sorted(find_defects(record(*throttled_s))) == hosts
