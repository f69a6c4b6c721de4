"""Tests of Slurm site files: valid options, and the messages for invalid options."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from slurm_jobs import options

from bench.cli import main
from bench.config import compose
from bench.core.errors import UserError
from bench.launchers.slurm import Options, check
from bench.sweep import inputs

CONF = compose.find_conf_folder() / "launcher"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("launcher.gpus='--gres=gpu:4'", "launcher.gpus=--gres=gpu:4: requests the same number of GPUs"),
        ("launcher.gpus='gpu:{devices}'", "launcher.gpus=gpu:{devices}: is not an option of sbatch"),
        ("launcher.extra=[mail]", "launcher.extra.0=mail: is not an option of sbatch; begin it with --"),
        (
            "launcher.extra=['--clusters=b']",
            "selects another cluster, but squeue, sacct and scancel would use the default cluster",
        ),
        ("launcher.extra=['-Mb']", "remove it, and export SLURM_CLUSTERS="),
        ("launcher.silence_s=60", "agent_silence_s=60 must be above silence_s=60"),
        ("launcher.extra=['--a\nb']", "is empty or not one line of text"),
        ("+launcher.environment.A-B=1", "is not a name of an environment variable"),
        ("+launcher.environment.HF_TOKEN=abc", "looks like a secret"),
        ("launcher.span=gpu", "launcher.span=gpu: must be one of node, device; "),
        ("launcher.warning_s=120 launcher.time_limit_min=2", "is not longer than warning_s=120"),
        (
            "launcher.gpus=8",
            "launcher.gpus=8: must be text or null; set launcher.gpus=--gres=gpu:{devices}, for example",
        ),
        ("launcher.cpus_per_device=many", "launcher.cpus_per_device=many: must be an integer > 0 or null; "),
        (
            "launcher.account=7",
            "launcher.account=7: must be text or null; write it in quotes: launcher.account='\"7\"'",
        ),
        ("launcher.python=python3", "must be a list of text or null; write a list, such as launcher.python=[python3]"),
        (
            "launcher.container=x",
            "launcher.container=x: must be a section or null; `zeroscale explain launcher.container`",
        ),
        ("+launcher.environment.A=[1]", "launcher.environment.A=[1]: must be text or integer or number; "),
        ("launcher.partitoin=a", "launcher.partitoin: no such key; did you mean launcher.partition?"),
        (
            "launcher.container={runtime:docker,image:a}",
            "launcher.container.runtime=docker: must be one of apptainer, pyxis, command; ",
        ),
    ],
)
def test_invalid_option_is_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        options("slurm", *override.split(" "))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_rendezvous_host_of_several_nodes_must_name_the_first_node() -> None:
    asked = compose.compose_request(
        compose.parse_single(
            ["nodes=2", "devices_per_node=2", "launcher=slurm", "launcher.network.rendezvous_host=head"]
        )
    )
    with pytest.raises(UserError, match=r"write \{host\} in place of the node's name"):
        check(asked.launcher_options, asked.spec)


ACCEPTED = (
    "today", "tomorrow", "NOON", "midnight", "teatime", "fika", "now", "now+90", "now+1hour", "now + 3 days",
    "now-1hour", "20:00", "8:30pm", "10:00am", "8:30 PM tomorrow", "noon tomorrow", "tomorrow-noon", "tomorrow 8:00",
    "tomorrow20:00", "12/31", "1/2", "12/31/30-20:00", "1231", "123130", "12.31.30", "2030-01-20", "2030-01-20T12:34",
    "2030-01-20T12:34:00", "2030-01-20 12:34", "now+1hour tomorrow", "uts1900000000",
)  # fmt: skip
REFUSED = (
    "tomorow", "monday", "now+1h", "+2hours", "20", "20h", "8:5", "25:00", "13:00pm", "13/1", "31.12.30", "2030-13-01",
    "2030-1-2",
)  # fmt: skip
"""Values of `sbatch --begin` that sbatch 22.05 refuses. A test below compares this list, and the list of accepted
values, with the installed sbatch."""


def begin(value: str) -> str:
    """Return the error message for this value of the option `launcher.begin` (the time before which a job must not
    start). Return an empty text if the value is accepted."""
    try:
        compose.compose_request([("launcher", "slurm"), ("devices_per_node", 1), ("launcher.begin", value)])
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", ACCEPTED)
def test_begin_time_accepted_by_sbatch_is_accepted(value: str) -> None:
    assert begin(value) == ""


@pytest.mark.parametrize("value", REFUSED)
def test_begin_time_refused_by_sbatch_is_refused_before_submission(value: str) -> None:
    remedy = "did you mean tomorrow?" if value == "tomorow" else ""
    assert begin(value).startswith(f"launcher.begin={value}: is not a time that sbatch --begin accepts; {remedy}")


@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("sbatch"), reason="needs sbatch")
def test_installed_sbatch_accepts_and_refuses_the_same_begin_times(tmp_path: Path) -> None:
    """sbatch stops at the first invalid option, before it contacts the Slurm controller. The test passes the begin
    time, and after it an option that is always invalid. So the error message names the begin time only if sbatch
    refuses the begin time."""
    (tmp_path / "slurm.conf").write_text("ClusterName=c\nSlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=2\n")
    variables = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}

    def refuses(value: str) -> bool:
        words = ["sbatch", "--test-only", f"--begin={value}", "--time-min=wrong", "--wrap=true"]
        stderr = subprocess.run(words, env=variables, capture_output=True, text=True, check=False).stderr
        assert "Invalid --begin" in stderr or "Invalid --time-min" in stderr, stderr
        return "Invalid --begin" in stderr

    assert [value for value in REFUSED if not refuses(value)] == []
    assert [value for value in ACCEPTED if refuses(value)] == []


def test_message_has_the_command_line_option_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "launcher=slurm", "devices_per_node=1", "--results", str(tmp_path)]
    assert main([*words, "--begin", "tomorow"]) == 2
    message = "--begin tomorow: is not a time that sbatch --begin accepts; did you mean tomorrow?"
    assert capsys.readouterr().err.splitlines()[-1] == f"zeroscale: {message}"
    assert not list(tmp_path.iterdir())


GPUS = "launcher.gpus=--gres=gpu:{devices}"


@pytest.mark.parametrize("words", [[GPUS], ["launcher.extra=[--gpus=8]"], ["launcher.exclusive=true"]])
def test_job_on_a_machine_with_gpus_must_request_gpus(words: list[str]) -> None:
    """Without a request for GPUs, the job would wait in the queue for hours, and then fail because its ranks find no
    GPU."""
    asked = ["machine=h200", "devices_per_node=8", "launcher=slurm"]
    without = compose.compose_request(compose.parse_single(asked))
    with pytest.raises(UserError) as refused:
        inputs.check_devices(without)
    assert str(refused.value) == (
        "machine=h200: has GPUs, but jobs of launcher=slurm request none; set launcher.gpus=--gres=gpu:{devices}"
    )
    inputs.check_devices(compose.compose_request(compose.parse_single([*asked, *words])))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep"], "devices_per_node: launcher=mine uses other machines"),
        (["sweep", "machine=h200", "devices_per_node=8"], "machine=h200: has GPUs, but jobs of launcher=mine request"),
        (["run", "devices_per_node=1"], "launcher=mine: `zeroscale run` runs on this computer only"),
        (["rehearse", "devices_per_node=1"], "launcher=mine: a rehearsal runs on this machine"),
    ],
)
def test_message_has_the_name_of_the_site_file_and_not_of_its_base_launcher(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "mine.yaml").write_text("defaults: [slurm, _self_]\n")
    assert main([*words, "model=tiny", "launcher=mine", "--config-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"zeroscale: {message}") and "launcher=slurm" not in error


def test_queue_option_without_a_queue_is_refused_with_the_name_of_the_site_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "mine.yaml").write_text("defaults: [local, _self_]\n")
    assert main(["sweep", "launcher=mine", "--nice", "5", "--config-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("zeroscale: --nice: launcher=mine has no queue; ")


def test_job_on_a_machine_without_gpus_need_not_request_gpus() -> None:
    for machine in ("cpu", "auto"):
        asked = [f"machine={machine}", "devices_per_node=2", "launcher=slurm"]
        inputs.check_devices(compose.compose_request(compose.parse_single(asked)))


def test_dry_run_of_a_gpu_job_without_requested_gpus_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "model=tiny", "machine=h200", "devices_per_node=8", "launcher=slurm", "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("launcher.gpus=--gres=gpu:{devices}", "--gres=gpu:{devices}"),
        ("launcher.gpus=--gpus-per-node=a100:{devices}", "--gpus-per-node=a100:{devices}"),
        ('launcher.gpus="--gres=gpu:{devices}"', "--gres=gpu:{devices}"),
        ("launcher.constraint=a100&nvlink=1", "a100&nvlink=1"),
        ("launcher.extra=[--gpus=8]", ["--gpus=8"]),
        ("launcher.extra=[--gpus=8, '--mail-type=END,FAIL', --nice]", ["--gpus=8", "--mail-type=END,FAIL", "--nice"]),
        ("+launcher.environment.FLAGS=-a=1", "-a=1"),
    ],
)
def test_option_with_an_equals_sign_needs_no_extra_quotes(override: str, value: object) -> None:
    assert [found for _, found in compose.parse_single([override])] == [value]


def test_malformed_overrides_are_refused_in_one_line() -> None:
    for text in ("model.name=a=b", "launcher.gpus", "launcher.extra=[--gpus=8"):
        with pytest.raises(UserError) as refused:
            options("slurm", text)
        assert str(refused.value).count("\n") == 0


def test_default_file_has_every_option_with_a_comment() -> None:
    path = CONF / "slurm.yaml"
    values = yaml.safe_load(path.read_text())
    assert values.pop("name") == "slurm"
    assert set(values) == set(Options.model_fields)
    assert Options.model_validate(values) == Options()
    lines = [line for line in path.read_text().splitlines() if re.match(r"[a-z_]+:", line)]
    assert all("#" in line for line in lines if line.partition(":")[0] in values and not line.endswith(":"))


@pytest.mark.parametrize("path", sorted(CONF.glob("slurm_*.yaml")), ids=lambda path: path.stem)
def test_site_file_has_only_options_that_differ_from_the_defaults(path: Path) -> None:
    values, defaults = yaml.safe_load(path.read_text()), Options().model_dump(mode="json")
    assert values.pop("defaults") == ["slurm", "_self_"]
    assert values.keys() <= defaults.keys() and not [key for key in values if values[key] == defaults[key]]


def test_options_survive_a_round_trip_through_json() -> None:
    for path in CONF.glob("slurm*.yaml"):
        chosen = options(path.stem)
        assert Options.model_validate_json(chosen.model_dump_json()) == chosen
