"""Tests of machine files. If a file or the command line has an implausible number, the error message has one line with
a remedy."""

import itertools
import json
from pathlib import Path

import pytest
import yaml

from bench.cli import main, options
from bench.config import compose
from bench.core.errors import UserError
from bench.core.machine import Machine

ABSURD = [
    ("peak_tflops", "{bf16: .inf}", "machine.peak_tflops.bf16=inf", "312"),
    ("peak_tflops", "{bf16: .nan}", "machine.peak_tflops.bf16=nan", "312"),
    (
        "peak_tflops",
        "{bf16: 0}",
        "machine.peak_tflops.bf16=0: not between 0.0001 and 100000; the unit is 10^12 FLOP/s",
        "",
    ),
    ("peak_tflops", "{bf16: -312}", "machine.peak_tflops.bf16=-312: not between", "312"),
    ("peak_tflops", "{bf16: 312e+12}", "machine.peak_tflops.bf16=3.12e+14: not between", "312"),
    ("matmul_ceiling_tflops", "{bf16: .nan}", "machine.matmul_ceiling_tflops.bf16=nan", "312"),
    (
        "matmul_ceiling_tflops",
        "{bf16: 500}",
        "machine.matmul_ceiling_tflops.bf16=500: above peak_tflops.bf16=312; set",
        "",
    ),
    (
        "memory_bytes",
        "80",
        "machine.memory_bytes=80: not between 1e+08 and 1e+13; the unit is bytes, for example 85e9",
        "",
    ),
    ("memory_bytes_per_s", "2039", "machine.memory_bytes_per_s=2039: not between", "2.039e12"),
    ("memory_bytes_per_s", ".inf", "machine.memory_bytes_per_s=inf", "2.039e12"),
    ("intra_node_bytes_per_s", "300", "machine.intra_node_bytes_per_s=300: not between", "3e11 for 300 GB/s"),
    ("inter_node_bytes_per_s", "25", "machine.inter_node_bytes_per_s=25: not between", "3e11 for 300 GB/s"),
    ("host_link_bytes_per_s", "32", "machine.host_link_bytes_per_s=32: not between", "3e11 for 300 GB/s"),
    ("host_memory_bytes", "1000", "machine.host_memory_bytes=1000: not between", "1e12"),
    ("power_w", ".inf", "machine.power_w=inf", "400"),
    ("price_per_device_hour", ".inf", "machine.price_per_device_hour=inf", "2.5"),
]


@pytest.mark.parametrize(("field", "value", "expected", "remedy"), ABSURD, ids=lambda part: str(part)[:30])
def test_implausible_number_in_a_machine_file_is_refused_with_a_remedy(
    field: str, value: str, expected: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert expected in err
    if "inf" not in value and "nan" not in value:  # such values may be refused as non-finite
        assert remedy in err


@pytest.mark.parametrize("number", ["peak_tflops.bf16=inf", "peak_tflops.bf16=nan", "peak_tflops.bf16=0"])
def test_implausible_number_on_the_command_line_is_refused(number: str) -> None:
    with pytest.raises(UserError, match=f"machine.{number}"):
        compose.compose_request(compose.parse_single(["devices_per_node=2", "machine=a100_80", f"machine.{number}"]))


def test_measured_ceiling_may_exceed_the_published_peak() -> None:
    """`zeroscale calibrate` may measure a rate above the published peak. Nevertheless, the machine file with this rate
    must be accepted."""
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


OFFER = {
    "provider": "gcp", "machine_type": "a2-ultragpu-8g", "region": "us-east5", "devices": 8, "price_per_hour": 44.19,
    "spot_price_per_hour": 12.33, "currency": "USD", "source": "a page", "date": "2026-11-26",
}  # fmt: skip
WRONG_OFFERS = [
    ({"price_per_hour": -1}, "machine.rented.0.price_per_hour=-1: must be a number > 0; set"),
    ({"price_per_hour": "much"}, "machine.rented.0.price_per_hour=much: must be a number > 0"),
    ({"price_per_hour": None}, "machine.rented.0.price_per_hour=null: must be a number > 0"),
    ({"price_per_hour": 1e9}, "machine.rented.0.price_per_hour=1e+09: not between 0.001 and 1e+06; the unit is"),
    ({"spot_price_per_hour": 50}, "machine.rented.0.spot_price_per_hour=50: above price_per_hour=44.19"),
    ({"devices": 0}, "machine.rented.0.devices=0: must be an integer > 0; set machine.rented.0.devices=1 or more"),
    ({"source": ""}, "machine.rented.0.source="),
    ({"date": "soon"}, "machine.rented.0.date=soon: must be a date such as 2026-11-26; `zeroscale explain machine.r"),
    ({"prize": 3}, "machine.rented.0.prize: no such key; did you mean machine.rented.0.p"),
    ({"machine_type": "a b"}, "machine.rented.0.machine_type=a b: a name is made of letters"),
]  # fmt: skip


def write_machine(folder: Path, *offers: dict[str, object]) -> None:
    shipped = yaml.safe_load((compose.find_conf_folder() / "machine" / "a100_80.yaml").read_text())
    (folder / "machine").mkdir()
    mine = {**shipped, "name": "mine", "rented": list(offers)}
    (folder / "machine" / "mine.yaml").write_text(yaml.safe_dump(mine))


@pytest.mark.parametrize(("change", "expected"), WRONG_OFFERS, ids=lambda part: str(part)[:30])
def test_a_wrong_offer_is_one_line_with_its_remedy(
    change: dict[str, object], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_machine(tmp_path, {**OFFER, **change})
    assert main(["predict", "model=mt5_base", "machine=mine", "devices_per_node=2", "--config-dir", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert expected in err


def test_a_second_price_of_a_node_type_in_one_region_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_machine(tmp_path, OFFER, {**OFFER, "region": "us-east4"}, {**OFFER, "price_per_hour": 40})
    assert main(["predict", "model=mt5_base", "machine=mine", "devices_per_node=2", "--config-dir", str(tmp_path)]) == 2
    message = "machine.rented.2.machine_type=a2-ultragpu-8g: is listed twice for gcp in us-east5; remove the older"
    assert message in capsys.readouterr().err


def test_offers_are_not_part_of_a_point_or_record() -> None:
    request = compose.compose_request(compose.parse_single(["machine=h100", "devices_per_node=1"]))
    assert request.machine.rented
    assert "rented" not in json.loads(options.format_point_json(request))["machine"]
    assert "rented" not in request.machine.on("cuda").model_dump()


def list_shipped() -> list[Machine]:
    files = sorted((compose.find_conf_folder() / "machine").glob("*.yaml"))
    return [Machine.model_validate(plain) for file in files if "rented" in (plain := yaml.safe_load(file.read_text()))]


def test_shipped_offers_of_one_provider_cost_about_the_same_per_device() -> None:
    """For one kind of device, the nodes of one provider have about the same price per device, whether large or small. A
    price that differs more is probably mistyped."""
    machines = list_shipped()
    assert {"a100_40", "a100_80", "h100", "h200", "l4", "v100_16", "a10g"} <= {one.name for one in machines}
    compared = 0
    for machine in machines:
        for one, other in itertools.combinations(machine.rented, 2):
            if one.provider == other.provider:
                ratio = (one.price_per_hour / one.devices) / (other.price_per_hour / other.devices)
                assert 0.7 < ratio < 1.5, (machine.name, one.machine_type, other.machine_type)
                compared += 1
    assert compared >= 6


def test_a_rented_node_type_is_explained_with_its_prices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a3-highgpu-8g"]) == 0
    out = capsys.readouterr().out
    # the catalogue's price of the host plus that of eight accelerators
    assert f"{9.46006 + 78.37241:g} USD in us-east4" in out
    assert f"{1.70352 + 14.1056:g} USD an hour" in out
