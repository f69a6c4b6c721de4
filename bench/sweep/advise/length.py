"""How much is to be trained, and what it loses to failures: what question, spec and machine say together."""

from bench.config.compose import Request
from bench.core.errors import UserError
from bench.core.network import count_parameters
from bench.core.spec import Device, RunSpec
from bench.predict.advice import Advice
from bench.predict.goodput import RESTART_S, FailureTerms, compute_checkpoint_bytes
from bench.predict.scaling_laws import ScalingLaw, TrainingNeed, compute_need, find_law
from bench.predict.workload import get_network
from bench.sweep.advise.questions import AdviceQuery
from bench.sweep.advise.rejected import Rejected

LAW = "kaplan"
"""Where none is said."""
LEAST_SHARE = 0.01
"""Goodput below which there is no answer: such a job is not run."""


def complete_query(query: AdviceQuery, request: Request, device: Device, rejected: list[Rejected]) -> AdviceQuery:
    """Return the query with its length in tokens or as a loss, its limit in node-hours, and the terms of failures.

    Batches beyond the critical one of a loss are left out and said so in `rejected`. Raises UserError for a question
    that lacks a number, or asks for such a batch.
    """
    spec, words, question = request.spec, query.training, query.question
    if words.samples:
        question = question._replace(tokens=words.samples * spec.tokens_per_sample)
    if words.epochs and question.tokens:
        question = question._replace(tokens=words.epochs * question.tokens)
    if words.budget:
        question = question._replace(node_hours=_convert_budget(query, spec))
    if words.storage:
        question = question._replace(failures=_build_failure_terms(query, spec, device))
    query = query._replace(question=question)
    return _add_need(query, spec, words.loss, rejected) if words.loss else query


def _convert_budget(query: AdviceQuery, spec: RunSpec) -> float:
    """Return the node-hours that the budget pays, at most those that are asked for."""
    budget = query.training.budget or 0.0
    if not query.price:
        raise UserError(f"budget={budget:g}", "the price of a device is not known", "say for example price=2.5")
    paid = budget / (query.price * spec.devices_per_node)
    return min(paid, query.question.node_hours or paid)


def _build_failure_terms(query: AdviceQuery, spec: RunSpec, device: Device) -> FailureTerms:
    words = query.training
    if device == "cpu" and not words.node_mtbf:
        rule = "published failure rates are those of GPUs"
        raise UserError(f"storage={words.storage:g}", rule, "say for example node_mtbf=300d as well")
    size = compute_checkpoint_bytes(count_parameters(get_network(spec)), spec.precision)
    device_mtbf_s = words.node_mtbf * spec.devices_per_node if words.node_mtbf else None
    return FailureTerms(size / (words.storage or 1.0), words.restart or RESTART_S, device_mtbf_s)


def _add_need(query: AdviceQuery, spec: RunSpec, loss: float, rejected: list[Rejected]) -> AdviceQuery:
    law = find_law(query.training.law or LAW)
    need = compute_need(law, count_law_parameters(law, spec), loss)
    limit = _find_batch_limit(need, spec)
    exact, given = query.axes.global_batch, query.axes.max_global_batch
    beyond = f"beyond the critical batch at this loss, {need.critical_batch:,.0f} tokens (arXiv 2001.08361)"
    if exact and exact > limit:
        raise UserError(f"batch.global={exact}", beyond, f"ask for {limit} at most, or for tokens in place of a loss")
    rejected.append(Rejected(f"more than {limit:,} samples per step", beyond))
    axes = query.axes._replace(max_global_batch=min(limit, given or limit))
    return query._replace(question=query.question._replace(need=need), axes=axes)


def build_critical_error(need: TrainingNeed) -> UserError:
    """Return the error for a question all of whose batches are beyond the critical one."""
    rule = f"with every choice a batch is beyond the critical one, {need.critical_batch:,.0f} tokens, or is not divided"
    return UserError(f"loss={need.loss:g}", rule, "ask for fewer nodes, smaller micro-batches or a lower loss")


def check_progress(advice: Advice) -> None:
    """Raise UserError where even the best choice makes next to no progress between failures."""
    goodput, failures = advice.question.predict_goodput(advice.winner), advice.question.failures
    if goodput and failures and goodput.share < LEAST_SHARE:
        value = f"a failure every {goodput.mtbf_s:.3g} s, a checkpoint in {failures.write_s:.3g} s"
        rule = f"less than {LEAST_SHARE:.0%} of the time is progress"
        raise UserError(value, rule, "give faster storage, a longer node_mtbf, a shorter restart, or fewer nodes")


def _find_batch_limit(need: TrainingNeed, spec: RunSpec) -> int:
    """Return the samples of the largest global batch that is not beyond the critical one."""
    limit = int(need.critical_batch // spec.tokens_per_sample)
    if limit < 1:
        rule = f"the critical batch, {need.critical_batch:,.0f} tokens, is less than a sample"
        raise UserError(f"loss={need.loss:g}", rule, "ask for a lower loss, or shorter sequences")
    return limit


def count_law_parameters(law: ScalingLaw, spec: RunSpec) -> int:
    """Return the parameters as a law counts them: without token and position embeddings, or all."""
    network = get_network(spec)
    everything = count_parameters(network)
    if law.counts_embedding:
        return everything
    positions = sum(stack.positions for stack in network.stacks) * network.width
    return everything - network.table * (1 if network.tied else 2) - positions
