"""Tests of `zeroscale advise where=…`, which compares a training on own nodes, rented nodes and spot nodes. The hours
and costs in its output must equal a calculation by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

from bench import api

WORDS = ("model=gpt2_medium", "engine=ddp", "batch.micro=8", "activation_checkpointing=true", "samples=1e6")
PLACES = "where=own:h100:8:2.5,rented:a3-highgpu-8g,spot:g2-standard-12"
# prices of the sources: a node of eight H100 in us-east4, and a spot node with one L4 in us-central1
NODE_PRICES = {"own h100": 8 * 2.5, "rented a3-highgpu-8g": 9.46006 + 78.37241, "spot g2-standard-12": 0.17621 + 0.2231}
OFFER = (
    "- {provider: mine, machine_type: box, region: a, devices: 2, price_per_hour: 9, source: contract, "
    "date: 2026-11-01}"
)
Advise = Callable[..., str]


def write_machine(folder: Path, offers: str) -> None:
    (folder / "machine").mkdir()
    (folder / "machine" / "mine.yaml").write_text(f"defaults: [h100, _self_]\nname: mine\nrented:\n{offers}\n")


def compare(run_advise: Advise, *words: str) -> Any:
    return json.loads(run_advise(*WORDS, *words, "--json"))


@pytest.mark.parametrize("nodes", [1, 2])
def test_hours_and_costs_are_those_computed_by_hand(run_advise: Advise, nodes: int) -> None:
    places = PLACES if nodes == 1 else "where=own:h100:8:2.5,rented:a3-highgpu-8g"  # network rate unknown
    rows = compare(run_advise, places, f"nodes={nodes}")["rows"]
    assert len(rows) == (3 if nodes == 1 else 2)
    for row in rows:
        ranks = row["nodes"] * row["devices_per_node"]
        for end, step_s in (("likely", "step_s"), ("low", "low_s"), ("high", "high_s")):
            hours = 1e6 / (8 * ranks) * row["step"][step_s] / 3600
            assert row["hours"][end] == pytest.approx(hours)
            assert row["cost"][end] == pytest.approx(hours * nodes * NODE_PRICES[row["place"]], rel=1e-4)
    assert [row["cost"]["likely"] for row in rows] == sorted(row["cost"]["likely"] for row in rows)


def test_rows_that_miss_the_deadline_come_last(run_advise: Advise) -> None:
    free = {row["place"]: row for row in compare(run_advise, PLACES)["rows"]}
    slow, fast = free["spot g2-standard-12"]["hours"], free["own h100"]["hours"]
    between = (fast["high"] + slow["low"]) / 2
    rows = compare(run_advise, PLACES, f"deadline={between:.3f}h")["rows"]
    assert [row["meets_deadline"] for row in rows] == [True, True, False]
    assert rows[-1]["place"] == "spot g2-standard-12"
    inside = (slow["likely"] + slow["high"]) / 2
    found = {row["place"]: row for row in compare(run_advise, PLACES, f"deadline={inside:.3f}h")["rows"]}
    assert found["spot g2-standard-12"]["meets_deadline"] is None, "the likely time meets it, the slow end does not"
    assert "spot g2-standard-12, full training: the least cost" not in run_advise(
        *WORDS, PLACES, f"deadline={between:.3f}h"
    )


def test_every_method_has_a_row_or_a_reason(run_advise: Advise) -> None:
    """The advice has a table row for a training method that fits into the device's memory. For a method that does not
    fit, it has the reason instead. The model has 8 billion parameters: on one L4, full training does not fit and QLoRA
    fits."""
    words = ("model=llama_3_8b", "samples=1000", "batch.micro=1", "engine=ddp", "adapter=none,qlora")
    answer = json.loads(run_advise(*words, "where=spot:g2-standard-12", "--json"))
    assert [(row["method"], row["nodes"], row["fits"]) for row in answer["rows"]] == [("qlora", 1, True)]
    (left,) = answer["left_out"]
    assert left["what"] == "spot g2-standard-12, full training" and "no configuration fits" in left["why"]


def test_unknown_price_of_an_own_node_is_one_line(run_advise: Advise) -> None:
    output = run_advise(*WORDS, "where=own:h100:8")
    assert "own h100, full training: the shortest time; no price is known" in output
    assert "own h100: unknown; add the price of a device per hour: where=own:h100:8:2.5" in output
    assert " unknown" in next(line for line in output.splitlines() if line.startswith("  own h100  "))


def test_places_that_share_a_machine_are_distinguished_by_their_devices(run_advise: Advise) -> None:
    one, eight = "own h100 (1 device)", "own h100 (8 devices)"
    output = run_advise(*WORDS, "where=own:h100:1:2.9,own:h100:8:2.5,own:h200:8:9")
    assert f"→ {eight}, full training: the least cost; costs overlap with {one}, full" in output
    assert [line.split("  ")[1] for line in output.splitlines() if " × " in line] == [eight, one, "own h200"]
    assert f"  {one}: 2.9 per hour for 1 device, as given\n" in output
    assert f"  {eight}: 20 per hour for 8 devices, as given\n" in output
    unknown = compare(run_advise, "where=own:h100:1,own:h100:8:2.5")["rows"]
    assert [(row["place"], row["price_per_hour"]) for row in unknown] == [(eight, 20), (one, None)]


def test_own_price_in_a_machine_file_is_used(run_advise: Advise, tmp_path: Path) -> None:
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine" / "mine.yaml").write_text("defaults: [h100, _self_]\nname: mine\nprice_per_device_hour: 3\n")
    (row,) = compare(run_advise, "where=own:mine:4", "--config-dir", str(tmp_path))["rows"]
    assert row["cost"]["likely"] == pytest.approx(row["hours"]["likely"] * 4 * 3)


def test_text_has_prices_with_their_date_and_what_costs_leave_out(run_advise: Advise) -> None:
    output = " ".join(run_advise(*WORDS, PLACES).split())
    assert "87.8325 USD per hour in us-east4" in output and "read 2026-11-26" in output
    assert "may take back a spot node" in output and "in the same currency (USD)" in output
    assert "Failures are not included" in output
    assert "Failures are not included" not in run_advise(*WORDS, PLACES, "storage=2e9")


def test_offers_of_an_own_machine_file_are_found_and_the_cheapest_region_is_chosen(
    run_advise: Advise, tmp_path: Path
) -> None:
    other = OFFER.replace("region: a", "region: b").replace("price_per_hour: 9", "price_per_hour: 8, currency: EUR")
    write_machine(tmp_path, f"{OFFER}\n{other}")
    answer = compare(run_advise, "where=rented:box", "--config-dir", str(tmp_path))
    (row,) = answer["rows"]
    assert (row["price_per_hour"], row["currency"], row["devices_per_node"], row["machine"]) == (8, "EUR", 2, "mine")
    assert row["price"].endswith("; the lowest price, before 9 USD in a (mine)")


def test_own_price_of_a_shipped_node_type_is_shown_with_the_list_price(run_advise: Advise, tmp_path: Path) -> None:
    write_machine(tmp_path, OFFER.replace("box", "a3-highgpu-8g"))
    output = " ".join(run_advise(*WORDS, "where=rented:a3-highgpu-8g", "--config-dir", str(tmp_path)).split())
    assert "9 USD per hour in a; contract; read 2026-11-01; the lowest price, before 87.8325 USD in us-east4" in output


def test_own_machine_file_with_the_name_of_a_shipped_file_is_refused(run_advise: Advise, tmp_path: Path) -> None:
    write_machine(tmp_path, OFFER)
    (tmp_path / "machine" / "mine.yaml").rename(tmp_path / "machine" / "h100.yaml")
    line = run_advise(*WORDS, "where=rented:a2-highgpu-8g", "--config-dir", str(tmp_path), fails=True)
    assert line.startswith("zeroscale: machine=h100: both ") and line.endswith("; rename your file\n")


@pytest.mark.parametrize("place", ["own:h100:8", "rented:a3-highgpu-8g"])
def test_missing_config_folder_is_refused(run_advise: Advise, place: str) -> None:
    line = run_advise(*WORDS, f"where={place}", "--config-dir", "nosuch", fails=True)
    assert line == "zeroscale: --config-dir nosuch: no such folder; name a folder with subfolders like those of conf/\n"


@pytest.mark.parametrize("place", ["box", "a3-highgpu-8g"])
@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ("- {provider: mine", "expected ',' or '}', but got '<stream end>' (line 5); correct the file"),
        (OFFER.replace("2026-11-01", "2026-13-01"), "machine.rented.0.date=2026-13-01: must be a date such as"),
        (OFFER.replace(": 9", ": -20"), "machine.rented.0.price_per_hour=-20: must be a number > 0; set machine."),
        (OFFER.replace(": 9", ": 1e9"), "machine.rented.0.price_per_hour=1e+09: not between 0.001 and 1e+06; the unit"),
        (f"{OFFER}\n{OFFER}", "machine.rented.1.machine_type=box: is listed twice for mine in a; remove the older"),
        (OFFER.replace("region: a", "region: a, regoin: b"), "machine.rented.0.regoin: no such key; did you mean reg"),
        (
            "  provider: mine",
            "machine.rented: must be a list of sections; `zeroscale explain machine.rented` describes",
        ),
    ],
)
def test_wrong_offer_of_an_own_machine_file_is_one_line_with_its_file(
    run_advise: Advise, tmp_path: Path, place: str, offers: str, expected: str
) -> None:
    write_machine(tmp_path, offers)
    line = run_advise(*WORDS, f"where=rented:{place}", "--config-dir", str(tmp_path), fails=True)
    assert f"{tmp_path}/machine/mine.yaml: " in line and expected in line


def test_python_interface_returns_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    question = {"model": "gpt2_medium", "engine": "ddp", "batch.micro": 8, "samples": 1000, "where": ["own:h100:8:2.5"]}
    (row,) = api.compare_places(question).rows
    assert row.cost and row.cost.likely == pytest.approx(20 * row.hours.likely)


def test_table_in_python_is_short_and_becomes_a_data_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    question = {"model": "gpt2_medium", "engine": "ddp", "batch.micro": 8, "samples": 1000, "deadline": "2h"}
    table = api.compare_places(question | {"where": "own:h100:8:2.5,own:h200:8"})
    first, *lines = repr(table).splitlines()
    assert first == "<PlaceTable 2 rows, 0 left out"
    assert [line.strip().partition(",")[0] for line in lines] == ["own h100", "own h200"]
    assert all(len(line) < 200 for line in lines) and "cost unknown" in lines[1]
    frame = pandas.DataFrame(table.list_cells())
    assert frame["hours_likely"].tolist() == [row.hours.likely for row in table.rows]
    assert frame["cost_low"].isna().tolist() == [False, True]


def test_wrong_place_in_a_mapping_is_named_without_quotes() -> None:
    with pytest.raises(api.UserError, match=r"^where=own h100: a place begins with own:, rented: or spot:;"):
        api.compare_places({"model": "gpt2_medium", "samples": 1000, "where": "own h100"})
    with pytest.raises(api.UserError, match=r"^deadline=2 years: not"):
        api.advise({"model": "gpt2_medium", "samples": 1000, "machine": "h100", "deadline": "2 years"})


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("where=own:h100",), "where=own:h100: an own place is own:MACHINE:DEVICES or own:MACHINE:DEVICES:PRICE"),
        (("where=mine:h100:8",), "where=mine:h100:8: a place begins with own:, rented: or spot:; write for example"),
        (("where=own:h1000:8",), "where=own:h1000:8: no machine h1000; did you mean h100?"),
        (("where=own:h100:0",), "'0' is not a number of devices per node; write for example"),
        (("where=own:h100:8:free",), "'free' is not a price of a device per hour above 0"),
        (("where=own:h100:8:nan",), "'nan' is not a price of a device per hour above 0"),
        (("where=rented:a3-hihgpu-8g",), "no machine file has a price of a3-hihgpu-8g; did you mean a3-highgpu-8g?"),
        (("where=rented:a3-highgpu-8g:8",), "a rented place is rented:NODE_TYPE; write"),
        (("where=rented:",), "where=rented:: a rented place is rented:NODE_TYPE; write for example"),
        (("where=own::8",), "where=own::8: an own place is own:MACHINE:DEVICES or own:MACHINE:DEVICES:PRICE; write"),
        (("where=spot:gpu_8x_v100",), "spot: the spot price of gpu_8x_v100 from lambda is unknown; remove spot"),
        (("where=own:h100:8,own:h100:8",), "where=own:h100:8: a place is given twice; remove one of them"),
        (("where=own:h100:8", "where=own:h100:4"), "where=own:h100:4: where is given twice"),
        (("where=own:h100:8", "machine=h100"), "machine=h100: each place sets it; remove it"),
        (("where=own:h100:8", "adapter=none,qlola"), "adapter=qlola: no such file in conf/adapter; did you mean"),
        (("where=own:h100:8", "budget=3"), "budget=3: not supported in a comparison of places; remove it"),
        (("where=own:h100:8", "--page", "x.html"), "--page: a comparison of places has no page"),
        (("where=spot:g2-standard-12", "model=llama_3_8b"), "where: no place can do this training; spot g2-"),
    ],
)  # fmt: skip
def test_wrong_place_is_one_line(run_advise: Advise, words: tuple[str, ...], line: str) -> None:
    assert line in run_advise(
        "samples=1000", *(() if any("model=" in word for word in words) else WORDS[:4]), *words, fails=True
    )


def test_training_without_a_length_is_refused(run_advise: Advise) -> None:
    line = run_advise(*WORDS[:4], "where=own:h100:8", fails=True)
    assert line == "zeroscale: where: the training has no length; add samples=100_000\n"
