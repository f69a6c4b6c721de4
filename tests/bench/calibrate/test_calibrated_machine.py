"""Tests of the YAML file that `zeroscale calibrate` writes for a machine. The file contains published and measured
numbers of the machine. Predictions use these numbers."""

from pathlib import Path

import pytest
import yaml

from bench.calibrate import CalibrationResult, build_machine, find_best_bus_bytes_per_s, format_yaml
from bench.cli import main
from bench.config import compose
from bench.core.errors import UserError
from bench.core.machine import Calibration, CollectiveTime, Machine, MatmulRate

PUBLISHED = Machine(
    name="bed",
    matmul_ceiling_tflops={"bf16": 5.0, "fp16": 4.0},
    memory_bytes_per_s=1e10,
    inter_node_bytes_per_s=5e7,
    power_w=100.0,
    source="somebody",
)


def all_reduce(nodes: int, ranks: int, payload_bytes: int, s: float) -> CollectiveTime:
    return CollectiveTime(kind="all_reduce", nodes=nodes, ranks=ranks, payload_bytes=payload_bytes, s=s)


COLLECTIVES = (
    all_reduce(1, 1, 8_000_000, 1e-6),
    all_reduce(1, 2, 8_000_000, 0.004),  # 2 × 1/2 × 8 MB ÷ 4 ms = 2 GB/s
    all_reduce(2, 2, 8_000_000, 0.1),  # 80 MB/s, ignored: two nodes are not the largest number
    all_reduce(4, 4, 8, 0.001),
    all_reduce(4, 4, 1_000_000, 0.01),  # 150 MB/s, ignored: a small payload is sent in a burst
    all_reduce(4, 4, 8_000_000, 0.25),  # 2 × 3/4 × 8 MB ÷ 0.25 s = 48 MB/s
    CollectiveTime(kind="all_gather", nodes=4, ranks=4, payload_bytes=8_000_000, s=1e-3),
)
MEASURED = CalibrationResult(
    device_name="EPYC",
    calibration=Calibration(
        made={
            "date": "2026-11-21 19:00 UTC",
            "device": "EPYC",
            "ranks": "4 × 1",
            "parts": "matmul, collectives",
            "backend": "gloo",
            "torch": "2.13.0",
        },
        matmul=(
            MatmulRate(precision="bf16", m=128, k=128, n=384, tflops=0.0123456),
            MatmulRate(precision="bf16", kind="weights", m=512, k=128, n=384, tflops=0.25),
            MatmulRate(precision="fp32", m=128, k=128, n=384, tflops=0.05),
        ),
        attention_tflops={"fp32": 0.03},
        kernel_s=2.34567e-06,
        slowdown=(1.0, 1.1),
        collectives=COLLECTIVES,
    ),
    memory_bytes_per_s=1.2e10,
)


def test_measured_values_replace_published_ones_and_are_marked_as_calibrated() -> None:
    machine = build_machine(PUBLISHED, MEASURED, "mine")
    assert (machine.name, machine.device, machine.device_names) == ("mine", "cpu", ("EPYC",))
    assert machine.memory_bytes_per_s == 1.2e10
    assert machine.intra_node_bytes_per_s == pytest.approx(2e9)
    assert machine.inter_node_bytes_per_s == pytest.approx(48e6), "over the most nodes, all-reduce alone"
    assert machine.matmul_ceiling_tflops == {"bf16": 0.25, "fp16": 4.0, "fp32": 0.05}
    assert machine.calibrated == {
        "matmul_ceiling_tflops": '{"bf16": 5.0, "fp16": 4.0}',
        "memory_bytes_per_s": "10000000000.0",
        "intra_node_bytes_per_s": "nothing published",
        "inter_node_bytes_per_s": "50000000.0",
    }
    assert (machine.power_w, machine.source) == (100.0, "somebody"), "what was not measured stays"


def test_second_calibration_of_a_part_keeps_other_parts_and_published_values() -> None:
    first = build_machine(PUBLISHED, MEASURED, "mine")
    again = CalibrationResult(
        device_name="EPYC",
        calibration=Calibration(made={"backend": "gloo"}, collectives=(all_reduce(4, 4, 8_000_000, 0.5),)),
    )
    second = build_machine(first, again, "mine")
    assert second.calibration and first.calibration
    assert second.calibration.collectives == again.calibration.collectives
    assert second.calibration.matmul == first.calibration.matmul
    assert second.inter_node_bytes_per_s == pytest.approx(24e6)
    assert second.matmul_ceiling_tflops == first.matmul_ceiling_tflops
    assert second.calibrated == first.calibrated
    assert second.calibration.made == {
        "backend": "gloo",
        "earlier": "matmul, collectives on 2026-11-21 19:00 UTC by 4 × 1 ranks",
    }


def test_bandwidth_between_nodes_is_unknown_without_several_nodes() -> None:
    calibration = Calibration(collectives=COLLECTIVES[:2])
    assert find_best_bus_bytes_per_s(calibration, between_nodes=True) is None
    assert find_best_bus_bytes_per_s(calibration, between_nodes=False) == pytest.approx(2e9)
    assert find_best_bus_bytes_per_s(Calibration(), between_nodes=False) is None


def test_calibrated_machine_file_can_be_used_for_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = build_machine(PUBLISHED, MEASURED, "mine")
    text = format_yaml(machine)
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine" / "mine.yaml").write_text(text)
    found = compose.compose_request([("machine", "mine"), ("devices_per_node", 2)], tmp_path).machine
    rounded = machine.calibration.matmul[0].model_copy(update={"tflops": 0.01235}) if machine.calibration else None
    assert found.calibration and machine.calibration
    assert found.calibration.matmul == (rounded, *machine.calibration.matmul[1:]), "four digits"
    assert found.calibration.kernel_s == 2.346e-06
    assert found.calibration.collectives == COLLECTIVES
    assert found.calibrated == machine.calibrated
    assert main(["predict", "machine=mine", "devices_per_node=2", "--config-dir", str(tmp_path)]) == 0
    capsys.readouterr()


def test_machine_file_has_a_header_and_one_line_per_row() -> None:
    lines = format_yaml(build_machine(PUBLISHED, MEASURED, "mine")).splitlines()
    assert "    kind nodes ranks payload_bytes s" in lines
    assert "    all_reduce 4 4 8000000 0.25" in lines
    assert "    bf16 forward 128 128 384 0.01235" in lines
    assert lines[0].startswith("# mine: measured on 2026-11-21 19:00 UTC by `zeroscale calibrate` (torch 2.13.0)")
    assert "EPYC" in lines[1] and "gloo" in lines[1]
    assert yaml.safe_load("\n".join(lines))["name"] == "mine"


def test_table_with_a_missing_value_is_refused(tmp_path: Path) -> None:
    (tmp_path / "machine").mkdir()
    file = "name: mine\ncalibration:\n  matmul: |\n    precision m k n tflops\n    fp32 128 128 384\n"
    (tmp_path / "machine" / "mine.yaml").write_text(file)
    with pytest.raises(UserError, match=r"^machine\.calibration\.matmul"):
        compose.compose_request([("machine", "mine"), ("devices_per_node", 2)], tmp_path)


def test_recorded_machine_has_no_calibration_tables() -> None:
    machine = build_machine(PUBLISHED, MEASURED, "mine").on("cpu")
    assert machine.calibration is None and machine.device == "cpu"
    assert machine.calibrated, "that it was calibrated stays known"
