"""Run all studies for a machine with one GPU, and pack their results into an archive.

  make gpu-study GPU_STUDY="--machine h200"     on a machine with a GPU
  make gpu-study GPU_STUDY=--trial              on a CPU: plan every study, measure one tiny point
  timeout --signal=INT 9m make gpu-study        stop in an orderly way after nine minutes

The program needs no network. Call it again to continue after an interruption. Points that already
have a result are not measured again.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CLI = "bench.cli"
TINY = ("model=tiny", "engine=zero2", "batch.micro=2", "precision=fp32", "sequence.encoder=32", "sequence.decoder=16")
SHORT = (
    "measure.warmup_steps=4", "measure.gpu_warmup_s=0", "measure.block_steps=2", "measure.min_steps=4",
    "measure.window_s=0",
)  # fmt: skip
"""Overrides with a short measurement protocol, for rehearsals (one rank run alone, without its peers) and for trials of
this program. The step times of rehearsals and trials are not compared with other runs, so a few steps are enough."""
PLAIN = {"mt5_xl": 8, "mt5_large": 16}
"""Models that are also measured with a plain transformers Trainer, each with a micro-batch size that fits in memory
with and without zeroscale."""


class Step(NamedTuple):
    """Step of the study: a Python module with command-line arguments. If the step succeeds and `output` is set, the
    text that the step printed is written to the file `output`."""

    module: str
    words: tuple[str, ...]
    output: Path | None = None
    environment: dict[str, str] = {}


def list_steps(machine: str, runs: Path, reports: Path) -> Iterator[Step]:
    """Yield the steps of the study. The most valuable steps come first, since the GPU time may end before the last
    step."""
    place = (f"machine={machine}", "--results", str(runs))

    def sweep(study: str) -> Step:
        return Step(CLI, ("sweep", f"study={study}", *place))

    # Without the variable ZEROSCALE_REQUIRE_CUDA, the tests would be skipped on a machine without a GPU, and the step
    # would succeed.
    tests = ("-q", "-rs", "tests/bench/test_cuda.py", "tests/bench/test_cuda_runs.py")
    yield Step("pytest", tests, reports / "check.txt", {"ZEROSCALE_REQUIRE_CUDA": "1"})
    yield from map(sweep, ("single_gpu", "single_gpu_tuning"))
    # Runs with another setting of the allocator must not count as repeats of the same measurement, so they have their
    # own folder.
    apart = (f"machine={machine}", "--results", str(runs / "expandable_segments"))
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    yield Step(CLI, ("sweep", "study=single_gpu_fast", *apart), environment=expandable)
    yield sweep("single_gpu_clock")
    for model, micro in PLAIN.items():
        plain = (f"model={model}", f"batch.micro={micro}", *place)
        yield Step("tests.benchmarks.plain", plain, reports / f"plain_{model}.txt")
    for overrides in list_fastest(runs / "single_gpu"):
        yield Step(CLI, ("sweep", *overrides, "--repeats", "3", "--results", str(runs / "repeats")))
    for ranks in (8, 512, 64):
        for model in ("mt5_xl", "mt5_xxl"):
            for stage in (3, 2, 1):
                rank = (f"model={model}", f"engine=zero{stage}", "batch.micro=4", f"nodes={ranks // 8}",
                        "devices_per_node=8", *SHORT, *place)  # fmt: skip
                yield Step(CLI, ("rehearse", *rank), reports / f"rehearsal_{model}_zero{stage}_{ranks}.txt")
    point = ("model=mt5_base", "batch.micro=8", "precision=bf16", "sequence.encoder=512", "sequence.decoder=128")
    words = ("--ranks", "1", "--device", "cuda", "--launches", "2", "--point", *point)
    yield Step("tests.benchmarks.overhead", words, reports / "overhead.txt")
    calibrated = reports / f"{machine}_calibrated.yaml"
    if not calibrated.exists():
        only = ("--only", "matmul,attention,memory", "--seconds", "60")
        yield Step(CLI, ("calibrate", f"machine={machine}", *only, "--out", str(calibrated)))
    yield sweep("single_gpu_xxl")


def list_trial_steps(runs: Path, reports: Path) -> Iterator[Step]:
    """Yield the steps that try this program out without a GPU: each sweep is planned by a dry run, and one tiny
    configuration is measured."""
    for step in list_steps("h200", runs, reports):
        if step.words[0] == "sweep":
            words = (*step.words, "launcher=slurm", "launcher.gpus=--gres=gpu:{devices}", "--dry-run")
            yield step._replace(words=words)
    yield Step(CLI, ("sweep", *TINY, *SHORT, "devices_per_node=1", "machine=cpu", "--results", str(runs)))


def list_fastest(folder: Path) -> Iterator[list[str]]:
    """Yield the overrides of the fastest run (most samples per second) of each model in a results folder."""
    import analysis

    if not folder.is_dir():
        return
    runs = analysis.load(folder)
    runs = runs[(runs["outcome"] == "ok") & (runs["evidence"] == "measured") & runs["samples_per_s"].notna()]
    for place in runs.groupby("model")["samples_per_s"].idxmax():
        row = runs.loc[place]
        record = folder / row["config_id"] / f"{row['repeat']}.{row['attempt']}" / "record.json"
        yield json.loads(record.read_text())["circumstance"]["overrides"]


def call(step: Step) -> bool:
    """Run a step. Do nothing if its output file exists already. Return True if the step succeeded or the file
    exists."""
    if step.output and step.output.exists():
        return True
    print(" ".join((step.module, *step.words)), flush=True)
    command = (sys.executable, "-P", "-m", step.module, *step.words)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **step.environment}
    if step.output is None:
        return subprocess.run(command, env=environment, check=False).returncode == 0
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    if done.returncode == 0:
        step.output.write_text(done.stdout)
    return done.returncode == 0


def main() -> int:
    """Run all steps, then write the reports and the archive. Return 0 if every step succeeded, otherwise 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="auto", help="file of conf/machine, for the peak rate (%(default)s)")
    parser.add_argument("--trial", action="store_true", help="on a CPU: plan the studies, and measure none")
    help_text = "folder of runs/gpu and reports/gpu (%(default)s)"
    parser.add_argument("--results", type=Path, default=Path("results"), help=help_text)
    args = parser.parse_args()
    runs, reports = args.results / "runs/gpu", args.results / "reports/gpu"
    reports.mkdir(parents=True, exist_ok=True)
    interrupted: list[int] = []
    # The step that runs at this time receives the signal too, and ends. The remaining steps are then skipped.
    signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number))
    steps = list_trial_steps(runs, reports) if args.trial else list_steps(args.machine, runs, reports)
    failed = [step for step in steps if interrupted or not call(step)]
    for folder in sorted({path.parents[3] for path in runs.rglob("record.json")}):
        name = "_".join(folder.relative_to(runs).parts)
        call(Step(CLI, ("report", str(folder), "--out", str(reports / name))))
    with tarfile.open(args.results / "gpu_study.tar.gz", "w:gz") as archive:
        for folder in filter(Path.is_dir, (runs, reports)):
            archive.add(folder, folder.relative_to(args.results))
    for step in failed:
        print("not answered: call it again, or see the errors above:", step.module, *step.words)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
