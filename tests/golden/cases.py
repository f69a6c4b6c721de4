"""Golden cases by name. A golden case is a command whose output must not change. Each case is a function that returns
this output as text, without differences between machines.

The cases only call the command, so they do not depend on its implementation.
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from bench import cli
from bench.core.store import find_records
from bench.measure import environment
from tests.report_data import read_data

ROOT = Path(__file__).parents[2]
RECORDED = Path("results/measured/two_cores.zip")
BLOCKS, IN_CI = 126, 12  # number of cases with predictions; each has 18 to 30 points

Case = Callable[[], str]

_LARGE = ("frontier_175b", "frontier_1t")
"""Studies whose pipeline schedules take seconds to simulate. `frontier_22b` has points of the same kinds, and takes
less time."""
_REPORTED = ("failures", "smoke", "testbed/400mbit", "gpt2_3b_testbed")
_COMPARED = (
    ("gpt2_3b_cpu", "gpt2_3b_testbed"),
    ("step_time/100mbit", "step_time/1gbit"),
    ("testbed/100mbit", "testbed/400mbit"),
)
_MODELS = ("mt5_small", "mt5_base", "mt5_large", "mt5_xl", "mt5_xxl", "t5_3b", "t5_11b", "t5_v1_1_xl", "tiny")
_MACHINES = (
    "a100_40",
    "a100_80",
    "b200",
    "cpu",
    "h100",
    "h200",
    "mi250x",
    "mi300x",
    "testbed_1gbit",
    "v100_16",
    "v100_32",
)
_VARIED = {
    "precision": ("bf16", "bf16", "fp32"),
    "devices_per_node": ("1", "4", "8"),
    "activation_checkpointing": ("false", "true"),
    "batch.accumulation": ("1", "2", "7"),
    "sequence.encoder": ("128", "512", "1000"),
    "sequence.decoder": ("32", "128", "256"),
    "optimizer.implementation": ("torch", "fused"),
    "model.attention": ("sdpa", "eager"),
    "model.loss_chunk_tokens": ("null", "null", "4096"),
    "data.workers": ("0", "2"),
}
_V100 = {"precision": ("fp16", "fp32"), "model.loss_chunk_tokens": ("null",)}
_ZERO = {
    "optimizer.implementation": ("torch", "fused", "native"),
    "engine.reduce_bucket_size": ("5e8", "1e7"),
    "engine.overlap_comm": ("true", "false"),
    "engine.contiguous_gradients": ("true", "false"),
}
"""Values of options that only ZeRO stages 1 to 3 have."""
_OFFLOADED = {"engine.offload_optimizer.device": ("cpu",), "optimizer.implementation": ("native",)}
"""Overrides that move the optimizer to the host; they are combined with the options above."""


_RENTED = (
    "launcher.project=my-project", "launcher.region=us-central1", "launcher.staging_bucket=gs://my-bucket",
    "launcher.image=registry.example.com/my-project/r/zeroscale:1", "launcher.machine_type=unlisted-8",
)  # fmt: skip

# Accelerators of machines that are no H100. Google has no MI250X; a P100 fits any machine.
_ACCELERATORS = {"a100_80": "NVIDIA_A100_80GB", "v100_16": "NVIDIA_TESLA_V100", "mi250x": "NVIDIA_TESLA_P100"}


def names(prefix: str) -> list[str]:
    """Return the names of the YAML files in the folder `prefix` of conf/ (such as `launcher`), without `.yaml`."""
    return sorted(path.stem for path in (ROOT / "conf" / prefix).glob("*.yaml"))


def cases(*, whole: bool) -> dict[str, Case]:
    """Return the golden cases by name: all of them, or a selection that takes about a minute."""
    found: dict[str, Case] = {}
    for study, launcher in _planned(whole=whole):
        words = ("sweep", f"study={study}", f"launcher={launcher}", *_list_site_overrides(study, launcher), "--dry-run")
        found[f"dry-run {study} {launcher}"] = partial(_plan, *words)
        found[f"dry-run {study} {launcher} as JSON"] = partial(_plan, *words, "--json")
    for block in range(BLOCKS if whole else IN_CI):
        found[f"predict {block}"] = partial(answer, "predict", "--json", *_drawn(block))
    for block in range(BLOCKS // 10 if whole else 2):
        found[f"advise {block}"] = partial(answer, "advise", "--json", *_drawn_advice(block))
    for name in _sets():
        found[f"table {name}"] = partial(answer, "table", str(RECORDED / name), "--format", "csv")
        found[f"claims {name}"] = partial(answer, "claims", str(RECORDED / name))
    for before, after in _COMPARED:
        words = ("compare", str(RECORDED / before), str(RECORDED / after), "--across", "machine")
        found[f"compare {before} {after}"] = partial(answer, *words)
    for words in (("status",), ("status", "--json"), ("resume",), ("cancel",)):
        found[f"{' '.join(words)} of a submitted study"] = partial(_submitted, *words)
    found |= {f"report {name}": partial(_report, name) for name in (_REPORTED if whole else _REPORTED[:1])}
    return found


def _list_site_overrides(study: str, launcher: str) -> list[str]:
    """Return the overrides that a study needs with this launcher: those with which jobs request GPUs, and those that
    the launcher always needs."""
    on_gpus = re.search(
        r"^  machine: (?!cpu|testbed)(\w+)", (ROOT / f"conf/study/{study}.yaml").read_text(), re.MULTILINE
    )
    if launcher == "vertex":
        kind = _ACCELERATORS.get(on_gpus[1], "NVIDIA_H100_80GB") if on_gpus else ""
        return [*_RENTED, *([f"launcher.accelerator_type={kind}"] if kind else [])]
    return ["launcher.gpus=--gres=gpu:{devices}"] if on_gpus and launcher in ("slurm", "slurm_testbed") else []


def _planned(*, whole: bool) -> list[tuple[str, str]]:
    """Return the (study, launcher) pairs for which a dry run of `zeroscale sweep` is a golden case.

    Unless `whole`, the pairs are small studies with the launcher `slurm`, and the study `smoke` with all launchers.
    """
    studies, launchers = names("study"), names("launcher")
    return [
        (study, launcher)
        for study in studies
        for launcher in launchers
        if whole or (launcher == "slurm" and study not in _LARGE) or study == "smoke"
    ]


def _plan(*words: str) -> str:
    """Return the output of a dry run in an empty folder, on a host with 16 GB of memory. In the checkout's folder, a
    dry run would also count runs that `make study` has left there."""
    memory = mock.patch.object(environment, "read_host_memory_bytes", lambda: 16 * 10**9)
    with tempfile.TemporaryDirectory() as folder, memory:
        return answer(*words, folder=Path(folder)).replace(folder, "ROOT")


def answer(*words: str, folder: Path = ROOT) -> str:
    """Run a command in this process. Return its output, its errors and its exit code as text."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = cli.main(words)
    return plain(f"{out.getvalue()}\n{errors.getvalue()}\nexit code {code}\n")


def plain(text: str) -> str:
    """Return a text that is the same on every machine and at any time.

    Paths, the time in job names, and this host's memory are replaced. Numbers are rounded to 9 digits, because the last
    digits depend on the processor.
    """
    text = text.replace(sys.executable, "PYTHON").replace(str(Path(sys.executable).parent), "PROGRAMS")
    text = text.replace(str(ROOT), "ROOT")
    text = re.sub(r"-\d{10}-[0-9a-f]{6}\b", "-JOB", text)
    text = re.sub(r"of \S+ on this machine", "of its memory on this machine", text)
    return re.sub(r"-?\d+\.\d{9,}(e[+-]?\d+)?", lambda number: f"{float(number[0]):.9g}", text)


_SLURM = {
    "squeue": f"cat {ROOT}/tests/data/submitted/squeue.txt",
    "sacct": f"cat {ROOT}/tests/data/submitted/sacct.txt",
    "sbatch": "echo 200",
    "scontrol": "true",
    "sinfo": "true",
    "scancel": "true",
}
"""Fake Slurm programs by name. They print recorded output of Slurm from the day when the study was submitted."""


def _submitted(command: str, *options: str) -> str:
    """Return the output of a command for a study that an earlier revision submitted, and the list of files in the
    study's folder afterwards."""
    with tempfile.TemporaryDirectory() as place, _slurm(Path(place)):
        study = Path(place) / "adhoc"
        shutil.copytree(ROOT / "tests/data/submitted/adhoc", study)
        printed = answer(command, str(study), *options)
        left = [plain(str(path.relative_to(study))) for path in sorted(study.rglob("*")) if path.is_file()]
    printed = re.sub(r"\d+ s ago", "some time ago", printed.replace(place, "PLACE"))
    return "\n".join([printed, *sorted(left)])


@contextlib.contextmanager
def _slurm(folder: Path) -> Iterator[None]:
    before = os.environ["PATH"]
    for name, shell in _SLURM.items():
        (folder / name).write_text(f"#!/bin/sh\n{shell}\n")
        (folder / name).chmod(0o755)
    os.environ["PATH"] = f"{folder}:{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _sets() -> list[str]:
    """Return the names of all studies in RECORDED that have at least one record."""
    studies = {path.parents[2].relative_to(ROOT / RECORDED) for path in find_records([ROOT / RECORDED])}
    return sorted(map(str, studies))


def _drawn(block: int) -> Iterator[str]:
    """Yield the overrides of one block of predictions: all combinations of engines, two micro-batches and three node
    counts.

    All predictions of a block are for the same model and the same type of machine. Model, machine and all values that
    do not differ within the block are drawn at random, with the block's number as seed.
    """
    draw = random.Random(block)
    machine = draw.choice(_MACHINES)
    varied = _VARIED | _V100 if machine.startswith("v100") else _VARIED
    engines = "ddp,zero1,zero2,zero3" if machine.startswith("v100") else "ddp,zero0,zero1,zero2,zero3"
    if block % 3 == 2:
        engines, varied = "zero1,zero2,zero3", varied | _ZERO | draw.choice(({}, _OFFLOADED))
    yield from (f"model={draw.choice(_MODELS)}", f"machine={machine}", f"engine={engines}")
    yield f"batch.micro={draw.choice(('1,4', '2,16', '3,8', '8,64'))}"
    yield f"nodes={draw.choice(('1,2,8', '1,3,16', '4,32,128'))}"
    for key, values in varied.items():
        yield f"{key}={draw.choice(values)}"


def _drawn_advice(block: int) -> Iterator[str]:
    draw = random.Random(1000 + block)
    yield f"model={draw.choice(_MODELS[:-1])}"
    yield f"machine={draw.choice(_MACHINES[:3] + _MACHINES[4:8])}"
    yield f"devices_per_node={draw.choice((4, 8))}"


def _report(name: str) -> str:
    """Return the printed output of `zeroscale report`, the data embedded in its page, and its tables."""
    with tempfile.TemporaryDirectory() as folder:
        printed = answer("report", str(RECORDED / name), "--out", folder)
        known = read_data(Path(folder) / "report.html")
        del known["folds"]  # HTML of the other parts of the page, not data
        tables = [path.read_text() for path in sorted(Path(folder).glob("*.csv"))]
        values = json.dumps(known, indent=1, sort_keys=True)
        return plain("\n".join([printed, values, *tables]).replace(folder, "OUT"))
