"""Tests of the container image for launcher=vertex. `zeroscale prepare` writes its Dockerfile, and the tests run the
steps of this file."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from vertex_study import QUICK

from bench.cli import main

WORDS = (*QUICK, "launcher.staging_bucket=gs://bucket")
IMAGE = "registry.example.com/my-project/r/zeroscale:1"
pytestmark = pytest.mark.processes


def prepare(capsys: pytest.CaptureFixture[str], results: Path, *words: str, code: int = 0) -> str:
    assert main(["prepare", *words, "--results", str(results), "--json"]) == code
    output = capsys.readouterr()
    return output.out or output.err


def run_step(dockerfile: str, step: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run one RUN step of the Dockerfile as the image build would run it, in the folder `folder`. The step is the only
    RUN step that contains the text `step`."""
    (line,) = (found for found in re.findall(r"^RUN ((?:.*\\\n)*.*)$", dockerfile, re.MULTILINE) if step in found)
    line = line.replace("python3 ", f"{shlex.quote(sys.executable)} ")
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}  # no test uses the network
    return subprocess.run(["sh", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_image_stages_and_checks_the_needs_of_the_points(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (found,) = json.loads(prepare(capsys, tmp_path, *WORDS, "batch.micro=2,4"))
    folder = tmp_path / "adhoc" / "prepare" / "image"
    assert found["subject"] == f"image {IMAGE}" and found["state"] == "note"
    commands = [shlex.split(command) for command in found["remedy"].split(" && ")]
    assert [command[0] for command in commands] == ["pip", "docker", "gcloud", "docker"]
    assert commands[0][-2:] == [str(folder), str(Path(__file__).parents[2])]
    assert commands[1] == ["docker", "build", "--tag", IMAGE, str(folder)]
    assert commands[2][-1] == "registry.example.com" and commands[3][-1] == IMAGE
    dockerfile = (folder / "Dockerfile").read_text()
    assert dockerfile.startswith("# Image of the jobs") and "FROM ubuntu:24.04\n" in dockerfile
    assert f"ENV ZEROSCALE_CONTAINER_DIGEST={IMAGE}\n" in dockerfile
    assert sorted(path.name for path in folder.iterdir()) == ["Dockerfile", "needs-0.json"]
    for mode in ("stage", "check"):
        done = run_step(dockerfile, f"staging {mode}", folder)
        assert done.returncode == 0 and '"state": "ok"' in done.stdout, done.stdout + done.stderr


def test_a_missing_need_makes_the_build_fail(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prepare(capsys, tmp_path, *WORDS, "data=text", "data.tokenizer=my_tokenizer")
    folder = tmp_path / "adhoc" / "prepare" / "image"
    done = run_step((folder / "Dockerfile").read_text(), "staging stage", folder)
    assert done.returncode == 1 and '"state": "missing"' in done.stdout, done.stdout + done.stderr


def test_gpu_ops_need_the_architecture_of_the_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept = [word for word in WORDS if not word.startswith(("machine=", "launcher.machine_type=", "engine="))]
    words = (
        *kept,
        "machine=l4",
        "launcher.machine_type=g2-standard-4",
        "engine=zero2",
        "optimizer.implementation=native",
    )
    told = prepare(capsys, tmp_path, *words, code=2)
    assert "--arch: ops must be compiled for the jobs' GPU" in told and "8.9 for L4" in told
    prepare(capsys, tmp_path, *words, "--arch", "8.9")
    folder = tmp_path / "adhoc" / "prepare" / "image"
    needs = json.loads((folder / "needs-0.json").read_text())
    assert (needs["operations"], needs["architecture"], needs["elsewhere"]) == (["FusedAdam"], "8.9", False)
    assert "FROM nvidia/cuda:" in (folder / "Dockerfile").read_text()
