"""Tests of submission while the scheduler does not respond. Shell scripts replace Slurm's programs, so that each call
can fail as a test needs."""

import errno
import json
import os
import re
from pathlib import Path
from random import Random

import pytest
from sweeps import point, spec, sweep

from bench.cli import main
from bench.core.errors import UserError
from bench.core.scheduling import ClusterLimits, SchedulerUnavailable
from bench.launchers.slurm import queue
from bench.sweep import definition, jobs, submitting

WAITS = ((2, "0.01"), (3, "0.02"))
AWAY = "Unable to contact slurm controller (connect failure)"


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a study with two points, each in its own job.

    Slurm's programs are replaced by scripts. They report no jobs, and `sbatch` accepts every job and gives the jobs the
    ids 11, 12, ….
    """
    made = sweep([point(spec(batch__micro=micro)) for micro in (4, 8)])
    folder = tmp_path / "study"
    definition.write(folder, made.model_copy(update={"launcher": {"name": "slurm", "mode": "point"}}))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(queue, "_PAUSES_S", (0.01,))
    monkeypatch.setattr(submitting, "_FIRST_RETRY_S", 0.01)
    for program in ("squeue", "sacct", "sinfo", "scontrol"):
        play(tmp_path, program, "exit 0")
    play(tmp_path, "sbatch", "echo $((10 + number))")
    return folder


def play(folder: Path, program: str, shell: str) -> None:
    """Replace a program of Slurm by the shell script `shell`. In the script, the variable `number` counts the calls of
    this program, including the current call."""
    calls = folder / f"{program}.calls"
    calls.write_text("")
    count = f"echo >> {calls}\nnumber=$(wc -l < {calls})"
    (folder / program).write_text(f"#!/bin/bash\n{count}\n{shell}\n")
    (folder / program).chmod(0o755)


def test_submission_waits_for_an_unavailable_controller_when_it_reads_limits(study: Path, tmp_path: Path) -> None:
    play(tmp_path, "scontrol", f"if ((number < 3)); then echo '{AWAY}' >&2; exit 1; fi")
    with pytest.raises(SchedulerUnavailable):
        submitting.submit_pending(study, autopilot=False, patience_s=0)
    done = submitting.submit_pending(study, autopilot=False)
    assert [number for _, number in done.submitted] == ["11", "12"] and done.complete and done.queued == 2


def test_each_wait_for_the_controller_is_printed_with_a_way_to_stop(
    study: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    play(tmp_path, "scontrol", f"if ((number < 3)); then echo '{AWAY}' >&2; exit 1; fi")
    submitting.submit_pending(study, autopilot=False, patience_s=30)
    begins = [f"scontrol: {AWAY}; attempt {attempt} in {pause} s, the last within " for attempt, pause in WAITS]
    assert len(caplog.messages) == len(begins)
    for told, begin in zip(caplog.messages, begins, strict=True):
        assert told.startswith(begin) and told.endswith(" s; Ctrl-C stops, submitted jobs remain")


FULL = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
COUNTS = f"""
array=$(grep -oP '(?<=--array=0-)[0-9]+' "${{@: -1}}" || echo 0)
taken=$(cat "$0.taken" 2>/dev/null || echo 0)
if ((taken + array + 1 > 3)); then echo '{FULL}' >&2; exit 1; fi
echo $((taken + array + 1)) > "$0.taken"; echo $((10 + number))
"""


def test_array_above_the_submit_limit_is_halved_and_leaves_room_for_the_autopilot(study: Path, tmp_path: Path) -> None:
    """The scheduler refuses more than three jobs, and does not report this limit. The array of eight tasks is halved
    until the scheduler accepts it together with the job of the autopilot, which submits the remaining tasks later."""
    many = sweep([point(spec(batch__micro=micro)) for micro in range(1, 9)])
    definition.write(study, many.model_copy(update={"launcher": {"name": "slurm", "mode": "array"}}))
    play(tmp_path, "sbatch", COUNTS)
    play(tmp_path, "scancel", f"echo 2 > {tmp_path / 'sbatch.taken'}")  # the cancelled job had one task
    done = submitting.submit_pending(study, autopilot=True)
    assert [len(job.points) for job, _ in done.submitted] == [2] and done.autopilot
    assert len(done.left) == 6 and done.good


def test_autopilot_keeps_a_place_for_the_next_autopilot_in_a_full_queue(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue has three places. The running autopilot and a job of another program use two of them. The next
    autopilot gets the third place, so no job of the sweep is submitted. Therefore the next autopilot has no job to wait
    for, and starts ten minutes later."""
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    play(tmp_path, "sbatch", COUNTS)
    (tmp_path / "sbatch.taken").write_text("2")
    play(tmp_path, "scancel", f"echo 2 > {tmp_path / 'sbatch.taken'}")
    done = submitting.submit_pending(study, autopilot=True)
    assert not done.submitted and len(done.left) == 2 and done.autopilot and done.complete
    [script] = [
        path.read_text() for path in study.glob(f"{jobs.FOLDER}/*-autopilot-*/job.sh") if "begin" in path.read_text()
    ]
    assert "#SBATCH --begin=now+10minutes\n" in script and "--dependency" not in script


def test_autopilot_tries_again_while_the_queue_is_full(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, "sbatch", f"if ((number < 3)); then echo '{FULL}' >&2; exit 1; fi; echo $number")
    with pytest.raises(UserError, match="accounting/QOS policy"):
        submitting.submit_pending(study, autopilot=True)  # in a terminal
    play(tmp_path, "sbatch", f"if ((number < 3)); then echo '{FULL}' >&2; exit 1; fi; echo $number")
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    with pytest.raises(UserError, match="accounting/QOS policy"):
        submitting.submit_pending(study, autopilot=True, patience_s=0)
    done = submitting.submit_pending(study, autopilot=True)
    assert len(done.submitted) == 2 and done.autopilot


@pytest.mark.parametrize(
    ("autopilot", "told"),
    [
        (False, "the cluster allows at most 1 job in the queue"),
        (True, "the cluster allows at most 1 job in the queue, and the autopilot needs 2 places"),
    ],
)
def test_limit_of_the_cluster_is_told_with_the_places_of_the_autopilot(
    study: Path, monkeypatch: pytest.MonkeyPatch, autopilot: bool, told: str
) -> None:
    monkeypatch.setattr("bench.launchers.slurm.limits", lambda options: ClusterLimits(max_submit_jobs=1))
    done = submitting.submit_pending(study, autopilot=autopilot)
    assert (len(done.submitted), done.why_left) == (1, told)


def read_dependencies(study: Path) -> dict[str, tuple[str, str]]:
    """Return the values of the array and dependency options in the script of each job, by job id."""
    found = {}
    for job in jobs.list_submitted(study)[0]:
        script, values = (job.folder / "job.sh").read_text(), []
        for option in ("array", "dependency"):
            value = re.search(rf"^#SBATCH --{option}=(.*)$", script, re.MULTILINE)
            values.append(value[1] if value else "")
        found[str(job.handle)] = (values[0], values[1])
    return found


def test_throttle_holds_over_several_arrays(study: Path) -> None:
    """At most one array task of the sweep may run at a time. Slurm limits only the tasks within one array. Points of
    one and of two nodes are in different arrays, so the second array must wait for the end of the first."""
    many = sweep([point(spec(batch__micro=micro, nodes=nodes)) for nodes in (1, 2) for micro in (4, 8)])
    definition.write(study, many.model_copy(update={"launcher": {"name": "slurm", "mode": "array", "throttle": 1}}))
    assert len(submitting.submit_pending(study, autopilot=False).submitted) == 2
    assert read_dependencies(study) == {"11": ("0-1%1", ""), "12": ("0-1%1", "afterany:11")}


def test_throttled_job_waits_for_all_earlier_jobs_and_not_only_for_the_last(study: Path) -> None:
    many = sweep([point(spec(batch__micro=micro)) for micro in (2, 4, 6, 8)])
    definition.write(study, many.model_copy(update={"launcher": {"name": "slurm", "mode": "point", "throttle": 2}}))
    submitting.submit_pending(study, autopilot=False)
    after = [dependency for _, dependency in read_dependencies(study).values()]
    assert sorted(after) == ["", "", "afterany:11", "afterany:11:12"]


@pytest.mark.parametrize("seed", range(20))
def test_throttle_holds_if_waiting_jobs_are_cancelled_and_others_are_submitted_later(seed: int) -> None:
    """A simulated queue starts every job whose predecessors have ended. Jobs are submitted, end and are cancelled at
    random."""
    random, throttle = Random(seed), 1 + seed % 4
    queued: dict[str, int] = {}  # number of tasks by job id, oldest first
    after: dict[str, list[str]] = {}
    most = 0
    for number in range(500):
        if random.random() < 0.55:
            tasks = random.choice((1, 1, 1, 3))
            after[str(number)] = jobs.list_predecessors(queued, tasks, throttle)
            queued[str(number)] = tasks
        elif queued:
            del queued[
                random.choice(list(queued))
            ]  # the job was running and has ended, or was waiting and is cancelled
        running = [job for job in queued if not set(after[job]) & set(queued)]
        most = max(most, sum(min(queued[job], throttle) for job in running))
    assert most == throttle


def test_points_too_large_for_the_cluster_are_reported_with_exit_code_one(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = sweep([point(spec(batch__micro=4, nodes=nodes)) for nodes in (1, 4)])
    definition.write(study, large.model_copy(update={"launcher": {"name": "slurm", "mode": "point"}}))
    play(tmp_path, "scontrol", "echo 'PartitionName=main Default=YES TotalNodes=3 MaxNodes=UNLIMITED State=UP'")
    assert main(["resume", str(study)]) == 1
    told = capsys.readouterr().out
    assert "cannot start on this cluster: 1 run (nodes=4: the partition allows at most 3 nodes per job" in told
    assert "not submitted yet" not in told and told.count("job 1") == 2, told


def test_jobs_submitted_before_the_scheduler_failed_are_reported(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, "sbatch", f"if ((number > 1)); then echo '{AWAY}' >&2; exit 1; fi; echo 11")
    monkeypatch.setattr("bench.cli.resume.PATIENCE_S", 0.0)
    assert main(["resume", str(study), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [job["job"] for job in told["submitted"]] == ["11"] and "Unable to contact" in told["cut_short"]


def test_failing_function_of_a_launcher_is_named_and_is_no_full_disk(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OSError in a function of a launcher must not be reported as a full disk. In contrast, an OSError from writing
    the job's own files is reported as a failed write, and an error for lack of space as a full disk."""

    def fail_with(function: str, error: OSError) -> str:
        def fail(*_: object) -> str:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(f"bench.launchers.slurm.{function}", fail)
            assert main(["resume", str(study)]) == 2
        return capsys.readouterr().err

    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "slurm-submit")
    for function in ("submit", "limits"):
        told = fail_with(function, missing)
        failure = "failed (FileNotFoundError: [Errno 2] No such file or directory: 'slurm-submit'); "
        assert f"zeroscale: launcher=slurm: its function {function} {failure}" in told and "space" not in told
    assert not list(study.glob("jobs/*/job.json")), "no job was submitted"
    script = PermissionError(errno.EACCES, "Permission denied", str(study / "jobs" / "x" / "job.sh"))
    for own in (script, OSError(errno.ENOSPC, "No space left on device")):
        assert f"{study}: cannot be written to ({own.strerror})" in fail_with("submit", own)


@pytest.mark.parametrize(("returned", "handle"), [(7, "7"), (None, None), ("", None)])
def test_job_id_that_is_no_text_is_converted_or_refused(
    study: Path, returned: object, handle: str | None, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("bench.launchers.slurm.submit", lambda *_: returned)
    assert main(["resume", str(study)]) == (0 if handle else 2)
    handles = [path.read_text() for path in study.glob("jobs/*/handle")]
    assert handles == ["7", "7"] if handle else not handles
    refusal = f"launcher=slurm: its function submit returned {returned!r} instead of the job's id as text (str)"
    assert (refusal in capsys.readouterr().err) == (handle is None)
    assert list(study.glob("jobs/*/job.json")), "a job that may have been submitted is found by its name"


def test_submitted_jobs_are_printed_if_the_autopilot_is_refused(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path, "sbatch", "case $2 in *-autopilot-*) echo 'no job without a GPU' >&2; exit 1;; esac; echo $number")
    assert main(["resume", str(study), "--autopilot"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said[:2]] == ["job 1", "job 2"]
    assert said[2].startswith("the autopilot was not submitted: sbatch: no job without a GPU; the script is ")
    assert f"; continue with: zeroscale resume {study} --autopilot, or repeat" in said[2]


def test_refused_autopilot_names_its_own_option(study: Path, tmp_path: Path) -> None:
    [made] = definition.read(study)
    own = {**made.launcher, "partition": "main", "autopilot": {"partition": "typo"}}
    definition.write(study, made.model_copy(update={"launcher": own}))
    play(tmp_path, "sbatch", "grep -q partition=typo $2 && { echo 'Invalid partition' >&2; exit 1; }; echo $number")
    refused = submitting.submit_pending(study, autopilot=True).autopilot_refused
    assert refused.startswith("launcher.autopilot.partition=typo: Invalid partition")


def test_scheduler_that_does_not_respond_is_a_failure_and_no_invalid_command(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path, "scontrol", f"echo '{AWAY}' >&2; exit 1")
    monkeypatch.setattr("bench.cli.resume.PATIENCE_S", 0.0)
    assert main(["resume", str(study)]) == 1
    end = "no job is known to be submitted; repeat the command when the scheduler responds\n"
    assert capsys.readouterr().err == f"zeroscale: scontrol: {AWAY}; {end}"


@pytest.mark.parametrize(
    ("most", "told"), [(None, "when the other jobs have ended"), (1, "when the first job has ended")]
)
def test_start_of_the_autopilot_is_printed(
    study: Path, capsys: pytest.CaptureFixture[str], most: int | None, told: str
) -> None:
    [made] = definition.read(study)
    definition.write(study, made.model_copy(update={"rules": made.rules.model_copy(update={"max_queued": most})}))
    assert main(["resume", str(study), "--autopilot"]) == 0
    assert f"the autopilot, which starts {told}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("refused", "why"), [("*-autopilot-*", "no job without a GPU"), ("*", FULL)])
def test_autopilot_that_cannot_submit_the_next_one_ends_with_a_summary(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, why: str
) -> None:
    """The scheduler refuses the next autopilot, or every job, in all attempts."""
    monkeypatch.setattr("bench.cli.resume.build_module_command", lambda *words: ["sh", "-c", "exit 1"])
    monkeypatch.setattr("bench.cli.resume._AUTOPILOT_PATIENCE_S", 0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    play(tmp_path, "sbatch", f"case $2 in {refused}) echo '{why}' >&2; exit 1;; esac; echo $number")
    assert main(["resume", str(study), "--autopilot"]) != 0
    summary = (study / "report" / "summary.md").read_text()
    assert "The autopilot could not continue: sbatch: " in summary


def test_runs_that_a_changed_study_no_longer_has_are_counted(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.yaml"
    for micros, earlier in (("[2, 4]", 0), ("[4, 8]", 1)):
        base = "{model: tiny, machine: cpu, devices_per_node: 2, launcher: slurm}"
        file.write_text(f"name: small\nbase: {base}\naxes: {{batch.micro: {micros}}}\n")
        assert main(["sweep", f"study={file}", "--results", str(tmp_path / "runs")]) == 0
        told = "1 run of earlier sweeps is not in this sweep; `status` and `resume` include them"
        assert (told in capsys.readouterr().err) == bool(earlier)


def test_autopilot_job_gets_the_notify_command(study: Path) -> None:
    done = submitting.submit_pending(study, autopilot=True, notify="mail -s 'it is done' me")
    [script] = [path / "job.sh" for path in (study / jobs.FOLDER).iterdir() if "-autopilot-" in path.name]
    assert done.autopilot == "13" and """--autopilot '--notify=mail -s '"'"'it is done'"'"' me'""" in script.read_text()


def test_points_with_too_many_nodes_are_refused_and_the_other_points_are_submitted(study: Path, tmp_path: Path) -> None:
    play(tmp_path, "scontrol", "echo 'PartitionName=main Default=YES TotalNodes=1 MaxNodes=UNLIMITED'")
    many = sweep([point(spec(nodes=2))]).model_copy(update={"launcher": {"name": "slurm"}})
    definition.write(study, many)
    done = submitting.submit_pending(study, autopilot=False)
    assert len(done.submitted) == 1 and [one.point.nodes for one in done.left] == [2]
    assert done.why_left.startswith("nodes=2: the partition allows at most 1 node per job")
    with pytest.raises(UserError, match="nodes=2"):
        submitting.submit_pending(_alone(tmp_path), autopilot=False)


def _alone(folder: Path) -> Path:
    study = folder / "alone"
    definition.write(study, sweep([point(spec(nodes=2))]).model_copy(update={"launcher": {"name": "slurm"}}))
    return study


def test_refused_sweep_leaves_the_study_unchanged(
    tmp_path: Path, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path, "sbatch", "grep -q partition=typo $2 && { echo 'Invalid partition' >&2; exit 1; }; echo 7")
    words = "model=tiny machine=h100 devices_per_node=8 launcher=slurm launcher.gpus=--gres=gpu:{devices}"
    sweep_here = ["sweep", *words.split(), "--results", str(study.parent)]
    assert main([*sweep_here, "engine=ddp"]) == 0
    before = read_study(study.parent / "adhoc")
    assert main([*sweep_here, "engine=zero2", "launcher.partition=typo"]) == 2
    assert capsys.readouterr().err.startswith("zeroscale: launcher.partition=typo: Invalid partition")
    assert read_study(study.parent / "adhoc") == before


def read_study(folder: Path) -> tuple[list[definition.SweepDefinition], list[jobs.SubmittedJob]]:
    return definition.read(folder), jobs.list_submitted(folder)[0]


def test_resume_fails_if_the_budget_is_spent_before_all_points_have_a_result(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = sweep([point(spec(batch__micro=2))])
    budget = made.rules.budget.model_copy(update={"node_hours": 0.05})
    rules = made.rules.model_copy(update={"budget": budget})
    definition.write(study, made.model_copy(update={"launcher": {"name": "slurm", "mode": "point"}, "rules": rules}))
    job = study / jobs.FOLDER / "s-1"
    job.mkdir(parents=True)
    jobs.write_handle(job, "7")
    jobs.begin_allocation(job, jobs.AllocationPeriod("7", None, 0, 1, 100.0, 292.6))
    assert main(["resume", str(study)]) == 1
    assert "the budget is spent: 0.0535 of 0.05 node-hours" in capsys.readouterr().out
