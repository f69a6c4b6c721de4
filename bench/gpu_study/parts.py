"""The parts of the study on one GPU, each callable by itself. A part returns whether all of it is answered, and
measures nothing again that is."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from bench.gpu_study import best
from bench.gpu_study.session import Session

SHORT = (
    "measure.warmup_steps=2", "measure.warmup_max_steps=4", "measure.block_steps=2", "measure.min_steps=4",
    "measure.max_steps=4",
)  # fmt: skip
"""The protocol of rehearsals and trials: they time nothing that is to be compared."""
TINY = ("model=tiny", "precision=fp32", "sequence.encoder=32", "sequence.decoder=16", *SHORT)
"""In place of every model in a trial."""
FEW = {"model": ["tiny"], "engine": ["ddp", "zero2"], "batch.micro": [2]}
"""In place of a study's axes in a trial."""
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
REHEARSED_MODELS, STAGES, WORLD_SIZES, DEVICES_PER_NODE = ("mt5_xl", "mt5_xxl"), (3, 2, 1), (8, 512, 64), 8
REPORTED = (
    "single_gpu", "single_gpu_tuning", "expandable_segments/single_gpu_fast", "single_gpu_xxl", "plain", "rehearsals",
)  # fmt: skip
"""Folders of results."""
PLAIN = (("mt5_xl", 8), ("mt5_large", 16))
"""Models, and micro-batches that fit either way."""


def check(session: Session) -> bool:
    """The tests of all that only a GPU can show."""
    report = session.reports / "check.txt"
    if not (report.exists() or session.in_checkout("check", "tests/bench/test_cuda.py")):
        return False
    tests = ("tests/bench/test_cuda.py", "tests/bench/test_cuda_runs.py")
    needed = {} if session.trial else {"ZEROSCALE_REQUIRE_CUDA": "1"}  # where tests that skip show nothing
    return report.exists() or session.module("pytest", "-q", "-rs", *tests, environment=needed, output=report)


def sweep(session: Session) -> bool:
    """The study single_gpu."""
    study = _few(session, "single_gpu") if session.trial else "single_gpu"
    return _swept(session, "single_gpu", f"study={study}", *_circumstances(session), *_tiny(session))


def repeats(session: Session) -> bool:
    """Two more runs of each model's fastest point: an interval from repeats, not from steps."""
    study = best.study(session, session.results / "single_gpu", repeats=3)
    return study is not None and _swept(session, "single_gpu", f"study={study}", *_circumstances(session))


def tuning(session: Session) -> bool:
    """The study single_gpu_tuning, and single_gpu_fast under another setting of the allocator."""
    tuned = _study(session, "single_gpu_tuning")
    tiny = (*TINY, "model.compile=none") if session.trial else ()  # for a processor it compiles for minutes
    apart = f"{session.results}/expandable_segments"  # another setting is another question, and no repeat of it
    fast = ("sweep", "study=single_gpu_fast", f"machine={session.machine}", "--results", apart, *tiny)
    return session.module("bench.cli", *fast, environment=EXPANDABLE) and tuned


def plain(session: Session) -> bool:
    """What a user would get without us, beside the same point of ours."""
    answered = [_plain(session, model, micro) for model, micro in PLAIN]
    return all(answered)


def _plain(session: Session, model: str, micro: int) -> bool:
    report = session.reports / f"plain_{model}.txt"
    words = (f"model={model}", f"batch.micro={micro}", *_circumstances(session), *_tiny(session))
    return report.exists() or session.module("bench.gpu_study.plain", *words, output=report)


def rehearsals(session: Session) -> bool:
    """One real rank of 8, 64 and 512."""
    asked = [(model, stage, ranks) for ranks in WORLD_SIZES for model in REHEARSED_MODELS for stage in STAGES]
    answered = [_rehearsal(session, *one) for one in (asked[:2] if session.trial else asked)]
    return all(answered)


def _rehearsal(session: Session, model: str, stage: int, ranks: int) -> bool:
    words = (
        f"model={model}", f"engine=zero{stage}", f"machine={session.machine}", "batch.micro=4", *SHORT,
        f"nodes={ranks // DEVICES_PER_NODE}", f"devices_per_node={DEVICES_PER_NODE}", *_tiny(session),
    )  # fmt: skip
    told = session.ask("rehearse", *words, "--dry-run", "--json")
    if told and best.answered(session.results / "rehearsals" / json.loads(told)["config_id"]):
        return True
    return session.zeroscale("rehearse", *words, "--results", str(session.results))


def overhead(session: Session) -> bool:
    """What the harness costs beside a bare loop."""
    report = session.reports / "overhead.txt"
    if not (report.exists() or session.in_checkout("overhead", "tests/benchmarks/overhead.py")):
        return False
    point = ["model=mt5_base", "batch.micro=8", "precision=bf16", "sequence.encoder=512", "sequence.decoder=128"]
    few = ["--launches", "1", "--rounds", "2"] if session.trial else ["--launches", "2", "--point", *point]
    words = ["--ranks", "1", "--device", "cpu" if session.trial else "cuda", *few]
    here = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))}
    return report.exists() or session.module("tests.benchmarks.overhead", *words, environment=here, output=report)


def calibrate(session: Session) -> bool:
    """What the device really does: the matmul ceiling that MFU is reported against, beside the published peak."""
    machine = session.reports / f"{session.machine}_calibrated.yaml"
    seconds = ("--seconds", "5", "--ranks", "1") if session.trial else ("--seconds", "60")
    words = ("calibrate", f"machine={session.machine}", "--only", "matmul,attention,memory", "--out", str(machine))
    return machine.exists() or session.zeroscale(*words, *seconds)


def xxl(session: Session) -> bool:
    """The study single_gpu_xxl: mt5_xxl, its optimizer state divided between device and host."""
    return _study(session, "single_gpu_xxl")


def report(session: Session) -> bool:
    """Report, tables and figures of what there is so far; no GPU is needed."""
    found = [name for name in REPORTED if (session.results / name).is_dir()]
    done = [_drawn(session, name) for name in found]
    return bool(done) and all(done)


def _drawn(session: Session, name: str) -> bool:
    folder, told = str(session.results / name), name.replace("/", "_")
    table = session.reports / f"{told}.csv"
    drawn = session.zeroscale("report", folder, "--out", str(session.reports / told))
    return session.module("bench.cli", "table", folder, "--format", "csv", output=table) and drawn


def _study(session: Session, name: str) -> bool:
    """A study that names its points itself; in a trial it is only looked at."""
    if session.trial:
        return _shown(session, "sweep", f"study={name}")
    return _swept(session, name, f"study={name}", *_circumstances(session))


def _swept(session: Session, name: str, *asked: str) -> bool:
    """Sweep; return whether every point has its answer, of which out of memory is one."""
    return session.zeroscale("sweep", *asked) or session.zeroscale("status", str(session.results / name))


PARTS: dict[str, Callable[[Session], bool]] = {
    "check": check, "sweep": sweep, "tuning": tuning, "plain": plain, "repeats": repeats, "rehearsals": rehearsals,
    "overhead": overhead, "calibrate": calibrate, "xxl": xxl, "report": report,
}  # fmt: skip
"""By name, in the order in which they are worth most to somebody whose time may end."""


def _circumstances(session: Session) -> tuple[str, ...]:
    return f"machine={session.machine}", "--results", str(session.results)


def _tiny(session: Session) -> tuple[str, ...]:
    return TINY if session.trial else ()


def _few(session: Session, name: str) -> Path:
    """Write a study of two tiny points in the place of another; return its file."""
    file = session.results / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    base = {"launcher": "local", "devices_per_node": 1}
    file.write_text(json.dumps({"name": name, "base": base, "axes": FEW}))
    return file.rename(file.with_suffix(".yaml"))  # JSON is YAML


def _shown(session: Session, *asked: str) -> bool:
    """Have every point decoded and checked, where none can run: as jobs for a machine with a GPU."""
    return session.zeroscale(*asked, "machine=h200", "launcher=slurm", "--dry-run")


def names() -> str:
    """Return every part with what it does, a line each."""
    return "\n".join(f"  {name:<12}{part.__doc__}" for name, part in PARTS.items())
