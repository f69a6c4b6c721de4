"""Data, tokenizers and compiled ops for nodes without a network: staged, then checked as a run would use them."""

import shlex
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from bench import launchers, store
from bench.checks import Check
from bench.config import compose
from bench.config.compose import Request
from bench.errors import UserError
from bench.launching import Work
from bench.preparation import process
from bench.preparation.needs import architectures, collect_needs, outside_of, python, variables
from bench.preparation.process import StagerMode
from bench.preparation.staging import StagingNeeds
from bench.study import Study, list_control_pairs
from bench.sweep import inputs
from bench.sweep.inputs import GivenOverrides, find_study, format_overrides
from bench.terminal import Progress

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
    """Stage what a study's points need, then check it, or only check; return the findings, which are made as they are
    read. Raises UserError at once for what contradicts itself."""
    chosen, requests = _points(study, overrides, config_dir)
    wanted = collect_needs(requests, architectures(build_for, requests[0]))
    image = outside_of(requests[0])
    if image and offline:
        rule = f"jobs run in {image}, and this is outside of it"
        raise UserError("--offline", rule, "leave it out: then a job is written that checks inside")
    if image:  # libraries and ops are the image's own
        wanted = [kind.model_copy(update={"operations": ()}) for kind in wanted]
    modes: tuple[StagerMode, ...] = ("check",) if offline else ("stage",) if image else ("stage", "check")

    def findings() -> Iterator[Check]:
        complete = yield from _staged(modes, wanted, requests[0], follow)
        if complete and not offline and launchers.load(requests[0].launcher).QUEUES:
            folder = (results / chosen.name / "prepare" / "node").resolve()  # as deep as the folder of any other job
            yield _write_job(folder, _words(study, overrides, config_dir, folder), chosen.name, requests[0], image)

    return findings()


def _points(study: StudyGiven, overrides: GivenOverrides, config_dir: Path | None) -> tuple[Study, list[Request]]:
    """Return every point of the study or of the comma lists, its control point included."""
    chosen, given = find_study(study, overrides, config_dir, "prepare")
    requests = [
        point.composed for point in compose.compose_points(chosen, given, config_dir, inputs.find_device).points
    ]
    if control := list_control_pairs(chosen, given):
        requests.append(compose.compose_request(control, config_dir))
    if len({request.launcher_options.model_dump_json() for request in requests}) > 1:
        raise UserError("launcher", "points have several", "call prepare once for each")
    return chosen, requests


def _build_listener(follow: Callable[[Progress], None], share: float) -> Callable[[str], None]:
    """Return what tells the texts of one kind of node, before which a share of all is done."""
    return lambda text: follow(Progress(text, share))


def _staged(
    modes: Sequence[StagerMode], wanted: Sequence[StagingNeeds], request: Request, follow: Callable[[Progress], None]
) -> Generator[Check, None, bool]:
    """Yield what staging and checking find, each thing once; return whether nothing was missing after staging. What
    cannot be staged need not be checked."""
    process.create_log_path().unlink(missing_ok=True)
    done, of = 0, len(modes) * len(wanted)
    for mode in modes:
        found: set[Check] = set()
        for kind in wanted:
            hear, done = _build_listener(follow, done / of), done + 1
            for finding in process.run_checks(mode, kind, python(request), variables(mode, request), hear):
                if finding not in found:  # kinds of node share much
                    found.add(finding)
                    yield finding
        if mode == "stage" and any(finding.state == "missing" for finding in found):
            return False
    return True


def _words(study: StudyGiven, overrides: GivenOverrides, config_dir: Path | None, folder: Path) -> tuple[str, ...]:
    """Return the words that ask for the same on a node. A Study that is no file yet becomes one in `folder`."""
    if isinstance(study, Study):
        path, content = folder / "study.yaml", study.model_dump_json(indent=1)  # JSON is YAML as well
        folder.mkdir(parents=True, exist_ok=True)
        store.write_atomically(path, content.encode())
        study = path
    named = format_overrides({"study": str(study)}) if study is not None else ()
    elsewhere = ["--config-dir", str(config_dir.resolve())] if config_dir else []
    return ("prepare", *named, *format_overrides(overrides), "--offline", *elsewhere)


def _write_job(folder: Path, words: tuple[str, ...], study: str, request: Request, image: str | None) -> Check:
    """Write the job that checks where runs will be, with all that a site file says of it; return how to submit it."""
    work = Work(f"{study}-prepare", folder, "bench.cli", words, devices_per_node=1, time_limit_min=_NODE_MIN)
    plan = launchers.load(request.launcher).plan(work, request.launcher_options)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in plan.files.items():
        store.write_atomically(path, text.encode(errors="surrogateescape"))
    where = f"{socket.gethostname()}, outside of {image}" if image else socket.gethostname()
    found = f"not looked at: this is {where}. A job that checks, and builds what is still missing there, is written"
    return Check("compute node", "note", found, f"{shlex.join(plan.command)}, then read its log in {folder}")
