"""The parts of the study on one GPU, each callable by itself. A part returns whether all of it is answered, and
measures nothing again that is."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.gpu_study import best
from bench.gpu_study.session import StudySession

SHORT = (
    "measure.warmup_steps=4", "measure.gpu_warmup_s=0", "measure.block_steps=2", "measure.min_steps=4",
    "measure.window_s=0",
)  # fmt: skip
"""The protocol of rehearsals and trials: they time nothing that is to be compared."""
TINY = ("model=tiny", "precision=fp32", "sequence.encoder=32", "sequence.decoder=16", *SHORT)
"""In place of every model in a trial."""
CLOCK = {"data.pin_memory": [False, True], "measure.block_steps": [5, 50]}
"""What the clock and the way of batches may cost: blocks of 50 steps have a tenth of the boundaries of those of 5."""
FEW = {"model": ["tiny"], "engine": ["ddp", "zero2"], "batch.micro": [2]}
"""In place of a study's axes in a trial."""
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
REHEARSED_MODELS, STAGES, WORLD_SIZES, DEVICES_PER_NODE = ("mt5_xl", "mt5_xxl"), (3, 2, 1), (8, 512, 64), 8
REPORTED = (
    "single_gpu", "single_gpu_tuning", "clock", "expandable_segments/single_gpu_fast", "single_gpu_xxl", "plain",
    "rehearsals",
)  # fmt: skip
"""Folders of results."""
PLAIN = (("mt5_xl", 8), ("mt5_large", 16))
"""Models, and micro-batches that fit either way."""


def run_tests(session: StudySession) -> bool:
    """The tests of all that only a GPU can show."""
    report = session.reports / "check.txt"
    if not (report.exists() or session.in_checkout("check", "tests/bench/test_cuda.py")):
        return False
    tests = ("tests/bench/test_cuda.py", "tests/bench/test_cuda_runs.py")
    needed = {} if session.trial else {"ZEROSCALE_REQUIRE_CUDA": "1"}  # where tests that skip show nothing
    return report.exists() or session.module("pytest", "-q", "-rs", *tests, environment=needed, output=report)


def run_sweep(session: StudySession) -> bool:
    """The study single_gpu."""
    study = _write_trial_study(session, "single_gpu") if session.trial else "single_gpu"
    return _run_swept(
        session, "single_gpu", f"study={study}", *_list_context_overrides(session), *_list_tiny_overrides(session)
    )


def run_repeats(session: StudySession) -> bool:
    """Two more runs of each model's fastest point: an interval from repeats, not from steps."""
    study = best.write_study(session, session.results / "single_gpu", repeats=3)
    return study is not None and _run_swept(session, "single_gpu", f"study={study}", *_list_context_overrides(session))


def run_tuning(session: StudySession) -> bool:
    """The study single_gpu_tuning, and single_gpu_fast under another setting of the allocator."""
    tuned = _run_study(session, "single_gpu_tuning")
    tiny = (*TINY, "model.compile=none") if session.trial else ()  # for a processor it compiles for minutes
    apart = f"{session.results}/expandable_segments"  # another setting is another question, and no repeat of it
    fast = ("sweep", "study=single_gpu_fast", f"machine={session.machine}", "--results", apart, *tiny)
    return session.module("bench.cli", *fast, environment=EXPANDABLE) and tuned


def compare_clocks(session: StudySession) -> bool:
    """Whether blocks of steps, or batches from page-locked memory, change the time of a step: the same point four ways,
    three times each."""
    point = {"model": "mt5_base", "engine": "ddp", "batch.micro": 16, "devices_per_node": 1, "launcher": "local"}
    window = {"measure.min_steps": 100}
    study = _write_study(session, "clock", point if session.trial else point | window, CLOCK, repeats=3)
    tiny = [word for word in _list_tiny_overrides(session) if not word.startswith("measure.block_steps=")]
    return _run_swept(session, "clock", f"study={study}", *_list_context_overrides(session), *tiny)


def run_plain_loops(session: StudySession) -> bool:
    """What a user would get without us, beside the same point of ours."""
    answered = [_run_plain_loop(session, model, micro) for model, micro in PLAIN]
    return all(answered)


def _run_plain_loop(session: StudySession, model: str, micro: int) -> bool:
    report = session.reports / f"plain_{model}.txt"
    words = (
        f"model={model}",
        f"batch.micro={micro}",
        *_list_context_overrides(session),
        *_list_tiny_overrides(session),
    )
    return report.exists() or session.module("bench.gpu_study.plain", *words, output=report)


def run_rehearsals(session: StudySession) -> bool:
    """One real rank of 8, 64 and 512."""
    overrides = [(model, stage, ranks) for ranks in WORLD_SIZES for model in REHEARSED_MODELS for stage in STAGES]
    answered = [_run_rehearsal(session, *one) for one in (overrides[:2] if session.trial else overrides)]
    return all(answered)


def _run_rehearsal(session: StudySession, model: str, stage: int, ranks: int) -> bool:
    words = (
        f"model={model}", f"engine=zero{stage}", f"machine={session.machine}", "batch.micro=4", *SHORT,
        f"nodes={ranks // DEVICES_PER_NODE}", f"devices_per_node={DEVICES_PER_NODE}", *_list_tiny_overrides(session),
    )  # fmt: skip
    text = session.ask("rehearse", *words, "--dry-run", "--json")
    if text and best.is_answered(session.results / "rehearsals" / json.loads(text)["config_id"]):
        return True
    return session.zeroscale("rehearse", *words, "--results", str(session.results))


def measure_overhead(session: StudySession) -> bool:
    """What the harness costs beside a bare loop."""
    report = session.reports / "overhead.txt"
    if not (report.exists() or session.in_checkout("overhead", "tests/benchmarks/overhead.py")):
        return False
    point = ["model=mt5_base", "batch.micro=8", "precision=bf16", "sequence.encoder=512", "sequence.decoder=128"]
    few = ["--launches", "1", "--rounds", "2"] if session.trial else ["--launches", "2", "--point", *point]
    words = ["--ranks", "1", "--device", "cpu" if session.trial else "cuda", *few]
    here = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))}
    return report.exists() or session.module("tests.benchmarks.overhead", *words, environment=here, output=report)


def run_calibration(session: StudySession) -> bool:
    """What the device really does: the matmul ceiling that MFU is reported against, beside the published peak."""
    machine = session.reports / f"{session.machine}_calibrated.yaml"
    seconds = ("--seconds", "5", "--ranks", "1") if session.trial else ("--seconds", "60")
    words = ("calibrate", f"machine={session.machine}", "--only", "matmul,attention,memory", "--out", str(machine))
    return machine.exists() or session.zeroscale(*words, *seconds)


def run_xxl(session: StudySession) -> bool:
    """The study single_gpu_xxl: mt5_xxl, its optimizer state divided between device and host."""
    return _run_study(session, "single_gpu_xxl")


def write_reports(session: StudySession) -> bool:
    """Report, tables and figures of what there is so far; no GPU is needed."""
    found = [name for name in REPORTED if (session.results / name).is_dir()]
    done = [_write_report(session, name) for name in found]
    return bool(done) and all(done)


def _write_report(session: StudySession, name: str) -> bool:
    folder, text = str(session.results / name), name.replace("/", "_")
    table = session.reports / f"{text}.csv"
    drawn = session.zeroscale("report", folder, "--out", str(session.reports / text))
    return session.module("bench.cli", "table", folder, "--format", "csv", output=table) and drawn


def _run_study(session: StudySession, name: str) -> bool:
    """A study that names its points itself; in a trial it is only looked at."""
    if session.trial:
        return _check_decoding(session, "sweep", f"study={name}")
    return _run_swept(session, name, f"study={name}", *_list_context_overrides(session))


def _run_swept(session: StudySession, name: str, *overrides: str) -> bool:
    """Sweep; return whether every point has its answer, of which out of memory is one."""
    return session.zeroscale("sweep", *overrides) or session.zeroscale("status", str(session.results / name))


PARTS: dict[str, Callable[[StudySession], bool]] = {
    "check": run_tests,
    "sweep": run_sweep,
    "tuning": run_tuning,
    "clock": compare_clocks,
    "plain": run_plain_loops,
    "repeats": run_repeats,
    "rehearsals": run_rehearsals,
    "overhead": measure_overhead,
    "calibrate": run_calibration,
    "xxl": run_xxl,
    "report": write_reports,
}
"""By name, in the order in which they are worth most to somebody whose time may end."""


def _list_context_overrides(session: StudySession) -> tuple[str, ...]:
    return f"machine={session.machine}", "--results", str(session.results)


def _list_tiny_overrides(session: StudySession) -> tuple[str, ...]:
    return TINY if session.trial else ()


def _write_trial_study(session: StudySession, name: str) -> Path:
    """Write a study of two tiny points in the place of another; return its file."""
    return _write_study(session, name, {"launcher": "local", "devices_per_node": 1}, FEW)


def _write_study(
    session: StudySession, name: str, base: Mapping[str, Any], axes: Mapping[str, Any], repeats: int = 1
) -> Path:
    """Write a study and return its file."""
    file = session.results / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"name": name, "base": dict(base), "axes": dict(axes), "repeats": repeats}))
    return file.rename(file.with_suffix(".yaml"))  # JSON is YAML


def _check_decoding(session: StudySession, *overrides: str) -> bool:
    """Have every point decoded and checked, where none can run: as jobs for a machine with a GPU."""
    return session.zeroscale(*overrides, "machine=h200", "launcher=slurm", "--dry-run")


def format_parts() -> str:
    """Return every part with what it does, a line each."""
    return "\n".join(f"  {name:<12}{part.__doc__}" for name, part in PARTS.items())
