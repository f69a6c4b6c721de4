"""The search for the best stage, micro-batch and node count: candidates, their times, and the advice they make."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench import config, launchers, store
from bench.advising import remedies
from bench.advising.left_out import LeftOut, nothing_fits, without_candidates
from bench.advising.questions import Asked
from bench.config import Request
from bench.errors import UserError
from bench.planning import target
from bench.plugins import StandaloneLauncherPlugin
from bench.predict.advice import Advice, advise, duration, measured, standing
from bench.predict.advice.candidates import Candidate, Room, look
from bench.predict.advice.choices import Choice, choose
from bench.predict.advice.measured import Known
from bench.predict.memory import memory
from bench.predict.step_time import step_time
from bench.record import RunRecord
from bench.spec import Device, RunSpec
from bench.store import RESULTS
from bench.wording import count


class Answer(NamedTuple):
    """Advice, and what it answers."""

    advice: Advice
    request: Request  # with one of the engines
    asked: Asked
    left_out: list[LeftOut]
    looked_at: int


def answer(asked: Asked, config_dir: Path | None, results: Path | None, *, hand_over: bool) -> Answer:
    """Return the advice on a question; UserError where there is none, or none that can be handed over."""
    left_out: list[LeftOut] = []
    requests = _requests(asked, config_dir, left_out)
    first = next(iter(requests.values()))
    if hand_over:
        standalone(first)
    asked = asked._replace(price=asked.price or first.machine.price_per_device_hour)
    device = target.kind(first)
    known = _known(first, device, results, left_out)
    room = _room(first, device, known)
    found = look([request.spec for request in requests.values()], asked.axes, room)
    remedy = functools.partial(remedies.remedy, asked, config_dir, room)
    left_out += without_candidates(found, asked.axes, functools.partial(remedy, changes=(remedies.FUSED,)))
    if not found.candidates:
        raise nothing_fits(found, left_out, functools.partial(remedy, changes=(remedies.FUSED, *remedies.OFFLOAD)))
    made = _choices(_allowed(found.candidates, requests, device, left_out), known, first, device, left_out)
    return Answer(_advice(asked, made), first, asked, left_out, len(found.candidates))


def standalone(asked: Request) -> StandaloneLauncherPlugin:
    """Return the launcher that writes the job script of a handover; UserError for one that writes none."""
    launcher = launchers.standalone(asked.launcher)
    if not launcher:
        rule, remedy = "writes no job script that starts without zeroscale", f"choose launcher={launchers.cluster()}"
        raise UserError(f"launcher={asked.launcher}", rule, f"leave out --export, or {remedy}")
    return launcher


def _requests(asked: Asked, config_dir: Path | None, left_out: list[LeftOut]) -> dict[str, Request]:
    """Return what is asked with each engine, by its name; one that cannot be, or of which nothing is predicted, is left
    out unless it was named."""
    found: dict[str, Request] = {}
    why: UserError | None = None
    for engine in asked.engines:
        pairs = [("launcher", launchers.cluster()), ("batch.micro", 1), *asked.overrides, ("engine", engine)]
        try:
            request = config.request(pairs, config_dir)
            memory(request.spec, target.kind(request))
            found[request.spec.engine.name] = request
        except UserError as error:
            if asked.chosen:
                raise
            why = why or error
            left_out.append(LeftOut(engine, str(error)))
    if not found:
        assert why
        raise why
    return found


def _room(asked: Request, device: Device, known: Known) -> Room:
    machine = asked.machine
    if machine.memory_bytes is None:
        rule = f"machine={machine.name} does not say it, so nobody can tell what fits"
        raise UserError("machine.memory_bytes", rule, "give machine.memory_bytes=80e9, or another machine")
    return Room(machine.memory_bytes, device, known.fits)


def _known(asked: Request, device: Device, folder: Path | None, left_out: list[LeftOut]) -> Known:
    """Return what was measured of such points; the default folder need not exist."""
    if folder is None and not RESULTS.is_dir():
        return Known()

    def seconds(spec: RunSpec) -> float | None:
        try:
            return step_time(spec, asked.machine, device).step_s
        except UserError:  # a number that the machine's file lacks
            return None

    return measured.known(_records(folder or RESULTS, left_out), asked.spec, asked.machine, seconds)


def _records(folder: Path, left_out: list[LeftOut]) -> list[RunRecord]:
    records, unreadable = [], 0
    for path in store.find_records([folder]):
        try:
            records.append(store.read_record(path))
        except (store.Unreadable, FileNotFoundError):
            unreadable += 1
    if unreadable:
        left_out.append(LeftOut(str(folder), f"{count(unreadable, 'record')} cannot be read"))
    return records


def _allowed(
    candidates: list[Candidate], requests: dict[str, Request], device: Device, left_out: list[LeftOut]
) -> list[Candidate]:
    """Return the candidates that break no rule between spec, machine and engine."""
    return _without_errors(
        candidates,
        lambda c: config.check(requests[c.spec.engine.name]._replace(spec=c.spec), device),
        lambda c: c.spec.engine.name,
        left_out,
    )


def _choices(
    candidates: list[Candidate], known: Known, asked: Request, device: Device, left_out: list[LeftOut]
) -> list[Choice]:
    """Return the candidates with their times; those for which the machine's file lacks a number are left out."""
    made: list[Choice] = []
    _without_errors(
        candidates,
        lambda c: made.append(choose(c, known, step_time(c.spec, asked.machine, device))),
        lambda c: "1 node" if c.spec.nodes == 1 else "several nodes",
        left_out,
    )
    return made


def _without_errors(
    candidates: list[Candidate],
    act: Callable[[Candidate], None],
    kind: Callable[[Candidate], str],
    left_out: list[LeftOut],
) -> list[Candidate]:
    """Return the candidates for which `act` raises no UserError, the others left out by kind; if all do, raise."""
    good: list[Candidate] = []
    errors: dict[tuple[str, str], UserError] = {}
    for candidate in candidates:
        try:
            act(candidate)
            good.append(candidate)
        except UserError as error:
            errors[kind(candidate), str(error)] = error
    if errors and not good:
        raise next(iter(errors.values()))
    left_out.extend(LeftOut(what, why) for what, why in errors)
    return good


def _advice(asked: Asked, made: list[Choice]) -> Advice:
    """Return the advice; UserError where nothing keeps within the limits."""
    question, most = asked.question, max(asked.axes.nodes)
    advice = advise(question, made)
    if standing(advice.winner, question) < 3:
        return advice
    quick = min(made, key=lambda choice: question.hours(choice, choice.estimate.step_s) or 0.0)
    hours = question.hours(quick, quick.estimate.step_s) or 0.0
    cheap = min(made, key=lambda choice: choice.spec.nodes * (question.hours(choice, choice.estimate.step_s) or 0.0))
    least = cheap.spec.nodes * (question.hours(cheap, cheap.estimate.step_s) or 0.0)
    rule = (
        f"nothing keeps to that; the fastest takes {duration(hours)} on {count(quick.spec.nodes, 'node')}, "
        f"the cheapest {least:,.0f} node-hours; searched up to {count(most, 'node')}"
    )
    raise UserError(question.objective, rule, "ask for less, or give more nodes, time or node-hours")
