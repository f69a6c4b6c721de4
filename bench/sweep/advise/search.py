"""Search for the best engine, micro-batch and node count: compose candidates, predict their step times, and advise on
the best one."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench.config import compose, decode
from bench.config.decode import Request
from bench.core import store
from bench.core.errors import UserError
from bench.core.files import RESULTS
from bench.core.formatting import describe_choice, format_count, format_interval, format_number
from bench.core.record import RunRecord
from bench.core.spec import Device, RunSpec
from bench.predict.advice import Advice, advise, format_hours, rate_doubt
from bench.predict.advice.candidates import Candidate, DeviceLimits, apply_layout, list_layouts, search_candidates
from bench.predict.advice.choices import Choice, choose
from bench.predict.memory import predict_memory
from bench.predict.neighbours import MeasuredPoints, collect_measured
from bench.predict.step_time import predict_step_time
from bench.predict.workload import Software
from bench.sweep import inputs
from bench.sweep.advise import remedies
from bench.sweep.advise.length import build_critical_error, check_progress, complete_query
from bench.sweep.advise.questions import AdviceQuery
from bench.sweep.advise.remedies import SEVERAL_NODES, Rejected, build_nothing_fits_error, list_rejected


class Answer(NamedTuple):
    """Advice, with the question that it answers and the candidates: the configurations that may fit into memory."""

    advice: Advice
    request: Request  # for one of the engines
    query: AdviceQuery
    rejected: list[Rejected]
    looked_at: int
    choices: list[Choice]  # all candidates that have a predicted time
    device: Device  # device that the times are predicted for

    def __repr__(self) -> str:
        winner, ties = self.advice.winner, len(self.advice.ties)
        step = format_interval(*winner.estimate[:3])
        tied = f"; {format_count(ties, 'other layout')} cannot be told apart from it" if ties else ""
        counted = f"{format_count(self.looked_at, 'candidate')}"
        return f"<Answer: {winner.spec.engine.name}, {describe_choice(winner.spec)}; {step} s a step{tied}; {counted}>"


def find_answer(query: AdviceQuery, config_dir: Path | None, results: Path | None) -> Answer:
    """Return the advice on a question. Raise UserError if no candidate fits into memory, or if every candidate exceeds
    a limit of the question, such as the deadline."""
    rejected: list[Rejected] = []
    query, requests = _compose_requests(query, config_dir, rejected)
    first = next(iter(requests.values()))
    query = query._replace(price=query.price or first.machine.price_per_device_hour)
    device = inputs.find_predicted_device(first)
    query = complete_query(query, first, device, rejected)
    known = _collect_measured(first, device, results, rejected, query.software)
    if len(query.adapters) > 1:  # a run with another adapter corrects no prediction
        known = known._replace(neighbours=())
    if first.machine.memory_bytes is None:
        rule = f"machine={first.machine.name} has no memory size, so it is unknown what fits"
        raise UserError(
            "machine.memory_bytes", rule, "choose a machine, such as machine=h100, or set machine.memory_bytes=80e9"
        )
    room = DeviceLimits(first.machine.memory_bytes, device, known.fits)
    found = search_candidates([request.spec for request in requests.values()], query.axes, room)
    remedy = functools.partial(remedies.find_remedy, query, config_dir, room)
    rejected += list_rejected(found, query.axes, functools.partial(remedy, changes=(remedies.FUSED,)))
    if not found.candidates:
        if query.question.need and not found.short:
            raise build_critical_error(query.question.need)
        changes = (remedies.FUSED, *remedies.OFFLOAD)
        raise build_nothing_fits_error(found, rejected, functools.partial(remedy, changes=changes))
    allowed = _drop_errors(  # candidates that break no rule of spec, machine and engine; no launcher is chosen yet
        found.candidates,
        lambda c: decode.check_rank(requests[_identify(c.spec)]._replace(spec=c.spec), device),
        lambda c: c.spec.engine.name,
        rejected,
    )
    made: list[Choice] = []

    def add_timed(one: Candidate) -> None:
        made.append(choose(one, known, predict_step_time(one.spec, first.machine, device, software=query.software)))

    # drops candidates for which the machine's file lacks a number: mostly the bandwidth between nodes
    _drop_errors(allowed, add_timed, lambda c: "1 node" if c.spec.nodes == 1 else SEVERAL_NODES, rejected)
    advice = _build_advice(query, made)
    check_progress(advice)
    return Answer(advice, first, query, rejected, len(found.candidates), made, device)


def _compose_requests(
    query: AdviceQuery, config_dir: Path | None, rejected: list[Rejected]
) -> tuple[AdviceQuery, dict[tuple[str, str], Request]]:
    """Return two values: the query with the node counts to search, and a dict of requests by (engine, adapter). The
    query has the parsed arguments of `zeroscale advise`. A request is a complete configuration with its machine. For
    each combination of engine and adapter, one request is composed from the overrides in the query. Requests for full
    training are composed without overrides of an adapter's values.

    If an engine refuses the request, or if there is no prediction for the engine, a line is added to `rejected`. If the
    user named the engines, the error is raised instead.
    """
    found: dict[tuple[str, str], Request] = {}
    first_error: UserError | None = None
    for adapter, engine in itertools.product(query.adapters, query.engines):
        try:
            request = compose.compose_request(remedies.list_pairs(query, engine, adapter), config_dir)
            query = _assume_one_node(query, request, rejected)
            _check_predictable(query, request)
            found[_identify(request.spec)] = request
        except UserError as error:
            if error.value == "devices_per_node" and "launcher" not in dict(query.overrides):
                # the error names a launcher that the user did not choose
                if not {"machine", "machine.memory_bytes"} & {key for key, _ in query.overrides}:
                    rule = "not given, so it is unknown what fits"
                    remedy = "add machine=h100 devices_per_node=8, or the machine and devices of your nodes"
                    raise UserError("machine", rule, remedy) from error
                rule = f"unknown for machine={dict(query.overrides).get('machine', 'auto')}"
                raise UserError(error.value, rule, "add devices_per_node=8, or the devices of your nodes") from error
            if query.chosen:
                raise
            first_error = first_error or error
            rejected.append(Rejected(engine if adapter == "none" else f"{engine} with {adapter}", str(error)))
    if not found:
        assert first_error
        raise first_error
    return query, found


def _identify(spec: RunSpec) -> tuple[str, str]:
    """Return the names of a spec's engine and adapter."""
    return spec.engine.name, spec.adapter.name


def _assume_one_node(query: AdviceQuery, request: Request, rejected: list[Rejected]) -> AdviceQuery:
    """Return the query restricted to one node if the machine has one device per node and no known bandwidth between
    nodes.

    Step times on several nodes cannot be predicted without this bandwidth. The restriction is reported in `rejected`.
    If the user chose the node counts, the query stays as it is.
    """
    machine = request.machine
    if query.nodes_given or request.spec.devices_per_node > 1 or machine.inter_node_bytes_per_s is not None:
        return query
    rule = f"nodes=1 is assumed, since machine={machine.name} has no inter_node_bytes_per_s"
    rejected.append(Rejected(SEVERAL_NODES, f"{rule}; for more, set it and nodes=1,2,4"))
    return query._replace(axes=query.axes._replace(nodes=(1,)), nodes_given=True)


def _check_predictable(query: AdviceQuery, request: Request) -> None:
    """Raise UserError if the engine refuses a request, or if the memory that the request needs cannot be predicted.

    The request is checked with the largest node count of the search and with the first layout that the engine supports.
    """
    device = inputs.find_predicted_device(request)
    spec = request.spec.model_copy(update={"nodes": max(query.axes.nodes)})
    layouts = list_layouts(spec, query.axes.layouts, device)
    if layouts and layouts[0] != spec.parallel:
        request = request._replace(spec=apply_layout(spec, layouts[0]))
    decode.check_rank(request, device)
    predict_memory(request.spec, device)


def _collect_measured(
    query: Request, device: Device, folder: Path | None, rejected: list[Rejected], software: Software
) -> MeasuredPoints:
    """Return the measured runs that are comparable with the request `query`. They are read from `folder` or, if it is
    None, from the default results folder, which need not exist. If some records cannot be read, a line is added to
    `rejected`."""
    if folder is None and not RESULTS.is_dir():
        return MeasuredPoints()
    records: list[RunRecord] = []
    unreadable = 0
    for path in store.find_records([folder or RESULTS]):
        try:
            records.append(store.read_record(path))
        except (store.Unreadable, FileNotFoundError):
            unreadable += 1
    if unreadable:
        rejected.append(Rejected(str(folder or RESULTS), f"{format_count(unreadable, 'record')} cannot be read"))

    def predict_seconds(spec: RunSpec) -> float | None:
        try:
            return predict_step_time(spec, query.machine, device, software=software).step_s
        except UserError:  # the machine's file lacks a number
            return None

    return collect_measured(records, query.spec, query.machine, predict_seconds)


def _drop_errors(
    candidates: list[Candidate],
    act: Callable[[Candidate], None],
    kind: Callable[[Candidate], str],
    rejected: list[Rejected],
) -> list[Candidate]:
    """Call `act` with each candidate. Return the candidates for which it raises no UserError.

    For each other candidate, the error is added to `rejected`. Candidates with equal error and equal result of `kind`
    share one line there. If `act` raises an error for every candidate, the first error is raised.
    """
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
    """Return the advice. Raise UserError if every candidate exceeds a limit of the question, such as the deadline."""
    question = query.question
    advice = advise(question, made)
    if rate_doubt(advice.winner, question) < 3:
        return advice
    hours = [(question.hours(choice, choice.estimate.step_s) or 0.0, choice) for choice in made]
    least_h, fastest = min(hours, key=lambda taken: taken[0])
    cheapest_h, cheapest = min(((taken, one.spec) for taken, one in hours), key=lambda pair: pair[0] * pair[1].nodes)
    # The table of an answer prefers choices that surely fit, so it may list another micro-batch for this engine.
    name = f"{fastest.spec.engine.name}, {describe_choice(fastest.spec)}"
    perhaps = ", which may fit" if fastest.candidate.fits is None else ""
    cost = f", at a cost of {format_number(cheapest_h * cheapest.world_size * query.price)}" if query.price else ""
    rule = (
        f"no choice keeps this; the fastest takes {format_hours(least_h)} ({name}{perhaps}), "
        f"the cheapest {format_number(cheapest_h * cheapest.nodes)} node-hours{cost}; searched up to "
        f"{format_count(max(query.axes.nodes), 'node')}"
    )
    given = ("deadline", question.deadline_h), ("budget", question.budget), ("node_hours", question.node_hours)
    raised = [name for name, limit in given if limit and (name != "node_hours" or not question.budget)]
    remedy = f"raise {' or '.join(raised)}, shorten the training, or allow more nodes"
    raise UserError(", ".join(question.limits), rule, remedy)
