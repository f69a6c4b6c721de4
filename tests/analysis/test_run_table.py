from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from records import MIB, failed, machine, memory, observed, run, run_table, scattered, spec, steps

from analysis import columns as columns_module
from analysis import metrics as metrics_package
from analysis.columns import LATER, LEARNED, SHOWN, list_columns
from analysis.summary import summarise
from analysis.table import list_rows
from bench.core import plugins
from bench.core.record import Evaluation, Link, Outcome
from bench.core.spec import RunSpec
from bench.predict.work import compute_flops_per_step
from tests.bench.installed_packages import Install

ISSUE = [
    "config_id", "environment_id", "device", "machine", "allocation", "repeat", "attempt", "study", "model",
    "parameters", "engine", "options", "precision", "activation_checkpointing", "data", "seed", "nodes",
    "devices_per_node", "world_size", "micro", "accumulation", "global_batch", "encoder_length", "decoder_length",
    "encoder_tokens", "decoder_tokens", "padding_tokens",
    "evidence", "outcome", "sample_s", "step_s", "step_s_low", "step_s_high", "step_s_p95", "step_s_p99", "step_s_max",
    "longest_step", "n_steps", "samples_per_s", "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high",
    "effective_tokens_per_s", "encoder_tokens_per_s", "decoder_tokens_per_s",
    "padding_tokens_per_s", "model_tflops_per_device", "hardware_tflops_per_device", "mfu", "hfu",
    "peak_allocated_bytes", "peak_allocated_spread_bytes", "peak_reserved_bytes", "init_peak_bytes", "resident_bytes",
    "peak_rss_bytes", "data_wait_s", "data_wait_share", "compute_s", "slowest_over_median", "moved_bytes", "idle_share",
    "energy_j_per_million_tokens", "cost_per_million_tokens", "slowest_rank", "slowest_host", "slowest_link_node",
    "reason", "flags", "notes",
]  # fmt: skip
TIMING = [
    *ISSUE[ISSUE.index("sample_s") : ISSUE.index("peak_allocated_bytes")],
    *ISSUE[ISSUE.index("data_wait_s") : ISSUE.index("slowest_rank")],
]
UNITS = {
    "", "s", "bytes", "steps", "samples", "tokens", "samples/s", "tokens/s", "10^12 FLOP/s", "of peak", "ratio",
    "of step time", "J/10^6 tokens", "currency/10^6 tokens",
}  # fmt: skip


def row(record, *others) -> SimpleNamespace:
    return SimpleNamespace(**list_rows(run_table([record, *others]))[0])


def test_run_table_has_its_columns_in_order() -> None:
    assert list(run_table([run()]).columns) == ISSUE
    assert list(run_table([]).columns) == ISSUE
    assert set(SHOWN) <= {*ISSUE, *LATER, *LEARNED}


def test_completed_training_has_the_loss_of_its_last_evaluation() -> None:
    """If at least one run is a training, the table has additional columns for trainings. These columns are empty for
    other runs, and for a training that failed."""
    of = spec(micro=2, ranks=2, learning={"tokens": 10_000})
    evaluations = [
        Evaluation(step=step, loss=loss, target_tokens=50, seconds=0.1, trained_s=2.0 * step)
        for step, loss in ((0, 6.0), (3, 4.5), (5, 4.25))
    ]
    trained = run(of, evaluations=tuple(evaluations))
    values = row(trained, run())
    assert (values.validation_loss, values.trained_s) == (4.25, 10.0)
    assert values.tokens_trained == 5 * of.global_batch * sum(of.sequence.values())
    table = run_table([trained, run(), trained.model_copy(update={"outcome": Outcome(kind="invalid", reason="…")})])
    assert list(table.columns) == [*ISSUE, *LEARNED[:4]], "the evaluations of this training measured no quality"
    assert table["validation_loss"].isna().tolist() == [False, True, True]
    assert summarise(run_table([trained, run()]))["validation_loss"].tolist()[0] == 4.25


def test_quality_of_answers_is_from_the_first_and_the_last_evaluation() -> None:
    found = [{"exact_match": share, "token_f1": share + 0.1, "mine:count": 3.0} for share in (0.0, 0.9, 0.5)]
    evaluations = [
        Evaluation(step=step, loss=1.0, target_tokens=50, seconds=0.1, trained_s=1.0, quality=one)
        for step, one in enumerate(found)
    ]
    trained = run(spec(micro=2, ranks=2, learning={"tokens": 10_000}), evaluations=tuple(evaluations))
    table = run_table([trained, run()])
    assert list(table.columns) == [*ISSUE, *LEARNED]
    values = row(trained, run())
    assert (values.exact_match_before, values.exact_match) == (0.0, 0.5)
    assert (values.token_f1_before, values.token_f1) == (0.1, 0.6)
    assert table["exact_match"].isna().tolist() == [False, True]
    assert summarise(table)["token_f1"].tolist()[0] == 0.6


def test_each_column_has_a_meaning_and_a_known_unit() -> None:
    for column in list_columns().values():
        assert column.meaning
        assert column.unit in UNITS
        assert column.better in ("more", "less", "neither")
        assert not column.name.endswith("_bytes") or column.unit == "bytes"
        assert not column.name.endswith("tokens_per_s") or column.unit == "tokens/s"


def test_numbers_of_a_run_computed_by_hand() -> None:
    # The global batch is 2 × 2 ranks × 3 = 12. Ten steps each of 0.1, 0.15 and 0.4 s add up to 6.5 s; pauses between
    # blocks do not count.
    of = spec(micro=2, ranks=2, batch={"micro": 2, "accumulation": 3})
    window = scattered(0.1, 0.15, 0.4)
    values = row(run(of, steps=steps(window, window_s=6.5), tokens=observed(of).tokens))
    assert (values.global_batch, values.world_size, values.accumulation) == (12, 2, 3)
    assert (values.encoder_tokens, values.decoder_tokens, values.padding_tokens) == (96, 24, 4)
    assert (values.n_steps, values.step_s) == (30, 0.15)
    assert (values.step_s_low, values.step_s_high) == (0.1, 0.4)
    assert values.samples_per_s == pytest.approx(30 * 12 / 6.5)
    assert values.tokens_per_s == pytest.approx(30 * 120 / 6.5)
    assert values.tokens_per_s_low < values.tokens_per_s < values.tokens_per_s_high
    assert values.effective_tokens_per_s == pytest.approx(30 * 116 / 6.5)
    assert values.data_wait_s == 0.001
    assert values.slowest_over_median == pytest.approx(0.02 / 0.015)
    assert (values.peak_allocated_bytes, values.init_peak_bytes, values.peak_rss_bytes) == (11 * MIB, 5 * MIB, 70 * MIB)
    assert values.peak_reserved_bytes is None, "a CPU has no caching allocator"
    assert (values.parameters, values.outcome, values.reason) == (402, "ok", "")


def test_sequence_lengths_and_engine_options_are_columns() -> None:
    bucket = {"name": "zero1", "backend": "deepspeed", "options": {"reduce_bucket_size": 1_000_000, "stage": 1}}
    plain = {"name": "zero1", "backend": "deepspeed", "options": {"reduce_bucket_size": 50_000_000, "stage": 1}}
    own, preset = row(run(spec(engine=bucket))), row(run(spec(engine=plain)))
    assert (own.encoder_length, own.decoder_length) == (8, 2)
    assert own.options == "reduce_bucket_size=1000000", "options with the value of the preset file are omitted"
    assert preset.options is None


def test_throughput_is_total_work_divided_by_total_time() -> None:
    values = row(run(spec(ranks=1), steps=steps((1.0, 3.0))))
    assert values.samples_per_s == pytest.approx(2 * 2 / 4.0), "the mean of the rates would be 1.33"


def test_utilisation_is_relative_to_the_dense_peak_of_the_precision() -> None:
    of = spec(precision="bf16", activation_checkpointing=True)
    flops = compute_flops_per_step(of)
    values = row(run(of, steps=steps((0.5,) * 30), machine=machine(bf16=2e-6, fp32=1.0)))
    assert values.model_tflops_per_device == pytest.approx(flops.model / 0.5 / 2 / 1e12)
    assert values.mfu == pytest.approx(flops.model / 0.5 / 2 / 2e6)
    assert values.hfu == pytest.approx(flops.hardware / 0.5 / 2 / 2e6)
    assert values.hfu > values.mfu


def test_utilisation_is_unknown_without_a_peak_rate() -> None:
    values = row(run(machine=machine(bf16=2.0)))  # an fp32 run
    assert values.mfu is None
    assert values.hfu is None
    assert values.model_tflops_per_device > 0


@pytest.mark.parametrize("model", [{"family": "unheard"}, {"shape": {"d_model": 4}}])
def test_unknown_model_has_no_flops(model: dict) -> None:
    values = row(run(spec(model=model)))
    assert values.model_tflops_per_device is None
    assert values.tokens_per_s > 0


@pytest.mark.parametrize("kind", ["oom", "host_oom", "hang", "comm_error", "pruned", "infeasible"])
def test_a_failure_is_a_row_without_a_number(kind) -> None:
    values = row(failed(kind, reason="rank 1: out of memory", torch=None))
    assert (values.outcome, values.reason) == (kind, "rank 1: out of memory")
    assert (values.engine, values.micro, values.world_size, values.parameters) == ("zero1", 2, 2, 400)
    assert (values.encoder_tokens, values.decoder_tokens) == (32, 8), "known before any step"
    unknown = [*TIMING, "padding_tokens", "environment_id", "device", "peak_allocated_bytes", "init_peak_bytes"]
    assert [getattr(values, name) for name in unknown] == [None] * len(unknown)


def test_invalid_run_has_memory_but_no_times() -> None:
    of = spec()
    nan = run(of, steps=steps(loss=(9.0, *(None,) * 34), stopped="invalid"))
    values = row(nan.model_copy(update={"outcome": Outcome(kind="invalid", reason="loss is NaN at step 1")}))
    assert [getattr(values, name) for name in TIMING] == [None] * len(TIMING)
    assert values.peak_allocated_bytes == 11 * MIB, "memory of an invalid run remains valid"


@pytest.mark.parametrize("window", [{"window": ()}, {"window": (0.1,), "window_s": 0.0}])
def test_empty_window_has_no_times_and_no_rates(window: dict) -> None:
    values = row(run(steps=steps(**window)))
    assert (values.step_s, values.tokens_per_s, values.data_wait_s) == (None, None, None)
    assert values.padding_tokens is None or window["window"]


def test_few_steps_have_a_median_and_no_interval() -> None:
    values = row(run(steps=steps((0.1, 0.2, 0.3, 0.4, 0.5))))
    assert (values.step_s, values.n_steps, values.step_s_low, values.step_s_high) == (0.3, 5, None, None)


def test_a_single_rank_has_no_straggler() -> None:
    assert row(run(spec(ranks=1))).slowest_over_median is None
    assert row(run(spec(ranks=2), outside_collectives_s=(0.1,))).slowest_over_median is None, (
        "the value of one of two ranks is unknown"
    )


def staged(stage: int, **more: Any) -> RunSpec:
    of = spec(f"zero{stage}", **more)
    return of.model_copy(update={"engine": of.engine.model_copy(update={"options": {"stage": stage}})})


def test_slowest_rank_and_its_host_are_columns_at_stage_3() -> None:
    of = staged(3, nodes=2)
    late = {"outside_collectives_s": (0.10, 0.11, 0.25, 0.10), "environment": {"hosts": ("a", "b")}}
    values = row(run(of, **late))
    assert (values.slowest_rank, values.slowest_host) == (2, "b")
    assert values.slowest_over_median == pytest.approx(0.25 / 0.105)
    same_name = row(run(of, **late | {"environment": {"hosts": ("a",)}}))  # both nodes call themselves so
    assert (same_name.slowest_rank, same_name.slowest_host) == (2, None)


def test_ranks_of_a_pipeline_are_compared_within_their_stage() -> None:
    of = spec("zero1", ranks=4, parallel={"pipeline": 2})
    values = row(run(of, outside_collectives_s=(0.10, 0.10, 0.40, 0.60)))
    assert values.slowest_over_median == pytest.approx(0.6 / 0.5) and values.slowest_rank == 3
    alone = row(run(spec("zero1", ranks=4, parallel={"pipeline": 4}), outside_collectives_s=(0.1, 0.1, 0.4, 0.6)))
    assert alone.slowest_over_median is None and alone.slowest_rank is None


def test_nearly_equal_ranks_have_no_slowest_rank() -> None:
    values = row(run(outside_collectives_s=(0.100, 0.119)))
    assert (values.slowest_rank, values.slowest_host) == (None, None)
    assert values.slowest_over_median == pytest.approx(0.119 / 0.1095)


def test_slow_link_is_identified_by_its_host_or_node_number() -> None:
    def find_slow_node(hosts: tuple[str, ...], *rates: float) -> str | None:
        link = Link(backend="nccl", payload_bytes=8, bus_bytes_per_s=1e9, nodes_bytes_per_s=rates)
        return row(run(spec(ranks=1, nodes=3), link=link, environment={"hosts": hosts})).slowest_link_node

    assert find_slow_node(("a", "b", "c"), 5e9, 4e9, 1e9) == "c"
    assert find_slow_node((), 5e9, 4e9, 1e9) == "2"
    assert find_slow_node(("a", "b", "c"), 5e9, 4e9, 3e9) is None


def test_maximum_over_ranks_is_unknown_if_one_rank_is_unknown() -> None:
    known = memory(2)
    values = row(run(memory=(known[0], known[1].model_copy(update={"peak_allocated_bytes": None}))))
    assert values.peak_allocated_bytes is None
    assert values.init_peak_bytes == 5 * MIB


@pytest.mark.parametrize(
    ("around", "allocation"),
    [
        ({"job": {"job_id": "a7.batch"}}, "a7.batch"),
        ({"job": {"job_id": "7", "cluster": "c", "restart": 1}}, "c.7.1"),
        ({"slurm": {"SLURM_CLUSTER_NAME": "c", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}}, "c.7.1"),  # of old
        ({"slurm": {"SLURM_JOB_ID": "7"}}, "7"),
    ],
)
def test_allocation_names_of_schedulers_and_record_versions(around: Any, allocation: str) -> None:
    assert run_table([run(environment=around)])["allocation"].tolist() == [allocation]


def test_reused_job_id_of_another_submission_is_another_allocation() -> None:
    runs = [
        run(launcher={"name": "slurm", "job": job}, repeat=repeat, environment={"job": {"job_id": "1", "cluster": "c"}})
        for repeat, job in enumerate(("smoke-1123160557-8f09db", "smoke-1123192248-a74b54", "smoke-1123192248-a74b54"))
    ]
    first, second, third = run_table(runs)["allocation"]
    assert first != second == third


def test_column_types_represent_missing_values() -> None:
    table = run_table([run(), failed("oom", torch=None)])
    assert {str(dtype) for dtype in table.dtypes} == {"string", "Int64", "float64", "boolean"}
    assert table.peak_allocated_bytes.isna().tolist() == [False, True]
    numbers = table.select_dtypes("number").drop(columns=["repeat", "attempt", "seed"])
    assert not (numbers <= 0).any().any(), "an unknown value is never 0 or -1"


METRIC = """
from analysis.metrics import Metric
def compute(record) BODY
METRICS = (Metric("theirs", "a quantity", "s", "more", compute),)
"""


def test_metric_in_a_new_file_adds_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losses.py").write_text(
        "from analysis.metrics import Metric\n"
        "def read_last_loss(record) -> float | None:\n"
        "    return record.observations.steps.loss[-1] if record.observations else None\n"
        'METRICS = (Metric("loss_at_end", "last loss", "", "less", read_last_loss),)\n'
    )
    monkeypatch.setattr(metrics_package, "__path__", [*metrics_package.__path__, str(tmp_path)])
    _forget_metrics()
    try:
        table = run_table([run(), failed("oom")])
    finally:
        _forget_metrics()
    assert list(table.columns) == [*ISSUE[:-3], "loss_at_end", *ISSUE[-3:]]
    assert table.loss_at_end[0] == 4.0
    assert pd.isna(table.loss_at_end[1])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("-> float | None: return 'many'", "its function returned 'many', which is not of the type float | int | None"),
        ("-> int | None: return 2.5", "its function returned 2.5, which is not of the type int | None"),
        ("-> int | None: return 1 // 0", "its function failed: ZeroDivisionError: integer division or modulo by zero"),
    ],
)
def test_cells_of_a_broken_metric_of_a_package_are_empty_with_a_warning(
    install: Install, caplog: pytest.LogCaptureFixture, body: str, why: str
) -> None:
    install("zeroscale.metric", "theirs = their_metric", METRIC.replace("BODY", body))
    table = run_table([run(), run(spec("zero3"))])
    assert table["theirs"].isna().all() and table["step_s"].notna().all()
    (message,) = caplog.messages
    assert message.startswith(f"column theirs skipped: metric theirs of package somebodys-package: {why}")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"more"', '"higher"', "better='higher': must be one of more, less, neither"),
        ('"s"', "7", "unit=7: must be text"),
        ("),)", "))", "METRICS is Metric"),
        ('"theirs"', '"step_s"', "column step_s is also defined in another file"),
    ],
)
def test_wrong_metric_of_a_package_is_skipped_with_a_warning(
    install: Install, caplog: pytest.LogCaptureFixture, old: str, new: str, why: str
) -> None:
    text = METRIC.replace("BODY", "-> float | None: return 1.0")
    install("zeroscale.metric", "theirs = their_metric", text.replace(old, new))
    (seconds,) = run_table([run()])["step_s"]
    assert seconds != 1.0
    (message,) = caplog.messages
    assert message.startswith("metric theirs of package somebodys-package skipped: ")
    assert why in message


def _forget_metrics() -> None:
    plugins._list_shipped.cache_clear()
    metrics_package.load_metrics.cache_clear()


def test_column_order_contains_exactly_the_columns() -> None:
    assert set(columns_module.ORDER) == set(list_columns())
