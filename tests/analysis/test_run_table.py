from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from records import MIB, failed, machine, memory, observed, run, run_table, scattered, spec, steps

from analysis import columns as columns_module
from analysis import metrics as metrics_package
from analysis.columns import LEARNED, SHOWN, list_columns
from analysis.summary import summarise
from analysis.table import list_rows
from bench.core import plugins
from bench.core.record import Evaluation, Link, Outcome
from bench.core.spec import RunSpec
from bench.predict.work import compute_flops_per_step

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


def test_the_columns_are_these_in_this_order() -> None:
    assert list(run_table([run()]).columns) == ISSUE
    assert list(run_table([]).columns) == ISSUE
    assert set(SHOWN) <= {*ISSUE, *LEARNED}


def test_a_run_that_was_trained_to_its_end_has_the_loss_of_its_last_evaluation() -> None:
    """The table has the columns of trainings. A training that failed has no values in them."""
    of = spec(micro=2, ranks=2, learning={"tokens": 10_000})
    taken = [
        Evaluation(step=step, loss=loss, target_tokens=50, seconds=0.1, trained_s=2.0 * step)
        for step, loss in ((0, 6.0), (3, 4.5), (5, 4.25))
    ]
    trained = run(of, evaluations=tuple(taken))
    told = row(trained, run())
    assert (told.validation_loss, told.trained_s) == (4.25, 10.0)
    assert told.tokens_trained == 5 * of.global_batch * sum(of.sequence.values())
    table = run_table([trained, run(), trained.model_copy(update={"outcome": Outcome(kind="invalid", reason="…")})])
    assert list(table.columns) == [*ISSUE, *LEARNED[:3]], "its evaluations measured no quality"
    assert table["validation_loss"].isna().tolist() == [False, True, True]
    assert summarise(run_table([trained, run()]))["validation_loss"].tolist()[0] == 4.25


def test_the_quality_of_answers_is_that_before_the_first_step_and_at_the_end() -> None:
    found = [{"exact_match": share, "token_f1": share + 0.1, "mine:count": 3.0} for share in (0.0, 0.9, 0.5)]
    taken = [
        Evaluation(step=step, loss=1.0, target_tokens=50, seconds=0.1, trained_s=1.0, quality=one)
        for step, one in enumerate(found)
    ]
    trained = run(spec(micro=2, ranks=2, learning={"tokens": 10_000}), evaluations=tuple(taken))
    table = run_table([trained, run()])
    assert list(table.columns) == [*ISSUE, *LEARNED]
    told = row(trained, run())
    assert (told.exact_match_before, told.exact_match) == (0.0, 0.5)
    assert (told.token_f1_before, told.token_f1) == (0.1, 0.6)
    assert table["exact_match"].isna().tolist() == [False, True]
    assert summarise(table)["token_f1"].tolist()[0] == 0.6


def test_every_column_says_what_it_means_and_its_unit() -> None:
    for column in list_columns().values():
        assert column.meaning
        assert column.unit in UNITS
        assert column.better in ("more", "less", "neither")
        assert not column.name.endswith("_bytes") or column.unit == "bytes"
        assert not column.name.endswith("tokens_per_s") or column.unit == "tokens/s"


def test_numbers_of_a_run_worked_out_by_hand() -> None:
    # The global batch is 2 × 2 ranks × 3 = 12. Ten steps each of 0.1, 0.15 and 0.4 s add up to 6.5 s; pauses between
    # blocks do not count.
    of = spec(micro=2, ranks=2, batch={"micro": 2, "accumulation": 3})
    window = scattered(0.1, 0.15, 0.4)
    told = row(run(of, steps=steps(window, window_s=6.5), tokens=observed(of).tokens))
    assert (told.global_batch, told.world_size, told.accumulation) == (12, 2, 3)
    assert (told.encoder_tokens, told.decoder_tokens, told.padding_tokens) == (96, 24, 4)
    assert (told.n_steps, told.step_s) == (30, 0.15)
    assert (told.step_s_low, told.step_s_high) == (0.1, 0.4)
    assert told.samples_per_s == pytest.approx(30 * 12 / 6.5)
    assert told.tokens_per_s == pytest.approx(30 * 120 / 6.5)
    assert told.tokens_per_s_low < told.tokens_per_s < told.tokens_per_s_high
    assert told.effective_tokens_per_s == pytest.approx(30 * 116 / 6.5)
    assert told.data_wait_s == 0.001
    assert told.slowest_over_median == pytest.approx(0.02 / 0.015)
    assert (told.peak_allocated_bytes, told.init_peak_bytes, told.peak_rss_bytes) == (11 * MIB, 5 * MIB, 70 * MIB)
    assert told.peak_reserved_bytes is None, "a CPU has no caching allocator"
    assert (told.parameters, told.outcome, told.reason) == (402, "ok", "")


def test_lengths_and_options_of_the_engine_are_columns() -> None:
    bucket = {"name": "zero1", "backend": "deepspeed", "options": {"reduce_bucket_size": 1_000_000, "stage": 1}}
    plain = {"name": "zero1", "backend": "deepspeed", "options": {"reduce_bucket_size": 50_000_000, "stage": 1}}
    own, preset = row(run(spec(engine=bucket))), row(run(spec(engine=plain)))
    assert (own.encoder_length, own.decoder_length) == (8, 2)
    assert own.options == "reduce_bucket_size=1000000", "what is as its file in conf/engine has it is left out"
    assert preset.options is None


def test_throughput_is_no_mean_of_rates() -> None:
    told = row(run(spec(ranks=1), steps=steps((1.0, 3.0))))
    assert told.samples_per_s == pytest.approx(2 * 2 / 4.0), "the mean of the rates would be 1.33"


def test_utilisation_is_of_the_dense_peak_in_the_precision_used() -> None:
    of = spec(precision="bf16", activation_checkpointing=True)
    flops = compute_flops_per_step(of)
    told = row(run(of, steps=steps((0.5,) * 30), machine=machine(bf16=2e-6, fp32=1.0)))
    assert told.model_tflops_per_device == pytest.approx(flops.model / 0.5 / 2 / 1e12)
    assert told.mfu == pytest.approx(flops.model / 0.5 / 2 / 2e6)
    assert told.hfu == pytest.approx(flops.hardware / 0.5 / 2 / 2e6)
    assert told.hfu > told.mfu


def test_an_unknown_peak_leaves_utilisation_empty() -> None:
    told = row(run(machine=machine(bf16=2.0)))  # an fp32 run
    assert told.mfu is None
    assert told.hfu is None
    assert told.model_tflops_per_device > 0


@pytest.mark.parametrize("model", [{"family": "unheard"}, {"shape": {"d_model": 4}}])
def test_a_model_that_this_version_does_not_know_has_no_flops(model: dict) -> None:
    told = row(run(spec(model=model)))
    assert told.model_tflops_per_device is None
    assert told.tokens_per_s > 0


@pytest.mark.parametrize("kind", ["oom", "host_oom", "hang", "comm_error", "pruned", "infeasible"])
def test_a_failure_is_a_row_without_a_number(kind) -> None:
    told = row(failed(kind, reason="rank 1: out of memory", torch=None))
    assert (told.outcome, told.reason) == (kind, "rank 1: out of memory")
    assert (told.engine, told.micro, told.world_size, told.parameters) == ("zero1", 2, 2, 400)
    assert (told.encoder_tokens, told.decoder_tokens) == (32, 8), "known before any step"
    unknown = [*TIMING, "padding_tokens", "environment_id", "device", "peak_allocated_bytes", "init_peak_bytes"]
    assert [getattr(told, name) for name in unknown] == [None] * len(unknown)


def test_a_diverged_run_shows_no_speed() -> None:
    of = spec()
    nan = run(of, steps=steps(loss=(9.0, *(None,) * 34), stopped="invalid"))
    told = row(nan.model_copy(update={"outcome": Outcome(kind="invalid", reason="loss is NaN at step 1")}))
    assert [getattr(told, name) for name in TIMING] == [None] * len(TIMING)
    assert told.peak_allocated_bytes == 11 * MIB, "memory is as real as before"


@pytest.mark.parametrize("window", [{"window": ()}, {"window": (0.1,), "window_s": 0.0}])
def test_an_empty_window_is_not_a_speed_of_zero(window: dict) -> None:
    told = row(run(steps=steps(**window)))
    assert (told.step_s, told.tokens_per_s, told.data_wait_s) == (None, None, None)
    assert told.padding_tokens is None or window["window"]


def test_few_steps_have_a_median_and_no_interval() -> None:
    told = row(run(steps=steps((0.1, 0.2, 0.3, 0.4, 0.5))))
    assert (told.step_s, told.n_steps, told.step_s_low, told.step_s_high) == (0.3, 5, None, None)


def test_one_rank_straggles_behind_nobody() -> None:
    assert row(run(spec(ranks=1))).slowest_over_median is None
    assert row(run(spec(ranks=2), outside_collectives_s=(0.1,))).slowest_over_median is None, "one of two is unknown"


def staged(stage: int, **more: Any) -> RunSpec:
    of = spec(f"zero{stage}", **more)
    return of.model_copy(update={"engine": of.engine.model_copy(update={"options": {"stage": stage}})})


def test_the_slowest_rank_is_named_with_its_host_at_every_stage() -> None:
    of = staged(3, nodes=2)
    late = {"outside_collectives_s": (0.10, 0.11, 0.25, 0.10), "environment": {"hosts": ("a", "b")}}
    told = row(run(of, **late))
    assert (told.slowest_rank, told.slowest_host) == (2, "b")
    assert told.slowest_over_median == pytest.approx(0.25 / 0.105)
    nameless = row(run(of, **late | {"environment": {"hosts": ("a",)}}))  # both nodes call themselves so
    assert (nameless.slowest_rank, nameless.slowest_host) == (2, None)


def test_in_a_pipeline_ranks_with_the_same_part_of_the_layers_are_compared() -> None:
    of = spec("zero1", ranks=4, parallel={"pipeline": 2})
    told = row(run(of, outside_collectives_s=(0.10, 0.10, 0.40, 0.60)))
    assert told.slowest_over_median == pytest.approx(0.6 / 0.5) and told.slowest_rank == 3
    alone = row(run(spec("zero1", ranks=4, parallel={"pipeline": 4}), outside_collectives_s=(0.1, 0.1, 0.4, 0.6)))
    assert alone.slowest_over_median is None and alone.slowest_rank is None


def test_ranks_that_are_nearly_alike_have_no_slowest() -> None:
    told = row(run(outside_collectives_s=(0.100, 0.119)))
    assert (told.slowest_rank, told.slowest_host) == (None, None)
    assert told.slowest_over_median == pytest.approx(0.119 / 0.1095)


def test_a_slow_link_is_named_by_the_host_at_its_end() -> None:
    def told(hosts: tuple[str, ...], *rates: float) -> str | None:
        link = Link(backend="nccl", payload_bytes=8, bus_bytes_per_s=1e9, nodes_bytes_per_s=rates)
        return row(run(spec(ranks=1, nodes=3), link=link, environment={"hosts": hosts})).slowest_link_node

    assert told(("a", "b", "c"), 5e9, 4e9, 1e9) == "c"
    assert told((), 5e9, 4e9, 1e9) == "2"
    assert told(("a", "b", "c"), 5e9, 4e9, 3e9) is None


def test_the_worst_of_ranks_is_unknown_while_one_is() -> None:
    known = memory(2)
    told = row(run(memory=(known[0], known[1].model_copy(update={"peak_allocated_bytes": None}))))
    assert told.peak_allocated_bytes is None
    assert told.init_peak_bytes == 5 * MIB


@pytest.mark.parametrize(
    ("around", "allocation"),
    [
        ({"job": {"job_id": "a7.batch"}}, "a7.batch"),
        ({"job": {"job_id": "7", "cluster": "c", "restart": 1}}, "c.7.1"),
        ({"slurm": {"SLURM_CLUSTER_NAME": "c", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}}, "c.7.1"),  # of old
        ({"slurm": {"SLURM_JOB_ID": "7"}}, "7"),
    ],
)
def test_an_allocation_has_one_name_whichever_scheduler_and_version_wrote_it(around: Any, allocation: str) -> None:
    assert run_table([run(environment=around)])["allocation"].tolist() == [allocation]


def test_a_cluster_that_counts_its_jobs_from_1_again_gave_another_allocation() -> None:
    runs = [
        run(launcher={"name": "slurm", "job": job}, repeat=repeat, environment={"job": {"job_id": "1", "cluster": "c"}})
        for repeat, job in enumerate(("smoke-1123160557-8f09db", "smoke-1123192248-a74b54", "smoke-1123192248-a74b54"))
    ]
    first, second, third = run_table(runs)["allocation"]
    assert first != second == third


def test_types_know_what_is_missing() -> None:
    table = run_table([run(), failed("oom", torch=None)])
    assert {str(dtype) for dtype in table.dtypes} == {"string", "Int64", "float64", "boolean"}
    assert table.peak_allocated_bytes.isna().tolist() == [False, True]
    numbers = table.select_dtypes("number").drop(columns=["repeat", "attempt", "seed"])
    assert not (numbers <= 0).any().any(), "unknown is never 0 or -1"


def test_a_new_file_is_a_new_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def _forget_metrics() -> None:
    plugins._list_shipped.cache_clear()
    metrics_package.load_metrics.cache_clear()


def test_order_names_no_column_that_does_not_exist() -> None:
    assert set(columns_module.ORDER) == set(list_columns())
