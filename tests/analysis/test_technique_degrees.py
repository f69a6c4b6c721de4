"""Tests of the predicted effect of a technique's degree (such as the number of pipeline stages). Predictions are
compared with observations on the supercomputer Frontier, and with a table in the guide."""

import re
from pathlib import Path

import pytest

from analysis.answer_page import VALUES, list_values
from bench import api

FRONTIER = (
    "machine=mi250x engine=pipeline devices_per_node=8 batch.micro=1 activation_checkpointing=true "
    "optimizer.implementation=fused"
)
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "predict.md"


# -- what was observed on Frontier (results/published/claims.csv)


def test_tensor_parallelism_across_nodes_is_predicted_slower_than_within_a_node() -> None:
    """Observed on Frontier (claim F1): tensor parallelism across nodes is slower than within a node."""
    words = f"model=gpt_22b {FRONTIER} nodes=16 batch.global=640 parallel.pipeline=8 parallel.tensor=8,16"
    inside, across = (one.time for one in api.predict(overrides=words))
    assert inside and across and across.step_s > inside.step_s


def test_more_pipeline_stages_are_predicted_to_have_a_larger_idle_share() -> None:
    """Observed on Frontier (claim F2): the idle share grows with the number of stages. In theory, p equal stages with m
    micro-batches are idle for p - 1 of m + p - 1 passes (arXiv 2104.04473, section 2.2.1)."""
    room = "machine.memory_bytes=2e11"  # with two stages, the model would exceed the memory of a device of Frontier
    words = f"model=gpt_22b {FRONTIER} {room} batch.accumulation=16 engine.cut=blocks nodes=2"
    shares = {}
    for stages in (2, 4, 8):
        (one,) = api.predict(overrides=f"{words} parallel.pipeline={stages}")
        assert one.time
        shares[stages] = one.time.parts["idle"] / one.time.step_s
    assert list(shares.values()) == sorted(shares.values())
    assert shares[8] == pytest.approx(7 / (16 + 7), rel=0.25)


def test_table_of_the_guide_equals_current_predictions() -> None:
    section = GUIDE.read_text(encoding="utf-8").partition("### Degrees of each technique")[2].partition("\n#")[0]
    written = [line for line in section.splitlines() if line.startswith("| gpt_")]
    found = []
    for words in re.findall(r"^zeroscale predict (.*) --page \S+$", section, re.MULTILINE):
        model = words.partition("model=")[2].split()[0]
        for one in api.predict(overrides=words):
            spec = one.point.composed.spec
            technique, degree = next(
                (name, degree)
                for key, name, degree in (
                    ("parallel.tensor=", "tensor parallelism", spec.parallel.tensor),
                    ("parallel.pipeline=", "pipeline", spec.parallel.pipeline),
                    ("nodes=", "data parallelism", spec.data_parallel),
                )
                if "," in words.partition(key)[2].split(" ")[0]
            )
            cells = [cell for name, cell in zip(VALUES, list_values(one), strict=True) if name != "tokens/s"]
            if one.time:
                found.append(f"| {' | '.join([model, technique, str(degree), *cells])} |")
    assert written == found
