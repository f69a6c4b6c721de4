"""Stage what a sweep needs on nodes without a network, and check that nothing is missing. For a login node.

  zeroscale prepare study=paper launcher=my_cluster
  zeroscale prepare data=text data.tokenizer=google/mt5-base optimizer.implementation=native --arch 8.0,9.0
  srun --gpus=1 zeroscale prepare study=paper launcher=my_cluster --offline

Data sets and tokenizers are fetched, and the corpus is tokenised, into Hugging Face's cache (HF_HOME); DeepSpeed's ops
are built for each kind of node: processor or GPU, versions, container image. Then all of it is used as a run would, in
a process without a network. `--offline` does only that: on a compute node it shows what a run will find there, and an
op that nobody built for nodes of that kind is built. Exit code 0 if nothing is missing.
"""

import argparse
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import config, data, engines, extensions, launchers, store
from bench.cli import live, options, stager
from bench.cli.stager import Mode
from bench.config import Request
from bench.errors import UserError
from bench.findings import Finding, tell
from bench.launching import Work
from bench.planning import target
from bench.planning.overrides import study_of
from bench.scheduling import JobSetup, SchedulingOptions
from bench.spec import RunSpec
from bench.staging import Needs
from bench.study import Study, control_pairs

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_NODE_MIN = 30


def arguments(parser: argparse.ArgumentParser) -> None:
    options.overrides(parser, "as for sweep: study=NAME, comma lists")
    parser.add_argument("--offline", action="store_true", help="only check, as on a compute node; fetch nothing")
    parser.add_argument("--arch", metavar="LIST", help="GPU architectures to build for: 8.0,9.0; default: the GPU here")
    options.as_json(parser)
    options.config_dir(parser)
    options.results(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if nothing is missing."""
    study, asked = _asked(args)
    wanted = needs(asked, _architectures(args.arch, asked[0]))
    with live.line(quiet=args.json) as follow:
        return tell(_findings(args, study, asked[0], wanted, follow), as_json=args.json)


def _asked(args: argparse.Namespace) -> tuple[Study, list[Request]]:
    """Return every point of the study or of the comma lists, its control point included."""
    study, overrides = study_of(None, args.overrides, args.config_dir, "prepare")
    asked = [point.asked for point in config.points(study, overrides, args.config_dir, target.device).points]
    if control := control_pairs(study, overrides):
        asked.append(config.request(control, args.config_dir))
    if len({request.launcher_options.model_dump_json() for request in asked}) > 1:
        raise UserError("launcher", "points have several", "call prepare once for each")
    return study, asked


def _findings(
    args: argparse.Namespace, study: Study, asked: Request, wanted: list[Needs], follow: Callable[[str], None]
) -> Iterator[Finding]:
    """Stage, then check: what cannot be staged need not be checked."""
    image = _outside_of(asked)
    if image and args.offline:
        rule = f"jobs run in {image}, and this is outside of it"
        raise UserError("--offline", rule, "leave it out: then a job is written that checks inside")
    if image:  # libraries and ops are the image's own
        wanted = [kind.model_copy(update={"operations": ()}) for kind in wanted]
    stager.log().unlink(missing_ok=True)
    modes: tuple[Mode, ...] = ("check",) if args.offline else ("stage",) if image else ("stage", "check")
    for mode in modes:
        told: set[Finding] = set()
        for kind in wanted:
            for finding in stager.findings(mode, kind, _python(asked), _variables(mode, asked), follow):
                if finding not in told:  # kinds of node share much
                    told.add(finding)
                    yield finding
        if mode == "stage" and any(finding.state == "missing" for finding in told):
            return
    if not args.offline and launchers.load(asked.launcher).QUEUES:
        yield _on_a_node(args, study, asked, image)


def needs(asked: Sequence[Request], architectures: Sequence[str | None] = (None,)) -> list[Needs]:
    """Return what points need by kind of node, each thing once."""
    kinds: dict[tuple[str, tuple[str, ...]], dict[str, list[RunSpec]]] = {}
    seen = set()
    for request in asked:
        operations = engines.facts(request.spec).compiled_ops
        kind = kinds.setdefault((_device(request), operations), {"data": [], "models": []})
        for part, key in _keys(request.spec).items():
            if key not in seen:
                seen.add(key)
                kind[part].append(request.spec)
    elsewhere = launchers.load(asked[0].launcher).QUEUES
    found = []
    for (device, names), specs in kinds.items():
        every = architectures if extensions.on_gpu(names, device) else (None,)
        for number, architecture in enumerate(every):
            plain = {"device": device, "operations": names, "architecture": architecture, "elsewhere": elsewhere}
            found.append(Needs.model_validate(plain | (specs if number == 0 else {})))
    return found


def _keys(spec: RunSpec) -> dict[str, str]:
    """Return what tells data, and models, apart."""
    text = [spec.data.source, spec.data.options, spec.objective, spec.sequence, data.vocabulary(spec)]
    shape = [spec.model.model_dump(mode="json"), spec.activation_checkpointing]
    return {"data": json.dumps(["data", *text]), "models": json.dumps(["model", *shape])}


def _setup(asked: Request) -> JobSetup:
    """Return what the jobs' commands run in; where there are no jobs, nothing but what is here."""
    launcher, options = launchers.queueing(asked.launcher), asked.launcher_options
    return launcher.job_setup(options) if launcher and isinstance(options, SchedulingOptions) else JobSetup()


def _device(asked: Request) -> str:
    return target.device(asked) or _setup(asked).device or "cpu"


def _outside_of(asked: Request) -> str | None:
    """Return the container image of the jobs, unless this runs in one already."""
    return None if extensions.IMAGE in os.environ else _setup(asked).image


def _architectures(listed: str | None, asked: Request) -> list[str | None]:
    """Return the GPU architectures to build for; None is that of the GPU here."""
    if listed is None:
        return [None]
    variables = _variables("check", asked)
    if variable := variables.get(extensions.ARCHITECTURES):
        rule = f"jobs will find {extensions.ARCHITECTURES}={variable} in their environment, and build for that"
        raise UserError(f"--arch {listed}", rule, "unset the variable, or leave --arch out")
    if not re.fullmatch(r"\d+\.\d[a-f]?(,\d+\.\d[a-f]?)*", listed):
        raise UserError(f"--arch {listed}", "not a list of architectures", "write it like 8.0,9.0")
    if "," in listed and extensions.FOLDER in variables:
        rule = f"{extensions.FOLDER}={variables[extensions.FOLDER]} holds the builds for one"
        raise UserError(f"--arch {listed}", rule, "unset the variable, or give one")
    return [*listed.split(",")]


def _variables(mode: Mode, asked: Request) -> dict[str, str]:
    """Return the environment in which to stage or check: that of a job, with or without a network."""
    given = _setup(asked).variables
    offline = dict.fromkeys(_OFFLINE, "1")
    if mode == "check":
        return dict(os.environ) | given | offline
    return dict(os.environ) | {name: value for name, value in given.items() if name not in offline}


def _python(asked: Request) -> tuple[str, ...]:
    """Return the jobs' own Python where it can be named from here: not in a container, and not found by modules."""
    setup = _setup(asked)
    python = setup.python
    if not python or not Path(python[0]).is_absolute() or setup.image:
        return (sys.executable,)
    if not Path(python[0]).exists():
        raise UserError(f"launcher.python={python[0]}", "not on this machine", "call prepare where it is")
    return python


def _on_a_node(args: argparse.Namespace, study: Study, asked: Request, image: str | None) -> Finding:
    """Write the job that checks where runs will be, with all that a site file says of it; tell how to submit it."""
    folder = (args.results / study.name / "prepare" / "node").resolve()  # as deep as the folder of any other job
    words = ["prepare", *args.overrides, "--offline"]
    words += ["--config-dir", str(args.config_dir.resolve())] if args.config_dir else []
    work = Work(
        f"{study.name}-prepare", folder, "bench.cli", tuple(words), devices_per_node=1, time_limit_min=_NODE_MIN
    )
    plan = launchers.load(asked.launcher).plan(work, asked.launcher_options)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in plan.files.items():
        store.write_atomically(path, text.encode(errors="surrogateescape"))
    where = f"{socket.gethostname()}, outside of {image}" if image else socket.gethostname()
    told = f"not looked at: this is {where}. A job that checks, and builds what is still missing there, is written"
    return Finding("compute node", "note", told, f"{shlex.join(plan.command)}, then read its log in {folder}")
