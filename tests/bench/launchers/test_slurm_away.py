"""Tests of the launcher while Slurm does not respond, or responds too late.

Shell scripts replace Slurm's programs, so that a program can fail in the middle of a submission.
"""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from slurm_jobs import options, work

from bench.core.errors import UserError
from bench.core.scheduling import ClusterLimits, JobContext, SchedulerUnavailable
from bench.launchers.slurm import Options, ask, cancel_all, cluster, limits, plan, states, submit
from bench.launchers.slurm.queue import find_end, list_queued

AWAY = "Unable to contact slurm controller (connect failure)"
SLOW = "Socket timed out on send/recv operation"


class Programs:
    """Shell scripts that replace Slurm's programs and count their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calls = folder / "calls"
        self._calls.touch()

    def play(self, name: str, *, says: str = "", error: str = "", then: str = "") -> None:
        """Write a shell script that replaces the program `name`. It prints `says`. If `error` is given, it prints this
        error message and fails instead.

        From the second call on, the script first executes the shell code `then`.
        """
        done = f"echo '{name}: error: {error}' >&2; exit 1" if error else f"printf '%s' '{says}'; exit 0"
        second = self.folder / f"{name}.second"
        again = f"if [ -e {second} ]; then {then}; fi\ntouch {second}\n" if then else ""
        self.write(name, f"echo {name} >> {self._calls}\n{again}{done}")

    def write(self, name: str, shell: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{shell}\n")
        path.chmod(0o755)

    def called(self, name: str) -> int:
        return sum(line.split()[0] == name for line in self._calls.read_text().splitlines())


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("env", "sleep", "touch"):
        (folder / tool).symlink_to(f"/usr/bin/{tool}")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("bench.launchers.slurm.queue._PAUSES_S", (0.01, 0.01, 0.01))
    return Programs(folder)


def row(name: str, number: int = 77, state: str = "PENDING") -> str:
    """Return a line of squeue's output. `name`, `number` and `state` are those of the job in this line."""
    values = {"ArrayJobID": number, "ArrayTaskID": "N/A", "State": state, "RestartCnt": 0, "NumNodes": 1, "Name": name}
    columns = [column.split(":") for column in states.SQUEUE_FORMAT.split(",")]
    return "".join(f"{values.get(field, 'N/A')!s:<{width}}" for field, width in columns) + "\n"


def submitted(folder: Path) -> str:
    return submit(plan(work(folder=folder), Options()))


def test_submission_is_retried_until_the_controller_is_available(programs: Programs, tmp_path: Path) -> None:
    programs.play("sbatch", error=f"Batch job submission failed: {AWAY}", then="echo '12;cluster'; exit 0")
    programs.play("squeue")
    assert submitted(tmp_path) == "12" and programs.called("sbatch") == 2


def test_job_accepted_without_a_reply_is_not_submitted_twice(programs: Programs, tmp_path: Path) -> None:
    programs.play("sbatch", error=f"Batch job submission failed: {SLOW}")
    programs.play("squeue", says=row("another", 76) + row(work().name, 77))
    assert submitted(tmp_path) == "77" and programs.called("sbatch") == 1


def test_submission_is_not_retried_while_squeue_is_unavailable(programs: Programs, tmp_path: Path) -> None:
    programs.play("sbatch", error=f"Batch job submission failed: {SLOW}")
    programs.play("squeue", error=AWAY)
    with pytest.raises(SchedulerUnavailable):
        submitted(tmp_path)
    assert programs.called("sbatch") == 1 and programs.called("squeue") == 3


def test_refused_submission_is_reported_at_once_with_slurms_message(programs: Programs, tmp_path: Path) -> None:
    programs.play("sbatch", error="Batch job submission failed: Invalid account or account/partition combination")
    with pytest.raises(
        UserError, match=r"launcher\.account=null: .*Invalid account or account/partition combination; `sacctmgr"
    ) as refused:
        submitted(tmp_path)
    assert not isinstance(refused.value, SchedulerUnavailable) and programs.called("sbatch") == 1
    assert (tmp_path / "job.sh").exists(), "to be looked at"


@pytest.mark.parametrize(
    ("site", "error", "told"),
    [
        ({"constraint": "a100"}, "Invalid feature specification", r"launcher\.constraint=a100: .*; `sinfo --format"),
        (
            {"reservation": "mine"},
            "Requested reservation is invalid",
            r"launcher\.reservation=mine: .*; `scontrol show",
        ),
        ({"memory_gb": 9}, "Memory specification can not be satisfied", r"launcher\.memory_gb=9G: .*; reduce launcher"),
    ],
)
def test_refusal_names_the_option_and_a_remedy(
    programs: Programs, tmp_path: Path, site: dict[str, object], error: str, told: str
) -> None:
    programs.play("sbatch", error=f"Batch job submission failed: {error}")
    made = Options.model_validate(site)
    with pytest.raises(UserError, match=told):
        submit(plan(work(folder=tmp_path), made), made)


def test_submission_without_slurm_is_refused_with_a_remedy(programs: Programs, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not installed on this machine; run the command on a login node"):
        submitted(tmp_path)


def test_cluster_limits_are_empty_on_a_machine_without_slurm(programs: Programs) -> None:
    assert limits(options("slurm_gpu_modules")) == ClusterLimits()


@pytest.mark.parametrize(
    ("default", "site", "variable", "expected"),
    [
        ("proj", {}, "", 25),
        ("proj", {"account": "root"}, "", 10),
        ("proj", {}, "root", 10),
        ("proj", {"extra": ["--account=root"]}, "", 10),
        ("", {}, "", 10),
    ],
    ids=["default account", "option", "variable", "not parsed", "unknown"],
)
def test_job_limit_is_that_of_the_account_that_slurm_uses(
    programs: Programs, monkeypatch: pytest.MonkeyPatch,
    default: str, site: dict[str, object], variable: str, expected: int,
) -> None:  # fmt: skip
    """If the account is unknown, the smallest limit of all accounts of the user counts."""
    monkeypatch.setenv("SBATCH_ACCOUNT", variable)
    programs.play("scontrol", says="ClusterName = c\n")
    programs.play("sinfo")
    accounts = "proj||long|25|\nroot|||10|\n"
    programs.write("sacctmgr", f"case $4 in user) echo '{default}';; assoc) printf '{accounts}';; esac")
    assert limits(Options.model_validate(site)).max_submit_jobs == expected


def test_unavailable_scheduler_is_an_error_and_not_an_empty_queue(programs: Programs) -> None:
    programs.play("squeue", error=AWAY)
    programs.play("scontrol", error=AWAY)
    questions: list[Callable[[], object]] = [lambda: ask(["a"]), list_queued, lambda: limits(Options())]
    for question in questions:
        with pytest.raises(SchedulerUnavailable, match="Unable to contact"):
            question()
    programs.play("squeue")
    programs.play("sacct", error="Slurm accounting storage is disabled")
    programs.play("scontrol", says="JobCompType = jobcomp/none\n")
    assert ask(["a"]) == {}


def test_each_program_is_called_once_for_all_jobs(programs: Programs) -> None:
    names = [f"job-{number}" for number in range(5000)]
    programs.play("squeue", says="".join(row(name, number) for number, name in enumerate(names[:3000])))
    programs.play("sacct", says="9000|FAILED|1|2026-01-02T03:04:05|2026-01-02T03:04:06|1:0|None|job-3000\n")
    programs.play("scontrol", says="JobCompType = jobcomp/none\n")
    assert len(ask(names)) == 3001
    assert [programs.called(name) for name in ("squeue", "sacct", "scontrol")] == [1, 1, 1]


def test_state_from_squeue_takes_precedence_over_sacct(programs: Programs) -> None:
    programs.play("squeue", says=row("a", 12, "RUNNING"))
    programs.play("sacct", says="12|REQUEUED|1|2026-01-02T03:04:05|2026-01-02T03:04:06|0:0|None|a\n")
    assert ask(["a"])["a", None].state == "RUNNING" and programs.called("sacct") == 0


@pytest.mark.parametrize(
    ("prints", "expected"),
    [("2026-11-23T08:30:00", datetime(2026, 11, 23, 8, 30).timestamp()), ("N/A", None), ("", None)],
    ids=["known", "not known", "no such job"],
)
def test_end_of_a_job_is_read_from_squeue(programs: Programs, prints: str, expected: float | None) -> None:
    task = JobContext("13", task=3, variables={"SLURM_ARRAY_JOB_ID": "12"})
    for job, number in ((JobContext("7"), "7"), (task, "12_3")):
        programs.write("squeue", f'[ "$2" = --jobs={number} ] && echo {prints}')
        assert find_end(job) == expected
    programs.play("squeue", error=AWAY)
    assert find_end(task) is None


def test_users_squeue_variables_do_not_change_the_output(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    programs.write("squeue", '[ -z "$SQUEUE_STATES" ]')
    assert list(list_queued()) == []


def test_job_submitted_within_a_job_inherits_no_variables_of_that_job(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {
        "SLURM_JOB_ID": "5",
        "SLURM_MEM_PER_NODE": "2048",
        "SLURM_NTASKS": "1",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_JOB_NAME": "another",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_ACCOUNT": "mine",
        "SBATCH_ARRAY_INX": "0-3",  # would make an array of any job
        "SBATCH_DEPENDENCY": "afterok:1",
        "ZEROSCALE_JOB": '{"job_id": "s-1"}',
    }.items():
        monkeypatch.setenv(name, value)
    seen = tmp_path / "seen"
    programs.write("sbatch", f"env > {seen}\necho 6")
    assert submitted(tmp_path) == "6"
    kept = {line.partition("=")[0] for line in seen.read_text().splitlines()}
    of_a_job = ("SLURM", "SBATCH", "ZEROSCALE_JOB")
    assert {name for name in kept if name.startswith(of_a_job)} == {"SLURM_CONF", "SBATCH_ACCOUNT"}


def test_cancelling_is_one_call_and_ended_jobs_are_no_error(programs: Programs) -> None:
    programs.play("scancel", error="Kill job error on job id 3: Invalid job id specified")
    cancel_all(["1", "2", "3", "3"])
    assert programs.called("scancel") == 1
    programs.play("scancel", error=f"Kill job error on job id 3: {AWAY}")
    with pytest.raises(SchedulerUnavailable):
        cancel_all(["3"])
    programs.play("scancel", error="Kill job error on job id 3: Access/permission denied")
    with pytest.raises(UserError, match="permission denied"):
        cancel_all(["3"])


def test_program_without_a_reply_for_5_s_is_reported_and_waited_for(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert cluster._NOTICE_S == 5
    monkeypatch.setattr("bench.launchers.slurm.cluster._NOTICE_S", 0.2)
    programs.write("sbatch", "sleep 0.5; echo 7")
    assert submitted(tmp_path) == "7"
    assert caplog.messages == ["sbatch has not answered for 0 s; still waiting; stop with Ctrl-C"]


def test_program_that_replies_at_once_is_not_reported(
    programs: Programs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    programs.write("sbatch", "echo 7")
    assert submitted(tmp_path) == "7" and caplog.messages == []


def test_error_of_many_lines_is_reported_in_one(programs: Programs, tmp_path: Path) -> None:
    retries = "echo 'sbatch: error: no such file, retrying' >&2; echo 'sbatch: error: no such file, retrying' >&2"
    programs.write("sbatch", f"{retries}; echo 'sbatch: fatal: Unable to process configuration file' >&2; exit 1")
    with pytest.raises(UserError) as refused:
        submitted(tmp_path)
    assert str(refused.value) == (
        f"sbatch: no such file, retrying; fatal: Unable to process configuration file; the script is {tmp_path}/job.sh"
    )


def test_unavailable_controller_is_reported_before_each_retry(
    programs: Programs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    programs.play("sbatch", error=f"Batch job submission failed: {AWAY}", then="echo 12; exit 0")
    programs.play("squeue")
    assert submitted(tmp_path) == "12"
    [line] = caplog.messages
    assert AWAY in line and line.endswith("next try in 0.01 s; stop with Ctrl-C")


def test_squeue_call_has_a_timeout(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.launchers.slurm.cluster._ANSWER_S", 0.2)
    programs.write("squeue", "exec sleep infinity")
    with pytest.raises(SchedulerUnavailable, match="no answer within"):
        list_queued()
