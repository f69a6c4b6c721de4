"""`zeroscale status`, `resume` and `cancel` where no scheduler is needed."""

import json
import subprocess
import sys
from pathlib import Path

from sweeps import attempt, point, spec, sweep

from bench.sweep import asked


def zeroscale(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bench.cli", *words], capture_output=True, text=True, timeout=120)


def test_status_shows_every_point_and_succeeds_once_all_are_answered(tmp_path: Path) -> None:
    four, eight = spec(batch__micro=4), spec(batch__micro=8)
    asked.write(tmp_path, sweep([point(four), point(eight)]))
    attempt(tmp_path, four, "ok")
    told = zeroscale("status", str(tmp_path))
    assert told.returncode == 1
    assert [line.split()[0] for line in told.stdout.splitlines()] == ["ok", "waiting", "2"]
    attempt(tmp_path, eight, "oom")
    told = zeroscale("status", str(tmp_path), "--json")
    assert told.returncode == 0
    states = [(found["state"], found["outcome"]) for found in json.loads(told.stdout)["points"]]
    assert states == [("answered", "ok"), ("answered", "oom")]


def test_what_was_asked_twice_at_the_same_moment_is_kept_twice(tmp_path: Path) -> None:
    made = sweep([point(spec())])
    assert asked.write(tmp_path, made) != asked.write(tmp_path, made)
    assert len(asked.read(tmp_path)) == 2


def test_a_folder_without_a_sweep_is_refused_in_one_line(tmp_path: Path) -> None:
    for verb in ("status", "resume", "cancel"):
        told = zeroscale(verb, str(tmp_path))
        assert (told.returncode, told.stderr.count("\n")) == (2, 1) and "no sweep was asked for" in told.stderr


def test_ten_thousand_answered_points_are_shown(tmp_path: Path) -> None:
    """How long that takes is for the benchmark."""
    made = spec()
    points = [point(made).model_copy(update={"config_id": f"{number:010x}"}) for number in range(10_000)]
    asked.write(tmp_path, sweep(points))
    record = (attempt(tmp_path / "one", made, "ok") / "record.json").read_bytes()
    for one in points:
        folder = tmp_path / one.config_id / "0.0"
        folder.mkdir(parents=True)
        (folder / "record.json").write_bytes(record)
    told = zeroscale("status", str(tmp_path))
    assert told.returncode == 0 and told.stdout.endswith("10000 points: 10000 ok\n"), told.stderr
