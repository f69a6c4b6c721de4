"""Tests that scaling tables have a row for every requested configuration. Numbers that were not measured are missing
values in the row."""

import pytest
from clusters import asked, measured, out_of_memory
from records import MIB, results

from analysis.results import Results
from analysis.scaling import best, crossover, curves
from analysis.table import list_rows


@pytest.fixture(scope="module")
def found() -> Results:
    times = {("zero2", 1): 8.0, ("zero2", 2): 5.0, ("zero3", 1): 9.0, ("zero3", 2): 4.5}
    records = [
        record for (engine, n), s in times.items() for record in measured(asked(n, engine=engine, samples=64), s)
    ]
    return results(*records, *out_of_memory(asked(4, samples=64), reason="no room"))


def test_curve_table_has_a_row_per_node_count(found: Results) -> None:
    table = curves.build_curve_table(curves.build_curves(found))
    assert tuple(table.columns) == curves.COLUMNS
    rows = [row for row in list_rows(table) if row["engine"] == "zero2"]
    assert [(row["nodes"], row["base_nodes"], row["outcome"]) for row in rows] == [
        (1, 1, "ok"), (2, 1, "ok"), (4, 1, "oom"),
    ]  # fmt: skip
    first, second, failed = rows
    assert (first["efficiency"], first["efficiency_low"], first["serial_fraction"]) == (1.0, None, None)
    assert first["base_step_s_low"] < first["base_step_s"] < first["base_step_s_high"]
    assert second["efficiency"] == pytest.approx(0.8)
    assert second["efficiency_low"] < 0.8 < second["efficiency_high"]
    assert (second["ratio_kind"], second["ratio_level"], second["ratio_n"]) == ("between repeats", 0.95, 6)
    assert (failed["speedup"], failed["efficiency"], failed["reason"]) == (None, None, "no room")


def test_crossover_table_has_a_row_per_node_count(found: Results) -> None:
    rows = list_rows(crossover.build_crossover_table(crossover.find_crossovers(found)))
    told = "zero3 overtakes zero2 between 1 and 2 nodes"
    assert [(row["nodes"], row["verdict"], row["told"]) for row in rows] == [
        (1, "faster", told), (2, "slower", told), (4, None, told),
    ]  # fmt: skip
    assert (rows[2]["one_outcome"], rows[2]["other_outcome"]) == ("oom", None)
    assert rows[0]["ratio"] == pytest.approx(8 / 9)


def test_best_table_has_a_row_per_configuration(found: Results) -> None:
    rows = list_rows(best.as_table(best.best(found)))
    assert [(row["nodes"], row["engine"], row["standing"], row["pareto"]) for row in rows] == [
        (1, "zero2", "fastest", "front"),
        (1, "zero3", "slower", "dominated"),
        (2, "zero3", "fastest", "front"),
        (2, "zero2", "slower", "dominated"),
        (4, "zero2", "failed", None),
    ]
    assert rows[1]["ratio"] == pytest.approx(9 / 8)
    assert rows[1]["peak_allocated_bytes"] == 11 * MIB


def test_empty_tables_have_their_columns() -> None:
    assert tuple(crossover.build_crossover_table([]).columns) == crossover.COLUMNS
    assert tuple(best.as_table([]).columns) == best.COLUMNS
