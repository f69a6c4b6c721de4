"""Tests of job scripts. The script of a job must contain the options of a site file. Names in the script must be
quoted, so that a shell never executes a name as a command."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from slurm_jobs import FOLDER, STUDY, options, script, work

from bench.config import compose
from bench.core.errors import UserError
from bench.launchers.slurm import Options, plan
from bench.launchers.slurm.script import quote_directive

GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = sorted(path.stem for path in (compose.find_conf_folder() / "launcher").glob("slurm*.yaml"))
NASTY = "x; rm -rf ~ $(touch gone) `touch gone` \"a\" 'b' #c % é &|><*?\n\t!"
EVERYTHING = {
    "python": ["my python", "-X", "utf8"],
    "partition": NASTY.replace("\n\t", ""),
    "account": "a",
    "qos": "q",
    "constraint": "[rack1|rack2]",
    "reservation": "r",
    "gpus": "--gres=gpu:{devices}",
    "cpus_per_device": 3,
    "memory_gb": 10,
    "exclusive": True,
    "modules": ["gcc/13", "a b; true"],
    "environment": {"NASTY": NASTY, "NUMBER": 3},
    "setup": ["source /dev/null", "if true; then\n    true\nfi"],
    "extra": ["--mail-type=END"],
    "srun": ["--mpi=none", "--label; true"],
    "throttle": 4,
    "nice": 5,
    "begin": "now+1hour",
    "requeue": False,
    "warning_s": 0,
}


def directives(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


def command(text: str) -> list[str]:
    """Return the words of a script's last command, parsed as a shell does."""
    return shlex.split(text[text.index("\nexec ") :].replace("\\\n", ""))[1:]


# -- complete generated scripts


@pytest.mark.parametrize("site", ["slurm_gpu_modules", "slurm_gpu_pyxis"])
def test_example_sites_generate_the_golden_scripts(site: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    array = {"tasks": 30} if site == "slurm_gpu_pyxis" else {"after": ("12", "13"), "exclude": ("gpu07",)}
    made = script(work(**array), options(site)).replace(str(tmp_path), "/home/me/zeroscale")
    golden, new = GOLDEN / f"{site}.sh", tmp_path / f"{site}.sh"
    new.write_text(made)
    assert made == golden.read_text(), f"the script has changed; if that is meant: cp {new} {golden}"


@pytest.mark.parametrize("site", EXAMPLES)
@pytest.mark.parametrize(
    ("more", "changes"),
    [({}, {}), ({}, {"devices_per_node": 0}), (EVERYTHING, {}), (EVERYTHING, {"tasks": 3, "after": ("1", "2_3")})],
    ids=["site", "small", "everything", "array"],
)
def test_every_script_passes_bash_and_shellcheck(
    site: str, more: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "x; rm -rf ~ %j" / "jobs" / "it's"
    chosen = Options.model_validate(options(site).model_dump() | more)
    path = tmp_path / "job.sh"
    path.write_text(script(work(folder=folder, arguments=(str(folder), NASTY), **changes), chosen))
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    meant = "SC2016"  # a $ inside the script's single quotes is literal text on purpose
    subprocess.run([shellcheck, "--shell=bash", f"--exclude={meant}", path], check=True)


def test_modules_are_purged_before_the_sites_modules_are_loaded() -> None:
    lines = script(
        work(), Options(modules=("gcc/13", "cuda"), setup=("source /etc/profile.d/modules.sh",))
    ).splitlines()
    begin = lines.index("source /etc/profile.d/modules.sh")
    assert [line.partition(" #")[0] for line in lines[begin + 1 :][:3]] == [
        "module purge",
        "module load gcc/13",
        "module load cuda",
    ]
    assert "module" not in script(work(), Options())


def test_header_of_a_script_explains_that_a_dry_run_writes_no_file() -> None:
    about = script(work(), Options()).splitlines()[1]
    assert "zeroscale writes this script when it submits the job (not in a dry run)" in about
    assert about.endswith(f"sbatch {FOLDER}/job.sh")


# -- everything that reaches a shell is quoted


def test_names_given_by_users_are_never_executed(tmp_path: Path) -> None:
    folder = tmp_path / "x; touch gone" / "jobs" / "$(touch gone)"
    folder.mkdir(parents=True)
    chosen = Options.model_validate({"environment": {"NASTY": NASTY}, "python": ["printenv; true", "$(touch gone)"]})
    text = script(work(folder=folder, arguments=(NASTY,)), chosen)
    show = "printf '%s\\0' \"$NASTY\" "
    run = ["bash", "-c", text.replace("\nexec ", f"\n{show}")]
    shown = subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]
    assert shown[0] == NASTY
    assert shown[-6:] == ["printenv; true", "$(touch gone)", "-P", "-m", "bench.sweep.allocation", NASTY]
    assert [path.name for path in tmp_path.rglob("gone")] == []


@pytest.mark.parametrize("text", ["plain-1.2_3", "x; rm -rf ~", 'a "b" \\c', "#no comment", "é", "%j", "a\\"])
def test_directive_is_quoted_for_sbatch(text: str) -> None:
    # sbatch parses a line like a shell without expansions, and shlex does the same.
    assert shlex.split(f"--output={quote_directive(text)} --next", comments=True) == [f"--output={text}", "--next"]


def test_percent_signs_in_the_log_path_are_escaped() -> None:
    text = script(work(folder=Path("/r/100% %j/jobs/a")), Options())
    assert '--output="/r/100%% %%j/jobs/a/slurm-%j.log"' in directives(text)


def test_script_contains_no_environment_variables_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    assert "hf_abc" not in script(work(), options("slurm_gpu_modules"))


# -- resources


def test_job_requests_the_resources_of_its_points() -> None:
    chosen = Options(gpus="--gres=gpu:a100:{devices}", cpus_per_device=12, memory_gb=0)
    asked = directives(script(work(nodes=4, devices_per_node=6), chosen))
    wanted = {"--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=72", "--gres=gpu:a100:6", "--mem=0", "--time=90"}
    assert wanted <= set(asked)
    assert "--mem=480G" in directives(script(work(), Options(memory_gb=480)))


def test_span_device_starts_one_supervisor_per_device() -> None:
    text = script(work(), Options(span="device", cpus_per_device=12, gpus="--gpus-per-node={devices}"))
    assert {"--ntasks-per-node=8", "--cpus-per-task=12", "--gpus-per-node=8"} <= set(directives(text))
    assert {"--nodes=2", "--ntasks-per-node=8", "--cpus-per-task=12"} <= set(command(text))


def test_script_has_no_directives_for_unset_options() -> None:
    asked = {option.partition("=")[0] for option in directives(script(work(time_limit_min=None), Options()))}
    mine = {"--job-name", "--output", "--open-mode", "--chdir", "--nodes", "--ntasks-per-node", "--signal", "--requeue"}
    assert asked == mine


def test_time_limit_of_a_job_includes_setup_time() -> None:
    chosen = Options(time_limit_min=30.5, setup_min=10)
    assert "--time=41" in directives(script(work(time_limit_min=None), chosen))
    assert "--time=90" in directives(script(work(), chosen))


def test_autopilot_job_requests_one_core_and_no_gpu_or_container() -> None:
    text = script(work(devices_per_node=0, module="bench.cli"), options("slurm_gpu_pyxis", "launcher.python=[python]"))
    asked = directives(text)
    assert {"--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=2G", "--partition=batch"} <= set(asked)
    assert not any("gpu" in option for option in asked)
    assert "--signal=B:TERM@60" in asked, "it is no step of the job, which alone are told by default"
    assert command(text) == [sys.executable, "-P", "-m", "bench.cli", str(FOLDER)]


def test_array_has_a_log_per_task_and_a_throttle() -> None:
    asked = directives(script(work(tasks=30), Options(throttle=4)))
    assert {"--array=0-29%4", f"--output={FOLDER}/slurm-%A_%a.log"} <= set(asked)
    assert "--array=0-29" in directives(script(work(tasks=30), Options()))


def test_job_has_directives_for_dependencies_and_excluded_nodes() -> None:
    asked = directives(script(work(after=("12", "13_4"), exclude=("n1", "n2")), Options(nice=3, begin="20:00")))
    assert {"--dependency=afterany:12:13_4", "--exclude=n1,n2", "--nice=3", "--begin=20:00"} <= set(asked)


def test_warning_before_the_time_limit_is_sigterm() -> None:
    assert "--signal=TERM@90" in directives(script(work(), Options(warning_s=90)))
    assert not any("signal" in option for option in directives(script(work(), Options(warning_s=0))))


# -- the command that a job runs


def test_job_runs_the_current_python_unless_another_is_set() -> None:
    assert command(script(work(), Options()))[-5:] == [
        sys.executable,
        "-P",
        "-m",
        "bench.sweep.allocation",
        str(FOLDER),
    ]
    assert command(script(work(), Options(python=("python3", "-O"))))[-6:-4] == ["python3", "-O"]


def test_srun_ends_all_tasks_if_one_fails_and_exports_the_environment() -> None:
    words = command(script(work(), Options(srun=("--mpi=none",))))
    assert words[0] == "srun" and {"--kill-on-bad-exit=1", "--export=ALL", "--mpi=none"} <= set(words)


def bindings(**chosen: Any) -> list[str]:
    """Return the options of srun that bind processes to cores, memory and GPUs. `chosen` are options of the
    launcher."""
    return [word for word in command(script(work(), Options.model_validate(chosen))) if "-bind" in word]


def test_bindings_of_one_supervisor_per_node_and_of_one_task_per_device() -> None:
    gpus = "--gpus-per-node={devices}"
    assert bindings() == ["--cpu-bind=none"]
    assert bindings(gpus=gpus, cpus_per_device=12) == ["--cpu-bind=none", "--gpu-bind=none"]
    per_device = {"span": "device", "cpus_per_device": 12}
    assert bindings(**per_device) == ["--cpu-bind=cores", "--mem-bind=local"]
    assert bindings(**per_device, gpus=gpus) == ["--cpu-bind=cores", "--mem-bind=local", "--gpu-bind=none"]
    assert bindings(span="device") == [], "whose cores are how many is not known"
    assert bindings(**per_device, gpus="--gpus-per-task=1") == ["--cpu-bind=cores", "--mem-bind=local"]


def test_bindings_of_the_site_take_precedence() -> None:
    site = ["--cpu-bind=map_ldom:0,1", "--gpu-bind=closest"]
    assert bindings(gpus="--gpus-per-node={devices}", srun=site) == site
    assert bindings(span="device", cpus_per_device=12, srun=site) == ["--mem-bind=local", *site]


def test_container_mounts_the_studys_folder() -> None:
    container = {"image": "/images/z.sif", "mounts": ["/data:/data:ro", "/src"], "options": ["--nv"]}
    apptainer = Options.model_validate({"container": container | {"runtime": "apptainer"}})
    words = command(script(work(), apptainer))
    binds = ["--bind", str(STUDY), "--bind", "/data:/data:ro", "--bind", "/src"]
    inside = [*binds, "/images/z.sif", "python3", "-P", "-m", "bench.sweep.allocation", str(FOLDER)]
    assert words[words.index("apptainer") :] == ["apptainer", "exec", "--nv", *inside]
    pyxis = Options.model_validate({"container": container | {"runtime": "pyxis", "options": []}})
    words = command(script(work(), pyxis))
    assert f"--container-mounts={STUDY}:{STUDY},/data:/data:ro,/src:/src" in words
    assert "--container-image=/images/z.sif" in words and words[-5] == "python3"


def test_site_can_set_its_own_container_command() -> None:
    prefix = ["podman-hpc", "run", "--volume={study}:{study}", "{image}"]
    container = {"runtime": "command", "image": "zeroscale:1", "command": prefix}
    words = command(script(work(), Options.model_validate({"container": container})))
    inside = ["podman-hpc", "run", f"--volume={STUDY}:{STUDY}", "zeroscale:1", "python3", "-P", "-m"]
    assert words[words.index("podman-hpc") :][: len(inside)] == inside
    for wrong in ({"command": []}, {"mounts": ["/data"]}, {"runtime": "apptainer"}):
        with pytest.raises(ValidationError, match="write"):
            Options.model_validate({"container": container | wrong})


def test_container_digest_is_part_of_the_environment_class() -> None:
    container = {"runtime": "apptainer", "image": "z.sif"}
    digest = "export ZEROSCALE_CONTAINER_DIGEST="
    assert f"{digest}z.sif\n" in script(work(), Options.model_validate({"container": container}))
    container["digest"] = "sha256:12"
    assert f"{digest}sha256:12\n" in script(work(), Options.model_validate({"container": container}))


# -- the launch plan, and options that it refuses


def test_launch_plan_writes_no_files(tmp_path: Path) -> None:
    made = plan(work(folder=tmp_path), Options())
    assert made.command == ("sbatch", "--parsable", f"{tmp_path}/job.sh") and list(made.files) == [tmp_path / "job.sh"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/r/back\\slash/jobs/a", "/r/line\nbreak/jobs/a"])
def test_folder_with_characters_unsupported_by_slurm_is_refused(folder: str) -> None:
    with pytest.raises(UserError, match="choose another results folder"):
        plan(work(folder=Path(folder)), Options())


def test_folder_that_cannot_be_mounted_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be mounted"):
        plan(work(folder=Path("/r/12:30/jobs/a")), options("slurm_gpu_pyxis"))


def test_autopilot_job_has_its_own_partition_and_begin_time() -> None:
    small = work(module="bench.cli", arguments=("resume", "x"), devices_per_node=0)
    site = {"partition": "gpu", "qos": "long", "constraint": "a100", "account": "me", "begin": "20:00"}

    def place(**own: str) -> set[str]:
        keys = ("--partition", "--qos", "--constraint", "--account", "--begin")
        text = script(small, Options.model_validate(site | {"autopilot": own}))
        return {line for line in directives(text) if line.startswith(keys)}

    as_the_others = {"--partition=gpu", "--qos=long", "--constraint=a100", "--account=me"}
    assert place() == as_the_others, "it goes on at once: its jobs waited for the evening already"
    assert place(begin="now+1hour") == as_the_others | {"--begin=now+1hour"}
    assert place(partition="cpu", qos="short") == {"--partition=cpu", "--qos=short", "--account=me"}
    assert "--begin=20:00" in directives(script(work(), Options.model_validate(site)))
