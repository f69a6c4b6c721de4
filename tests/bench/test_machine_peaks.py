"""Test of the peak rates in conf/machine. The expected rate of a GPU is the product of three numbers in its vendor's
white paper: multiprocessors, FLOPs of each per clock cycle, and clock rate."""

from pathlib import Path

import pytest
import yaml

from bench.config import compose
from bench.core.machine import Machine, check_plausible

MACHINES = compose.find_conf_folder() / "machine"
CLOCKED = [
    # machine, precision, FLOPs per clock cycle and multiprocessor, clock rate in MHz
    ("v100_32", "fp16", 1024, 1530), ("a100_40", "bf16", 2048, 1410), ("a100_80", "fp32", 128, 1410),
    ("h100", "bf16", 4096, 1830), ("h100", "fp32", 256, 1980), ("h800", "bf16", 4096, 1830),
    ("gh200", "bf16", 4096, 1830), ("h100_pcie", "bf16", 4096, 1620), ("h100_pcie", "fp32", 256, 1755),
    ("a10g", "bf16", 512, 1710), ("a10g", "fp32", 256, 1710), ("a40", "bf16", 1024, 1740), ("a40", "fp32", 256, 1740),
    ("a6000", "bf16", 1024, 1800), ("a6000", "fp32", 256, 1800), ("rtx_3090", "bf16", 512, 1695),
    ("rtx_3090", "fp32", 256, 1695), ("l4", "bf16", 1024, 2040), ("l4", "fp32", 256, 2040),
    ("l40s", "bf16", 1024, 2520), ("l40s", "fp32", 256, 2520), ("rtx_4090", "bf16", 512, 2520),
    ("rtx_4090", "fp32", 256, 2520), ("mi300x", "bf16", 2048, 2100), ("mi325x", "bf16", 2048, 2100),
    ("mi325x", "fp32", 256, 2100), ("mi250x", "bf16", 1024, 1700),
]  # fmt: skip


def read(name: str) -> Machine:
    return Machine.model_validate(yaml.safe_load((MACHINES / f"{name}.yaml").read_text(encoding="utf-8")))


@pytest.mark.parametrize(("name", "precision", "per_clock", "mhz"), CLOCKED)
def test_peak_equals_multiprocessors_times_clock_times_operations_per_cycle(
    name: str, precision: str, per_clock: int, mhz: int
) -> None:
    machine = read(name)
    assert machine.multiprocessors
    by_hand = machine.multiprocessors * per_clock * mhz * 1e6 / 1e12
    peaks = {str(of): peak for of, peak in machine.peak_tflops.items()}
    assert peaks[precision] == pytest.approx(by_hand, rel=0.015)


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_machine_is_plausible_and_names_its_sources(path: Path) -> None:
    machine = read(path.stem)
    check_plausible(machine)
    assert machine.source or not machine.peak_tflops
