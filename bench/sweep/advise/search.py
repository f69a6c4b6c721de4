"""The search for the best stage, micro-batch and node count: candidates, their times, and the advice they make."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench import launchers
from bench.config import compose, decode
from bench.config.compose import Request
from bench.core import store
from bench.core.errors import UserError
from bench.core.files import RESULTS
from bench.core.formatting import format_count
from bench.core.record import RunRecord
from bench.core.spec import Device, RunSpec
from bench.predict.advice import Advice, advise, format_hours, measured, rate_doubt
from bench.predict.advice.candidates import Candidate, DeviceLimits, apply_layout, list_layouts, search_candidates
from bench.predict.advice.choices import Choice, choose
from bench.predict.advice.measured import MeasuredPoints
from bench.predict.memory import predict_memory
from bench.predict.step_time import predict_step_time
from bench.predict.workload import Software
from bench.sweep import inputs
from bench.sweep.advise import remedies
from bench.sweep.advise.length import build_critical_error, check_progress, complete_query
from bench.sweep.advise.questions import AdviceQuery
from bench.sweep.advise.rejected import Rejected, build_nothing_fits_error, list_rejected


class Answer(NamedTuple):
    """Advice, and what it answers."""

    advice: Advice
    request: Request  # with one of the engines
    query: AdviceQuery
    rejected: list[Rejected]
    looked_at: int
    choices: list[Choice]  # all of which a time is known
    device: Device  # that times are predicted for


def find_answer(query: AdviceQuery, config_dir: Path | None, results: Path | None) -> Answer:
    """Return the advice on a question; UserError where there is none."""
    rejected: list[Rejected] = []
    requests = _compose_requests(query, config_dir, rejected)
    first = next(iter(requests.values()))
    query = query._replace(price=query.price or first.machine.price_per_device_hour)
    device = inputs.find_predicted_device(first)
    query = complete_query(query, first, device, rejected)
    known = _collect_measured(first, device, results, rejected, query.software)
    room = _build_limits(first, device, known)
    found = search_candidates([request.spec for request in requests.values()], query.axes, room)
    remedy = functools.partial(remedies.find_remedy, query, config_dir, room)
    rejected += list_rejected(found, query.axes, functools.partial(remedy, changes=(remedies.FUSED,)))
    if not found.candidates:
        if query.question.need and not found.short:
            raise build_critical_error(query.question.need)
        raise build_nothing_fits_error(
            found, rejected, functools.partial(remedy, changes=(remedies.FUSED, *remedies.OFFLOAD))
        )
    allowed = _select_allowed(found.candidates, requests, device, rejected)
    made = _build_choices(allowed, known, first, device, rejected, query.software)
    advice = _build_advice(query, made)
    check_progress(advice)
    return Answer(advice, first, query, rejected, len(found.candidates), made, device)


def _compose_requests(query: AdviceQuery, config_dir: Path | None, rejected: list[Rejected]) -> dict[str, Request]:
    """Return what is asked with each engine, by its name; one that cannot be, or of which nothing is predicted, is left
    out unless it was named."""
    found: dict[str, Request] = {}
    why: UserError | None = None
    for engine in query.engines:
        pairs = [("launcher", launchers.find_cluster()), ("batch.micro", 1), *query.overrides, ("engine", engine)]
        try:
            request = compose.compose_request(pairs, config_dir)
            device = inputs.find_predicted_device(request)
            _check_predictable(query, request, device)
            found[request.spec.engine.name] = request
        except UserError as error:
            if query.chosen:
                raise
            why = why or error
            rejected.append(Rejected(engine, str(error)))
    if not found:
        assert why
        raise why
    return found


def _check_predictable(query: AdviceQuery, request: Request, device: Device) -> None:
    """Raise UserError for what cannot be, or is not predicted: with the first layout that the engine can do, where it
    needs one, on the most nodes."""
    spec = request.spec.model_copy(update={"nodes": max(query.axes.nodes)})
    layouts = list_layouts(spec, query.axes.layouts, device)
    if layouts and layouts[0] != spec.parallel:
        request = request._replace(spec=apply_layout(spec, layouts[0]))
    decode.check_rank(request, device)
    predict_memory(request.spec, device)


def _build_limits(query: Request, device: Device, known: MeasuredPoints) -> DeviceLimits:
    machine = query.machine
    if machine.memory_bytes is None:
        rule = f"machine={machine.name} does not say it, so nobody can tell what fits"
        raise UserError("machine.memory_bytes", rule, "give machine.memory_bytes=80e9, or another machine")
    return DeviceLimits(machine.memory_bytes, device, known.fits)


def _collect_measured(
    query: Request, device: Device, folder: Path | None, rejected: list[Rejected], software: Software
) -> MeasuredPoints:
    """Return what was measured of such points; the default folder need not exist."""
    if folder is None and not RESULTS.is_dir():
        return MeasuredPoints()

    def seconds(spec: RunSpec) -> float | None:
        try:
            return predict_step_time(spec, query.machine, device, software=software).step_s
        except UserError:  # a number that the machine's file lacks
            return None

    return measured.collect_measured(_read_records(folder or RESULTS, rejected), query.spec, query.machine, seconds)


def _read_records(folder: Path, rejected: list[Rejected]) -> list[RunRecord]:
    records, unreadable = [], 0
    for path in store.find_records([folder]):
        try:
            records.append(store.read_record(path))
        except (store.Unreadable, FileNotFoundError):
            unreadable += 1
    if unreadable:
        rejected.append(Rejected(str(folder), f"{format_count(unreadable, 'record')} cannot be read"))
    return records


def _select_allowed(
    candidates: list[Candidate], requests: dict[str, Request], device: Device, rejected: list[Rejected]
) -> list[Candidate]:
    """Return the candidates that break no rule between spec, machine and engine."""
    return _drop_errors(
        candidates,
        lambda c: compose.check(requests[c.spec.engine.name]._replace(spec=c.spec), device),
        lambda c: c.spec.engine.name,
        rejected,
    )


def _build_choices(
    candidates: list[Candidate], known: MeasuredPoints, query: Request, device: Device, rejected: list[Rejected],
    software: Software,
) -> list[Choice]:  # fmt: skip
    """Return the candidates with their times; those for which the machine's file lacks a number are left out."""
    made: list[Choice] = []
    _drop_errors(
        candidates,
        lambda c: made.append(choose(c, known, predict_step_time(c.spec, query.machine, device, software=software))),
        lambda c: "1 node" if c.spec.nodes == 1 else "several nodes",
        rejected,
    )
    return made


def _drop_errors(
    candidates: list[Candidate],
    act: Callable[[Candidate], None],
    kind: Callable[[Candidate], str],
    rejected: list[Rejected],
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
    rejected.extend(Rejected(what, why) for what, why in errors)
    return good


def _build_advice(query: AdviceQuery, made: list[Choice]) -> Advice:
    """Return the advice; UserError where nothing keeps within the limits."""
    question, max_nodes = query.question, max(query.axes.nodes)
    advice = advise(question, made)
    if rate_doubt(advice.winner, question) < 3:
        return advice
    quick = min(made, key=lambda choice: question.hours(choice, choice.estimate.step_s) or 0.0)
    hours = question.hours(quick, quick.estimate.step_s) or 0.0
    cheap = min(made, key=lambda choice: choice.spec.nodes * (question.hours(choice, choice.estimate.step_s) or 0.0))
    least = cheap.spec.nodes * (question.hours(cheap, cheap.estimate.step_s) or 0.0)
    rule = (
        f"nothing keeps to that; the fastest takes {format_hours(hours)} on {format_count(quick.spec.nodes, 'node')}, "
        f"the cheapest {least:,.0f} node-hours; searched up to {format_count(max_nodes, 'node')}"
    )
    raise UserError(question.objective, rule, "ask for less, or give more nodes, time or node-hours")
