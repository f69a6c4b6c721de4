"""Stage data, tokenizers and compiled ops for nodes without a network, and check that a run could start with them."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from bench import data, engines, launchers
from bench.config import compose
from bench.config.decode import Request
from bench.core import store
from bench.core.errors import Check, UserError
from bench.core.files import get_cache_folder
from bench.core.processes import build_module_command
from bench.core.scheduling import JobSetup, SchedulingOptions, Work
from bench.core.spec import RunSpec
from bench.core.study import Study, list_control_pairs
from bench.core.terminal import Progress
from bench.runtime import extensions
from bench.runtime.process import start_child
from bench.sweep import inputs
from bench.sweep.inputs import GivenOverrides, find_study, format_overrides
from bench.sweep.prepare.staging import StagingNeeds

_WITHOUT_NETWORK = (("unshare", "--net"), ("unshare", "--user", "--map-root-user", "--net"))  # for root, for others
_END_S = 10.0  # seconds between SIGTERM and SIGKILL

StagerMode = Literal["stage", "check"]


def run_checks(
    mode: StagerMode,
    kind: StagingNeeds,
    python: Sequence[str],
    variables: dict[str, str],
    follow: Callable[[str], None],
) -> Iterator[Check]:
    """In a separate process, fetch or build the data, models and compiled ops that `kind` lists (mode `stage`), or
    check that a run can use them (mode `check`). Yield a finding for each thing that works or is missing. `python` is
    the command of the interpreter, and `variables` is its environment. `follow` is called with a text about the current
    step."""
    noise = create_log_path()
    prefix = find_network_isolation() if mode == "check" else ()
    command = [*prefix, *build_module_command("bench.sweep.prepare.staging", mode, python=python)]
    with noise.open("a") as output:
        # Ctrl-C reaches the child through this process, and it removes partial results.
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        child = start_child(command, env=variables, stderr=output, text=True, **pipes)
    assert child.stdin and child.stdout
    try:
        with contextlib.suppress(BrokenPipeError), child.stdin:  # it ended at once; its exit code is reported
            child.stdin.write(kind.model_dump_json(by_alias=True))
        with child.stdout:
            for message in map(json.loads, child.stdout):
                if isinstance(message, str):
                    follow(f"{mode}: {message}")
                    continue
                found = Check(**message)
                yield found._replace(remedy=f"see {noise}") if found.state == "missing" and not found.remedy else found
        if code := child.wait():
            yield Check(mode, "missing", f"its process ended with {code}", f"see {noise}")
    finally:
        _end_child(child)


def create_log_path() -> Path:
    """Return the path of the log that collects the output of libraries and compilers. Its folder is created."""
    path = get_cache_folder(os.environ) / "prepare.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _end_child(child: "subprocess.Popen[str]") -> None:
    """End a process that is still running, first by SIGTERM and then by SIGKILL."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def find_network_isolation() -> tuple[str, ...]:
    """Return the words to put before a command so that it runs without a network. Empty if this machine does not permit
    that."""
    for prefix in _WITHOUT_NETWORK if shutil.which("unshare") else ():
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
            return prefix
    return ()


_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def collect_needs(requests: Sequence[Request], architectures: Sequence[str | None] = (None,)) -> list[StagingNeeds]:
    """Return what all points (configurations) need: data, models and compiled ops. There is one entry for each
    combination of device and compiled ops. If the ops have GPU kernels, there is one entry for each combination of
    device, compiled ops and GPU architecture.

    Data and models that several points need are listed only once.
    """
    kinds: dict[tuple[str, tuple[str, ...]], dict[str, list[RunSpec]]] = {}
    seen = set()
    for request in requests:
        operations = engines.facts(request.spec).compiled_ops
        kind = kinds.setdefault((_device(request), operations), {"data": [], "models": []})
        for part, key in _keys(request.spec).items():
            if key not in seen:
                seen.add(key)
                kind[part].append(request.spec)
    elsewhere = launchers.load(requests[0].launcher).QUEUES
    found = []
    for (device, names), specs in kinds.items():
        every = architectures if extensions.has_gpu_kernel(names, device) else (None,)
        for number, architecture in enumerate(every):
            # Ops are built for every architecture; data and models are staged once.
            plain = {"device": device, "operations": names, "architecture": architecture, "elsewhere": elsewhere}
            found.append(StagingNeeds.model_validate(plain | (specs if number == 0 else {})))
    return found


def _keys(spec: RunSpec) -> dict[str, str]:
    """Return two texts by which the needs of specs are compared. The text with the key "data" identifies the data, and
    the text with the key "models" identifies the model. For example, two specs with equal texts for "data" need the
    same data."""
    text = [spec.data.source, spec.data.options, spec.objective, spec.sequence, data.vocabulary(spec)]
    shape = [spec.model.model_dump(mode="json"), spec.activation_checkpointing, spec.adapter.model_dump(mode="json")]
    return {"data": json.dumps(["data", *text]), "models": json.dumps(["model", *shape])}


def _device(request: Request) -> str:
    return inputs.find_device(request) or _setup(request).device or "cpu"


def _setup(request: Request) -> JobSetup:
    """Return the setup of the launcher's jobs: their Python, environment variables and container image. Empty if the
    launcher has no queue."""
    launcher, options = launchers.load_queueing(request.launcher), request.launcher_options
    return launcher.job_setup(options) if launcher and isinstance(options, SchedulingOptions) else JobSetup()


def architectures(listed: Sequence[str] | None, request: Request) -> list[str | None]:
    """Return the GPU architectures to build ops for: those that the user `listed`, such as "8.0". If none are given,
    the list contains None, which stands for the architecture of the local GPU."""
    if listed is None:
        return [None]
    given = f"--arch {','.join(listed)}"
    available = variables("check", request)
    if variable := available.get(extensions.ARCHITECTURES):
        rule = f"the jobs' environment sets {extensions.ARCHITECTURES}={variable}, which takes precedence"
        raise UserError(given, rule, "unset the variable, or remove --arch")
    if not listed or not all(re.fullmatch(r"\d+\.\d[a-f]?", one) for one in listed):
        raise UserError(given, "is not a list of GPU architectures", "write for example 8.0,9.0")
    if len(listed) > 1 and extensions.FOLDER in available:
        rule = f"{extensions.FOLDER}={available[extensions.FOLDER]} holds the builds for one architecture"
        raise UserError(given, rule, "unset the variable, or list only one architecture")
    return [*listed]


def variables(mode: StagerMode, request: Request) -> dict[str, str]:
    """Return the environment variables for staging or checking: those of this process and those of a job. For checking,
    libraries are also set to offline mode."""
    given = _setup(request).variables
    offline = dict.fromkeys(_OFFLINE, "1")
    if mode == "check":
        return dict(os.environ) | given | offline
    return dict(os.environ) | {name: value for name, value in given.items() if name not in offline}


def python(request: Request) -> tuple[str, ...]:
    """Return the command of the Python interpreter for staging and checking. It is the jobs' Python, or the current
    interpreter if the launcher names none.

    The current interpreter is also used in two other cases: the jobs' Python is in a container, or it has no absolute
    path because an environment module provides it. Raise UserError if the path of the jobs' Python does not exist on
    this machine.
    """
    setup = _setup(request)
    command = setup.python
    if not command or not Path(command[0]).is_absolute() or setup.image:
        return (sys.executable,)
    if not Path(command[0]).exists():
        rule = "does not exist on this machine"
        raise UserError(f"launcher.python={command[0]}", rule, "run `zeroscale prepare` on a machine that has it")
    return command


_NODE_MIN = 30

StudyGiven = Study | str | Path | None


def prepare(
    study: StudyGiven,
    overrides: GivenOverrides,
    config_dir: Path | None,
    results: Path,
    *,
    offline: bool,
    build_for: Sequence[str] | None,
    follow: Callable[[Progress], None],
) -> Iterator[Check]:
    """Stage what a study's points (configurations) need: data, models and compiled ops. Then check that a run could use
    it. With `offline`, only check. Findings are yielded as soon as they are made.

    `build_for` lists the GPU architectures to build ops for. Arguments that contradict each other raise UserError at
    the call, before the first finding.
    """
    chosen, requests = _points(study, overrides, config_dir)
    wanted = collect_needs(requests, architectures(build_for, requests[0]))
    image = None if extensions.IMAGE in os.environ else _setup(requests[0]).image  # set in the container
    if image and offline:
        rule = f"jobs run in the container {image}, but this process runs outside of it"
        remedy = "remove it; zeroscale then writes a job script that makes this check in the container"
        raise UserError("--offline", rule, remedy)
    if image and _setup(requests[0]).dockerfile:
        _check_architectures(wanted)
        folder = (results / chosen.name / "prepare" / "image").resolve()
        return iter([_write_image(folder, wanted, requests[0])])
    if image:  # libraries and ops are in the image
        wanted = [kind.model_copy(update={"operations": ()}) for kind in wanted]
    modes: tuple[StagerMode, ...] = ("check",) if offline else ("stage",) if image else ("stage", "check")

    def findings() -> Iterator[Check]:
        complete = yield from _staged(modes, wanted, requests[0], follow)
        if complete and not offline and launchers.load(requests[0].launcher).QUEUES:
            folder = (results / chosen.name / "prepare" / "node").resolve()  # as deep as the folders of other jobs
            yield _write_job(folder, _words(study, overrides, config_dir, folder), chosen.name, requests[0], image)

    return findings()


def _check_architectures(wanted: Sequence[StagingNeeds]) -> None:
    """Raise UserError if ops have GPU kernels but the GPU architecture to compile them for is unknown."""
    if any(extensions.has_gpu_kernel(kind.operations, kind.device) and not kind.architecture for kind in wanted):
        rule = "ops must be compiled for the jobs' GPU, and images are built without one"
        raise UserError("--arch", rule, "set it: 7.5 for T4, 8.0 for A100, 8.9 for L4, 9.0 for H100 and H200")


_STAGE = """\
RUN python3 -P -m bench.sweep.prepare.staging {mode} < {needs} > {mode}.log; cat {mode}.log; \\
    test -s {mode}.log && ! grep -q '"state": "missing"' {mode}.log
"""


def _write_image(folder: Path, wanted: Sequence[StagingNeeds], request: Request) -> Check:
    """Write a Dockerfile. The build of its image fetches or builds the data, models and ops in `wanted`, checks them
    inside the image, and fails if any of them is missing. Return a finding with the commands that build the image."""
    setup, text = _setup(request), f"{_setup(request).dockerfile}COPY needs-*.json ./\n"
    folder.mkdir(parents=True, exist_ok=True)
    for number, kind in enumerate(wanted):
        needs = f"needs-{number}.json"
        inside = kind.model_copy(update={"elsewhere": False})  # the folders of the image are those of the jobs
        store.write_atomically(folder / needs, inside.model_dump_json(by_alias=True).encode())
        text += "".join(_STAGE.format(mode=mode, needs=needs) for mode in ("stage", "check"))
    store.write_atomically(folder / "Dockerfile", text.encode())
    commands = (shlex.join(word.replace("{folder}", str(folder)) for word in command) for command in setup.build)
    found = f"wrote {folder}/Dockerfile. Its build fetches and checks everything that the points need"
    return Check(f"image {setup.image}", "note", found, " && ".join(commands))


def _points(study: StudyGiven, overrides: GivenOverrides, config_dir: Path | None) -> tuple[Study, list[Request]]:
    """Return the study and the composed configurations of its points. The control point, which jobs repeat as a
    reference, is included."""
    chosen, given = find_study(study, overrides, config_dir, "prepare")
    points = compose.compose_points(chosen, given, config_dir, inputs.find_device).points
    requests = [point.composed for point in points]
    if control := list_control_pairs(chosen, given):
        requests.append(compose.compose_request(control, config_dir))
    if len({request.launcher_options.model_dump_json() for request in requests}) > 1:
        rule = "the points have several launchers"
        raise UserError("launcher", rule, "run `zeroscale prepare` once for each launcher")
    return chosen, requests


def _staged(
    modes: Sequence[StagerMode], wanted: Sequence[StagingNeeds], request: Request, follow: Callable[[Progress], None]
) -> Generator[Check, None, bool]:
    """Run the given modes one after the other. `stage` fetches or builds the data, models and ops in `wanted`, and
    `check` checks them. Yield a finding for each thing that works or is missing, without duplicates. `follow` is called
    with the progress.

    If anything is missing after the mode `stage`, return False without running the mode `check`. In all other cases
    return True, even if `check` finds something missing.
    """
    create_log_path().unlink(missing_ok=True)
    share = 0.0
    for mode in modes:
        found: set[Check] = set()
        for kind in wanted:
            report = partial(lambda share, text: follow(Progress(text, share)), share)
            share += 1 / (len(modes) * len(wanted))
            for finding in run_checks(mode, kind, python(request), variables(mode, request), report):
                if finding not in found:  # several entries of `wanted` may have the same need
                    found.add(finding)
                    yield finding
        if mode == "stage" and any(finding.state == "missing" for finding in found):
            return False
    return True


def _words(study: StudyGiven, overrides: GivenOverrides, config_dir: Path | None, folder: Path) -> tuple[str, ...]:
    """Return the arguments with which zeroscale checks on a compute node whether runs can use what was staged: `prepare
    … --offline`. A Study object is written to a file in `folder`, and the arguments name this file."""
    if isinstance(study, Study):
        path, content = folder / "study.yaml", study.model_dump_json(indent=1)  # JSON is YAML as well
        folder.mkdir(parents=True, exist_ok=True)
        store.write_atomically(path, content.encode())
        study = path
    named = format_overrides({"study": str(study)}) if study is not None else ()
    elsewhere = ["--config-dir", str(config_dir.resolve())] if config_dir else []
    return ("prepare", *named, *format_overrides(overrides), "--offline", *elsewhere)


def _write_job(folder: Path, words: tuple[str, ...], study: str, request: Request, image: str | None) -> Check:
    """Write a job script to `folder`. On a compute node, the script checks whether runs can use what was staged. For
    this check, the script runs zeroscale with the arguments `words`. `request` has the launcher and its options.
    `image` is the jobs' container, if any. Return a finding with the command that submits the script."""
    work = Work(f"{study}-prepare", folder, "bench.cli", words, devices_per_node=1, time_limit_min=_NODE_MIN)
    plan = launchers.load(request.launcher).plan(work, request.launcher_options)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in plan.files.items():
        store.write_atomically(path, text.encode(errors="surrogateescape"))
    where = f"{socket.gethostname()}, outside of {image}" if image else socket.gethostname()
    found = f"not checked, because this is {where}. Wrote a job script that checks there and builds missing ops"
    return Check("compute node", "note", found, f"{shlex.join(plan.command)}, then read its log in {folder}")
