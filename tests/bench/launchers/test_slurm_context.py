"""Tests of the job context that a process in a Slurm job finds, and of its part that is recorded."""

from bench.launchers.slurm import context
from bench.measure.environment import classify, probe

VARIABLES = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "paper-1",
    "SLURM_CLUSTER_NAME": "c",
    "SLURM_JOB_NODELIST": "gpu[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_PROCID": "1",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
}


def test_process_outside_a_job_has_no_context() -> None:
    assert context({"PATH": "/bin"}) is None


def test_recorded_job_has_scheduler_neutral_fields_and_slurms_variables() -> None:
    around = context(VARIABLES)
    assert around
    told = probe(classify("cpu", 1), ("gpu1", "gpu2"), {}, around)
    assert told.job and (told.job.allocation, told.job.nodelist) == ("c.7.1", "gpu[1-2]")
    assert told.slurm == {name: VARIABLES[name] for name in VARIABLES if name not in ("SLURM_PROCID", "SLURM_CONF")}
