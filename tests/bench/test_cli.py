"""Tests of the command `zeroscale`: the packages that it imports, its output, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli import COMMANDS, main

HEAVY = ("torch", "deepspeed", "transformers", "datasets", "pandas", "matplotlib", "hydra", "pydantic", "numpy")
TRAINING = ("torch", "deepspeed", "transformers", "datasets", "pandas", "matplotlib")


def zeroscale(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


def imported_by(*words: str) -> set[str]:
    """Run a command in a new process, and return the names of the top-level packages that it imports."""
    command = [sys.executable, "-X", "importtime", "-m", "bench.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    lines = (line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {name.partition(".")[0] for name in lines}


@pytest.mark.processes
def test_help_imports_no_heavy_library() -> None:
    assert not imported_by("--help") & set(HEAVY)


@pytest.mark.processes
@pytest.mark.parametrize(
    "words", [("run", "--dry-run"), ("sweep", "study=smoke", "--dry-run"), ("sweep", "study=testbed", "--dry-run")]
)
def test_planning_imports_no_training_library(words: tuple[str, ...]) -> None:
    assert not imported_by(*words) & set(TRAINING)


@pytest.mark.processes
@pytest.mark.parametrize("verb", COMMANDS)
def test_every_command_has_help(verb: str) -> None:
    done = zeroscale(verb, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: zeroscale {verb}")


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_fits_100_columns_except_for_commands_to_copy(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 100 and not line.startswith(("  zeroscale ", "  sbatch "))] == []


@pytest.mark.processes
def test_error_is_one_line_with_exit_code_2_and_v_adds_the_traceback() -> None:
    done = zeroscale("run", "batch.mico=3")
    assert done.returncode == 2
    assert done.stderr == "zeroscale: batch.mico: no such key; did you mean batch.micro?\n"
    assert "Traceback" in zeroscale("run", "batch.mico=3", "-v").stderr


@pytest.mark.processes
def test_unknown_verb_suggests_the_nearest() -> None:
    done = zeroscale("swep")
    assert (done.returncode, done.stderr) == (2, "zeroscale: swep: no such command; did you mean sweep?\n")


@pytest.mark.processes
def test_dry_run_lists_every_point_and_starts_nothing(tmp_path: Path) -> None:
    done = zeroscale("sweep", "engine=ddp,zero1,zero2", "batch.micro=1,2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    started, *_, repeats, command = done.stdout.splitlines()
    assert started == "6 points, nothing started"
    assert repeats.startswith("a single run per point is only indicative; 5 runs per point take ") and repeats.endswith(
        " node-hours:"
    )
    assert command.split() == ["zeroscale", "sweep", "engine=ddp,zero1,zero2", "batch.micro=1,2", "--repeats", "5"]
    again = zeroscale(*command.split()[1:], "--dry-run", cwd=tmp_path)
    first, *_, last = again.stdout.splitlines()
    assert first == "30 runs of 6 points, nothing started" and "indicative" not in last
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_dry_run_prints_json() -> None:
    plain = json.loads(zeroscale("run", "model=t5_11b", "engine=zero3", "--dry-run", "--json").stdout)
    assert plain["spec"]["model"]["parameters"] == 11_307_321_344
    points = json.loads(zeroscale("sweep", "study=smoke", "--dry-run", "--json").stdout)
    assert len({point["config_id"] for point in points}) == 5


@pytest.mark.processes
def test_unknown_study_suggests_the_nearest() -> None:
    done = zeroscale("sweep", "study=smok", "--dry-run")
    assert done.stderr == "zeroscale: study=smok: no such file in conf/study; did you mean smoke?\n"


@pytest.mark.processes
def test_doctor_reports_the_capabilities_of_this_machine() -> None:
    findings = json.loads(zeroscale("doctor", "--json").stdout)
    by_subject = {finding["subject"]: finding for finding in findings}
    assert by_subject["torch"]["state"] == "ok"
    assert by_subject["CPU memory counter"]["found"] == "counts a tensor's bytes exactly"


def test_options_may_stand_between_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "model=tiny", "--dry-run", "engine=zero2"]) == 0
    assert "zero2" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "expected"), [
    (["run", "--bogus"], "run: unrecognized arguments: --bogus; see `zeroscale run --help`"),
    (["sweep", "--study"], "sweep: unrecognized arguments: --study; write study=NAME"),
    (["sweep", "--study", "smoke"], "sweep: unrecognized arguments: --study; write study=smoke"),
    (["sweep", "--study=smok"], "sweep: unrecognized arguments: --study=smok; study=NAME selects a file of conf/study, "
     "and smok is none of them (--results DIR names the folder of results); did you mean smoke?"),
    (["sweep", "--model", "tini"], "sweep: unrecognized arguments: --model; model=NAME selects a file of conf/model, "
     "and tini is none of them; did you mean tiny?"),
    (["sweep", "--repeat", "3"], "sweep: unrecognized arguments: --repeat; did you mean --repeats?"),
    (["sweep", "--max-queued", "0"], "--max-queued 0: is not a positive integer; set 1 or more"),
])  # fmt: skip
def test_unknown_option_is_refused_in_one_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"zeroscale: {expected}")
    assert error.count("\n") == 1


SMOKE = str(Path(__file__).parents[1] / "data" / "runs.zip" / "smoke")


@pytest.mark.parametrize(("words", "expected"), [
    (["table", SMOKE, "--columns", ""], "--columns: is followed by an empty argument; add a value"),
    (["table", SMOKE, "--columns="], "--columns: has an empty value; add a value, or remove the option"),
    (["table", SMOKE, "--columns", ","], "--columns ,: no such column; "),
    (["table", ""], "table: is followed by an empty argument; add a value"),
    (["table", SMOKE, "--price", "nan"], "--price nan: must be a positive finite number; "),
    (["report", SMOKE, "--out", " "], "--out: is followed by an empty argument; "),
    (["report", SMOKE, "--price", "0"], "--price 0: must be a positive finite number; "),
    (["pack", "nowhere"], "nowhere: no such file or folder; "),
    (["export", SMOKE, "--to", "nothing", "--out", "x"], "--to nothing: is not one of the choices; choose from "),
    (["export", SMOKE, "--to", "mlflow"], "export: the following arguments are required: --out; "),
    (["compare", SMOKE, ""], "compare: is followed by an empty argument; "),
    (["compare", SMOKE, SMOKE, "--gate", "3"], "--gate 3: must be a percentage; write 3%"),
    (["compare", SMOKE, SMOKE, "--across", ","], "--across ,: names no field; give a field, e.g. versions.torch"),
    (["compare", SMOKE, SMOKE, "--across", "engin"], "--across engin: no such field; did you mean engine?"),
    (["compare", SMOKE, SMOKE, "--allow", "resident_bytes"], "--allow: has no meaning without --gate or --exact; add"),
    (["compare", SMOKE, SMOKE, "--strict"], "--strict: has no meaning without --gate or --exact; add --gate 3%"),
    (["compare", SMOKE, SMOKE, "--gate", "3%", "--allow", "resident_byte"],
     "--allow resident_byte: must be a count or a number of bytes; did you mean resident_bytes?"),
    (["claims", "nowhere"], "nowhere: no such file or folder; "),
    (["predict", "model=tiny", "--straggler", "0"], "predict: argument --straggler: 0: must be a factor of at least 1"),
    (["predict", "model=tiny", "--data-wait", "-1"], "predict: argument --data-wait: -1: must be a number of "),
    (["predict", "model=tiny", "--rehearsed", "nan"], "predict: argument --rehearsed: nan: must be a number of "),
    (["predict", "model=tiny", "--config-dir", "nowhere"], "--config-dir nowhere: no such folder; "),
    (["advise", "model=tiny", "tokens="], "tokens=: not a number above 0; set for example tokens=1e12"),
    (["compare", SMOKE, SMOKE, "--gate", "-3%"], "--gate -3%: must be a percentage; write it like 3%"),
    (["sweep", "study=nope.yaml"], "study=nope.yaml: no such file; give the path of a file, or a name of conf/study"),
    (["run", "--study", "nope.yaml", "--dry-run"], "--study nope.yaml: names a folder of results, not a study file; "),
    (["run", "--study", "a/b", "--dry-run"], "--study a/b: a name is made of letters, digits, "),
    (["sweep", "--max-queued", "x"], "--max-queued x: is not a positive integer; set 1 or more"),
    (["sweep", "--nice", "x"], "--nice x: must be an integer; "),
    (["sweep", "--begin", "20:00"], "--begin: launcher=local has no queue; "),
    (["rehearse", "--rank", "99", "machine=cpu", "devices_per_node=2"], "--rank 99: the run has ranks 0 to 1; "),
    (["status", "nowhere"], "nowhere: no such folder; "),
    (["resume", "nowhere"], "nowhere: no such folder; "),
    (["cancel", "nowhere"], "nowhere: no such folder; "),
    (["prepare", "machine=cpu", "--arch", "hopper"], "--arch hopper: is not a list of GPU architectures; "),
    (["calibrate", "machine=cpu", "--only", "matmul,mat"], "--only mat: no such part; did you mean matmul?"),
    (["ab", "HEAD"], "ab: the following arguments are required: REF_B; "),
    (["ab", "HEAD", "HEAD", "--rounds", "0"], "--rounds 0: is not a positive integer; set 1 or more"),
    (["ab", "HEAD", "HEAD", "--allow", "foo"], "--allow foo: must be a count or a number of bytes; "),
    (["ledger"], "ledger: this command was removed; use `zeroscale claims`"),
])  # fmt: skip
def test_wrong_value_of_every_option_is_refused_in_one_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert error.startswith(f"zeroscale: {expected}")
    assert (out, error.count("\n")) == ("", 1)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("zeroscale ")


@pytest.mark.parametrize("words", [
    ["run", "--x\ny"], ["status", "a\nb"], ["table", "x" * 300], ["run", "seed='\x1b[31m\n'"], ["swe\nep"],
])  # fmt: skip
def test_any_input_is_answered_in_one_line_without_control_characters(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.endswith("\n") and error[:-1].isprintable()


@pytest.mark.parametrize("verb", ["run", "rehearse", "sweep"])
def test_results_folder_that_cannot_be_created_is_refused_in_one_line(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = ["model=tiny", "engine=ddp", "machine=cpu", "devices_per_node=1", "--results", str(tmp_path / "file")]
    assert main([verb, *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"zeroscale: {tmp_path}/file") and "ot a directory" in error


def test_launcher_options_are_checked_before_a_sweep_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "launcher=slurm", "devices_per_node=1", "--begin", "20:00\n#", "--results", str(tmp_path)]
    assert main(words) == 2
    assert "zeroscale: --begin '20:00" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
