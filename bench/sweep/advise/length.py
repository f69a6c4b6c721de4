"""Complete the question that a user asks with `zeroscale advise`: compute the length of the training in tokens, and
collect the data needed to predict the time lost to failures. Both are derived from the arguments of the command, the
spec and the machine."""

from bench.config.decode import Request
from bench.core.errors import UserError
from bench.core.formatting import format_count
from bench.core.network import count_parameters, count_trained_parameters
from bench.core.spec import Device, RunSpec
from bench.predict.advice import Advice
from bench.predict.advice.candidates import Axes
from bench.predict.goodput import RESTART_S, FailureTerms, compute_checkpoint_bytes
from bench.predict.scaling_laws import ScalingLaw, TrainingNeed, compute_need, find_law
from bench.predict.workload import get_network
from bench.sweep.advise.questions import AdviceQuery
from bench.sweep.advise.remedies import Rejected

LAW = "kaplan"
"""Name of the scaling law that is used if the question (the arguments of `zeroscale advise`) names none."""
LEAST_SHARE = 0.01
"""Smallest goodput for which advice is given, because a job with a lower goodput is not worth its cost. Goodput is the
share of a job's time in which it makes progress. The rest is repeated work, restarts and checkpoints."""


def complete_query(query: AdviceQuery, request: Request, device: Device, rejected: list[Rejected]) -> AdviceQuery:
    """Return the query with three additions:

    - the length of the training, in tokens or as a loss to reach,
    - the limit on the node-hours of the training,
    - the data from which the time lost to failures is predicted.

    Global batches with more samples than one pass over the data are removed from the search. If the user gives a loss
    to reach, global batches above the critical batch of this loss are also removed, and a line in `rejected` reports
    this. At the critical batch, a training needs twice as many tokens as with small batches.

    Raise UserError if a value needed for an addition is missing, such as the price of a device for a budget. Also raise
    UserError if the user asks for a batch that is removed.
    """
    spec, words, question = request.spec, query.training, query.question
    if words.samples:
        question = question._replace(tokens=words.samples * spec.tokens_per_sample)
    if question.tokens:
        query = query._replace(axes=_limit_batch(query, int(question.tokens // spec.tokens_per_sample), spec))
    if words.epochs and question.tokens:
        question = question._replace(tokens=words.epochs * question.tokens)
    if words.budget:
        if not query.price:
            raise UserError(f"budget={words.budget:g}", "the price of a device is unknown", "add for example price=2.5")
        paid = words.budget / (query.price * spec.devices_per_node)
        question = question._replace(node_hours=min(paid, question.node_hours or paid), budget=words.budget)
    if words.storage:
        question = question._replace(failures=_build_failure_terms(query, spec, device))
    query = query._replace(question=question)
    return _add_need(query, spec, words.loss, rejected) if words.loss else query


def _limit_batch(query: AdviceQuery, samples: int, spec: RunSpec) -> Axes:
    """Return the axes (values and limits) of the search. They exclude global batches of more than `samples`, the number
    of samples in one pass over the data. Raise UserError if the user asks for a larger batch."""
    exact = query.axes.global_batch
    if not samples:
        rule = f"less than one sample, which has {spec.tokens_per_sample} tokens"
        raise UserError(f"tokens={query.question.tokens:g}", rule, "ask for more, or for shorter sequences")
    if exact and exact > samples:
        rule = f"the training has only {format_count(samples, 'sample')}"
        raise UserError(f"batch.global={exact}", rule, f"ask for {samples} at most")
    return query.axes._replace(pass_samples=samples)


def _build_failure_terms(query: AdviceQuery, spec: RunSpec, device: Device) -> FailureTerms:
    words = query.training
    if device == "cpu" and not words.node_mtbf:
        rule = "published failure rates are those of GPUs"
        raise UserError(f"storage={words.storage:g}", rule, "add for example node_mtbf=300d")
    size = compute_checkpoint_bytes(count_trained_parameters(get_network(spec)), spec.precision)
    device_mtbf_s = words.node_mtbf * spec.devices_per_node if words.node_mtbf else None
    return FailureTerms(size / (words.storage or 1.0), words.restart or RESTART_S, device_mtbf_s)


def _add_need(query: AdviceQuery, spec: RunSpec, loss: float, rejected: list[Rejected]) -> AdviceQuery:
    """Return the query with the number of tokens that the model of `spec` needs to reach `loss`. The critical batch (at
    which a training needs twice as many tokens as with small batches) becomes the largest global batch that is
    searched. A line about the excluded larger batches is added to `rejected`."""
    if get_network(spec).adapter:
        rule = "a scaling law is for trainings from random weights, and not for adapters of trained weights"
        raise UserError(f"loss={loss:g}", rule, "give samples or tokens")
    law = find_law(query.training.law or LAW)
    need = compute_need(law, count_law_parameters(law, spec), loss)
    limit = int(need.critical_batch // spec.tokens_per_sample)
    if limit < 1:
        rule = f"the critical batch, {need.critical_batch:,.0f} tokens, is less than one sample"
        raise UserError(f"loss={loss:g}", rule, "ask for a lower loss, or shorter sequences")
    exact, given = query.axes.global_batch, query.axes.max_global_batch
    beyond = f"beyond the critical batch at this loss, {need.critical_batch:,.0f} tokens (arXiv 2001.08361)"
    if exact and exact > limit:
        remedy = f"ask for {limit} at most, or give tokens in place of a loss"
        raise UserError(f"batch.global={exact}", beyond, remedy)
    rejected.append(Rejected(f"more than {limit:,} samples per step", beyond))
    axes = query.axes._replace(max_global_batch=min(limit, given or limit))
    return query._replace(question=query.question._replace(need=need), axes=axes)


def build_critical_error(need: TrainingNeed) -> UserError:
    """Return the error for a search without a result: each global batch exceeds the critical batch, or cannot be
    divided among the ranks. At the critical batch, a training needs twice as many tokens as with small batches. Larger
    batches are not searched."""
    beyond = f"a batch beyond the critical batch, {need.critical_batch:,.0f} tokens"
    rule = f"every choice has {beyond}, or one that its ranks cannot divide"
    return UserError(f"loss={need.loss:g}", rule, "ask for fewer nodes, smaller micro-batches or a lower loss")


def check_progress(advice: Advice) -> None:
    """Raise UserError if even the best candidate makes progress in less than `LEAST_SHARE` of its time. The rest goes
    to failures, restarts and checkpoints."""
    goodput, failures = advice.question.predict_goodput(advice.winner), advice.question.failures
    if goodput and failures and goodput.share < LEAST_SHARE:
        value = f"a failure every {goodput.mtbf_s:.3g} s, a checkpoint in {failures.write_s:.3g} s"
        rule = f"less than {LEAST_SHARE:.0%} of the time is progress"
        raise UserError(value, rule, "give faster storage, a longer node_mtbf, a shorter restart, or fewer nodes")


def count_law_parameters(law: ScalingLaw, spec: RunSpec) -> int:
    """Return the number of parameters as a scaling law counts it: either all parameters, or all except the token and
    position embeddings."""
    network = get_network(spec)
    everything = count_parameters(network)
    if law.counts_embedding:
        return everything
    positions = sum(stack.positions for stack in network.stacks) * network.width
    return everything - network.table * (1 if network.tied else 2) - positions
