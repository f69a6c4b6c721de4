"""Tests of `zeroscale explain`, which describes the names in tables, reports, records and configs."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from installed_packages import Install

from analysis.columns import list_all_columns
from analysis.flags import FLAGS, NOTES, OUTCOMES, REMEDIES
from bench import cli
from bench.cli.explain import Explanation, list_explanations
from bench.core.record import OutcomeKind
from bench.sweep.status import State


@pytest.fixture(scope="module")
def known() -> list[Explanation]:
    return list(list_explanations())


def test_every_column_flag_note_and_outcome_is_explained(known: list[Explanation]) -> None:
    meanings = {(one.kind, one.name): one.meaning for one in known}
    assert {name for kind, name in meanings if kind == "column"} == set(list_all_columns())
    assert meanings["column", "tokens_per_s"] == list_all_columns()["tokens_per_s"].meaning
    assert {name for kind, name in meanings if kind == "flag"} == set(FLAGS)
    assert {name for kind, name in meanings if kind == "note"} == set(NOTES)
    assert set(OUTCOMES) == set(get_args(OutcomeKind))


def test_every_state_of_a_run_is_explained(known: list[Explanation]) -> None:
    assert {one.name for one in known if one.kind == "state of a run"} == set(get_args(State))


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_every_option_in_the_help_of_a_verb_is_explained(
    verb: str, known: list[Explanation], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    shown = set(re.findall(r"^  (--[a-z][a-z-]*)", capsys.readouterr().out, flags=re.MULTILINE))
    of = {one.name for one in known if one.kind == "option" and verb in dict(one.details)["of"].split(", ")}
    assert of == shown


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deadline", "deadline (word of advise)\n  longest time of the training"),
        ("max-queued", "--max-queued (option)\n  maximum number of the sweep's jobs in the queue\n  of: sweep"),
        ("max_queued", "--max-queued (option)"),
        ("gate", "--gate (option)"),
        ("repeats", "--repeats (option)"),
        ("serial fraction", "serial fraction (word of reports)\n  share of a step that more nodes do not shorten"),
    ],
)
def test_options_and_words_are_explained_by_their_help(
    name: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", name]) == 0
    assert expected in capsys.readouterr().out


def test_name_in_another_case_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "MFU", "Batch.Micro"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("mfu (column)\n") and "\nbatch.micro (config key)\n" in output


def test_option_with_dashes_is_refused_with_its_correct_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--max-queued"]) == 2
    assert capsys.readouterr().err.endswith("; write the name without dashes: zeroscale explain max-queued\n")


def test_every_name_except_keys_and_files_has_an_explanation(known: list[Explanation]) -> None:
    assert [one for one in known if not one.meaning and "key" not in one.kind and "file" not in one.kind] == []


def test_several_names_are_explained_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "oom", "batch.micro", "predict"]) == 0
    assert capsys.readouterr().out == (
        "oom (outcome)\n  the device ran out of memory\n  tried again: no\n\n"
        "batch.micro (config key)\n  samples per device and forward pass\n  type: integer > 0\n  default: 4\n\n"
        f"predict (command)\n  {cli.COMMANDS['predict']}\n  see: zeroscale predict --help\n"
    )


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("interval_level", "probability that the intervals of step_s"), ("standing", "verdict on sample_s"),
        ("ratio_low", "lower end of the interval of ratio"), ("cost_to_loss", "median cost of a repeat until"),
    ],
)  # fmt: skip
def test_column_of_a_derived_table_is_explained(name: str, meaning: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", name]) == 0
    assert capsys.readouterr().out.startswith(f"{name} (column of derived tables)\n  {meaning}")


def test_last_part_of_a_key_or_file_is_sufficient(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "micro", "mt5_xl", "--json"]) == 0
    found = [(one["kind"], one["name"]) for one in json.loads(capsys.readouterr().out)]
    assert found == [("column", "micro"), ("config key", "batch.micro"), ("file of conf/model", "model=mt5_xl")]


def test_every_flag_and_note_has_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(REMEDIES) == {*FLAGS, *NOTES}
    assert cli.main(["explain", "short"]) == 0
    assert "\n  what to do: measure longer: set measure=full" in capsys.readouterr().out


def test_group_is_explained_by_its_files_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "engine", "engine.stage"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("engine (group of config keys)\n  the training engine")
    assert "files: ddp, fsdp, " in out and "engine.reduce_bucket_size" in out
    assert "1: optimizer state" in out
    assert max(map(len, out.splitlines())) <= 100


def test_own_node_types_and_files_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "machine").mkdir()
    offer = "{provider: me, machine_type: box, region: a, devices: 2, price_per_hour: 9, source: b, date: 2026-11-01}"
    (tmp_path / "machine" / "mine.yaml").write_text(f"# our node\nname: mine\nrented:\n- {offer}\n")
    assert cli.main(["explain", "box", "machine=mine", "--config-dir", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith(
        "box (rented node type)\n  a node of me with 2 devices of mine\n  price per hour: 9 USD in a"
    )
    assert second == "machine=mine (file of conf/machine)\n  our node\n"
    assert cli.main(["explain", "box", "--config-dir", str(tmp_path / "none")]) == 2
    assert "/none: no such folder; name a folder with subfolders like those of conf/" in capsys.readouterr().err


def test_plugins_of_zeroscale_and_of_installed_packages_are_explained(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(
        "zeroscale.objective", "summed_lm = summed", '"""Sums of losses.\n\nMore."""\nKINDS, REDUCTION = (), "sum"\n'
    )
    assert cli.main(["explain", "summed_lm", "fsdp"]) == 0
    own, shipped = capsys.readouterr().out.split("\n\n")[:2]
    expected = "summed_lm (objective plug-in)\n  Sums of losses.\n  module: summed\n  select: objective.name=summed_lm"
    assert own == expected
    assert shipped.startswith("fsdp (engine plug-in)\n") and shipped.endswith("select: engine.backend=fsdp")


@pytest.mark.parametrize("group", ["batch", "measure", "model", "launcher", "data", "parallel", "learning"])
def test_every_group_of_keys_has_an_explanation(group: str, known: list[Explanation]) -> None:
    assert next(one.meaning for one in known if one.name == group)


def test_explain_without_a_name_lists_all_names_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("command:\n  run  init  sweep") and "\n\nflag:\n  drill" in out and "model=tiny" in out


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("tokens_per_sec", "did you mean tokens_per_s?"),
        ("comm_eror", "did you mean comm_error?"),
        ("engine.overlap_com", "did you mean engine.overlap_comm?"),
        ("qqqqqqqq", "`zeroscale explain` lists all names"),
    ],
)
def test_unknown_name_is_refused_in_one_line(word: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", word]) == 2
    rule = "no column, flag, outcome, figure, plug-in, command, option, config key or file of conf/ has this name"
    assert capsys.readouterr().err == f"zeroscale: {word}: {rule}; {remedy}\n"
