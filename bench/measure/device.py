"""The device of a rank, refused where it is not what the spec and the machine say."""

from typing import Any

import torch

from bench.core.machine import Machine
from bench.measure.environment import read_cpu_model
from bench.measure.failures import Refused


def find_device(machine: Machine, devices: int, local_rank: int) -> torch.device:
    """Return this rank's device, one of `devices` that this node must have, and make it the current one; raise Refused
    for another device than `machine` names."""
    kind = machine.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        _refuse_unless(machine, read_cpu_model())
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count < devices:
        raise Refused(f"devices_per_node={devices} but this node has {count}")
    torch.cuda.set_device(local_rank)
    _refuse_unless(machine, torch.cuda.get_device_name(local_rank))
    return torch.device("cuda", local_rank)


def read_driver_name(device: torch.device) -> str | None:
    """Return the name under which the driver's library knows a device: NVIDIA's UUID, AMD's PCI address; None of a CPU.
    A slice of a device (MIG) has a UUID of its own, which torch tells as if it were a device's."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:
        return f"GPU-{properties.uuid}"
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    address: list[Any] = [getattr(properties, name, None) for name in names]
    return None if None in address else "{:04x}:{:02x}:{:02x}.0".format(*address)


def _refuse_unless(machine: Machine, found: str) -> None:
    if not machine.accepts(found):
        raise Refused(f"machine={machine.name} expects {' or '.join(machine.device_names)} and found {found}")
