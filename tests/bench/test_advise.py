"""Tests of `zeroscale advise`: the questions that it answers, its advice as text and as JSON, and the questions that it
refuses."""

import importlib
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.config import compose
from bench.core.files import read_regular
from bench.core.store import find_records
from bench.predict.scaling_laws import find_reference_batch

XL = ("model=mt5_xl", "machine=h200", "devices_per_node=8", "nodes=1", "batch.micro=8,16")
ROOT = Path(__file__).parents[2]

Ask = Callable[..., Any]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Function that runs `zeroscale advise` in an empty folder, so without recorded runs, and returns its decoded JSON
    output."""
    monkeypatch.chdir(tmp_path)

    def answer(*words: str) -> Any:
        assert main(["advise", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return answer


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Function that runs `zeroscale advise` with words that the command must refuse. It returns the error message,
    which must have one line."""
    monkeypatch.chdir(tmp_path)

    def line(*words: str) -> str:
        assert main(["advise", *words]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        return printed.err

    return line


# ---------------------------------------- advice


LLAMA = (
    "model=llama_2_7b", "objective=causal_lm", "sequence.tokens=1024", "devices_per_node=1", "nodes=1", "engine=ddp",
)  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "fitting", "excluded"),
    [
        ("h200", ["lora", "none", "qlora"], []),  # 150 GB: with gradients in fp32, 20 bytes per parameter are 135 GB
        ("a100_80", ["lora", "qlora"], ["ddp, full training"]),
        ("rtx_3090", ["lora", "qlora"], ["ddp, full training"]),
    ],
)
def test_full_training_and_adapters_are_compared_on_a_device(
    ask: Ask, machine: str, fitting: list[str], excluded: list[str]
) -> None:
    """Training methods are full training, LoRA and QLoRA. Exactly those in `fitting` fit into the memory of the
    machine. The model has 6.7 billion parameters. Its weights take 13.5 GB in 16 bits (LoRA). They take 3.9 GB in 4
    bits (QLoRA), with scales and with the matrices that stay in 16 bits."""
    found = ask(
        *LLAMA, "optimizer.implementation=fused", f"machine={machine}", "adapter=none,lora,qlora", "samples=50000"
    )
    listed = found.get("adapters", [found["winner"]])
    assert sorted(choice.get("adapter", "none") for choice in listed) == fitting
    assert [one["what"] for one in found["left_out"]] == excluded
    assert all(choice["micro_batch"] >= 1 and choice["hours"] > 0 for choice in listed)


def test_advised_adapter_is_an_override_with_both_parameter_counts(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*LLAMA, "machine=a100_80", "adapter=none,lora", "adapter.rank=8", "batch.micro=2")
    assert "adapter=lora" in ask(*words)["winner"]["overrides"]
    assert main(["advise", *words]) == 0
    output = capsys.readouterr().out
    assert re.search(r"parameters +19,988,480 trained of 6,758,404,096 ", output)
    assert "learn per token is not predicted" in output


def test_answer_names_the_point_its_cost_and_its_rivals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["advise", *XL, "tokens=1e11", "price=2"]) == 0
    output = capsys.readouterr().out
    words = [
        "question: 100,000,000,000 tokens, the fewest node-hours",
        "micro-batch 16",
        "MFU",
        "memory",
        "fits",
        "node-hours",
        "cost",
    ]
    words += ["each engine at its best", "how sure", "predicted", "zeroscale sweep", "Not tried, but may save"]
    for word in words:
        assert word in output


def test_numbers_of_the_answer_are_consistent(ask: Ask) -> None:
    winner = ask(*XL, "tokens=1e11", "price=2")["winner"]
    assert winner["global_batch"] == winner["micro_batch"] * winner["accumulation"] * 8 // winner["pipeline"]
    assert winner["tokens_per_s"] == pytest.approx(winner["global_batch"] * 640 / winner["step"]["step_s"])
    assert winner["hours"] == pytest.approx(1e11 / winner["tokens_per_s"] / 3600)
    assert winner["cost"] == pytest.approx(2 * 8 * winner["node_hours"])
    assert sum(winner["predicted_parts_s"].values()) == pytest.approx(winner["step"]["step_s"])
    assert winner["device_bytes"]["high"] <= 150_000_000_000


def test_no_rival_is_certainly_better_than_the_winner(ask: Ask) -> None:
    answer = ask(*XL)
    rates = {row["engine"]: row["tokens_per_s"] for row in answer["engines"] if row["fits"]}
    whole = {"ddp", "fsdp", "fsdp_hybrid", "fsdp_no_reshard", "zero0", "zero1", "zero2", "zero3"}
    assert set(rates) == whole | {"pipeline", "interleaved", "modular", "lga"}
    rates.pop("zero3")  # predicted to be faster, but the uncertainty of the prediction is larger than the difference
    assert answer["winner"]["tokens_per_s"] >= 0.95 * max(rates.values())


def test_small_gain_does_not_justify_several_nodes_instead_of_one(ask: Ask) -> None:
    answer = ask(*XL[:3], "engine=fsdp,fsdp_no_reshard,zero1,zero2")
    winner, most = answer["winner"], answer["nodes"][-1]
    assert (winner["nodes"], winner["micro_batch"], most["nodes"]) == (1, 50, 128)
    per_device = {row["nodes"]: row["tokens_per_s"] / row["nodes"] / winner["tokens_per_s"] for row in answer["nodes"]}
    assert 1 < max(per_device.values()) < 1.05 and max(per_device, key=per_device.__getitem__) > 1
    assert not any("Searched up to" in line or "far above the usual" in line for line in answer["doubts"])


def test_fewest_nodes_that_certainly_meet_the_deadline_are_advised(ask: Ask) -> None:
    words = ("model=mt5_xl", "machine=a100_80", "devices_per_node=8", "engine=fsdp_no_reshard,zero1,zero2")
    answer = ask(*words, "tokens=1e9", "deadline=1h")
    kept = [row["nodes"] for row in answer["nodes"] if row["within_limits"] and row["fits"]]
    assert answer["winner"]["nodes"] == min(kept) == 4


def test_answer_states_if_a_search_limit_or_the_batch_decided(ask: Ask, refused: Callable[..., str]) -> None:
    words = ("model=mt5_xl", "machine=h100", "devices_per_node=8", "engine=zero1,zero2", "tokens=1e12")
    doubts = ask(*words, "node_hours=1e6")["doubts"]
    assert any(line.startswith("Searched up to 128 nodes") for line in doubts)
    (large,) = [line for line in doubts if "far above the usual" in line]
    tokens = int(re.search(r"A step of ([\d,]+) tokens", large)[1].replace(",", ""))  # type: ignore[index]
    asked = int(re.search(r"max_global_batch=(\d+)", large)[1])  # type: ignore[index]
    assert tokens > 2 * 2**20 and 2**19 < asked * 640 <= 2**20, "mT5 was trained with 2^20 tokens a step"
    assert not any("far above" in line for line in ask(*words, f"max_global_batch={asked}")["doubts"])
    assert not any("Accumulation was not tried" in line for line in doubts), "it would raise the batch further"
    assert "searched up to 128 nodes" in refused(*words, "deadline=1h")


def test_first_line_of_the_answer_doubts_a_large_batch(run_advise: Callable[..., str]) -> None:
    words = ("model=mt5_xl", "machine=h100", "devices_per_node=8", "engine=zero1", "nodes=1,128", "batch.micro=16")
    output = " ".join(run_advise(*words, "best=shortest", "tokens=1e12").split())
    times = 16 * 8 * 128 * (512 + 128) / 2**20
    assert f"checkpointing; its batch is {times:.3g} times that of mT5, so the training may need more" in output
    slower = float(re.search(r"([\d.]+) times as long(?! at)", output)[1])  # type: ignore[index]
    assert 100 < slower < 140, "one node against 128, with hardly any loss on the network"
    small = run_advise(*words, "tokens=1e12", "nodes=1")
    assert "Accumulation was not tried" in small and "set max_global_batch=1024 to try" in small
    assert "times that of mT5" not in small
    output = run_advise(*words[1:3], "model=llama_3_8b", "engine=pipeline", "parallel.tensor=2", "tokens=2e9")
    assert "Accumulation above 2, the number of ranks of a model copy, was not" in " ".join(output.split())


@pytest.mark.parametrize(
    ("model", "name", "tokens"),
    [("mt5_xl", "mT5", 2**20), ("gpt2_xl", "GPT-3 of 1.3B", 1_000_000), ("gpt_175b", "GPT-3 of 175B", 3_200_000),
     ("llama_2_7b", "Llama 2", 2**22)],
)  # fmt: skip
def test_reference_batch_is_that_of_the_model_family(model: str, name: str, tokens: int) -> None:
    asked = compose.compose_request([("model", model), ("machine", "h100"), ("devices_per_node", 8)], None)
    found = find_reference_batch(asked.spec)
    assert found and (found.name, found.tokens) == (name, tokens)


def test_deadline_is_met_only_if_the_upper_bound_meets_it(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*XL[:3], "nodes=1", "engine=zero1", "batch.micro=16", "activation_checkpointing=false", "tokens=1e10")
    step, hours = (ask(*words)["winner"][key] for key in ("step", "hours"))
    far = hours * step["high_s"] / step["step_s"]
    for deadline, kept in ((1.01 * far, True), (0.99 * far, None)):
        assert ask(*words, f"deadline={deadline}h")["winner"]["within_limits"] is kept
        assert main(["advise", *words, f"deadline={deadline}h"]) == 0
        assert ("not promised" in capsys.readouterr().out) is (kept is None)


def test_class_of_software_is_part_of_the_question(ask: Ask) -> None:
    words = (*XL[:3], "nodes=1", "engine=zero1", "batch.micro=16", "activation_checkpointing=false")
    usual, fused = ask(*words), ask(*words, "software=fused")
    assert (usual["asked"]["software"], fused["asked"]["software"]) == ("usual", "fused")
    assert fused["winner"]["step"]["step_s"] < usual["winner"]["step"]["step_s"]


def test_t5_in_fp16_gets_a_warning(ask: Ask) -> None:
    words = ("model=mt5_base", "machine=v100_32", "devices_per_node=8", "nodes=1", "batch.micro=4", "engine=zero1")
    assert any("fp16 often diverges" in line for line in ask(*words, "precision=fp16")["doubts"])
    assert not any("diverges" in line for line in ask(*words, "precision=fp32")["doubts"])


def test_host_memory_is_checked_for_lower_stages_of_large_models(ask: Ask) -> None:
    engines = "engine=ddp,zero0,zero1,zero2,zero3"
    answer = ask("model=mt5_xxl", "machine=a100_40", "devices_per_node=8", "nodes=8", engines)
    assert {"zero1", "zero2", "zero3"} == {row["engine"] for row in answer["engines"] if row["fits"]}
    assert answer["winner"]["engine"] == "zero1"
    assert any("flattening 413" in line for line in answer["doubts"]), "8 ranks, 2 copies of 25.8 GB each"


def test_deadline_determines_the_number_of_nodes(ask: Ask) -> None:
    words = ("model=mt5_xl", "machine=h200", "devices_per_node=8", "tokens=1e11", "engine=zero3", "batch.micro=16",
             "nodes=1,2,4", "machine.inter_node_bytes_per_s=4e11", "activation_checkpointing=false")  # fmt: skip
    free = ask(*words)
    assert free["winner"]["nodes"] == 1
    slowest = free["winner"]["hours"] * free["winner"]["step"]["high_s"] / free["winner"]["step"]["step_s"]
    assert ask(*words, f"deadline={slowest * 0.9}h")["winner"]["nodes"] > 1
    assert ask(*words, f"node_hours={1e6}")["winner"]["nodes"] == 4


def test_machine_without_inter_node_links_gets_advice_for_one_node(ask: Ask) -> None:
    answer = ask(*XL[:3], "engine=zero2", "nodes=1,2", "machine.inter_node_bytes_per_s=null", "batch.micro=8")
    assert answer["winner"]["nodes"] == 1
    (left,) = [item for item in answer["left_out"] if item["what"] == "several nodes"]
    assert "machine.inter_node_bytes_per_s" in left["why"] and "set machine" in left["why"]


def test_engine_that_does_not_fit_is_omitted_with_the_reason(ask: Ask) -> None:
    answer = ask("model=mt5_xxl", "machine=a100_80", "devices_per_node=8", "nodes=1", "batch.micro=1")
    reasons = {item["what"]: item["why"] for item in answer["left_out"]}
    assert {"ddp", "zero0"} <= set(reasons)
    assert re.search(r"needs at least [\d.]+ GB more", reasons["ddp"])


def test_infeasible_engine_is_omitted_unless_named(ask: Ask, refused: Callable[..., str]) -> None:
    words = (
        "model=mt5_base",
        "machine=v100_32",
        "devices_per_node=2",
        "precision=fp16",
        "nodes=1",
        "batch.micro=4",
        "machine.peak_tflops.fp16=125",
    )
    assert "zero0" in {item["what"] for item in ask(*words)["left_out"]}
    assert "fp16 at stage 0" in refused(*words, "engine=zero0")


def test_measured_run_on_the_same_machine_replaces_the_prediction(ask: Ask) -> None:
    runs = ROOT / "tests/data/runs.zip/smoke"
    records = [json.loads(read_regular(path)) for path in find_records([runs])]
    (record,) = [r for r in records if r["outcome"]["kind"] == "ok" and r["spec"]["engine"]["name"] == "zero1"
                 and r["spec"]["devices_per_node"] == 2 and r["spec"]["batch"]["micro"] == 4]  # fmt: skip
    given = [text for text in record["circumstance"]["overrides"] if text.partition("=")[0] not in ("engine", "study")]
    numbers = ("memory_bytes=8e9", "memory_bytes_per_s=1e10", "intra_node_bytes_per_s=1e9", "peak_tflops.fp32=0.1")
    words = [*given, "engine=zero1", "nodes=1", *(f"machine.{number}" for number in numbers)]
    answer = ask(*words, "--results", str(runs))
    window = record["observations"]["steps"]["step_s"][record["observations"]["steps"]["cut"] :]
    assert answer["winner"]["step"]["evidence"] == "measured"
    assert answer["winner"]["step"]["step_s"] == pytest.approx(sorted(window)[len(window) // 2], rel=0.05)


def test_answer_has_the_next_pareto_point_and_the_number_of_ties(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice lists one node first. Eight nodes cost about the same, and finish in an eighth of the time, so they
    are the next point on the Pareto front of time and cost."""
    monkeypatch.chdir(tmp_path)
    words = ["advise", *XL[:3], "engine=fsdp,zero1,zero3", "nodes=1,8", "tokens=1e11", "price=2"]
    assert main(words) == 0
    headline = " ".join(capsys.readouterr().out.partition("→")[2].partition("  step ")[0].split())
    assert "3 other layouts cannot be told apart from it Next on the Pareto front" in headline
    found = re.search(r"Next on the Pareto front: 8 nodes \(fsdp\), (\S+) times sooner at", headline)
    assert found and 7 < float(found[1]) < 9
    assert main([*words, "best=shortest"]) == 0
    assert "times as long at" not in capsys.readouterr().out, "one node saves less than 5 % of the cost"


def test_faster_but_less_certain_layout_is_listed_later_with_the_reason(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host so fast that the engines' own work takes no time, stage 3 is predicted to be faster than FSDP2. But the
    work of stage 3 on the host depends on the processor."""
    deepspeed, fsdp = (importlib.import_module(f"bench.engines.{name}.facts") for name in ("deepspeed", "fsdp"))
    monkeypatch.setattr(deepspeed, "_HOST_OPERATIONS", dict.fromkeys(range(4), 0.0))
    monkeypatch.setattr(fsdp, "_HOST_OPERATIONS", 0.0)
    doubts = ask(*XL[:3], "engine=fsdp,zero3", "nodes=1")["doubts"]
    (line,) = [line for line in doubts if "listed after the answer: zero3 on 1 node" in line]
    assert line.startswith("The surer choice is advised.") and "work on the host" in line


def test_unknown_inter_node_rate_limits_advice_to_one_node(ask: Ask, refused: Callable[..., str]) -> None:
    words = ("machine=rtx_4090", "devices_per_node=1", "engine=zero1,zero2")
    answer = ask("model=mt5_base", *words)
    assert {row["nodes"] for row in answer["nodes"]} == {1}
    (left,) = [item for item in answer["left_out"] if item["what"] == "several nodes"]
    assert left["why"].startswith("nodes=1 is assumed, since machine=rtx_4090 has no inter_node_bytes_per_s")
    error = refused("model=mt5_xxl", *words)
    assert "GB more than a device has" in error and "nodes=1 is assumed" in error
    assert "inter_node_bytes_per_s" in refused("model=mt5_base", *words, "nodes=2"), "nodes that are given are kept"


@pytest.mark.parametrize("machine", ["cpu", "h100"])
def test_unknown_device_count_is_refused_without_mention_of_launchers(
    refused: Callable[..., str], machine: str
) -> None:
    error = refused("model=mt5_base", f"machine={machine}")
    assert f"devices_per_node: unknown for machine={machine}; add devices_per_node=8" in error
    assert "launcher" not in error


# ---------------------------------------- on a terminal, and pasted from it

WORDY = (
    (*XL[:3],),
    ("model=mt5_xl", "machine=h100", "devices_per_node=8", "nodes=4,8", "max_global_batch=2048", "tokens=1e12"),
    ("model=gpt2_xl", "machine=h100", "devices_per_node=8", "loss=2.6", "best=shortest", "storage=2e9"),
)  # fmt: skip


@pytest.mark.parametrize("words", WORDY, ids=" ".join)
def test_answer_fits_100_columns_with_every_number_of_the_table(
    ask: Ask, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main(["advise", *words]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    (block,) = re.findall(r"^each engine at its best\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    rows = [line for line in block.splitlines()[1:] if not line.startswith("   ")]
    answer = ask(*words)
    assert [row[2:].split()[0] for row in rows] == [choice["engine"] for choice in answer["engines"]]
    assert [row.startswith("→") for row in rows] == [choice == answer["winner"] for choice in answer["engines"]]
    for row, choice in zip(rows, answer["engines"], strict=True):
        assert f" {choice['nodes']} " in row and f" {choice['micro_batch']} × {choice['accumulation']} " in row
        assert f" {choice['step']['step_s']:.3g} " in row


_SHELL = "zeroscale() { printf '%s\\n' \"$@\"; }; "


@pytest.mark.parametrize(
    ("words", "added"),
    [
        ((*XL, "engine=zero1"), ["launcher=slurm", "launcher.gpus=--gres=gpu:{devices}"]),
        ((*XL, "engine=zero1", "launcher=slurm"), ["launcher.gpus=--gres=gpu:{devices}"]),
        ((*XL, "engine=zero1", "launcher=slurm", "launcher.gpus=--gpus-per-node={devices}"), []),
        (("model=tiny", "machine=cpu", "devices_per_node=2", "nodes=1", "engine=zero1", "machine.memory_bytes=8e9",
          "machine.memory_bytes_per_s=1e10", "machine.intra_node_bytes_per_s=1e9", "machine.peak_tflops.bf16=0.1"),
         ["precision=bf16", "sequence.encoder=512", "sequence.decoder=128"]),
    ],
    ids=["elsewhere", "named", "complete", "here"],
)  # fmt: skip
def test_suggested_measurement_command_runs_as_printed(
    ask: Ask, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], added: list[str]
) -> None:
    """The printed command is pasted into a shell, which reads its words. As a dry run, the command must plan the
    advised configuration and no other. `words` are the arguments of `advise`, and `added` more of the command."""
    answer = ask(*words)
    assert main(["advise", *words]) == 0
    pasted = capsys.readouterr().out.partition("  To be surer:\n")[2]
    read = subprocess.run(["bash", "-c", _SHELL + pasted], capture_output=True, text=True, check=True)
    verb, *rest = read.stdout.splitlines()
    assert (verb, rest[-2:]) == ("sweep", ["--repeats", "5"])
    assert [word for word in rest if word.startswith(("launcher", "precision", "sequence."))][
        -len(added) or None :
    ] == (added or [word for word in words if word.startswith("launcher")])
    (doubt,) = [line for line in answer["doubts"] if line.startswith("To be surer: ")]
    assert shlex.split(doubt.removeprefix("To be surer: ")) == ["zeroscale", verb, *rest], "JSON has the same command"
    assert main([verb, *rest, "--dry-run", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)
    assert {point["repeat"] for point in points} == set(range(5))
    assert {point["spec"]["precision"] for point in points} == {"bf16"}
    assert {point["spec"]["batch"]["micro"] for point in points} == {answer["winner"]["micro_batch"]}


# ---------------------------------------- refused questions


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("tokens=many",), "tokens=many: not a number above 0; set for example tokens=1e12"),
        (("tokens=-1",), "tokens=-1: not a number above 0"),
        (("tokens=1e12", "tokens=2e12"), "given twice"),
        (("deadline=30d",), "the training has no length; add tokens=1e12"),
        (("node_hours=100",), "the training has no length; add tokens=1e12"),
        (("tokens=1e12", "deadline=soon"), "deadline=soon"),
        (("tokens=1e12", "deadline="), "deadline="),
        (("tokens=1e12", "deadline=3y"), "deadline=3y"),
        (("tokens=1e12", "node_hours=0"), "node_hours=0: not a number above 0"),
        (("price=free",), "price=free: not a number above 0; set for example price=2.5"),
        (("max_global_batch=1.5",), "not a whole number of samples"),
        (("token=1e12",), "did you mean tokens?"),
        (("dead_line=3d",), "did you mean deadline?"),
        (("batch.mico=3",), "did you mean batch.micro?"),
        (("nodes=0",), "nodes=0: not a whole number above 0"),
        (("nodes=two",), "nodes=two: not a whole number above 0"),
        (("batch.micro=0.5",), "batch.micro=0.5: not a whole number above 0"),
        (("activation_checkpointing=maybe",), "must be true or false"),
        (("engine=zero9",), "engine=zero9"),
        (("precision=bf16,fp16",), "must be one value"),
        (("study=paper",), "advice searches its own points"),
        (("machine=cpu",), "machine.memory_bytes"),
        (("tokens=1e15", "deadline=1h", "nodes=1", "batch.micro=8"), "micro-batch 8 × accumulation 1 ="),
        (("max_global_batch=4", "nodes=1", "engine=zero1"), "4 samples per step"),
        (("engine=zero1", "parallel.pipeline=2"), "engine zero1 does not support pipeline parallelism"),
        (("--results", "nowhere"), "nowhere"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_invalid_question_is_refused_in_one_line(
    refused: Callable[..., str], words: tuple[str, ...], expected: str
) -> None:
    assert expected in refused("model=mt5_base", "machine=h200", "devices_per_node=8", *words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("model=t5_3b", "machine=v100_16", "devices_per_node=4", "precision=fp16"),
         "try optimizer.implementation=fused, with which it may fit;"),
        (("model=t5_11b", "machine=a100_40", "devices_per_node=4"),
         "try engine.offload_optimizer.device=cpu optimizer.implementation=native, with which it may fit (its time is"),
        (("model=mt5_xxl", "machine=v100_16", "devices_per_node=1", "precision=fp16"),
         "engine.offload_param.device=cpu, with which it may fit"),
        (("model=mt5_xxl", "machine=v100_16", "devices_per_node=1", "precision=fp16", "machine.host_memory_bytes=64e9"),
         "has; more nodes, a smaller model"),
        (("model=t5_11b", "machine=a100_40", "devices_per_node=4", "optimizer.implementation=torch"),
         "has; more nodes, a smaller model"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_layout_that_does_not_fit_gets_a_remedy_that_predicts_to_fit(
    refused: Callable[..., str], words: tuple[str, ...], expected: str
) -> None:
    assert expected in refused(*words, "nodes=1")


def test_engine_that_fits_only_with_a_fused_optimizer_gets_that_advice(ask: Ask) -> None:
    words = ("model=mt5_xl", "machine=a100_80", "devices_per_node=8", "nodes=1", "batch.micro=1")
    (why,) = [item["why"] for item in ask(*words)["left_out"] if item["what"] == "ddp"]
    assert why.endswith("try optimizer.implementation=fused, with which it fits")
    assert "ddp" in {row["engine"] for row in ask(*words, "optimizer.implementation=fused")["engines"]}


def test_model_that_fits_nowhere_is_reported_with_the_missing_bytes(refused: Callable[..., str]) -> None:
    error = refused("model=mt5_xxl", "machine=v100_16", "devices_per_node=1", "nodes=1", "precision=fp16")
    assert re.search(r"needs at least [\d,.]+ GB more than a device has", error)
