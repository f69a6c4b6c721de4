"""Tests on a Slurm with accounting: rejected accounts and QOS, job states from sacct, and preemption."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_processes import ours, stepping
from slurm_testbed import Testbed, wait_for
from sweeping import QUICK, Study

from bench.core.scheduling import JobState, Work
from bench.launchers.slurm import Options, ask, limits, plan, submit

pytestmark = [pytest.mark.thorough, pytest.mark.processes, pytest.mark.timeout(400)]

_QUICK_TO_SCHEDULE = "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1"


@pytest.fixture(scope="module")
def accounting(slurm_possible: None) -> Iterator[Testbed]:
    """Testbed with two nodes and Slurm's accounting daemon slurmdbd. Slurm's controller forgets ended jobs within
    seconds, so that only sacct still lists them."""
    missing = [name for name in ("slurmdbd", "mariadbd", "my_print_defaults") if not shutil.which(name)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian packages slurmdbd mariadb-{{server,client}}-core)")
    bed = Testbed("a")
    system = [Path("/var/lib/mysql"), Path("/run/mysqld"), Path("/var/spool/slurm")]
    before = [sorted(path.rglob("*")) for path in system]
    try:
        again = f"AuthInfo=socket={bed.folder}/munge/socket,cred_expire=5"
        lines = (_QUICK_TO_SCHEDULE, again, "JobCompType=jobcomp/none")
        confs = [word for line in lines for word in ("--conf", line)]
        bed.up("--nodes", "2", "--accounting", "--min-job-age-s", "3", "--kill-wait-s", "5", *confs)
        assert (bed.folder / "slurmdbd.conf").stat().st_mode & 0o077 == 0
        yield bed
    finally:
        bed("down")
    assert bed.leftovers() == []
    assert [sorted(path.rglob("*")) for path in system] == before, "no database but its own"


@pytest.fixture
def study(accounting: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Study]:
    monkeypatch.setenv("SLURM_CONF", str(accounting.folder / "slurm.conf"))
    made = Study(accounting, tmp_path)
    yield made
    accounting.slurm("scancel", "--user=root")
    wait_for(lambda: not ours(accounting.name, made.folder))


def wait_for_accounting(bed: Testbed, name: str) -> JobState:
    """Wait until squeue no longer lists the job with this name. Return the state of the job in Slurm's accounting."""
    wait_for(lambda: ask([name])[name, None].source != "squeue")
    return ask([name])[name, None]


def test_unknown_account_and_qos_are_refused_in_one_line_each(study: Study) -> None:
    for option, rule in (("account", "Invalid account or account/partition combination"), ("qos", "Invalid qos")):
        refused = study(*study.asking(*QUICK, f"launcher.{option}=nobody"), code=2)
        assert f"launcher.{option}=nobody: " in refused and rule in refused and refused.count("\n") == 1, refused
        assert "sacctmgr show assoc" in refused
    assert study.bed.slurm("squeue", "--noheader") == ""


def test_account_and_qos_reach_the_job_and_sacct_has_its_final_state(study: Study, tmp_path: Path) -> None:
    bed = study.bed
    (tmp_path / "work").mkdir()
    work = Work("accounted", tmp_path / "work", "platform", ("--terse",), nodes=1, devices_per_node=1)
    handle = submit(plan(work, Options(account="project", qos="urgent", time_limit_min=3)))
    state = wait_for_accounting(bed, "accounted")
    assert (state.source, state.handle, state.state, state.live) == ("sacct", handle, "COMPLETED", False)
    shown = ("--noheader", "--parsable2", "--allocations", "--format=Account,QOS")
    assert bed.slurm("sacct", *shown, f"--jobs={handle}").strip() == "project|urgent"


def test_limits_of_an_account_and_a_qos_are_read(study: Study) -> None:
    manage = ("sacctmgr", "--immediate", "modify")
    bed = study.bed
    assert limits(Options(account="project")).max_submit_jobs is None
    bed.slurm(*manage, "user", "root", "where", "account=project", "set", "MaxSubmitJobs=7")
    bed.slurm(*manage, "qos", "urgent", "set", "MaxSubmitJobsPerUser=5")
    try:
        assert limits(Options(account="project")).max_submit_jobs == 7
        assert limits(Options(account="project", qos="urgent")).max_submit_jobs == 5
        assert limits(Options(account="root")).max_submit_jobs is None
        bed.slurm(*manage, "qos", "normal", "set", "MaxSubmitJobsPerUser=3")
        assert limits(Options(account="root")).max_submit_jobs == 3, "the QOS of a job that names none"
        assert limits(Options(account="project", qos="urgent")).max_submit_jobs == 5
        bed.slurm(*manage, "qos", "urgent", "set", "GrpSubmitJobs=4")
        assert limits(Options(account="project", qos="urgent")).max_submit_jobs == 4
    finally:
        bed.slurm(*manage, "qos", "normal", "set", "MaxSubmitJobsPerUser=-1")
        bed.slurm(*manage, "qos", "urgent", "set", "GrpSubmitJobs=-1")
        bed.slurm(*manage, "user", "root", "where", "account=project", "set", "MaxSubmitJobs=-1")
        bed.slurm(*manage, "qos", "urgent", "set", "MaxSubmitJobsPerUser=-1")


def test_point_of_a_preempted_job_is_measured_again_and_answered_once(study: Study) -> None:
    bed = study.bed
    long_enough = ("measure.window_s=8", "measure.max_s=8")
    study.sweep(*QUICK, *long_enough, "nodes=2", "launcher.qos=normal", "batch.micro=1")
    (job,) = study.status()["jobs"]
    stepping(bed.node(1))
    urgent = ("--qos=urgent", "--exclusive", f"--nodelist={bed.node(2)}", "--output=/dev/null")
    bed.slurm("sbatch", *urgent, "--wrap=true")
    preempted = study.next_record()
    assert preempted.outcome.kind == "preempted", preempted.outcome
    study.ended()
    again = study.next_record()
    assert (again.outcome.kind, again.outcome.reason) == ("ok", ""), study.log()
    assert [record.circumstance.launcher["restart"] for record in (preempted, again)] == [0, 1]
    assert study.check() == ["answered"]
    starts = ("--noheader", "--parsable2", "--allocations", "--duplicates", "--format=State")
    ended = ["PREEMPTED", "COMPLETED"]  # accounting is updated a few seconds later than squeue
    wait_for(lambda: bed.slurm("sacct", *starts, f"--jobs={job}").split() == ended)
