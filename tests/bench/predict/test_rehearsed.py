"""Memory of one rank of up to 1,024: predictions beside rehearsals, rehearsals beside runs in which all were real."""

import pytest
from rehearsals import BESIDE_REAL, REHEARSED, case_of, rows, spec_of

from bench.predict.memory import memory


@pytest.mark.parametrize("row", rows(REHEARSED), ids=lambda row: "-".join(list(row.values())[:8]))
def test_predictions_are_within_three_percent_of_rehearsals(row: dict[str, str]) -> None:
    foretold = memory(spec_of(case_of(row)), "cpu", rehearsed=True)
    assert foretold.resident == pytest.approx(int(row["resident_bytes"]), rel=0.003)
    assert foretold.init_peak == pytest.approx(int(row["init_peak_bytes"]), rel=0.03)
    assert foretold.peak == pytest.approx(int(row["peak_bytes"]), rel=0.03)


def test_every_stage_is_rehearsed_at_every_world_size() -> None:
    found = {(case.stage, case.ranks, case.precision, case.shape) for case in map(case_of, rows(REHEARSED))}
    assert len(found) == 4 * 6 * 2 * 2
    assert {ranks for _, ranks, _, _ in found} == {1, 2, 8, 64, 512, 1024}


@pytest.mark.parametrize("row", rows(BESIDE_REAL), ids=lambda row: str(row["overrides"])[:60])
def test_a_rehearsal_needs_what_the_real_runs_need(row: dict[str, str]) -> None:
    """At the peak of a real run's initialisation gloo may hold what a rehearsal's collectives never had."""
    for name, allowed in [("resident_bytes", 0.01), ("peak_bytes", 0.03)]:
        assert int(row[f"rehearsed_{name}"]) == pytest.approx(int(row[f"real_{name}"]), rel=allowed), name
    assert 0.87 < int(row["rehearsed_init_peak_bytes"]) / int(row["real_init_peak_bytes"]) <= 1
