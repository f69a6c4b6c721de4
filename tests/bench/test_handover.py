"""`zeroscale advise --export`: a folder that starts where this package is not."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path

import pytest

from bench.cli import main
from bench.engines.deepspeed.facts import build_deepspeed_config
from bench.engines.deepspeed.options import Options
from bench.spec import RunSpec

XL = (
    "model=mt5_xl",
    "machine=h200",
    "devices_per_node=8",
    "nodes=1",
    "batch.micro=16",
    "activation_checkpointing=true",
)
SITE = ("launcher.partition='a b; true'", "launcher.gpus='--gres=gpu:{devices}'")


@pytest.fixture(scope="module")
def handed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, nothing = tmp_path_factory.mktemp("handed") / "it's mine", tmp_path_factory.mktemp("none")
    words = [*XL, *SITE, "engine=zero2", "batch.accumulation=4", "tokens=1e11"]
    assert main(["advise", *words, "--results", str(nothing), "--export", str(folder)]) == 0
    return folder


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Ask for a folder that cannot be handed over; return the one line that says so."""

    def line(*words: str) -> str:
        assert main(["advise", *XL, *words, "--results", str(tmp_path)]) == 2
        return capsys.readouterr().err

    return line


def test_the_folder_holds_what_it_needs_and_imports_nothing_of_us(handed: Path) -> None:
    names = {"ds_config.json", "model.json", "training_arguments.json", "train.py", "job.sh", "README.md"}
    assert {path.name for path in handed.iterdir()} == names
    nodes = list(ast.walk(ast.parse((handed / "train.py").read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    outside = {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert outside == {"torch", "deepspeed", "transformers"}
    assert "bench" not in (handed / "job.sh").read_text()


def test_its_deepspeed_config_is_the_one_that_a_run_gets(handed: Path) -> None:
    spec = RunSpec.model_validate(
        {
            "model": {"name": "m", "shape": {}},
            "engine": {"name": "zero2", "backend": "deepspeed"},
            "data": {"name": "d", "source": "s"},
            "devices_per_node": 8,
            "batch": {"micro": 16, "accumulation": 4},
        }
    )
    options = Options(stage=2, reduce_bucket_size=50_000_000, overlap_comm=True)
    given = json.loads((handed / "ds_config.json").read_text())
    assert given == json.loads(json.dumps(build_deepspeed_config(options, spec)))
    assert given["train_batch_size"] == 16 * 4 * 8


def test_transformers_knows_every_training_argument_and_they_say_what_deepspeed_is_told(handed: Path) -> None:
    found = util.find_spec("transformers")
    assert found and found.submodule_search_locations
    source = (
        Path(found.submodule_search_locations[0]) / "training_args.py"
    ).read_text()  # importing it needs accelerate
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    (theirs,) = [node for node in classes if node.name == "TrainingArguments"]
    fields = [line.target for line in theirs.body if isinstance(line, ast.AnnAssign)]
    given = json.loads((handed / "training_arguments.json").read_text())
    assert set(given) <= {field.id for field in fields if isinstance(field, ast.Name)}
    config = json.loads((handed / "ds_config.json").read_text())
    assert given["per_device_train_batch_size"] == config["train_micro_batch_size_per_gpu"]
    assert given["gradient_accumulation_steps"] == config["gradient_accumulation_steps"]
    adam = config["optimizer"]["params"]
    assert (given["learning_rate"], given["adam_beta1"], given["adam_beta2"]) == (adam["lr"], *adam["betas"])
    assert given["gradient_checkpointing"] is True
    assert given["max_steps"] == -(-100_000_000_000 // (512 * 640))  # tokens over samples × tokens of each, rounded up


def test_its_job_script_is_sound_and_quotes_what_a_user_names(handed: Path) -> None:
    script = handed / "job.sh"
    subprocess.run(["bash", "-n", script], check=True)
    subprocess.run([Path(sys.executable).with_name("shellcheck"), "--shell=bash", script], check=True)
    text = script.read_text()
    assert '#SBATCH --partition="a b; true"' in text
    assert "#SBATCH --gres=gpu:8" in text


def test_its_job_script_starts_one_torchrun_per_node(handed: Path, tmp_path: Path) -> None:
    """Programs of Slurm that only show how they were called."""
    for name, shows in (("srun", 'printf "%s\\n" "$PWD" "$@"'), ("scontrol", "printf 'gpu07\\ngpu08\\n'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{shows}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_SUBMIT_DIR": str(handed)}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | job
    command = ["bash", str(handed / "job.sh"), "--save", "here"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd="/")
    where, *words = told.stdout.splitlines()
    assert Path(where) == handed
    assert words[: words.index("python3")] == [
        "--kill-on-bad-exit=1", "--export=ALL", "--nodes=1", "--ntasks-per-node=1",
    ]  # fmt: skip
    assert "--nproc-per-node=8" in words and "--rdzv-endpoint=gpu07:21234" in words
    train = words[words.index("train.py") :]
    assert train[1:5] == ["--encoder", "512", "--decoder", "128"]
    assert train[-2:] == ["--save", "here"]


def test_nothing_is_overwritten(handed: Path, refused: Callable[..., str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in handed.iterdir()}
    assert "nothing is overwritten" in refused("engine=zero2", "--export", str(handed))
    assert {path: path.stat().st_mtime_ns for path in handed.iterdir()} == before
    assert "make it first" in refused("engine=zero2", "--export", str(handed / "deep" / "er"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("engine=ddp",), "engine=zero0,zero1,zero2,zero3"),
        (("engine=zero2", "model.loss_chunk_tokens=128"), "leave it out"),
        (("engine=zero2", "model.attention=flex"), "set model.attention=sdpa"),
        (("engine=zero2", "launcher.container={runtime: apptainer, image: a.sif}"), "starts no container"),
        (("engine=zero2", "launcher=local"), "launcher=local: writes no job script"),
    ],
)
def test_what_cannot_be_handed_over_leaves_nothing_behind(
    refused: Callable[..., str], tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    assert told in refused(*words, "--export", str(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
@pytest.mark.thorough
def test_it_trains_where_this_package_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    words = ["model=tiny", "engine=zero3", "engine.reduce_bucket_size=1000000", "machine=h200", "devices_per_node=1",
             "nodes=1", "batch.micro=2", "batch.accumulation=2", "activation_checkpointing=true"]  # fmt: skip
    assert main(["advise", *words, "--results", str(tmp_path), "--export", str(folder)]) == 0
    program = (
        "import sys, runpy, deepspeed; sys.modules['bench'] = None; sys.argv = sys.argv[1:];"
        "deepspeed.ops.__compatible_ops__ = {};"  # on a CPU it would compile an op for half a minute that nothing calls
        "runpy.run_path('train.py', run_name='__main__')"
    )
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    } | alone
    asked = ["train.py", "--steps", "2", "--encoder", "16", "--decoder", "8", "--log-every", "1"]
    command = [sys.executable, "-c", program, *asked]
    told = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert told.returncode == 0, told.stderr
    steps = [line.split()[:2] for line in told.stdout.splitlines() if line.startswith("step ")]
    assert steps == [["step", "0"], ["step", "1"]]
