"""Text of the advice of `zeroscale advise`: the advised configuration, alternatives, excluded candidates, caveats."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.core import terminal
from bench.core.formatting import (
    TIMES,
    describe_adapter,
    describe_choice,
    describe_lengths,
    format_count,
    format_extra,
    format_interval,
    format_number,
    format_percent,
    list_layout,
)
from bench.core.spec import RunSpec
from bench.predict.advice import (
    CLOSE,
    Advice,
    AdviceQuestion,
    find_front,
    format_hours,
    format_hours_interval,
    rate_doubt,
)
from bench.predict.advice.choices import Choice, explain_difference
from bench.predict.memory import format_gigabytes, format_host_memory, predict_host_memory
from bench.predict.scaling_laws import FAR_BATCH, KAPLAN, find_law, find_reference_batch
from bench.predict.step_time.compute import describe_assumed_rate
from bench.predict.workload import describe_parameters, format_class, get_network
from bench.sweep import inputs
from bench.sweep.advise.length import LAW
from bench.sweep.advise.search import Answer

_EVIDENCE = {
    "measured": "measured, n = {runs}",
    "corrected": "predicted, and corrected by {runs} measured runs",
    "predicted": "predicted; nothing was measured",
}
_SHOWN_REASONS = 2
_NEAR = 0.25
"""Share of an interval's width. If a predicted time is closer than this share to the fast end of its interval, it is
almost the best case, and a caveat states this."""
_UNTRIED = (
    "Not tried, but may save time or memory: model.compile=blocks model.loss_chunk_tokens=1024 "
    "optimizer.implementation=fused."
)
_WORTH_IT = 0.1
"""Largest extra cost, as a share of the advised configuration's cost, for which the fastest configuration of the Pareto
front (time against cost) is proposed as the next one."""
SURER = "To be surer:"
"""Text before the command that measures the advised configuration."""
_EXAMPLE_BATCH = 2048  # samples, proposed for a model family without a published training
_FEW_STEPS = 10  # a training with fewer optimizer steps is unusual: its batch is a large part of its data
_NAME_WIDTH = 12
_LONG_H = 24
"""Duration of a training on GPUs, in hours, from which failures are likely, so that the advice mentions them."""


class AdviceText(NamedTuple):
    """Text of the advice in separate pieces, used both for the terminal and for the HTML page."""

    question: tuple[str, ...]  # lines
    winner: str  # the advised configuration, with doubts about its batch and the number of indistinguishable layouts
    next_on_front: str  # a sentence; empty if no other configuration of the Pareto front is worth proposing
    facts: list[tuple[str, str]]  # (name, text) of the advised configuration
    engines: list[list[str]]  # table with a header row; the last column, a comparison, has no header
    nodes: list[list[str]]  # empty with a single node count
    adapters: list[list[str]]  # empty with a single adapter
    rejected: list[tuple[str, str]]  # candidate and reason
    caveats: list[str]


def build_text(answer: Answer) -> AdviceText:
    """Return the text of the advice in separate pieces."""
    advice = answer.advice
    winner, ties = f"{advice.winner.spec.engine.name}, {describe_choice(advice.winner.spec)}", len(advice.ties)
    layouts = f"{format_count(ties, 'other layout')} cannot be told apart from it" if ties else ""
    large = describe_large_batch(answer.query.question, advice.winner)
    return AdviceText(
        _list_question(answer),
        "; ".join(filter(None, [winner, large, layouts])),
        describe_next_on_front(answer),
        _list_facts(answer),
        _build_table(advice, advice.engines),
        _build_table(advice, advice.nodes) if len(advice.nodes) > 1 else [],
        _build_table(advice, advice.adapters) if len(advice.adapters) > 1 else [],
        [(item.what, item.why) for item in answer.rejected],
        list_caveats(answer),
    )


def format_text(answer: Answer, measuring: Sequence[str]) -> str:
    """Return the text of the advice as printed on a terminal. `measuring` are the words of a command that measures the
    advised configuration; empty if this configuration was measured already."""
    text, advice = build_text(answer), answer.advice
    sure = [terminal.wrap(line, 2) for line in text.caveats]
    sure += [f"  {SURER}", terminal.wrap_command(measuring, 4)] if measuring else []
    parts = [
        map(terminal.wrap, text.question),
        [
            terminal.wrap(f"→ {text.winner}"),
            *([terminal.wrap(text.next_on_front, 2)] if text.next_on_front else []),
            *(terminal.wrap(f"{name:<{_NAME_WIDTH}}{fact}", 2, hang=_NAME_WIDTH) for name, fact in text.facts),
        ],
        ["each engine at its best", *_list_compared(advice, advice.engines)],
        ["each number of nodes at its best", *_list_compared(advice, advice.nodes)] if text.nodes else [],
        ["full training and each adapter", *_list_compared(advice, advice.adapters)] if text.adapters else [],
        ["excluded", *(terminal.wrap(f"{what}: {why}", 2) for what, why in text.rejected)] if text.rejected else [],
        ["how sure", *sure],
    ]
    return "\n\n".join(filter(None, map("\n".join, parts)))


def _list_question(answer: Answer) -> tuple[str, ...]:
    spec, question = answer.advice.winner.spec, answer.query.question
    where = f"nodes of {format_count(spec.devices_per_node, 'device')} of {answer.request.machine.name}"
    tokens = f"{question.tokens:,.0f} tokens, " if question.tokens else ""
    tokens = f"loss {question.need.loss:g}, " if question.need else tokens
    return (
        f"{spec.model.name}, {spec.precision}, {describe_lengths(spec)}, {where}",
        f"question: {tokens}{question.objective}; {format_count(answer.looked_at, 'candidate')}",
    )


def describe_next_on_front(answer: Answer) -> str:
    """Return a sentence on the next configuration of the Pareto front (time against cost) after the advised one.

    The next configuration is faster if the advice minimises cost, and cheaper if the advice minimises time. Its
    prediction is at least as certain as that of the advised configuration, and it saves more than the share `CLOSE` of
    the time or the cost. Return an empty string if there is no such configuration.
    """
    winner, question = answer.advice.winner, answer.query.question
    time, cost = question.compute_costs(winner)
    doubt = rate_doubt(winner, question)
    sound = [c for c in answer.choices if rate_doubt(c, question) <= doubt and c.spec is not winner.spec]
    front = find_front(sound, question.compute_costs)
    unit = ("cost" if answer.query.price else "node-hours") if question.has_length else "device-time per token"
    if question.per_device:
        sooner = [choice for choice in front if question.compute_costs(choice)[0] < (1 - CLOSE) * time]
        cheap = [choice for choice in sooner if question.compute_costs(choice)[1] <= (1 + _WORTH_IT) * cost]
        # The front is sorted by time, fastest first. Prefer the fastest point at about the same cost. If there is none,
        # take the cheapest of the faster points.
        found = cheap[:1] or sooner[-1:]
    else:
        found = [choice for choice in front if question.compute_costs(choice)[1] < (1 - CLOSE) * cost][:1]
    if not found:
        return ""
    (best,) = found
    best_time, best_cost = question.compute_costs(best)
    if not (math.isfinite(best_time) and math.isfinite(time)):
        return ""
    where = f"Next on the Pareto front: {format_count(best.spec.nodes, 'node')} ({best.spec.engine.name})"
    share = best_cost / cost - 1
    change = f"{abs(100 * share):.2g} % {'more' if share >= 0 else 'less'} {unit}"
    change = format_extra(share, unit) if share >= TIMES else change
    change += f"; {large}" if (large := describe_large_batch(question, best)) else ""
    ratio = max(time / best_time, best_time / time)
    times = f"{ratio:.2g}" if ratio < 10 else f"{ratio:,.0f}"
    if not question.per_device:
        return f"{where}, {times} times as long at {change}."
    return f"{where}, {times} times {'sooner' if question.has_length else 'the tokens per second'} at {change}."


def _list_facts(answer: Answer) -> list[tuple[str, str]]:
    """Return predicted step time, throughput, MFU, memory and costs of the advised configuration as (name, text)."""
    winner = answer.advice.winner
    estimate, time = winner.estimate, winner.time
    needed = "–".join(map(format_gigabytes, winner.candidate.memory.device))
    slowest_first = (estimate.step_s, estimate.high_s, estimate.low_s)
    mfu = "unknown, since the machine's peak is"
    if time.mfu is not None:
        mfu = f"{format_interval(*(100 * time.mfu * time.step_s / seconds for seconds in slowest_first))} %"
    fits = "may fit" if winner.candidate.fits is None else "fits"
    return [
        *([("parameters", parameters)] if (parameters := describe_parameters(winner.spec)) else []),
        ("step", f"{format_interval(estimate.step_s, estimate.low_s, estimate.high_s)} s, {_format_evidence(winner)}"),
        ("bound by", time.bound),
        ("tokens/s", format_interval(*(time.tokens / seconds for seconds in slowest_first))),
        ("MFU", mfu),
        ("memory", f"{needed} of {format_gigabytes(answer.request.machine.memory_bytes or 0)} GB: {fits}"),
        *_list_training_rows(answer),
    ]


def _list_training_rows(answer: Answer) -> list[tuple[str, str]]:
    """Return rows on steps, time and costs of the whole training. Empty if the user gave neither a number of tokens nor
    a loss to reach."""
    winner, question = answer.advice.winner, answer.query.question
    spec, hours = winner.spec, question.predict_hours(winner)
    if hours is None:
        return []
    rows = [("steps", f"{question.steps(winner):,}"), *_list_length_rows(question, winner)]
    rows.append(("time", format_hours_interval(*hours)))
    if question.deadline_h is not None or question.node_hours is not None:
        kept = question.kept(winner)
        promise = "kept, also at the slow end of the interval" if kept else "not promised: the slow end is beyond it"
        rows.append(("limits" if len(question.limits) > 1 else "limit", f"{', '.join(question.limits)}: {promise}"))
    rows.append(("node-hours", format_interval(*(spec.nodes * value for value in hours))))
    if answer.query.price:
        rows.append(("cost", format_interval(*(answer.query.price * spec.world_size * value for value in hours))))
    return rows


def _list_length_rows(question: AdviceQuestion, winner: Choice) -> list[tuple[str, str]]:
    """Return rows on tokens and batch if the user gave a loss to reach, and a row on goodput if it is predicted: the
    share of a job's time spent on steps that are not repeated after a failure."""
    rows, need, goodput = [], question.need, question.predict_goodput(winner)
    if need:
        counts = need.compute_tokens(winner.time.tokens), need.least_tokens
        tokens = "{} ({} with tiny batches)".format(*map(format_number, counts))
        batch = f"{winner.time.tokens:,} tokens; the critical batch has {need.critical_batch:,.0f}"
        rows += [("tokens", tokens), ("batch", batch)]
    if goodput:
        share = format_interval(*(100 * part for part in (goodput.share, goodput.low, goodput.high)))
        every = [format_hours(seconds / 3600) for seconds in (goodput.interval_s, goodput.mtbf_s)]
        rows.append(("goodput", f"{share} %, a checkpoint every {every[0]}, a failure every {every[1]}"))
    return rows


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
        f"{', '.join([spec.engine.name, *list_layout(spec)])}{_name_adapter(advice, spec)}",
        str(spec.nodes),
        f"{spec.batch.micro} × {spec.accumulation}",
        "yes" if spec.activation_checkpointing else "no",
        format_interval(*steps),
        format_interval(*per_device),
        *([format_hours_interval(*hours)] if hours else []),
    ]


def _name_adapter(advice: Advice, spec: RunSpec) -> str:
    """Return the adapter of a configuration as the end of its name, such as `, lora`. Empty if no compared
    configuration has an adapter."""
    adapter = spec.adapter.name if describe_adapter(spec) else "full" if len(advice.adapters) > 1 else ""
    return f", {adapter}" if adapter else ""


def _list_compared(advice: Advice, choices: list[Choice]) -> Iterator[str]:
    """Yield the lines of a table of configurations on a terminal. An arrow marks the advised configuration. Each row
    has a text: the layout, and the comparison with the advised configuration. If all rows fit the terminal with their
    texts, each text is at the end of its row. Otherwise each text is below its row."""
    head, *rows = _build_table(advice, choices)
    # A row fits on a line only without these columns and, for a whole training, without the rate's interval.
    dropped, rate = head.index("checkpoint"), head.index("tokens/s/device")
    cells, details = [head], [""]
    for choice, row in zip(choices, rows, strict=True):
        per_device = row[rate].partition(" ")[0] if advice.question.has_length else row[rate]
        name = f"{choice.spec.engine.name}{_name_adapter(advice, choice.spec)}"
        cells.append([name, *row[1:rate], per_device, *row[rate + 1 : len(head)]])
        layout = [*list_layout(choice.spec), *["checkpointed"] * choice.spec.activation_checkpointing]
        note = "" if choice is advice.winner else row[-1]
        details.append("; ".join(filter(None, [", ".join(layout), note])))
    lines = list_lines([[*row[:dropped], *row[dropped + 1 :]] for row in cells], details)
    marked = 1 + next((place for place, choice in enumerate(choices) if choice is advice.winner), len(lines))
    for place, (line, *more) in enumerate(lines):
        yield from (f"→{line[1:]}" if place == marked else line, *more)


def list_lines(cells: list[list[str]], details: Sequence[str]) -> list[list[str]]:
    """Return the lines of each row of a table. `details` has a text for each row. If all rows fit the terminal with
    their texts, the texts are the last column. Otherwise each text is below its row."""
    rows = list(zip(cells, details, strict=True))
    beside = terminal.align([[*row, more] for row, more in rows], indent=2).splitlines()
    if max(map(len, beside)) <= terminal.WIDTH:
        return [[line] for line in beside]
    lines = zip(terminal.align(cells, indent=2).splitlines(), details, strict=True)
    return [[line, *([terminal.wrap(more, 6)] if more else [])] for line, more in lines]


def _format_note(advice: Advice, choice: Choice) -> str:
    """Return a comparison of `choice` with the advised configuration: its extra time or device-time as a share, and the
    reasons for the difference."""
    winner, question = advice.winner, advice.question
    if choice is winner:
        return "the answer"
    own_doubt = rate_doubt(choice, question)
    if own_doubt > rate_doubt(winner, question):
        return {1: "within the limits only at the likely time", 2: "may not fit", 3: "beyond the limits"}[own_doubt]
    share = advice.compute_extra_share(choice)
    share_text = format_extra(share, "device-time" if question.per_device else "time")
    if abs(share) < CLOSE:
        equal = f"equal within {100 * CLOSE:.0f} %"
        reason = advice.explain_order(choice).removeprefix(f"{equal}: ")
        return f"{equal} ({share_text}{f'; {reason}' if reason else ''})"
    # With different world sizes, the number of devices explains the difference.
    if question.per_device or choice.spec.world_size == winner.spec.world_size:
        parts = list(explain_difference(winner, choice, per_device=question.per_device).items())[:_SHOWN_REASONS]
        reasons = [f"{name} {format_percent(part)}" if part < TIMES else name for name, part in parts]
        share_text += ": " * bool(parts) + ", ".join(reasons)
    if reason := advice.explain_order(choice):
        share_text += f"; {reason}"
    return share_text if advice.is_distinct(choice) else f"cannot be told apart ({share_text})"


def list_caveats(answer: Answer) -> list[str]:
    """Return the caveats of the advice: which measurements or formulas it uses, which configurations tie, and what is
    uncertain or not predicted."""
    advice, winner, axes = answer.advice, answer.advice.winner, answer.query.axes
    basis = "a calibration of this machine" if answer.request.machine.calibration else "the machine's published rates"
    lines = [f"The time of a step is {_format_evidence(winner)}; formulas use {basis}."]
    lines += filter(None, [describe_assumed_rate(answer.request.machine, winner.spec.precision, answer.device)])
    if winner.estimate.evidence == "predicted" and not answer.request.machine.calibration and answer.device == "cuda":
        lines.append(format_class(answer.query.software))
    step_s, low_s, high_s = winner.estimate[:3]
    if high_s > 1.1 * step_s and step_s - low_s < _NEAR * (high_s - low_s):  # the fast end is near, the slow end far
        lines.append(f"The step may be far slower, but hardly faster: plan with {format_number(high_s)} s a step.")
    if rate_doubt(winner, advice.question) == 1:
        lines.append("The limits are kept at the likely time only: the slow end of the interval is beyond them.")
    if winner.candidate.fits is None:
        lines.append("No choice surely fits; this choice may fit.")
    if ties := _list_ties(advice):
        lines.append(f"Cannot be told apart from the answer: {'; '.join(ties)}.")
    lines += _list_order_caveats(advice)
    if (better := advice.perhaps) is not None:
        needs = "–".join(map(format_gigabytes, better.candidate.memory.device))
        condition = f"fits, which takes {needs} GB" if better.candidate.fits is None else "keeps the limits"
        lines.append(f"Better, if it {condition}: {better.spec.engine.name}, {describe_choice(better.spec)}.")
    most = max(axes.nodes)
    if len(axes.nodes) > 1 and winner.spec.nodes == most:
        lines.append(f"Searched up to {format_count(most, 'node')}: set nodes={most},{2 * most} to search further.")
    if answer.device == "cuda" and winner.spec.model.compile == "none":
        lines.append(_UNTRIED)
    lines += [*_list_batch_caveats(answer), *_list_precision_caveats(winner)]
    lines += [*_list_host_caveats(answer), *_list_length_caveats(answer)]
    if len(answer.query.adapters) > 1:
        lines.append("How much full training, LoRA and QLoRA learn per token is not predicted; memory and time are.")
    return lines


def _list_ties(advice: Advice) -> list[str]:
    """Return a text for each engine that has configurations not distinguishable from the advised one. The text names
    the engine and the node counts of these configurations."""
    nodes: dict[str, set[int]] = {}
    for tie in advice.ties:
        nodes.setdefault(tie.spec.engine.name, set()).add(tie.spec.nodes)
    return [
        f"{engine} on {', '.join(map(str, sorted(found)))} {'node' if max(found) == 1 else 'nodes'}"
        for engine, found in nodes.items()
    ]


def _list_order_caveats(advice: Advice) -> Iterator[str]:
    """Yield a line for each reason why alternatives rank below the advised configuration although they are predicted to
    be better."""
    rivals: dict[str, list[str]] = {}
    for rival in advice.rivals:
        if reason := advice.explain_order(rival):
            share = format_percent(advice.compute_extra_share(rival))
            name = f"{rival.spec.engine.name} on {format_count(rival.spec.nodes, 'node')} ({share})"
            rivals.setdefault(reason, []).append(name)
    for reason, names in rivals.items():
        lead = "The surer choice is advised. " if reason.startswith("less sure") else ""
        yield f"{lead}Predicted better, but listed after the answer: {', '.join(names)}: {reason}."


def _list_batch_caveats(answer: Answer) -> Iterator[str]:
    """Yield a line if a smaller or larger global batch may be worth a search: a smaller batch if the advised batch is
    far above that of published trainings, a larger batch if accumulation was not tried."""
    winner, axes = answer.advice.winner, answer.query.axes
    if describe_large_batch(answer.query.question, winner):
        reference, usual = find_reference_batch(winner.spec), _find_usual_batch(winner)
        assert reference
        yield (
            f"A step of {winner.time.tokens:,} tokens is far above the usual, for {reference.name} "
            f"{reference.tokens:,}. How much a larger batch learns per token is not predicted: set "
            f"max_global_batch={usual} to keep to the usual."
        )
    elif not (axes.accumulation or axes.global_batch or axes.max_global_batch):
        most = min(_find_usual_batch(winner), axes.most_samples)
        if most > winner.spec.global_batch:
            copy = winner.spec.parallel.ranks  # the accumulation of each layout that was searched
            above = f" above {copy}, the number of ranks of a model copy," if copy > 1 else ""
            remedy = f"set max_global_batch={most} to try"
            yield f"Accumulation{above} was not tried, since it raises the global batch: {remedy}."


def _find_usual_batch(choice: Choice) -> int:
    """Return a usual batch size in samples. It is the largest power of two that is at most the batch of a published
    training of the model family. If no such training is known, it is the batch size of the examples."""
    reference, spec = find_reference_batch(choice.spec), choice.spec
    if reference is None:
        return _EXAMPLE_BATCH
    return int(2 ** max(0, (reference.tokens * spec.global_batch // choice.time.tokens).bit_length() - 1))


def describe_large_batch(question: AdviceQuestion, choice: Choice) -> str:
    """Return a text with the reason why the global batch may be too large: it is far above the batch of a published
    training, or it leaves the training only few steps. Empty if neither is the case."""
    steps = question.steps(choice)
    if steps is not None and steps < _FEW_STEPS:
        return f"its batch leaves the training only {format_count(steps, 'step')}"
    reference = find_reference_batch(choice.spec)
    # A target loss has a critical batch, which no searched batch exceeds.
    if question.need or reference is None or choice.time.tokens <= FAR_BATCH * reference.tokens:
        return ""
    times = format_number(choice.time.tokens / reference.tokens)
    return f"its batch is {times} times that of {reference.name}, so the training may need more tokens"


def _list_precision_caveats(winner: Choice) -> Iterator[str]:
    spec = winner.spec
    if spec.precision == "fp16" and get_network(spec).clamps_fp16:
        trouble = f"{spec.model.family.upper()} in fp16 often diverges, since its activations overflow"
        yield f"{trouble}: use bf16 where the device has it, else fp32."


def _list_host_caveats(answer: Answer) -> Iterator[str]:
    """Yield a line on host memory if the advised configuration copies its parameters into a flat tensor in host
    memory."""
    spec, machine = answer.advice.winner.spec, answer.request.machine
    needed = predict_host_memory(spec, inputs.find_predicted_device(answer.request), machine.memory_bytes)
    if needed and needed.terms.get("flattening"):
        yield format_host_memory(needed, spec.devices_per_node, machine.host_memory_bytes)


def _list_length_caveats(answer: Answer) -> Iterator[str]:
    """Yield lines on the sources of the predicted number of tokens, hours and goodput (share of time without repeated
    steps)."""
    question, winner = answer.query.question, answer.advice.winner
    if question.need:
        law = find_law(answer.query.training.law or LAW)
        batch = "" if law is KAPLAN else f", the critical batch from {KAPLAN.source}"
        yield f"Tokens to a loss come from {law.source}{batch}: fitted to decoders, on their text and tokenizer."
        if len(get_network(winner.spec).stacks) > 1:
            yield "No such law was fitted to an encoder with a decoder: a rough guess here."
    hours = question.predict_hours(winner)
    if (goodput := question.predict_goodput(winner)) is not None:
        yield f"Goodput uses the failure rate of {goodput.source}; hours and costs include failures."
    elif hours and hours.likely >= _LONG_H and inputs.find_predicted_device(answer.request) == "cuda":
        yield "Hours are those of a job that never fails: set storage=2e9, in bytes per second, to include failures."


def _format_evidence(choice: Choice) -> str:
    return _EVIDENCE[choice.estimate.evidence].format(runs=choice.estimate.runs)
