"""Run all studies for a machine with one GPU, and pack their results into an archive.

  make gpu-study GPU_STUDY="--machine h200"     on a machine with a GPU
  make gpu-study GPU_STUDY=--trial              on a CPU: plan every study, measure one tiny point
  timeout --signal=INT 9m make gpu-study        stop in an orderly way after nine minutes
  make gpu-study GPU_STUDY="--only overhead trainer"    these steps alone, in this order

The program needs no network. Call it again to continue after an interruption. Points that already
have a result are not measured again.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
QUICK = ("measure=quick", "measure.gpu_warmup_s=2", "measure.window_s=2.5", "measure.min_steps=12")
"""Overrides with the measurement protocol of runs that are compared with a Trainer of transformers."""
TOGETHER = 2  # steps that run at the same time, if their times do not matter; the memory of the GPU must suffice


class Step(NamedTuple):
    """Step of the study: a Python module with command-line arguments. If the step succeeds and `output` is set, the
    text that the step printed is written to the file `output`. Neighbouring steps that are not `alone` run at the same
    time. Several steps may have the same name."""

    name: str
    module: str
    words: tuple[str, ...]
    output: Path | None = None
    environment: dict[str, str] = {}
    alone: bool = True


def list_steps(machine: str, runs: Path, reports: Path) -> Iterator[Step]:
    """Yield the steps of the study. The most valuable steps come first, since the GPU time may end before the last
    step."""
    words: tuple[str, ...]
    place = (f"machine={machine}", "--results", str(runs))
    # Without the variable ZEROSCALE_REQUIRE_CUDA, the tests would be skipped on a machine without a GPU, and the step
    # would succeed.
    cuda = {"ZEROSCALE_REQUIRE_CUDA": "1"}
    yield Step("tests", "pytest", ("-q", "-rs", "tests/bench/test_cuda.py"), reports / "check_parts.txt", cuda)
    tests = ("-q", "-rs", "--durations=5", "tests/bench/test_cuda_runs.py")
    yield Step("tests", "pytest", tests, reports / "check_runs.txt", cuda)
    calibrated = reports / f"{machine}_calibrated.yaml"
    if not calibrated.exists():
        parts = "matmul,sustained,attention,memory,launches,host_link"
        only = ("--only", parts, "--seconds", "45")
        yield Step("calibrate", CLI, ("calibrate", f"machine={machine}", *only, "--out", str(calibrated)))
    for study in ("single_gpu", "single_gpu_fast", "finetune_single_gpu"):
        yield Step(study, CLI, ("sweep", f"study={study}", *place))
    point = ("model=mt5_base", "batch.micro=8", "precision=bf16", "sequence.encoder=512", "sequence.decoder=128")
    words = ("--ranks", "1", "--device", "cuda", "--launches", "1", "--rounds", "10", "--point", *point)
    yield Step("overhead", "tests.benchmarks.overhead", words, reports / "overhead.txt")
    words = ("model=mt5_base", "batch.micro=32", "precision=bf16", *QUICK, *place)
    yield Step("trainer", "tests.benchmarks.plain", ("--rounds", "2", *words), reports / "plain.txt")
    for model, ranks in (("mt5_large", 1), ("mt5_large", 8), ("mt5_xl", 64)):
        for stage in (1, 2, 3):
            micro = 16 if model == "mt5_large" else 4
            job = (f"nodes={-(-ranks // 8)}", f"devices_per_node={min(ranks, 8)}", "launcher.lock=false")
            rank = (f"model={model}", f"engine=zero{stage}", f"batch.micro={micro}", "precision=bf16", *job)
            answer = reports / f"rehearsal_{model}_zero{stage}_{ranks}.txt"
            yield Step("rehearsals", CLI, ("rehearse", *rank, *SHORT, *place), answer, alone=False)
    words = ("model=mt5_large", "engine=ddp", "batch.micro=16", "precision=bf16", "measure.block_steps=5", *place)
    yield Step("series", CLI, ("run", *words, "--study", "series"), reports / "series.txt")


def list_trial_steps(runs: Path, reports: Path) -> Iterator[Step]:
    """Yield the steps that try this program out without a GPU: each sweep is planned by a dry run, and one tiny
    configuration is measured."""
    for step in list_steps("h200", runs, reports):
        if step.words[0] == "sweep":
            words = (*step.words, "launcher=slurm", "launcher.gpus=--gres=gpu:{devices}", "--dry-run")
            yield step._replace(words=words)
    yield Step("tiny", CLI, ("sweep", *TINY, *SHORT, "devices_per_node=1", "machine=cpu", "--results", str(runs)))


def call(step: Step) -> bool:
    """Run a step. Do nothing if its output file exists already. Return True if the step succeeded or the file
    exists."""
    if step.output and step.output.exists():
        return True
    print(" ".join((step.module, *step.words)), flush=True)
    command = (sys.executable, "-P", "-m", step.module, *step.words)
    root = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(root), str(root / "bench/python"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **step.environment}
    if step.output is None:
        return subprocess.run(command, env=environment, check=False).returncode == 0
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    if done.returncode == 0:
        step.output.write_text(done.stdout)
    return done.returncode == 0


def main() -> int:
    """Run all steps, then write the archive. Return 0 if every step succeeded, otherwise 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="auto", help="file of conf/machine, for the peak rate (%(default)s)")
    parser.add_argument("--trial", action="store_true", help="on a CPU: plan the studies, and measure none")
    help_text = "folder of runs/gpu and reports/gpu (%(default)s)"
    parser.add_argument("--results", type=Path, default=Path("results"), help=help_text)
    known = itertools.chain(list_steps("", Path(), Path()), list_trial_steps(Path(), Path()))
    names = list(dict.fromkeys(step.name for step in known))
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="STEP", help=f"only these steps, in this order: {', '.join(names)}"
    )
    args = parser.parse_args()
    runs, reports = args.results / "runs/gpu", args.results / "reports/gpu"
    reports.mkdir(parents=True, exist_ok=True)
    interrupted: list[int] = []
    # The step that runs at this time receives the signal too, and ends. The remaining steps are then skipped.
    signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number))
    steps = list(list_trial_steps(runs, reports) if args.trial else list_steps(args.machine, runs, reports))
    if args.only:
        steps = [step for name in args.only for step in steps if step.name == name]
        if not steps:
            way = "with" if args.trial else "without"
            parser.error(f"--only {' '.join(args.only)}: has its result already, or is no step {way} --trial")
    failed = []
    for alone, neighbours in itertools.groupby(steps, key=lambda step: step.alone):
        with ThreadPoolExecutor(1 if alone else TOGETHER) as pool:
            group = list(neighbours)
            succeeded = pool.map(lambda step: not interrupted and call(step), group)
            failed += [step for step, done in zip(group, succeeded, strict=True) if not done]
    with tarfile.open(args.results / "gpu_study.tar.gz", "w:gz") as archive:
        for folder in filter(Path.is_dir, (runs, reports)):
            archive.add(folder, folder.relative_to(args.results))
    for step in failed:
        print("not answered: call it again, or see the errors above:", step.module, *step.words)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
