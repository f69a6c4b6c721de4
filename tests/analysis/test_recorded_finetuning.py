"""Tests that two texts agree with the recorded runs: the table in docs/guides/adapters.md, and the report's answer for
`study=finetune_cpu`. For this, their values are computed again from the records."""

import json
import math
import re
import statistics
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import t

from analysis import open_study
from bench.cli import main

ROOT = Path(__file__).parents[2]
METHODS = {"none": "full", "lora": "LoRA", "qlora": "QLoRA"}
Records = list[dict[str, Any]]


def read_points() -> dict[tuple[str, float, int], Records]:
    """Return the records by adapter, learning rate and micro-batch: one record per seed."""
    points: dict[tuple[str, float, int], Records] = {}
    with zipfile.ZipFile(ROOT / "results/measured/finetune_cpu.zip") as archive:
        for name in archive.namelist():
            record = json.loads(archive.read(name))
            spec = record["spec"]
            adapter = spec.get("adapter", {"name": "none"})["name"]
            points.setdefault((adapter, spec["optimizer"]["lr"], spec["batch"]["micro"]), []).append(record)
    return points


def find_end(record: dict[str, Any]) -> dict[str, Any]:
    return dict(record["observations"]["evaluations"][-1])


def format_mean(values: Sequence[float], digits: int) -> str:
    """Return the mean and its 95 % margin of error by Student's t as text, with this number of digits. If the interval
    reaches below 0, its ends are returned instead of the margin."""
    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.mean(values)
    return (
        f"{mean:.{digits}f} ± {half:.{digits}f}"
        if half < mean
        else f"{mean:.{digits}f} ({0:.{digits}f} to {mean + half:.{digits}f})"
    )


def average(records: Records, read: Callable[[dict[str, Any]], float]) -> float:
    return statistics.mean(map(read, records))


def test_table_of_the_guide_equals_the_records() -> None:
    points = read_points()
    assert {len(records) for records in points.values()} == {3}
    lines = []
    for (adapter, lr, micro), records in sorted(points.items(), key=lambda one: (list(METHODS).index(one[0][0]), one)):
        losses = [find_end(record)["loss"] for record in records]
        matches = average(records, lambda record: find_end(record)["quality"]["exact_match"])
        peak = average(records, lambda record: record["observations"]["memory"][0]["peak_allocated_bytes"])
        seconds = average(records, lambda record: find_end(record)["trained_s"])
        cells = (METHODS[adapter], f"{lr:g}", str(micro), format_mean(losses, 2), f"{100 * matches:.0f} %")
        lines.append(f"| {' | '.join(cells)} | {peak / 2**20:.1f} | {seconds:.1f} | {seconds / 3.6:.1f} |")
    page = (ROOT / "docs/guides/adapters.md").read_text()
    assert "\n".join(lines) in page, "\n".join(lines)


def test_records_of_the_study_are_complete_and_undisturbed() -> None:
    records = [record for records in read_points().values() for record in records]
    assert len(records) == 36
    assert {record["outcome"]["kind"] for record in records} == {"ok"}
    assert not any(record["environment"]["git"]["dirty"] for record in records)
    assert max(load["others_share"] for record in records for load in record["observations"]["load"]) < 0.05


def test_answer_names_the_configuration_with_the_lowest_mean_loss_first() -> None:
    losses = {name: [find_end(record)["loss"] for record in records] for name, records in read_points().items()}
    adapter, lr, micro = lowest = min(losses, key=lambda name: statistics.mean(losses[name]))
    assert adapter == "none"
    first = open_study(ROOT / "results/measured/finetune_cpu.zip").answer().splitlines()[0]
    mean = format_mean(losses[lowest], 3)
    assert first.startswith(
        f"Held-out loss after 240,000 tokens: ddp (lr={lr:g}) (micro {micro}) reached the lowest, {mean} nats per token"
    )
    tied = re.search(r"; ([^;]*) cannot be distinguished yet", first)
    assert tied and "lora" not in tied[1], "every adapter ends with a loss that is higher by several margins"


def test_text_table_has_losses_and_quality_at_the_default_width(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(ROOT / "results/measured/finetune_cpu.zip")]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "adapter", "micro", "learning_rate", "seed", "validation_loss", "exact_match_before", "exact_match", "flags",
    ]  # fmt: skip
    shown = {tuple(row.split()[:5]) for row in rows if row.split()[1:2] != []}
    for (adapter, lr, micro), records in read_points().items():
        for record in records:
            loss = find_end(record)["loss"]
            found = [
                cells for cells in shown if cells[:4] == (adapter, str(micro), f"{lr:g}", str(record["spec"]["seed"]))
            ]
            assert len(found) == 1 and float(found[0][4]) == pytest.approx(loss, rel=1e-3)


def test_report_states_the_weights_and_the_length_of_the_trainings(tmp_path: Path) -> None:
    assert main(["report", str(ROOT / "results/measured/finetune_cpu.zip"), "--out", str(tmp_path)]) == 0
    (constant,) = re.findall("<dt>Constant</dt><dd>(.*?)</dd>", (tmp_path / "report.html").read_text())
    assert constant.endswith("; sequence length 12 tokens; model.checkpoint base; learning.tokens 240000")
