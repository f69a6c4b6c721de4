"""Advice for another program: seconds, bytes and hours; shares as fractions."""

import json
from typing import Any

from bench.advising.search import Answer
from bench.cli.advised import doubts
from bench.predict.advice.choices import Choice
from bench.spec import config_id
from bench.wording import overrides


def as_json(answer: Answer) -> str:
    """Return the answer as JSON."""
    advice, question, asked = answer.advice, answer.asked.question, answer.asked
    plain = {
        "asked": question._asdict() | {"price": asked.price, "max_global_batch": asked.axes.max_global_batch},
        "objective": question.objective,
        "candidates": answer.looked_at,
        "winner": _plain(advice.winner, answer),
        "engines": [_plain(choice, answer) for choice in advice.engines],
        "nodes": [_plain(choice, answer) for choice in advice.nodes],
        "perhaps_better": _plain(advice.perhaps, answer) if advice.perhaps else None,
        "left_out": [item._asdict() for item in answer.left_out],
        "doubts": doubts(answer),
    }
    return json.dumps(plain, indent=1)


def _plain(choice: Choice, answer: Answer) -> dict[str, Any]:
    spec, (low, high) = choice.spec, choice.candidate.memory.device
    return {
        "config_id": config_id(spec),
        "overrides": [f"engine={spec.engine.name}", *overrides(spec)],
        "engine": spec.engine.name,
        "nodes": spec.nodes,
        "devices_per_node": spec.devices_per_node,
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
        **_training(choice, answer),
        "within_limits": answer.asked.question.kept(choice),
        "surely_worse": None if choice is answer.advice.winner else answer.advice.told_apart(choice),
    }


def _training(choice: Choice, answer: Answer) -> dict[str, float | None]:
    """Return what the whole training takes; None where no tokens were asked for."""
    spec, price = choice.spec, answer.asked.price
    hours = answer.asked.question.hours(choice, choice.estimate.step_s)
    if hours is None:
        return {"hours": None, "node_hours": None, "cost": None}
    return {"hours": hours, "node_hours": hours * spec.nodes, "cost": price and hours * spec.world_size * price}
