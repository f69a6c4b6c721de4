"""Advice for another program: seconds, bytes and hours; shares as fractions."""

import json
import math
from typing import Any

from bench.advising.search import Answer
from bench.cli.advice_text import list_caveats
from bench.formatting import list_overrides
from bench.predict.advice.choices import Choice
from bench.spec import config_id


def format_json(answer: Answer) -> str:
    """Return the answer as JSON."""
    advice, question = answer.advice, answer.query.question
    plain = {
        "asked": _build_question(answer),
        "objective": question.objective,
        "candidates": answer.looked_at,
        "winner": _build_choice(advice.winner, answer),
        "engines": [_build_choice(choice, answer) for choice in advice.engines],
        "nodes": [_build_choice(choice, answer) for choice in advice.nodes],
        "perhaps_better": _build_choice(advice.perhaps, answer) if advice.perhaps else None,
        "left_out": [item._asdict() for item in answer.rejected],
        "doubts": list_caveats(answer),
    }
    return json.dumps(plain, indent=1)


def _build_question(answer: Answer) -> dict[str, Any]:
    """Return what was asked; what is said of losses and failures where it was."""
    question, query = answer.query.question, answer.query
    given = {"tokens": question.tokens, "deadline_h": question.deadline_h, "node_hours": question.node_hours}
    named = given | {"price": query.price, "max_global_batch": query.axes.max_global_batch}
    named |= {name: value for name, value in query.training._asdict().items() if value is not None}
    return {**named, "software": query.software.name}


def _build_choice(choice: Choice, answer: Answer) -> dict[str, Any]:
    spec, (low, high) = choice.spec, choice.candidate.memory.device
    return {
        "config_id": config_id(spec),
        "overrides": [f"engine={spec.engine.name}", *list_overrides(spec)],
        "engine": spec.engine.name,
        "nodes": spec.nodes,
        "devices_per_node": spec.devices_per_node,
        **spec.parallel.model_dump(exclude_defaults=True),
        "micro_batch": spec.batch.micro,
        "accumulation": spec.accumulation,
        "global_batch": spec.global_batch,
        "activation_checkpointing": spec.activation_checkpointing,
        "step": choice.estimate._asdict(),
        "predicted_parts_s": choice.time.parts,
        "bound": choice.time.bound,
        "tokens_per_s": choice.time.tokens / choice.estimate.step_s,
        "mfu": None if choice.time.mfu is None else choice.time.mfu / choice.scale,
        "device_bytes": {"low": low, "high": high},
        "fits": choice.candidate.fits,
        **_build_training(choice, answer),
        "within_limits": answer.query.question.kept(choice),
        "surely_worse": None if choice is answer.advice.winner else answer.advice.is_distinct(choice),
    }


def _build_training(choice: Choice, answer: Answer) -> dict[str, float | None]:
    """Return what the whole training takes; None where no tokens were asked for, or where
    it never ends."""
    spec, price = choice.spec, answer.query.price
    hours = answer.query.question.hours(choice, choice.estimate.step_s)
    if hours is None or math.isinf(hours):
        return {"hours": None, "node_hours": None, "cost": None}
    taken = {"hours": hours, "node_hours": hours * spec.nodes, "cost": price and hours * spec.world_size * price}
    question, goodput = answer.query.question, answer.query.question.predict_goodput(choice)
    if question.need:
        taken |= {"tokens": question.count_tokens(choice), "critical_batch_tokens": question.need.critical_batch}
    if goodput:
        taken |= {f"goodput_{name}" if name != "share" else "goodput": getattr(goodput, name) for name in _GOODPUT}
    return taken


_GOODPUT = ("share", "low", "high", "interval_s", "mtbf_s")
