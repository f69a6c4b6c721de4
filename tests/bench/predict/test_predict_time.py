"""Tests of the step time that `zeroscale predict` prints. If the machine file lacks a number that is needed, the name
of this number is printed instead."""

import json
import re

import pytest

from bench.cli import main

NODE = ["predict", "model=mt5_xl", "engine=zero2", "devices_per_node=8", "machine=h200"]


def test_time_of_one_point_is_printed_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(NODE) == 0
    printed = capsys.readouterr().out
    for word in ("A step takes", "backward", "all-reduce", "overlap", "tokens/s", "MFU", "bound by"):
        assert word in printed


def test_missing_link_speed_is_printed_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NODE, "nodes=2", "machine.inter_node_bytes_per_s=null"]) == 0
    printed = capsys.readouterr().out
    assert "No step time is predicted: machine.inter_node_bytes_per_s" in printed
    assert "set machine.inter_node_bytes_per_s" in printed
    assert main([*NODE, "nodes=2"]) == 0
    assert "A step takes" in capsys.readouterr().out


def test_json_parts_add_up_to_the_step_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NODE, "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)
    time = point["time"]
    assert sum(time["parts"].values()) == pytest.approx(time["step_s"])
    assert time["low_s"] <= time["step_s"] <= time["high_s"]
    assert point["time_unknown"] is None


def test_straggler_increases_the_step_time_of_every_point(capsys: pytest.CaptureFixture[str]) -> None:
    def seconds(*words: str) -> list[float]:
        assert main([*NODE, "batch.micro=4,8", "--json", *words]) == 0
        return [point["time"]["step_s"] for point in json.loads(capsys.readouterr().out)]

    assert all(slow > plain for slow, plain in zip(seconds("--straggler", "1.2"), seconds(), strict=True))


def test_data_wait_is_printed_as_a_part_of_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NODE, "--data-wait", "0.25"]) == 0
    assert "data 0.25" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["0.9", "nan", "fast"])
def test_invalid_straggler_or_data_wait_is_refused_in_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NODE, "--straggler", wrong]) != 0
    error = capsys.readouterr().err.strip()
    assert f"{wrong}: must be a factor of at least 1" in error and "\n" not in error
    assert main([*NODE, "--data-wait", "-1"]) != 0
    assert "-1: must be a number of seconds" in capsys.readouterr().err


def test_rehearsed_time_is_the_sum_of_forward_backward_and_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NODE, "--rehearsed", "2", "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)
    parts = point["time"]["parts"]
    assert parts["forward"] + parts["backward"] + parts["optimizer"] == pytest.approx(2.0)


def test_printed_times_and_rates_have_intervals_and_three_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "model=mt5_xl", "engine=zero1", "machine=h100", "devices_per_node=8"]) == 0
    text = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    number = r"(?:0\.0*)?[\d,.]+"
    found = re.search(rf"A step takes ({number}) \(({number})–({number})\) s: ", text)
    assert found and float(found[2]) <= float(found[1]) <= float(found[3])
    rated = re.search(rf"({number}) \(({number})–({number})\) tokens/s, MFU {number} \({number}–{number}\) %; ", text)
    assert rated
    for shown in (*found.groups(), *rated.groups()):
        assert len(shown.replace(",", "").replace(".", "").strip("0")) <= 3, shown
    assert float(rated[2].replace(",", "")) <= float(rated[1].replace(",", "")) <= float(rated[3].replace(",", ""))


def test_assumed_rate_of_matrix_products_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["model=llama_3_8b", "engine=fsdp", "machine=h100", "devices_per_node=8", "precision=fp32"]
    assumed = "machine=h100 has neither sustained_tflops.fp32 nor matmul_ceiling_tflops.fp32: the rate of matrix"
    for verb, words in (("predict", []), ("advise", ["nodes=1", "batch.micro=2"])):
        assert main([verb, *large, *words]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert assumed in text
        (fastest,) = re.findall(r"MFU [\d.]+ \([\d.]+–([\d.]+)\) %", text)
        assert float(fastest) <= 100
    assert main(NODE) == 0
    assert "neither" not in capsys.readouterr().out, "h200 has a rate in bf16"
