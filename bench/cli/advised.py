"""How advice is told to a reader: the winner, its rivals and why, what was left out, how sure it is."""

import shlex
from collections.abc import Iterator

from bench import terminal
from bench.advising.search import Answer
from bench.planning import target
from bench.predict.advice import CLOSE, Advice, duration, standing
from bench.predict.advice.candidates import Axes
from bench.predict.advice.choices import Choice
from bench.predict.advice.difference import slower_by, why
from bench.predict.memory import gigabytes, host
from bench.predict.workload import network_of
from bench.wording import count, lengths, number, overrides, percent, point, span

_EVIDENCE = {
    "measured": "measured, n = {runs}",
    "corrected": "predicted, and corrected by {runs} measured runs",
    "predicted": "predicted, and nothing was measured",
}
_SHOWN_REASONS = 2
USUAL_TOKENS = 2**20
"""Of an optimizer step, all kinds together: mT5's pre-training (arXiv 2010.11934), 16 times T5's (1910.10683)."""
_FAR = 2
"""Times the usual from which a batch is named."""


def text(answer: Answer) -> str:
    """Return the answer for a reader."""
    advice = answer.advice
    parts = [_head(answer), _winner(answer), _table(advice, "each engine at its best", advice.engines)]
    if len(advice.nodes) > 1:
        parts.append(_table(advice, "each number of nodes at its best", advice.nodes))
    if answer.left_out:
        parts.append("\n".join(["left out", *(f"  {item.what}: {item.why}" for item in answer.left_out)]))
    return "\n\n".join([*parts, "\n".join(["how sure", *(f"  {line}" for line in doubts(answer))])])


def _head(answer: Answer) -> str:
    spec, question = answer.advice.winner.spec, answer.asked.question
    where = f"nodes of {count(spec.devices_per_node, 'device')} of {answer.request.machine.name}"
    tokens = f"{question.tokens:g} tokens, " if question.tokens else ""
    return (
        f"{spec.model.name}, {spec.precision}, {lengths(spec)}, {where}\n"
        f"asked: {tokens}{question.objective}; {answer.looked_at} candidates"
    )


def _winner(answer: Answer) -> str:
    winner = answer.advice.winner
    estimate, time = winner.estimate, winner.time
    needed = "–".join(map(gigabytes, winner.candidate.memory.device))
    rates = (time.tokens / seconds for seconds in (estimate.step_s, estimate.high_s, estimate.low_s))
    fits = "may fit" if winner.candidate.fits is None else "fits"
    rows = [
        ("step", f"{span(estimate.step_s, estimate.low_s, estimate.high_s)} s, {_evidence(winner)}"),
        ("bound by", time.bound),
        ("tokens/s", span(*rates)),
        ("MFU", "unknown, as the machine's peak is" if time.mfu is None else f"{100 * time.mfu / winner.scale:.3g} %"),
        ("memory", f"{needed} of {gigabytes(answer.request.machine.memory_bytes or 0)} GB: {fits}"),
        *_training(answer),
    ]
    table = terminal.align(rows, least=(12,), gap=0, indent=2)
    return f"→ {winner.spec.engine.name}, {point(winner.spec)}\n{table}"


def _training(answer: Answer) -> list[tuple[str, str]]:
    """Return what the asked tokens take."""
    winner, question = answer.advice.winner, answer.asked.question
    spec, estimate = winner.spec, winner.estimate
    hours = [question.hours(winner, seconds) for seconds in (estimate.step_s, estimate.low_s, estimate.high_s)]
    known = [value for value in hours if value is not None]
    if not known:
        return []
    rows = [
        ("steps", f"{question.steps(winner):,}"),
        ("time", f"{duration(known[0])} ({duration(known[1])}–{duration(known[2])})"),
        ("node-hours", span(*(spec.nodes * value for value in known))),
    ]
    if answer.asked.price:
        rows.append(("cost", span(*(answer.asked.price * spec.world_size * value for value in known))))
    return rows


def _table(advice: Advice, title: str, choices: list[Choice]) -> str:
    head = ["engine", "nodes", "micro × acc", "checkpoint", "s/step", "tokens/s/device"]
    head += ["time"] if advice.question.tokens else []
    rows = [head, *([*_row(advice, choice), _note(advice, choice)] for choice in choices)]
    return f"{title}\n{terminal.align(rows, indent=2)}"


def _row(advice: Advice, choice: Choice) -> list[str]:
    spec, step_s = choice.spec, choice.estimate.step_s
    hours = advice.question.hours(choice, step_s)
    return [
        spec.engine.name,
        str(spec.nodes),
        f"{spec.batch.micro} × {spec.accumulation}",
        "yes" if spec.activation_checkpointing else "no",
        number(step_s),
        number(choice.time.tokens / step_s / spec.world_size),
        *([] if hours is None else [duration(hours)]),
    ]


def _note(advice: Advice, choice: Choice) -> str:
    """Return how a rival compares with the winner, and why."""
    winner, question = advice.winner, advice.question
    if choice is winner:
        return "the answer"
    mine = standing(choice, question)
    if mine > standing(winner, question):
        return {1: "within the limits only if all goes well", 2: "may not fit", 3: "beyond the limits"}[mine]
    share = slower_by(winner, choice, per_device=question.per_device)
    told = f"{percent(share)} {'device-time' if question.per_device else 'time'}"
    if abs(share) < CLOSE:
        return f"as good ({told})"
    if question.per_device or choice.spec.world_size == winner.spec.world_size:  # else it is the number of devices
        parts = list(why(winner, choice, per_device=question.per_device).items())[:_SHOWN_REASONS]
        told += ": " * bool(parts) + ", ".join(f"{name} {percent(part)}" for name, part in parts)
    return told if advice.told_apart(choice) else f"cannot be told apart ({told})"


def doubts(answer: Answer) -> list[str]:
    """Return what the answer stands on, what cannot be told, and what would tell it."""
    advice, winner, axes = answer.advice, answer.advice.winner, answer.asked.axes
    basis = (
        "a calibration of this machine" if answer.request.machine.calibration else "the machine's published ceilings"
    )
    lines = [f"The time of a step is {_evidence(winner)}; formulas stand on {basis}."]
    if standing(winner, advice.question) == 1:
        lines.append("Within the limits only if all goes well: the slow end of the interval is beyond them.")
    if winner.candidate.fits is None:
        lines.append("Nothing fits for sure; this may fit.")
    if ties := _ties(advice):
        lines.append(f"Cannot be told apart from the answer: {'; '.join(ties)}.")
    if bolder := advice.bolder:
        by = percent(slower_by(winner, bolder, per_device=advice.question.per_device))
        lines.append(f"Foretold to take less, but less sure: {bolder.spec.engine.name}, {point(bolder.spec)}: {by}.")
    if (better := advice.perhaps) is not None:
        lines.append(f"Better, if it {_condition(better)}: {better.spec.engine.name}, {point(better.spec)}.")
    lines += [*_ends(axes, winner), *_batch(winner), *_precision(winner), *_host(answer)]
    if not (axes.accumulation or axes.global_batch or axes.max_global_batch):
        lines.append("Accumulation was not tried, for it makes the global batch larger: say max_global_batch=2048.")
    if winner.estimate.evidence != "measured":
        lines.append(f"To be surer: {shlex.join(['zeroscale', 'sweep', *_measure(answer)])}")
    return lines


def _ties(advice: Advice) -> list[str]:
    """Return the ties, the node counts of each engine together."""
    nodes: dict[str, set[int]] = {}
    for tie in advice.ties:
        nodes.setdefault(tie.spec.engine.name, set()).add(tie.spec.nodes)
    return [
        f"{engine} on {', '.join(map(str, sorted(found)))} {'node' if max(found) == 1 else 'nodes'}"
        for engine, found in nodes.items()
    ]


def _ends(axes: Axes, winner: Choice) -> Iterator[str]:
    most = max(axes.nodes)
    if len(axes.nodes) > 1 and winner.spec.nodes == most:
        yield f"Searched up to {count(most, 'node')}: say nodes={most},{2 * most} to look further."


def _batch(winner: Choice) -> Iterator[str]:
    """Yield a line on a global batch that is far above the usual: what it learns per token is not predicted."""
    spec, tokens = winner.spec, winner.time.tokens
    if tokens > _FAR * USUAL_TOKENS:
        usual = 2 ** ((USUAL_TOKENS * spec.global_batch // tokens).bit_length() - 1)
        yield (
            f"A step of {tokens:,} tokens is far above the usual, for mT5 {USUAL_TOKENS:,}; how much a larger batch "
            f"learns per token is not predicted: max_global_batch={usual} keeps to that."
        )


def _precision(winner: Choice) -> Iterator[str]:
    spec = winner.spec
    if spec.precision == "fp16" and network_of(spec).clamps_fp16:
        trouble = f"{spec.model.family.upper()} in fp16 often diverges, since its activations overflow"
        yield f"{trouble}: take bf16 where the device has it, else fp32."


def _host(answer: Answer) -> Iterator[str]:
    """Yield a line on the host where the winner's weights are flattened there."""
    spec, machine = answer.advice.winner.spec, answer.request.machine
    needed = host.host(spec, target.kind(answer.request), machine.memory_bytes)
    if needed and needed.terms.get("flattening"):
        yield host.told(needed, spec.devices_per_node, machine.host_memory_bytes)


def _condition(choice: Choice) -> str:
    low, high = choice.candidate.memory.device
    return (
        f"fits, for it needs {gigabytes(low)}–{gigabytes(high)} GB"
        if choice.candidate.fits is None
        else "keeps to the limits"
    )


def _measure(answer: Answer) -> list[str]:
    """Return the overrides that measure the winner, and with it the engines that are told apart by nothing else."""
    winner = answer.advice.winner.spec
    rivals = [tie.spec for tie in answer.advice.ties if overrides(tie.spec) == overrides(winner)]
    engines = dict.fromkeys(spec.engine.name for spec in (winner, *rivals))
    return [*answer.asked.texts, f"engine={','.join(engines)}", *overrides(winner)]


def _evidence(choice: Choice) -> str:
    return _EVIDENCE[choice.estimate.evidence].format(runs=choice.estimate.runs)
