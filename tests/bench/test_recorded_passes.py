"""Tests of the choice of forward and backward passes of a pipeline's step that a record stores."""

from typing import Any

import pytest

from bench.core.record import TimedPass
from bench.core.spec import RunSpec
from bench.measure import observe
from bench.measure.observe import Inspection, select_passes


def pipeline_of(places: int, ranks: int) -> RunSpec:
    plain: dict[str, Any] = {
        "model": {"name": "any", "shape": {}, "parameters": 1},
        "engine": {"name": "pipeline", "backend": "pipeline"},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": 1},
        "devices_per_node": ranks,
        "sequence": {"encoder": 8, "decoder": 2},
        "precision": "fp32",
        "parallel": {"pipeline": places},
    }
    return RunSpec.model_validate(plain)


def see(ranks: int) -> list[Inspection]:
    """Return the measurements of an untimed step, one inspection for each rank. An inspection has a single forward
    pass. The number of the pass's micro-batch is the index of the rank."""
    return [Inspection(passes=[TimedPass("forward", 0, rank, 0.0, 1.0)]) for rank in range(ranks)]


def test_record_has_the_passes_of_the_first_rank_at_each_position() -> None:
    found = select_passes(pipeline_of(2, 8), see(8))
    assert found and [[one.micro_batch for one in here] for here in found] == [[0], [4]]


def test_passes_are_omitted_if_missing_or_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = pipeline_of(2, 4)
    assert select_passes(spec, see(1)) is None, "a rehearsal"
    assert select_passes(spec, [Inspection() for _ in range(4)]) is None
    monkeypatch.setattr(observe, "MOST_PASSES", 1)
    assert select_passes(spec, see(4)) is None
