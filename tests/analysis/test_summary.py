import math
from typing import Any

import pytest
from records import MIB, failed, memory, results, run, run_table, scattered, spec, steps, trained

from analysis.questions import describe_series, group_by_question, name_question
from analysis.stats.intervals import describe_window, rate_interval
from analysis.summary import COLUMNS, summarise
from analysis.table import list_rows
from bench.core.record import NodeLoad


def rows(*records):
    return list_rows(summarise(run_table(records)))


def timed(*seconds, **more):
    """Return one run for each value in `seconds`, with 30 steps of this duration and consecutive repeat numbers."""
    return [run(repeat=i, steps=steps((s,) * 30), **more) for i, s in enumerate(seconds)]


def test_single_run_has_an_interval_of_kind_within_the_run() -> None:
    window = scattered(0.1, 0.2, 0.4)
    (row,) = rows(run(steps=steps(window)))
    assert (row["n"], row["runs"]) == (1, 1)
    assert (row["interval_kind"], row["interval_level"], row["interval_n"]) == ("within the run", 0.95, 30)
    assert (row["step_s"], row["step_s_low"], row["step_s_high"]) == (0.2, 0.1, 0.4)
    rate = 30 * 40 / sum(window)
    assert row["tokens_per_s"] == pytest.approx(rate)
    of_rate = rate_interval(describe_window(tuple(window)).mean, window, rate)
    assert of_rate is not None
    assert (row["tokens_per_s_low"], row["tokens_per_s_high"]) == pytest.approx(of_rate[:2])


def test_run_of_four_steps_has_no_interval() -> None:
    (row,) = rows(run(steps=steps((0.1,) * 4)))
    assert row["n"] == 1
    unknown = ("interval_kind", "interval_level", "interval_n", "step_s_low", "tokens_per_s_high")
    assert [row[column] for column in unknown] == [None] * len(unknown)


def test_three_repeats_have_their_range_at_level_75_percent() -> None:
    (row,) = rows(*timed(0.1, 0.3, 0.2))
    assert (row["n"], row["interval_kind"], row["interval_level"]) == (3, "range of repeats", 0.75)
    assert row["interval_n"] == 3
    assert (row["step_s"], row["step_s_low"], row["step_s_high"]) == (0.2, 0.1, 0.3)
    assert row["tokens_per_s_low"] == pytest.approx(40 / 0.3)


def test_six_repeats_have_an_interval_of_kind_between_repeats() -> None:
    (row,) = rows(*timed(0.1, 0.3, 0.2, 0.6, 0.5, 0.4))
    assert (row["n"], row["interval_kind"], row["interval_level"]) == (6, "between repeats", 0.95)
    assert (row["step_s"], row["step_s_low"], row["step_s_high"]) == (pytest.approx(0.35), 0.1, 0.6)


def test_note_few_applies_below_three_repeats() -> None:
    short = [run(repeat=repeat, steps=steps((0.1,) * 18)) for repeat in range(3)]
    for n, noted in ((1, True), (2, True), (3, False)):
        assert ("few" in rows(*short[:n])[0]["notes"].split()) is noted


def test_time_per_sample_is_a_geometric_mean_of_the_means_of_allocations() -> None:
    """The first allocation has two runs: one with 30 steps of 0.1 s and one with 10 steps of 0.5 s. Their 40 steps have
    a mean of 0.2 s. The second allocation has one run with steps of 0.4 s. A step has 4 samples."""
    slurm = {"slurm": {"SLURM_JOB_ID": "7"}}
    shared = [
        run(repeat=i, steps=steps((s,) * n), environment=slurm) for i, (s, n) in enumerate([(0.1, 30), (0.5, 10)])
    ]
    (row,) = rows(*shared, run(repeat=2, steps=steps((0.4,) * 5)))
    assert row["n"] == 2
    assert row["sample_s"] == pytest.approx(math.sqrt(0.2 * 0.4) / 4)
    assert (row["step_s_max"], row["step_s_p95"]) == (0.5, pytest.approx((0.3 + 0.4) / 2))


@pytest.mark.parametrize("odd", [{"steady": False}, {"skipped": (9,)}])
def test_unsteady_runs_and_skipped_steps_are_included(odd: dict[str, Any]) -> None:
    """One of four runs, each in its own allocation, is slow, as if throttled. `odd` marks its steps: as unsteady, or
    with a skipped step. The run gets a quality flag, but still counts in the configuration's mean time per sample."""
    (row,) = rows(*timed(0.1, 0.1, 0.1), run(repeat=3, steps=steps((0.9,) * 30, **odd)))
    assert (row["n"], row["step_s_high"], row["reason"]) == (4, 0.9, "")
    assert row["sample_s"] == pytest.approx((0.1**3 * 0.9) ** (1 / 4) / 4)
    assert {"unsteady", "skipped_steps"} & {*row["flags"].split()}


BUSY = {"load": (NodeLoad(node=0, others_share=0.4),)}


def test_busy_repeats_are_excluded_from_numbers() -> None:
    """Three repeats ran on a quiet machine. Three more ran under background load: they took 60 % longer and needed more
    memory, and do not count."""
    busy = [run(repeat=3 + i, steps=steps((0.16,) * 30), memory=memory(2, peak=99 * MIB), **BUSY) for i in range(3)]
    (row,) = rows(*timed(0.1, 0.1, 0.1), *busy)
    assert (row["n"], row["runs"], row["reason"]) == (3, 6, "3 of 6 repeats busy")
    assert (row["sample_s"], row["step_s_high"], row["step_s_max"]) == (pytest.approx(0.1 / 4), 0.1, 0.1)
    assert row["peak_allocated_bytes"] == 11 * MIB
    assert {"busy", "mixed"}.isdisjoint(row["flags"].split())


def test_configuration_with_only_busy_runs_has_memory_but_no_times() -> None:
    (row,) = rows(*timed(0.1, 0.1, **BUSY))
    assert (row["n"], row["outcome"], row["peak_allocated_bytes"], row["reason"]) == (2, "ok", 11 * MIB, "")
    assert "busy" in row["flags"].split()
    times = ("sample_s", "step_s", "step_s_high", "step_s_p99", "step_s_max", "tokens_per_s", "mfu", "data_wait_s")
    assert [row[name] for name in times] == [None] * len(times)


def test_reason_counts_excluded_repeats() -> None:
    gone = [failed("oom", repeat=2), failed("hang", repeat=3), failed("oom", repeat=4)]
    (row,) = rows(*timed(0.1, 0.1), *gone, run(repeat=5, **BUSY))
    assert (row["n"], row["reason"]) == (2, "2 of 6 repeats oom, 1 of 6 repeats hang, 1 of 6 repeats busy")
    assert "mixed" in row["flags"].split()


def test_environments_machines_and_kinds_of_evidence_have_separate_rows() -> None:
    other = [run(torch="2.12.0"), run(machine={"name": "h100"}), run(evidence="rehearsed"), failed("oom", torch=None)]
    assert [row["n"] for row in rows(run(), *other)] == [1, 1, 1, 1, 0]


def test_failed_attempt_with_a_retry_does_not_count() -> None:
    (row,) = rows(failed("node_failure"), run(attempt=1))
    assert (row["n"], row["runs"], row["outcome"], row["reason"]) == (1, 2, "ok", "")
    assert "mixed" not in row["flags"]


def test_repeats_with_different_outcomes_are_flagged_mixed() -> None:
    (row,) = rows(run(), failed("oom", repeat=1))
    assert (row["n"], row["outcome"]) == (1, "ok")
    assert "mixed" in row["flags"].split()


def test_configuration_with_only_failures_has_a_row_with_its_reason() -> None:
    (row,) = rows(failed("oom", reason="no room"))
    assert (row["n"], row["outcome"], row["reason"], row["tokens_per_s"]) == (0, "oom", "no room", None)


def test_drill_does_not_count_as_a_measurement() -> None:
    (row,) = rows(run(drill="sleep"))
    assert (row["n"], row["tokens_per_s"], row["peak_allocated_bytes"]) == (0, None, None)
    assert "drill" in row["flags"].split()


def test_run_on_nodes_of_two_jobs_does_not_count_as_a_measurement() -> None:
    mixed = {"hosts": ("gpu1", "gpu4"), "slurm": {"SLURM_JOB_NODELIST": "gpu[1-2]"}}
    (row,) = rows(run(environment=mixed))
    assert (row["n"], row["tokens_per_s"], row["peak_allocated_bytes"]) == (0, None, None)
    assert "foreign_hosts" in row["flags"].split()


def test_peak_memory_is_that_of_the_repeat_with_the_highest() -> None:
    (row,) = rows(run(memory=memory(2, peak=8)), run(repeat=1, memory=memory(2, peak=1000)))
    assert row["peak_allocated_bytes"] == 1000 + 2**20


def test_summary_of_an_empty_table_has_its_columns() -> None:
    assert list(summarise(run_table([])).columns) == list(COLUMNS)


def test_names_of_questions_contain_the_fields_that_differ() -> None:
    records = [run(), run(spec(ranks=1)), run(spec(precision="bf16")), run(spec(nodes=4))]
    questions = [question for question, _ in group_by_question(summarise(run_table(records)))]
    assert [name_question(question, questions) for question in questions] == [
        "tiny · 2 ranks · fp32", "tiny · 1 rank · fp32", "tiny · 2 ranks · bf16", "tiny · 4 × 2 ranks · fp32",
    ]  # fmt: skip


def test_runs_with_different_adapters_are_separate_questions() -> None:
    lora, frozen = {"name": "lora", "rank": 8, "targets": ["q", "v"]}, {"frozen": "^encoder"}
    specs = [spec(), spec(adapter=lora), spec(adapter=lora | {"rank": 4}), spec(adapter=frozen)]
    table = run_table([run(of, repeat=repeat) for of in specs for repeat in range(2)])
    assert [row["runs"] for row in list_rows(summarise(table))] == [2, 2, 2, 2]
    questions = [question for question, _ in group_by_question(summarise(table))]
    assert [name_question(question, questions) for question in questions] == [
        "tiny · 2 ranks · no adapter", "tiny · 2 ranks · lora rank=8 targets=[q, v]",
        "tiny · 2 ranks · lora rank=4 targets=[q, v]", "tiny · 2 ranks · frozen=^encoder",
    ]  # fmt: skip
    names = [describe_series(row) for row in list_rows(summarise(table))]
    assert names == ["zero1", "zero1 + lora", "zero1 + lora", "zero1 + frozen=^encoder"]
    assert "adapter" not in summarise(run_table([run()])), "tables without adapters have no additional column"


def test_name_of_a_question_contains_its_environment_if_two_ran_it() -> None:
    records = [run(), run(torch="2.12.0"), run(spec(ranks=1))]
    questions = [question for question, _ in group_by_question(summarise(run_table(records)))]
    assert [name_question(question, questions) for question in questions] == [
        "tiny · 2 ranks · env2-2.13.0", "tiny · 2 ranks · env2-2.12.0", "tiny · 1 rank",
    ]  # fmt: skip


def test_failure_with_unknown_environment_is_grouped_with_its_question() -> None:
    (group,) = group_by_question(summarise(run_table([failed("oom", spec(micro=64), torch=None), run()])))
    assert [row["micro"] for row in group[1]] == [2, 64]


def test_runs_of_one_allocation_count_once_with_their_median() -> None:
    slurm = {"slurm": {"SLURM_CLUSTER_NAME": "c", "SLURM_JOB_ID": "7"}}
    shared = [run(repeat=i, steps=steps((s,) * 30), environment=slurm) for i, s in enumerate((0.1, 0.3))]
    (row,) = rows(*shared, run(repeat=2, steps=steps((0.4,) * 30)))
    assert (row["n"], row["runs"]) == (2, 3)
    assert row["step_s"] == pytest.approx(0.3)  # of 0.2 and 0.4
    assert (row["interval_kind"], row["interval_n"]) == ("range of repeats", 2)
    (alone,) = rows(*shared)
    assert (alone["n"], alone["step_s"]) == (1, pytest.approx(0.2))
    assert (alone["interval_kind"], alone["interval_n"]) == ("within the run", 60)
    assert (alone["step_s_low"], alone["step_s_high"]) == (0.1, 0.3)


def test_requeued_job_counts_as_another_allocation() -> None:
    jobs = [{"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}]
    (row,) = rows(*(run(repeat=i, environment={"slurm": slurm}) for i, slurm in enumerate(jobs)))
    assert row["n"] == 2


def test_trainings_that_differ_only_in_the_seed_are_repeats_and_have_their_mean_loss() -> None:
    """Seed 0 has two runs with a mean loss of 2.1. With 2.2 of seed 1 and 2.6 of seed 2, the mean over the seeds is
    2.3. Student's interval is ± 4.303 × √0.07 / √3. The step time of a run with background load does not count, but its
    loss does."""
    busy = {"load": (NodeLoad(node=0, others_share=0.9),)}
    records = [
        trained(2.0, 0.1),
        trained(2.2, 0.1, repeat=1),
        trained(2.2, 0.1, seed=1),
        trained(2.6, 0.1, seed=2, **busy),
    ]
    of = results(*records, trained(4.0, 0.2, seed=5), run(spec("ddp")))
    one, other, plain = sorted(list_rows(of.summary), key=lambda row: -row["seeds"])
    assert (one["runs"], one["n"], one["seeds"], one["seed"]) == (4, 3, 3, None)
    assert one["validation_loss"] == pytest.approx(2.3)
    half = 4.302653 * math.sqrt(0.07 / 3)
    assert (one["validation_loss_low"], one["validation_loss_high"]) == pytest.approx((2.3 - half, 2.3 + half))
    assert one["config_id"] == records[0].config_id, "the lowest seed names the configuration"
    assert one["variant"] == "optimizer.lr=0.1", "the seed is no part of its name"
    assert (other["seed"], other["validation_loss"], other["validation_loss_low"]) == (5, 4.0, None)
    assert (plain["seeds"], plain["validation_loss"]) == (0, None)
    assert of.describe().startswith("6 runs of 3 configurations, 6 ok")


def test_failed_seed_is_counted_among_the_repeats_of_its_training() -> None:
    (row,) = list_rows(results(trained(2.0, 0.1), failed("oom", trained(2.0, 0.1, seed=1).spec)).summary)
    assert (row["n"], row["seeds"], row["reason"]) == (1, 1, "1 of 2 repeats oom")
    assert "mixed" in row["flags"]


def test_seeds_of_runs_that_are_no_trainings_are_separate_configurations() -> None:
    assert [row["seed"] for row in list_rows(results(run(), run(spec(seed=1))).summary)] == [0, 1]
