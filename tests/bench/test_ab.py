"""Tests of `zeroscale ab`, which compares the step times of two git revisions or two Python environments. It measures
both in every one of several rounds. The tests use real processes and a temporary git repository."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from started_runs import ENDLESS, PATIENCE_S, QUICK, alive

from bench import cli
from bench.cli.ab import _list_small_overrides, _pointing_at
from bench.core import store
from bench.core.errors import UserError
from bench.sweep.ab import AGAIN, SET_ASIDE, ComparedSide, looks, open_sides, order_runs, run_rounds

ROOT = Path(__file__).parents[2]
SMALL = ("engine=ddp", "devices_per_node=1")

# Code that the second commit adds to an engine: one more all-reduce of 4,000 bytes in every step.
PLANTED = """
import torch, torch.distributed
_build = build
def build(*given):
    engine = _build(*given)
    step = engine.train_step
    def careless(micro_batches):
        torch.distributed.all_reduce(torch.zeros(1000))
        return step(micro_batches)
    engine.train_step = careless
    return engine
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git repository with two commits of this code. The second commit makes training slower: it adds a collective to
    each step."""
    place = tmp_path / "checkout"
    for name in ("bench", "conf"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    git(place, "init", "--quiet", "--initial-branch=main")
    commit(place, "sound")
    git(place, "tag", "sound")
    engine = place / "bench" / "engines" / "ddp" / "engine.py"
    engine.write_text(engine.read_text() + PLANTED)
    commit(place, "careless")
    return place


def git(place: Path, *words: str) -> str:
    command = ["git", "-C", str(place), "-c", "user.name=n", "-c", "user.email=e", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit(place: Path, subject: str) -> None:
    git(place, "add", "--all")
    git(place, "commit", "--quiet", "--message", subject)


def ab(checkout: Path, *words: str) -> "subprocess.Popen[str]":
    """Start `zeroscale ab` in the folder `checkout`, as a user does, and return the process. The command itself runs
    from the code of this repository."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "PYTHONSAFEPATH": "1",
        "TMPDIR": str(checkout.parent),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "bench.cli", "ab", *words]
    return subprocess.Popen(
        command, cwd=checkout, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def nothing_left(checkout: Path) -> bool:
    """Return True if `zeroscale ab` has removed its temporary git worktrees. Neither a folder nor an entry in the
    repository's list of worktrees may be left."""
    return len(git(checkout, "worktree", "list").splitlines()) == 1 and not list(checkout.parent.glob("zeroscale-ab-*"))


def test_both_sides_run_in_every_round_and_alternate_in_order() -> None:
    turns = order_runs(4, seed=0)
    assert Counter(turns) == Counter((number, side) for number in range(4) for side in (0, 1))
    first = [side for _, side in turns[::2]]
    assert first in ([0, 1, 0, 1], [1, 0, 1, 0])
    assert {order_runs(4, seed)[0] for seed in range(10)} == {(0, 0), (0, 1)}, "the seed decides who begins"


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("soundd", "soundd: neither a git revision nor a Python environment; did you mean sound?"),
        ("bench", "bench: neither a git revision nor a Python environment; choose from HEAD, main, sound"),
        ("--upload-pack=x", "--upload-pack=x: neither a git revision nor a Python environment; choose from HEAD, "),
    ],
)
def test_unknown_side_is_refused_in_one_line_and_leaves_no_files(
    checkout: Path, named: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    with pytest.raises(UserError) as error, open_sides("sound", named, checkout):
        pass
    assert str(error.value).startswith(expected)
    assert nothing_left(checkout)


def test_revision_requires_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="this folder is not a checkout of zeroscale"), open_sides("HEAD", "HEAD", None):
        pass


def test_side_is_a_revision_the_working_tree_or_an_environment(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "torch 2.12" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (checkout / "bench" / "new.py").touch()
    monkeypatch.chdir(checkout / "conf")
    with open_sides("sound", ".", checkout) as (revision, as_it_is):
        assert revision.commit == git(checkout, "rev-parse", "sound")
        assert revision.code and not (revision.code / "bench" / "new.py").exists()
        assert "careless" not in revision.called and "sound" in revision.called
        assert (as_it_is.code, as_it_is.environment) == (checkout, False)
    with open_sides(str(python), str(python.parent.parent), checkout) as (one, other):
        assert one == other._replace(name=one.name, called=one.called)
        assert (one.python, one.code, one.environment) == (python, checkout, True), "the link is not followed"
        assert (one.name, other.name) == ("a-torch-2.12", "b-torch-2.12")
    assert nothing_left(checkout)


def test_number_of_rounds_doubles_up_to_its_maximum() -> None:
    assert looks(5, 5) == looks(5, 3) == [5]
    assert looks(5, 30) == [5, 10, 20, 30]


def test_overrides_change_only_their_keys_of_the_small_point() -> None:
    assert {"model=tiny", "engine=zero2", "engine.reduce_bucket_size=1000000", "batch.micro=4"} <= set(
        _list_small_overrides([])
    )
    small = _list_small_overrides(["engine=ddp", "batch.micro=2", "measure.max_s=9"])
    assert not [word for word in small if word.startswith(("engine", "batch.micro", "measure.max_s="))]
    assert {"model=tiny", "devices_per_node=2", "measure=smoke", "sequence.encoder=128"} <= set(small)


def test_model_with_another_objective_has_its_own_lengths() -> None:
    for wrong_or_not in ([], ["sequence.encoder=32"], ["no_such_key=1"]):
        assert not [word for word in _list_small_overrides(["model=gpt2_tiny", *wrong_or_not]) if "sequence" in word]
    small = _list_small_overrides(["model=gpt2_tiny"])
    assert not [word for word in small if word.startswith(("model", "sequence"))] and "measure=smoke" in small
    assert "sequence.encoder=128" in _list_small_overrides(["model=no_such"]), "the sides say what is wrong with it"


RECORDED = Path(__file__).parents[1] / "data/runs.zip/smoke"
SCRIPTED = """#!/bin/sh
# Runs nothing: makes the next of the records that are listed in this folder for its study the next repeat.
here=$(dirname "$0")
while [ $# -gt 0 ]; do
    case "$1" in --results) results=$2 ;; --study) study=$2 ;; esac
    shift
done
n=0
while [ -e "$results/$study/id/$n.0" ]; do n=$((n + 1)); done
mkdir -p "$results/$study/id/$n.0"
echo >> "$here/$study.count"
k=$(wc -l < "$here/$study.count")
cp "$here/$(sed -n "${k}p" "$here/$study").json" "$results/$study/id/$n.0/record.json"
"""


@pytest.mark.parametrize(
    ("a", "b", "ran", "busy"),
    [
        (["quiet"] * 3, ["quiet"] * 3, 3, ()),
        (["quiet", "busy", "quiet", "quiet"], ["quiet"] * 4, 4, ()),  # both sides of the second round are repeated
        (["quiet", "busy", "quiet", "quiet", "quiet"], ["quiet", "quiet", "waiting", "quiet", "quiet"], 5, ()),
        (["busy"] * 3 + ["quiet"] * 2, ["quiet"] * 5, 5, (0,)),  # the third try at a round counts, busy or not
        (["busy"] * 9, ["busy"] * 9, 9, (0, 1, 2)),  # on a machine that is always busy, all rounds still end
    ],
)
def test_round_on_a_busy_machine_is_repeated_at_most_twice(
    a: list[str], b: list[str], ran: int, busy: tuple[int, ...], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(SCRIPTED)
    python.chmod(0o755)
    record = store.read_record(next(store.find_records([RECORDED])))
    loads = {"quiet": {"others_share": 0.01}, "busy": {"others_share": 0.3}, "waiting": {"memory_pressure_share": 0.2}}
    for name, load in loads.items():
        plain = record.model_dump(mode="json", by_alias=True)
        plain["observations"]["load"] = [{"node": 0, **load}]
        (tmp_path / f"{name}.json").write_text(json.dumps(plain))
    compared = [ComparedSide(name, name, python, None, None) for name in ("a", "b")]
    for name, plan in (("a", a), ("b", b)):
        (tmp_path / name).write_text("\n".join(plan))
    followed = list[tuple[int, str]]()
    ended = run_rounds(
        compared,
        order_runs(3, 0),
        [],
        tmp_path / "runs",
        lambda number, side, _: followed.append((number, side.name)),
    )
    assert ended == (True, list(busy))
    assert Counter(name for _, name in followed) == {"a": ran, "b": ran}
    for name in ("a", "b"):
        kept = sorted(path.name for path in (tmp_path / "runs" / name / "id").iterdir())
        assert kept == ["0.0", "1.0", "2.0"], "repeat n of both sides is round n"
    assert len(list((tmp_path / "runs" / AGAIN).rglob(f"{SET_ASIDE}{store.RECORD}"))) == 2 * (ran - 3)
    assert len(list(store.find_records([tmp_path / "runs"]))) == 6, "analysis reads only the rounds that count"


@pytest.mark.parametrize(
    ("slower", "loads", "verdict", "code"),
    [
        (1.0, (0.3, 0.3), "PASS", 0),
        (1.1, (0.3, 0.3), "FAIL", 1),
        (1.1, (0.02, 0.3), "INCONCLUSIVE", 3),  # the load of b may have made it slower
        (1.0, (0.3, 0.02), "INCONCLUSIVE", 3),  # the load of a may hide that b is slower
    ],
)
def test_verdict_from_a_busy_machine_states_that_it_was_busy(
    slower: float, loads: tuple[float, float], verdict: str, code: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Runs of at least one side have background load, and each round takes 1.5 times as long as the round before. The
    command compares two environments, a and b. In each round, steps in b take `slower` times as long as steps in a: 1.0
    (equal) or 1.1 times."""
    plain = store.read_record(next(store.find_records([RECORDED]))).model_dump(mode="json", by_alias=True)
    for side, by, load in zip(("one", "two"), (1.0, slower), loads, strict=True):
        plain["observations"]["load"] = [{"node": 0, "others_share": load}]
        python = tmp_path / side / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(SCRIPTED)
        python.chmod(0o755)
        for number in range(5):
            scale = by * 1.5**number * (1.0, 1.004, 0.997)[(number + (side == "two")) % 3]
            of = plain["observations"]["steps"]
            timed = of | {"step_s": [scale * s for s in of["step_s"]], "window_s": scale * of["window_s"]}
            observed = plain["observations"] | {"steps": timed}
            record = plain | {"observations": observed, "circumstance": plain["circumstance"] | {"repeat": number}}
            (python.parent / f"{number}.json").write_text(json.dumps(record))
        for name in ("a-one", "b-two"):
            (python.parent / name).write_text("".join(f"{number}\n" * 3 for number in range(5)))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["ab", "one", "two", "--results", "runs"]) == code
    output = capsys.readouterr().out
    assert f"{verdict}: the gate (3 %, exact) " in output
    assert ("background load differs" in output) == (loads[0] != loads[1])
    assert output.count("5 of 5 rounds on a busy machine") == 2
    assert "with busy runs only" not in output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--most-rounds", "2"], "--most-rounds 2: must be at least the number of rounds, 5; raise it"),
        (["--out", "."], "--out .: is a folder; name a file in this folder"),
        (["--out", "no/file.md"], "--out no/file.md: the folder no does not exist; create it"),
        (["--allow", "speed"], "--allow speed: "),
    ],
)
def test_wrong_options_are_refused_before_the_first_round(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["ab", "one", "two", "--results", "runs", *words]) == 2
    assert capsys.readouterr().err.startswith(f"zeroscale: {expected}")
    assert not (tmp_path / "runs").exists()


def test_interrupted_rounds_are_kept_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "ab-a-b"
    for side in ("a-one", "b-two"):
        (results / side / "id" / "0.0").mkdir(parents=True)
        (results / side / "id" / "0.0" / store.RECORD).write_text("{}")
    with (
        pytest.raises(KeyboardInterrupt),
        _pointing_at(results, argparse.Namespace(gate=0.03, allow="", strict=False), ["model"]),
    ):
        raise KeyboardInterrupt
    said = " ".join(capsys.readouterr().err.replace("\\\n", " ").split())
    assert "next, compare the finished rounds without background load: zeroscale compare" in said
    assert f"{results}/a-one {results}/b-two --paired --exact --gate 3% --across model" in said
    empty = tmp_path / "empty"
    (empty / "a-one").mkdir(parents=True)
    with (
        pytest.raises(KeyboardInterrupt),
        _pointing_at(empty, argparse.Namespace(gate=0.03, allow="", strict=False), ["model"]),
    ):
        raise KeyboardInterrupt
    assert not empty.exists()


@pytest.mark.processes
def test_added_collective_is_detected_as_a_regression(checkout: Path, tmp_path: Path) -> None:
    words = ["sound", "main", *QUICK, *SMALL, "--rounds", "1", "--results", str(tmp_path / "runs"), "--format", "json"]
    process = ab(checkout, *words)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, errors
    [line] = json.loads(output)["lines"]
    assert line["held"] == "broken" and "all_reduce_calls, all_reduce_payload_bytes" in line["doubts"]
    changes = {change["name"]: change["b"][0] - change["a"][0] for change in line["changes"]}
    assert changes == {"all_reduce_calls": 1, "all_reduce_payload_bytes": 4000}
    records = [store.read_record(path) for path in store.find_records([tmp_path / "runs"])]
    ran = {(r.circumstance.study[:1], (r.environment.git or {})["commit"]) for r in records if r.environment}
    assert ran == {("a", git(checkout, "rev-parse", "sound")), ("b", git(checkout, "rev-parse", "main"))}
    assert len(records) in (2, 4, 6), "a round on a busy machine is measured again, twice at most"
    assert nothing_left(checkout)


@pytest.mark.processes
@pytest.mark.thorough
def test_revision_compared_with_itself_shows_no_change(checkout: Path, tmp_path: Path) -> None:
    words = [*QUICK, *SMALL, "--rounds", "1", "--gate", "900%", "--results", str(tmp_path / "runs"), "--format", "json"]
    process = ab(checkout, "sound", "sound", *words)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3, errors
    answer = json.loads(output)
    assert (answer["verdict"], answer["lines"][0]["changes"]) == ("INCONCLUSIVE", []), (
        "one round is not enough to compare times"
    )


@pytest.mark.processes
def test_meaningless_overrides_are_refused_in_one_line(checkout: Path, tmp_path: Path) -> None:
    process = ab(checkout, "sound", "main", "batch.mico=2", "--results", str(tmp_path / "runs"))
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert errors.splitlines()[-1].endswith("left no record: batch.mico: no such key; did you mean batch.micro?")
    assert nothing_left(checkout)
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.processes
def test_interrupted_ab_ends_its_run_and_removes_its_worktree(checkout: Path, tmp_path: Path) -> None:
    process = ab(checkout, "sound", "main", *ENDLESS, *SMALL, "--results", str(tmp_path / "runs"))
    beat = wait_for_steps(tmp_path / "runs", process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    [record] = store.find_records([tmp_path / "runs"])
    assert store.read_record(record).outcome.kind == "cancelled"
    assert alive([rank["pid"] for rank in beat["ranks"]]) == []
    assert nothing_left(checkout)


def wait_for_steps(results: Path, process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Wait until all ranks of the current run have begun their steps. Return the content of the run's `heartbeat.json`.
    Fail if the process of `zeroscale ab` ends earlier."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for path in results.rglob(store.HEARTBEAT):
            beat: dict[str, Any] = json.loads(path.read_text())
            if beat["ranks"] and all(rank["step"] >= 0 for rank in beat["ranks"]):
                return beat
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError("the run did not get there in time")
