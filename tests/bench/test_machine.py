"""Tests of machine files. An implausible number leads to a one-line message with a remedy, in a file and on the
command line."""

from pathlib import Path

import pytest

from bench.cli import main
from bench.config import compose
from bench.core.errors import UserError

ABSURD = [
    ("peak_tflops", "{bf16: .inf}", "machine.peak_tflops.bf16=inf", "312"),
    ("peak_tflops", "{bf16: .nan}", "machine.peak_tflops.bf16=nan", "312"),
    ("peak_tflops", "{bf16: 0}", "machine.peak_tflops.bf16=0: not between 0.0001 and 100000; give 10^12 FLOP/s", ""),
    ("peak_tflops", "{bf16: -312}", "machine.peak_tflops.bf16=-312: not between", "312"),
    ("peak_tflops", "{bf16: 312e+12}", "machine.peak_tflops.bf16=3.12e+14: not between", "312"),
    ("matmul_ceiling_tflops", "{bf16: .nan}", "machine.matmul_ceiling_tflops.bf16=nan", "312"),
    ("matmul_ceiling_tflops", "{bf16: 500}", "machine.matmul_ceiling_tflops.bf16=500: above the peak of 312; give", ""),
    ("memory_bytes", "80", "machine.memory_bytes=80: not between 1e+08 and 1e+13; give bytes, for example 85e9", ""),
    ("memory_bytes_per_s", "2039", "machine.memory_bytes_per_s=2039: not between", "2.039e12"),
    ("memory_bytes_per_s", ".inf", "machine.memory_bytes_per_s=inf", "2.039e12"),
    ("intra_node_bytes_per_s", "300", "machine.intra_node_bytes_per_s=300: not between", "3e11 for 300 GB/s"),
    ("inter_node_bytes_per_s", "25", "machine.inter_node_bytes_per_s=25: not between", "3e11 for 300 GB/s"),
    ("host_link_bytes_per_s", "32", "machine.host_link_bytes_per_s=32: not between", "3e11 for 300 GB/s"),
    ("host_memory_bytes", "1000", "machine.host_memory_bytes=1000: not between", "1e12"),
    ("power_w", ".inf", "machine.power_w=inf", "400"),
    ("price_per_device_hour", ".inf", "machine.price_per_device_hour=inf", "2.5"),
]


@pytest.mark.parametrize(("field", "value", "told", "remedy"), ABSURD, ids=lambda part: str(part)[:30])
def test_implausible_number_in_a_machine_file_is_refused_with_a_remedy(
    field: str, value: str, told: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = (
        (compose.find_conf_folder() / "machine" / "a100_80.yaml").read_text().replace("name: a100_80", "name: mine")
    )
    lines = [line for line in shipped.splitlines() if line.partition(":")[0] != field]
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine" / "mine.yaml").write_text("\n".join([*lines, f"{field}: {value}"]))
    assert main(["predict", "model=mt5_base", "machine=mine", "devices_per_node=2", "--config-dir", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err
    if "inf" not in value and "nan" not in value:  # these may be refused as non-finite
        assert remedy in err


@pytest.mark.parametrize("number", ["peak_tflops.bf16=inf", "peak_tflops.bf16=nan", "peak_tflops.bf16=0"])
def test_implausible_number_on_the_command_line_is_refused(number: str) -> None:
    with pytest.raises(UserError, match=f"machine.{number}"):
        compose.compose_request(compose.parse_single(["devices_per_node=2", "machine=a100_80", f"machine.{number}"]))


def test_measured_ceiling_may_exceed_the_published_peak() -> None:
    """A measured rate may exceed the published peak. Otherwise files of `zeroscale calibrate` would be rejected."""
    words = [
        "machine=a100_80",
        "machine.matmul_ceiling_tflops.bf16=320",
        "+machine.calibrated.matmul_ceiling_tflops='271.2'",
    ]
    assert (
        compose.compose_request(compose.parse_single(["devices_per_node=2", *words])).machine.matmul_ceiling_tflops[
            "bf16"
        ]
        == 320
    )
