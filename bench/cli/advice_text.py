"""How advice is told to a reader: the winner, its rivals and why, what was left out, how sure it is."""

import shlex
from collections.abc import Iterator
from typing import NamedTuple

from bench.core import terminal
from bench.core.formatting import (
    describe_choice,
    describe_layout,
    describe_lengths,
    format_count,
    format_interval,
    format_number,
    format_percent,
    list_overrides,
)
from bench.core.network import Attention, count_parameters
from bench.core.spec import RunSpec
from bench.predict.advice import CLOSE, Advice, AdviceQuestion, format_hours, format_hours_interval, rate_doubt
from bench.predict.advice.candidates import Axes
from bench.predict.advice.choices import Choice, explain_difference
from bench.predict.memory import format_gigabytes, format_host_memory, predict_host_memory
from bench.predict.scaling_laws import KAPLAN, find_law
from bench.predict.workload import format_class, get_network
from bench.sweep import inputs
from bench.sweep.advise.length import LAW
from bench.sweep.advise.search import Answer

_EVIDENCE = {
    "measured": "measured, n = {runs}",
    "corrected": "predicted, and corrected by {runs} measured runs",
    "predicted": "predicted, and nothing was measured",
}
_SHOWN_REASONS = 2
REFERENCE_BATCHES = {
    "t5": ((0.0, "mT5", 2**20),),
    "llama": ((0.0, "Llama 2", 2**22),),
    "gpt": (
        (0.0, "GPT-3 of 125M", 500_000), (1e9, "GPT-3 of 1.3B", 1_000_000), (5e9, "GPT-3 of 6.7B", 2_000_000),
        (5e10, "GPT-3 of 175B", 3_200_000),
    ),
}  # fmt: skip
"""Tokens of an optimizer step in the pre-training of a family, all kinds together, from so many parameters on: mT5
(arXiv 2010.11934), Llama 2 (2307.09288), GPT-3 (2005.14165, table 2.1)."""
_FAR = 2
"""Times the usual from which a batch is named."""
_NEAR = 0.25
"""Of an interval's width: what lies so near to its fast end is nearly the best case."""


class AdviceText(NamedTuple):
    """An answer in words, piece by piece: for a terminal, and for a page."""

    question: tuple[str, ...]  # lines
    winner: str
    facts: list[tuple[str, str]]  # of the winner, by name
    engines: list[list[str]]  # a table with its head; the last column has none
    nodes: list[list[str]]  # empty where only one number of nodes came into question
    rejected: list[tuple[str, str]]  # what, and why
    caveats: list[str]


def build_text(answer: Answer) -> AdviceText:
    """Return the answer in words."""
    advice = answer.advice
    return AdviceText(
        _list_question(answer),
        f"{advice.winner.spec.engine.name}, {describe_choice(advice.winner.spec)}",
        _list_facts(answer),
        _build_table(advice, advice.engines),
        _build_table(advice, advice.nodes) if len(advice.nodes) > 1 else [],
        [(item.what, item.why) for item in answer.rejected],
        list_caveats(answer),
    )


def format_text(answer: Answer) -> str:
    """Return the answer for a reader."""
    text = build_text(answer)
    parts = [
        "\n".join(text.question),
        f"→ {text.winner}\n{terminal.align(text.facts, least=(12,), gap=0, indent=2)}",
        f"each engine at its best\n{terminal.align(text.engines, indent=2)}",
    ]
    if text.nodes:
        parts.append(f"each number of nodes at its best\n{terminal.align(text.nodes, indent=2)}")
    if text.rejected:
        parts.append("\n".join(["left out", *(f"  {what}: {why}" for what, why in text.rejected)]))
    return "\n\n".join([*parts, "\n".join(["how sure", *(f"  {line}" for line in text.caveats)])])


def _list_question(answer: Answer) -> tuple[str, ...]:
    spec, question = answer.advice.winner.spec, answer.query.question
    where = f"nodes of {format_count(spec.devices_per_node, 'device')} of {answer.request.machine.name}"
    tokens = f"{question.tokens:g} tokens, " if question.tokens else ""
    tokens = f"loss {question.need.loss:g}, " if question.need else tokens
    return (
        f"{spec.model.name}, {spec.precision}, {describe_lengths(spec)}, {where}",
        f"asked: {tokens}{question.objective}; {format_count(answer.looked_at, 'candidate')}",
    )


def _list_facts(answer: Answer) -> list[tuple[str, str]]:
    """Return what the winner takes, by name."""
    winner = answer.advice.winner
    estimate, time = winner.estimate, winner.time
    needed = "–".join(map(format_gigabytes, winner.candidate.memory.device))
    rates = (time.tokens / seconds for seconds in (estimate.step_s, estimate.high_s, estimate.low_s))
    fits = "may fit" if winner.candidate.fits is None else "fits"
    return [
        ("step", f"{format_interval(estimate.step_s, estimate.low_s, estimate.high_s)} s, {_format_evidence(winner)}"),
        ("bound by", time.bound),
        ("tokens/s", format_interval(*rates)),
        ("MFU", _format_mfu(winner)),
        ("memory", f"{needed} of {format_gigabytes(answer.request.machine.memory_bytes or 0)} GB: {fits}"),
        *_list_training_rows(answer),
    ]


def _format_mfu(choice: Choice) -> str:
    """Return the share of the peak that is reached, with its interval."""
    if choice.time.mfu is None:
        return "unknown, as the machine's peak is"
    estimate, predicted_s = choice.estimate, choice.time.step_s
    steps = (estimate.step_s, estimate.high_s, estimate.low_s)
    return f"{format_interval(*(100 * choice.time.mfu * predicted_s / seconds for seconds in steps))} %"


def _list_training_rows(answer: Answer) -> list[tuple[str, str]]:
    """Return what the asked tokens take."""
    winner, question = answer.advice.winner, answer.query.question
    spec, hours = winner.spec, question.predict_hours(winner)
    if hours is None:
        return []
    rows = [
        ("steps", f"{question.steps(winner):,}"),
        *list_length_rows(question, winner),
        ("time", format_hours_interval(*hours)),
        *_list_promise(answer),
        ("node-hours", format_interval(*(spec.nodes * value for value in hours))),
    ]
    if answer.query.price:
        rows.append(("cost", format_interval(*(answer.query.price * spec.world_size * value for value in hours))))
    return rows


def _list_promise(answer: Answer) -> list[tuple[str, str]]:
    """Return whether the limits are promised: only where the far end of the interval keeps to them."""
    question = answer.query.question
    if question.deadline_h is None and question.node_hours is None:
        return []
    name = "deadline" if question.deadline_h is not None else "limit"
    kept = question.kept(answer.advice.winner)
    return [(name, "kept, also at the far end of the interval" if kept else "not promised: the far end is beyond it")]


def _build_table(advice: Advice, choices: list[Choice]) -> list[list[str]]:
    head = ["engine", "nodes", "micro × acc", "checkpoint", "s/step", "tokens/s/device"]
    head += ["time"] if advice.question.has_length else []
    return [head, *([*_build_row(advice, choice), _format_note(advice, choice)] for choice in choices)]


def _build_row(advice: Advice, choice: Choice) -> list[str]:
    spec, estimate = choice.spec, choice.estimate
    steps = estimate.step_s, estimate.low_s, estimate.high_s
    hours = advice.question.predict_hours(choice)
    per_device = (choice.time.tokens / seconds / spec.world_size for seconds in (steps[0], steps[2], steps[1]))
    return [
        f"{spec.engine.name}{describe_layout(spec).replace('  ', ', ')}",
        str(spec.nodes),
        f"{spec.batch.micro} × {spec.accumulation}",
        "yes" if spec.activation_checkpointing else "no",
        format_interval(*steps),
        format_interval(*per_device),
        *([format_hours_interval(*hours)] if hours else []),
    ]


def _format_note(advice: Advice, choice: Choice) -> str:
    """Return how a rival compares with the winner, and why."""
    winner, question = advice.winner, advice.question
    if choice is winner:
        return "the answer"
    own_doubt = rate_doubt(choice, question)
    if own_doubt > rate_doubt(winner, question):
        return {1: "within the limits only if all goes well", 2: "may not fit", 3: "beyond the limits"}[own_doubt]
    share = advice.compute_extra_share(choice)
    share_text = f"{format_percent(share)} {'device-time' if question.per_device else 'time'}"
    if abs(share) < CLOSE:
        return f"as good ({share_text})"
    if question.per_device or choice.spec.world_size == winner.spec.world_size:  # else it is the number of devices
        parts = list(explain_difference(winner, choice, per_device=question.per_device).items())[:_SHOWN_REASONS]
        share_text += ": " * bool(parts) + ", ".join(f"{name} {format_percent(part)}" for name, part in parts)
    return share_text if advice.is_distinct(choice) else f"cannot be told apart ({share_text})"


def list_caveats(answer: Answer) -> list[str]:
    """Return what the answer stands on, what cannot be told, and what would tell it."""
    advice, winner, axes = answer.advice, answer.advice.winner, answer.query.axes
    basis = "a calibration of this machine" if answer.request.machine.calibration else "the machine's published rates"
    lines = [f"The time of a step is {_format_evidence(winner)}; formulas stand on {basis}."]
    if winner.estimate.evidence == "predicted" and not answer.request.machine.calibration and answer.device == "cuda":
        lines.append(format_class(answer.query.software))
    step_s, low_s, high_s = winner.estimate[:3]
    if high_s > 1.1 * step_s and step_s - low_s < _NEAR * (high_s - low_s):  # hardly faster, perhaps far slower
        lines.append(f"Most of the doubt is on the slow side: plan with {format_number(high_s)} s a step.")
    if rate_doubt(winner, advice.question) == 1:
        lines.append("Within the limits only if all goes well: the slow end of the interval is beyond them.")
    if winner.candidate.fits is None:
        lines.append("Nothing fits for sure; this may fit.")
    if ties := _list_ties(advice):
        lines.append(f"Cannot be told apart from the answer: {'; '.join(ties)}.")
    if better_but_less_sure := advice.better_but_less_sure:
        by = format_percent(advice.compute_extra_share(better_but_less_sure))
        lines.append(
            f"Predicted to take less, but less sure: {better_but_less_sure.spec.engine.name}, "
            f"{describe_choice(better_but_less_sure.spec)}: {by}."
        )
    if (better := advice.perhaps) is not None:
        lines.append(
            f"Better, if it {_format_condition(better)}: {better.spec.engine.name}, {describe_choice(better.spec)}."
        )
    lines += [
        *_list_search_ends(axes, winner),
        *_list_batch_caveats(winner),
        *_list_precision_caveats(winner),
        *_list_host_caveats(answer),
        *list_length_caveats(answer),
    ]
    if not (axes.accumulation or axes.global_batch or axes.max_global_batch):
        lines.append("Accumulation was not tried, for it makes the global batch larger: say max_global_batch=2048.")
    if winner.estimate.evidence != "measured":
        lines.append(f"To be surer: {shlex.join(['zeroscale', 'sweep', *_list_measuring_overrides(answer)])}")
    return lines


def _list_ties(advice: Advice) -> list[str]:
    """Return the ties, the node counts of each engine together."""
    nodes: dict[str, set[int]] = {}
    for tie in advice.ties:
        nodes.setdefault(tie.spec.engine.name, set()).add(tie.spec.nodes)
    return [
        f"{engine} on {', '.join(map(str, sorted(found)))} {'node' if max(found) == 1 else 'nodes'}"
        for engine, found in nodes.items()
    ]


def _list_search_ends(axes: Axes, winner: Choice) -> Iterator[str]:
    max_nodes = max(axes.nodes)
    if len(axes.nodes) > 1 and winner.spec.nodes == max_nodes:
        more = f"nodes={max_nodes},{2 * max_nodes}"
        yield f"Searched up to {format_count(max_nodes, 'node')}: say {more} to look further."


def _list_batch_caveats(winner: Choice) -> Iterator[str]:
    """Yield a line on a global batch that is far above the usual: what it learns per token is not predicted."""
    spec, tokens = winner.spec, winner.time.tokens
    reference = find_reference_batch(spec)
    if reference and tokens > _FAR * reference.tokens:
        usual = 2 ** max(0, (reference.tokens * spec.global_batch // tokens).bit_length() - 1)
        yield (
            f"A step of {tokens:,} tokens is far above the usual, for {reference.name} {reference.tokens:,}; how much "
            f"a larger batch learns per token is not predicted: max_global_batch={usual} keeps to that."
        )


class ReferenceBatch(NamedTuple):
    """The batch that a published training of a model's family used."""

    name: str
    tokens: int


def find_reference_batch(spec: RunSpec) -> ReferenceBatch | None:
    """Return the batch of a published model of the family, the nearest in size; None for a family without one."""
    network = get_network(spec)
    rotary = any(isinstance(part, Attention) and part.rotary for stack in network.stacks for part in stack.block)
    known = REFERENCE_BATCHES.get("llama" if rotary else spec.model.family, ())
    parameters = count_parameters(network)
    found = [ReferenceBatch(name, tokens) for least, name, tokens in known if parameters >= least]
    return found[-1] if found else None


def _list_precision_caveats(winner: Choice) -> Iterator[str]:
    spec = winner.spec
    if spec.precision == "fp16" and get_network(spec).clamps_fp16:
        trouble = f"{spec.model.family.upper()} in fp16 often diverges, since its activations overflow"
        yield f"{trouble}: take bf16 where the device has it, else fp32."


def _list_host_caveats(answer: Answer) -> Iterator[str]:
    """Yield a line on the host where the winner's weights are flattened there."""
    spec, machine = answer.advice.winner.spec, answer.request.machine
    needed = predict_host_memory(spec, inputs.find_predicted_device(answer.request), machine.memory_bytes)
    if needed and needed.terms.get("flattening"):
        yield format_host_memory(needed, spec.devices_per_node, machine.host_memory_bytes)


def _format_condition(choice: Choice) -> str:
    low, high = choice.candidate.memory.device
    return (
        f"fits, for it needs {format_gigabytes(low)}–{format_gigabytes(high)} GB"
        if choice.candidate.fits is None
        else "keeps to the limits"
    )


def _list_measuring_overrides(answer: Answer) -> list[str]:
    """Return the overrides that measure the winner, and with it the engines that are told apart by nothing else."""
    winner = answer.advice.winner.spec
    rivals = [tie.spec for tie in answer.advice.ties if list_overrides(tie.spec) == list_overrides(winner)]
    engines = dict.fromkeys(spec.engine.name for spec in (winner, *rivals))
    return [*answer.query.texts, f"engine={','.join(engines)}", *list_overrides(winner)]


def _format_evidence(choice: Choice) -> str:
    return _EVIDENCE[choice.estimate.evidence].format(runs=choice.estimate.runs)


_LONG_H = 24
"""Hours from which a training on GPUs is said to be without failures where these are not counted."""


def list_length_rows(question: AdviceQuestion, winner: Choice) -> list[tuple[str, str]]:
    """Return rows on tokens, where they follow from a loss, and on goodput, where it is known."""
    rows, need, goodput = [], question.need, question.predict_goodput(winner)
    if need:
        tokens = f"{need.compute_tokens(winner.time.tokens):.3g}, {need.least_tokens:.3g} with tiny batches"
        batch = f"{winner.time.tokens:,} tokens of {need.critical_batch:,.0f}, the critical one"
        rows += [("tokens", tokens), ("batch", batch)]
    if goodput:
        share = format_interval(*(100 * part for part in (goodput.share, goodput.low, goodput.high)))
        interval = f"a checkpoint every {_format_time(goodput.interval_s)}"
        rows.append(("goodput", f"{share} %, {interval}, a failure every {_format_time(goodput.mtbf_s)}"))
    return rows


def list_length_caveats(answer: Answer) -> Iterator[str]:
    """Yield what tokens and hours stand on."""
    question, winner = answer.query.question, answer.advice.winner
    if question.need:
        law = find_law(answer.query.training.law or LAW)
        batch = "" if law is KAPLAN else f", the critical batch by {KAPLAN.source}"
        yield f"Tokens to a loss are by {law.source}{batch}: of decoders, on their text with their tokenizer."
        if len(get_network(winner.spec).stacks) > 1:
            yield "No law of these is of an encoder with a decoder: a rough guess here."
    hours = question.predict_hours(winner)
    if (goodput := question.predict_goodput(winner)) is not None:
        yield f"Goodput is by the failure rate of {goodput.source}; hours and costs are with failures."
    elif hours and hours.likely >= _LONG_H and inputs.find_predicted_device(answer.request) == "cuda":
        yield "Hours are those of a job that never fails: say storage=2e9, in bytes per second, to count failures."


def _format_time(seconds: float) -> str:
    return f"{seconds / 60:.3g} min" if seconds < 7200 else format_hours(seconds / 3600)
