"""Tests of the metrics of runs, compared with values computed by hand. A step of the spec `spec()` has 4 samples on 2
ranks, in total 32 encoder tokens and 8 decoder tokens."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from records import MIB, failed, machine, memory, results, run, run_table, save, spec, steps

from analysis.metrics.cost import add_prices
from analysis.table import list_rows
from bench.cli import main
from bench.core.errors import UserError
from bench.core.record import RankMemory, Tokens
from bench.predict.work import compute_flops_per_step

SECONDS = steps((0.1,) * 30)


def row(record) -> SimpleNamespace:
    return SimpleNamespace(**list_rows(run_table([record]))[0])


def test_token_rates_of_encoder_decoder_and_padding_are_separate() -> None:
    counted = Tokens.counted({"encoder": 32, "decoder": 8}, {"encoder": 3, "decoder": 1})
    values = row(run(steps=SECONDS, tokens=counted))
    assert values.encoder_tokens_per_s == pytest.approx(320)
    assert values.decoder_tokens_per_s == pytest.approx(80)
    assert values.padding_tokens_per_s == pytest.approx(40)
    assert values.effective_tokens_per_s == pytest.approx(360)
    assert values.tokens_per_s == pytest.approx(400)


def test_step_times_have_their_95th_and_99th_percentile_and_maximum() -> None:
    """The window has 101 steps, from 1.00 to 2.00 s. So each percentile equals the time of one of the steps, without
    interpolation."""
    window = [1 + n / 100 for n in range(101)]
    values = row(run(steps=steps(window[::-1])))
    assert (values.step_s, values.step_s_p95, values.step_s_p99, values.step_s_max) == pytest.approx(
        (1.5, 1.95, 1.99, 2.0)
    )
    assert values.sample_s == pytest.approx(1.5 / 4)


def test_time_per_sample_uses_the_duration_of_the_window() -> None:
    values = row(run(steps=steps((0.1,) * 30, window_s=3.6)))
    assert (values.sample_s, values.step_s) == pytest.approx((0.03, 0.1))
    assert values.sample_s * values.samples_per_s == pytest.approx(1)


def test_hardware_flops_include_recomputation() -> None:
    of = spec(activation_checkpointing=True)
    flops = compute_flops_per_step(of)
    values = row(run(of, steps=SECONDS))
    assert values.hardware_tflops_per_device == pytest.approx(flops.hardware / 0.1 / 2 / 1e12)
    assert values.hardware_tflops_per_device > values.model_tflops_per_device
    plain_run = row(run(steps=SECONDS))
    assert plain_run.hardware_tflops_per_device == plain_run.model_tflops_per_device


def test_memory_spread_is_the_difference_between_highest_and_lowest_rank() -> None:
    assert row(run(spec(ranks=4))).peak_allocated_spread_bytes == 3 * MIB
    assert row(run(spec(ranks=1))).peak_allocated_spread_bytes is None, "a single rank has no spread"
    assert row(run(memory=(*memory(1), RankMemory(rank=1)))).peak_allocated_spread_bytes is None, "one is unknown"


def test_data_wait_share_is_relative_to_the_timed_steps() -> None:
    waits = (9.0,) * 5 + (0.01, 0.03) * 15  # the waits of the warm-up are excluded
    assert row(run(steps=steps((0.1,) * 30, data_wait_s=waits))).data_wait_share == pytest.approx(0.2)


def test_energy_per_token_sums_all_devices() -> None:
    values = row(run(steps=SECONDS, energy_j=(300.0, 500.0)))
    assert values.energy_j_per_million_tokens == pytest.approx(800 / (30 * 40) * 1e6)


def test_energy_outside_the_window_is_excluded() -> None:
    """The energy of one device, 300 J, was measured over 1.25 times the length of the window. So 300 J / 1.25 = 240 J
    belong to the window. For the other device, the length of the energy measurement is unknown, so its 500 J count in
    full."""
    window_s = sum(SECONDS.step_s[SECONDS.cut :])
    values = row(run(steps=SECONDS, energy_j=(300.0, 500.0), energy_s=(1.25 * window_s, None)))
    assert values.energy_j_per_million_tokens == pytest.approx((240 + 500) / (30 * 40) * 1e6)


@pytest.mark.parametrize("energy", [(), (300.0,), (300.0, None)])
def test_energy_is_unknown_if_a_device_reports_none(energy: tuple) -> None:
    assert row(run(steps=SECONDS, energy_j=energy)).energy_j_per_million_tokens is None


def test_energy_of_an_invalid_run_is_unknown() -> None:
    diverged = run(steps=SECONDS, energy_j=(300.0, 500.0))
    diverged = diverged.model_copy(update={"outcome": failed("invalid").outcome})
    assert row(diverged).energy_j_per_million_tokens is None


def test_cost_is_computed_from_the_price_of_the_machine() -> None:
    # 2 devices at a price of 3.6 per hour cost 0.002 per second. 10^6 tokens at 400 tokens/s take 2500 s.
    priced = machine().model_copy(update={"price_per_device_hour": 3.6})
    assert row(run(steps=SECONDS, machine=priced)).cost_per_million_tokens == pytest.approx(5.0)
    assert row(run(steps=SECONDS)).cost_per_million_tokens is None
    assert row(failed("oom", machine=priced)).cost_per_million_tokens is None


def test_price_given_for_a_table_overrides_the_recorded_price() -> None:
    priced = machine().model_copy(update={"price_per_device_hour": 99.0})
    table = run_table([run(steps=SECONDS), run(spec("zero2"), steps=SECONDS, machine=priced), failed("oom")])
    values = list_rows(add_prices(table, 3.6))
    assert [one["cost_per_million_tokens"] for one in values] == [pytest.approx(5.0), pytest.approx(5.0), None]
    others = table.columns.drop("cost_per_million_tokens")
    assert add_prices(table, 3.6)[others].equals(table[others])
    assert list(add_prices(table, 3.6).columns) == list(table.columns)


def test_price_can_be_applied_to_a_summary() -> None:
    summary = add_prices(results(run(steps=SECONDS), failed("oom", spec("zero2"))).summary, 3.6)
    assert [one["cost_per_million_tokens"] for one in list_rows(summary)] == [pytest.approx(5.0), None]


@pytest.mark.parametrize("price", [0.0, -1.0, math.nan, math.inf])
def test_invalid_price_is_refused(price: float) -> None:
    with pytest.raises(UserError, match="must be a positive finite number; give what a device costs per hour"):
        add_prices(run_table([run()]), price)


def test_table_verb_has_a_price_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(save(tmp_path, run(steps=SECONDS)))
    assert main(["table", runs, "--format", "csv", "--columns", "cost_per_million_tokens"]) == 0
    assert main(["table", runs, "--format", "csv", "--columns", "cost_per_million_tokens", "--price", "3.6"]) == 0
    header, nothing, _, cost = capsys.readouterr().out.splitlines()
    assert (header, nothing) == ("cost_per_million_tokens", '""')
    assert float(cost) == pytest.approx(5.0)
    assert main(["table", runs, "--price", "0"]) == 2
    assert "--price 0: must be a positive finite number" in capsys.readouterr().err


def test_price_does_not_change_the_id_of_a_configuration() -> None:
    priced = machine().model_copy(update={"price_per_device_hour": 3.6})
    cheap, same = run(steps=SECONDS, machine=machine()), run(steps=SECONDS, machine=priced, repeat=1)
    assert cheap.config_id == same.config_id
    assert list(results(cheap, same).summary["n"]) == [2], "the runs are repeats of each other"


def test_shipped_machines_have_no_price() -> None:
    files = sorted((Path(__file__).parents[2] / "conf" / "machine").glob("*.yaml"))
    assert files
    assert all("price_per_device_hour" not in yaml.safe_load(file.read_text()) for file in files)
