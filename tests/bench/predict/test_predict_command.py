"""Tests of `zeroscale predict`. For one configuration it prints a table of memory by term. For several configurations
it prints two lines each. With --json it prints the same numbers as JSON."""

import json
import subprocess
import sys

import pytest

from bench import api
from bench.cli import main
from bench.predict.goodput import FailureTerms, predict_goodput


def test_memory_of_one_point_is_printed_by_term_with_the_largest_micro_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["predict", "model=mt5_xxl", "engine=zero3", "nodes=8", "devices_per_node=8", "machine=a100_80"]) == 0
    printed = capsys.readouterr().out
    for word in (
        "initialisation",
        "forward",
        "backward",
        "update",
        "master weights",
        "gathered layers",
        "activations",
        "logits and loss",
        "a100_80 has 85 GB: fits",
        "Largest micro-batch",
        "Computed exactly",
        "Upper bounds",
    ):
        assert word in printed


def test_several_points_are_printed_in_two_lines_each(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "model=mt5_xl", "engine=ddp,zero3", "devices_per_node=8", "machine=a100_40"]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert ["does not fit" in line for line in printed[1:4:2]] == [True, False]
    assert "Not certain for zero3: its work on the host depends" in " ".join(map(str.strip, printed))


@pytest.mark.parametrize(
    "words",
    [
        ("model=mt5_xxl", "engine=zero3", "nodes=8", "devices_per_node=8", "machine=a100_80", "--storage", "2e9"),
        ("model=mt5_xxl", "engine=ddp", "devices_per_node=8", "machine=a100_80"),
        ("model=gpt2_xl", "engine=pipeline", "parallel.pipeline=4", "batch.accumulation=8", "nodes=2",
         "devices_per_node=8", "machine=h200"),
        ("model=mt5_large,mt5_xl", "engine=zero2,fsdp_no_reshard", "devices_per_node=8", "machine=h100",
         "activation_checkpointing=true"),
        ("model=tiny", "machine=cpu"),
    ],
    ids=["fits", "does not fit", "pipeline", "several", "no step time"],
)  # fmt: skip
def test_no_line_is_wider_than_100_columns(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *words]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_json_bytes_of_memory_terms_add_up_to_the_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "model=mt5_base", "engine=zero2", "machine=a100_40", "devices_per_node=2", "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)
    totals = {name: sum(terms.values()) for name, terms in point["phases"].items()}
    assert point["peak_bytes"] == max(totals["forward"], totals["backward"], totals["update"])
    assert point["init_peak_bytes"] == totals["initialisation"]
    assert point["device_bytes"]["low"] < point["device_bytes"]["high"] < point["memory_bytes"]
    assert point["fits"] is True
    assert point["largest_micro_batch"]["surely"] >= 4


def test_machine_without_memory_size_has_no_largest_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "model=tiny", "machine=cpu"]) == 0
    assert "Largest micro-batch" not in capsys.readouterr().out


@pytest.mark.processes
def test_predicting_imports_no_training_library() -> None:
    code = (
        "import sys; from bench.cli import main; main(['predict', 'model=tiny', 'machine=a100_80']); "
        "sys.exit(bool({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_storage_option_adds_the_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    """`--storage` is the rate at which checkpoints are written. A checkpoint has 14 bytes per parameter. The rate of
    failures is that published for Llama 3."""
    words = ["predict", "model=gpt2_xl", "engine=zero1", "machine=h100", "devices_per_node=8", "nodes=16"]
    assert main([*words, "--storage", "2e9", "--json"]) == 0
    [point] = json.loads(capsys.readouterr().out)
    expected = predict_goodput(128, FailureTerms(14 * 1_557_611_200 / 2e9))
    assert point["goodput"]["share"] == pytest.approx(expected.share)
    assert main([*words, "--storage", "2e9"]) == 0
    assert f"Goodput {100 * expected.share:.3g} (" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["goodput"] is None


XXL = ("predict", "model=mt5_xxl", "devices_per_node=8", "machine=a100_40")


def test_point_that_does_not_fit_has_a_remedy_and_no_step_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*XXL, "engine=zero3", "batch.micro=64", "--json"]) == 0
    (smaller,) = json.loads(capsys.readouterr().out)
    assert (smaller["fits"], smaller["time"]) == (False, None)
    assert "does not fit" in smaller["time_unknown"]
    remedy = smaller["would_fit"].split()[0]
    assert main([*XXL, "engine=zero3", remedy, "--json"]) == 0
    (fitting,) = json.loads(capsys.readouterr().out)
    assert fitting["fits"] is True
    assert fitting["time"]["step_s"] > 0
    assert main([*XXL, "engine=zero2", "batch.micro=1"]) == 0
    printed = capsys.readouterr().out
    assert "No micro-batch fits with these settings." in printed
    assert "No step time is predicted: does not fit" in printed


@pytest.mark.parametrize(
    ("point", "remedies"),
    [
        ("model=mt5_xl machine=a100_80 devices_per_node=8 engine=ddp batch.micro=4",
         ("engine=zero1 fits", "optimizer.implementation=fused fits")),
        ("model=mt5_xl machine=a100_40 devices_per_node=8 engine=zero2 batch.micro=32",
         ("batch.micro=9 fits", "activation_checkpointing=true fits")),
        ("model=mt5_xxl machine=a100_40 devices_per_node=8 engine=zero3 batch.micro=8 nodes=1",
         ("batch.micro=1 fits", "nodes=32 may fit", "engine.offload_param.device=cpu may fit")),
        ("model=mt5_xxl machine=rtx_4090 devices_per_node=1 engine=ddp",
         ("nodes=16 may fit", "engine.offload_param.device=cpu may fit (its time is not predicted)")),
        ("model=gpt_1t machine=rtx_4090 devices_per_node=1 engine=pipeline parallel.pipeline=2 nodes=2 "
         "batch.accumulation=2", ("nothing that was tried",)),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_remedies_are_printed_in_place_of_step_time_rate_and_mfu(
    point: str, remedies: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """If a configuration does not fit into memory, the command prints remedies: a smaller micro-batch, more devices, a
    higher ZeRO stage, a fused optimizer, or offload. If none of them suffices alone, it prints combinations."""
    assert main(["predict", *point.split(), "--storage", "2e9"]) == 0
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    for word in ("A step takes", "tokens/s", "MFU", "Goodput"):
        assert word not in printed
    listed = " ".join(printed.partition("\nChanges that make it fit: ")[2].split())
    for remedy in remedies:
        assert remedy in listed


def test_every_printed_remedy_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*XXL, "engine=zero3", "batch.micro=8", "--json"]
    assert main(words) == 0
    changes = json.loads(capsys.readouterr().out)[0]["would_fit"].split("; ")
    assert len(changes) == 4
    for change in changes:
        overrides = dict(word.split("=") for word in change.split() if "=" in word)
        kept = [word for word in words if word.partition("=")[0] not in overrides]
        assert main([*kept, *(f"{key}={value}" for key, value in overrides.items())]) == 0
        assert json.loads(capsys.readouterr().out)[0]["fits"] is not False


def test_class_of_software_changes_step_time_and_narrows_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    times = {}
    for name in ("eager", "usual", "fused"):
        words = ["predict", "model=gpt2_xl", "machine=a100_80", "devices_per_node=8", f"software={name}", "--json"]
        assert main(words) == 0
        times[name] = json.loads(capsys.readouterr().out)[0]["time"]
    assert times["eager"]["step_s"] > times["usual"]["step_s"] > times["fused"]["step_s"]
    widths = {name: time["high_s"] / time["low_s"] for name, time in times.items()}
    assert widths["usual"] == max(widths.values())
    assert [time["software"] for time in times.values()] == list(times)
    plain = api.predict(overrides="model=gpt2_xl machine=a100_80 devices_per_node=8")[0].time
    assert plain and plain.step_s == times["usual"]["step_s"]
    named = api.predict(overrides="model=gpt2_xl machine=a100_80 devices_per_node=8", software="eager")[0].time
    assert named and named.step_s == times["eager"]["step_s"]


def test_unknown_class_of_software_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "model=tiny", "machine=a100_80", "software=egaer"]) != 0
    assert "software=egaer: no such class of software; did you mean eager?" in capsys.readouterr().err
