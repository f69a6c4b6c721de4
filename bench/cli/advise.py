"""Advise a ZeRO stage, micro-batch, accumulation, checkpointing and node count for a training, with
reasons.

  zeroscale advise model=mt5_xl machine=h200 devices_per_node=8
  zeroscale advise model=mt5_xxl machine=a100_80 devices_per_node=8 nodes=1,2,4,8 tokens=1e12 deadline=50d price=2
  zeroscale advise model=gpt2_xl machine=h100 devices_per_node=8 loss=2.6 best=shortest storage=2e9
  zeroscale advise model=mt5_xl machine=h100 devices_per_node=8 nodes=4 max_global_batch=2048
  zeroscale advise model=mt5_xl machine=h200 devices_per_node=8 tokens=1e12 price=2 --page advice.html
  zeroscale advise model=llama_3_8b samples=100_000 deadline=2d adapter=lora,qlora where=own:h100:8,spot:g2-standard-12

The command searches these keys if you do not set them: engine, nodes, batch.micro,
batch.accumulation (only with max_global_batch) and activation_checkpointing. For pipelines it also
searches parallel.tensor, parallel.pipeline and parallel.stages_per_rank. A comma list restricts the
search to its values. batch.global is kept exactly. More keys:

{words}

With a deadline, the advised configuration keeps the deadline with the fewest node-hours. With
node_hours, a budget or best=shortest, the fastest configuration is advised. Otherwise, the
configuration with the most tokens per second and device is advised. With storage (the bytes per
second of checkpoint writes), hours and costs include failures and checkpoints.

With where, a table compares places: own:MACHINE:DEVICES:PRICE (price per device and hour, or
without it), rented:NODE_TYPE and spot:NODE_TYPE. Each place has one node, or the given numbers of
nodes. Prices of node types are those of machine files: `zeroscale explain a3-highgpu-8g`.

Configurations are ranked by the slow end of their predicted interval. So the more certain of two
equal predictions is advised, such as a lower stage or a measured point. Configurations within 5 %
of the best configuration count as equal. Among equal configurations, fewer nodes are preferred,
then a measured step time, weights without quantisation, and a larger micro-batch.

If --results has runs of the same machine, their measurements replace predicted values.
"""

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import api, launchers
from bench.cli import advice_text, options, places_text
from bench.cli.advice_text import list_caveats
from bench.core.errors import UserError
from bench.core.files import RESULTS
from bench.core.formatting import describe_adapter, list_overrides
from bench.core.scheduling import SchedulingOptions
from bench.core.spec import config_id
from bench.predict.advice.choices import Choice
from bench.sweep.advise import places, questions
from bench.sweep.advise.search import Answer

__doc__ = __doc__.format(words=questions.format_help())


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_overrides(parser, "override of conf/config.yaml, or a plain word", least="+")
    options.add_json(parser)
    options.add_config_dir(parser)
    options.add_page(parser)
    parser.add_argument("--results", type=Path, metavar="DIR", help=f"folder of measured runs; default: {RESULTS}")


def run(args: argparse.Namespace) -> int:
    """Print the advice, and return 0. Raise UserError if no configuration can be advised."""
    if any(text.startswith(places.WORD) for text in args.overrides):
        return _print_places(args)
    if args.page:
        options.check_page(args.page)
    answer = api.advise(args.overrides, results=args.results, config_dir=args.config_dir)
    measuring = _build_measuring_command(answer, args)
    print(format_json(answer, measuring) if args.json else advice_text.format_text(answer, measuring))
    if args.page:
        from analysis.answer_page import render_advice_page

        text = advice_text.build_text(answer)
        text = text._replace(caveats=_list_doubts(answer, measuring))
        command = shlex.join(["zeroscale", "advise", *args.overrides, *options.list_given_folders(args)])
        options.write_page(args.page, render_advice_page(answer, text, command), quiet=args.json)
    return 0


def _print_places(args: argparse.Namespace) -> int:
    if args.page:
        raise UserError("--page", "a comparison of places has no page", "use --json, or remove where")
    table = api.compare_places(args.overrides, results=args.results, config_dir=args.config_dir)
    print(places_text.format_json(table) if args.json else places_text.format_text(table))
    return 0


def _build_measuring_command(answer: Answer, args: argparse.Namespace) -> list[str]:
    """Return a command that measures the advised configuration, as a list of words. Return an empty list if the advised
    configuration was measured already.

    The command also measures configurations that are predicted to be equally good and differ from the advised
    configuration only in the engine. If this machine cannot run the configurations, the command submits them to a
    scheduler.
    """
    winner = answer.advice.winner
    if winner.estimate.evidence == "measured":
        return []
    spec, settings = winner.spec, list_overrides(winner.spec)
    rivals = [tie.spec for tie in answer.advice.ties if list_overrides(tie.spec) == settings]
    engines = dict.fromkeys(one.engine.name for one in (spec, *rivals))
    overrides = [*answer.query.texts, f"engine={','.join(engines)}", *settings]
    try:
        chosen = dict(api.plan(overrides=overrides, config_dir=args.config_dir).chosen)
    except UserError:
        overrides += _list_cluster_overrides(answer)
    else:
        # A sweep on a CPU would replace these values by those of the smoke study.
        advised = {"precision": spec.precision, **{f"sequence.{kind}": n for kind, n in spec.sequence.items()}}
        overrides += [f"{key}={advised[key]}" for key in chosen if key in advised]
    can_write = args.results is not None and args.results.is_dir()
    folders = argparse.Namespace(config_dir=args.config_dir, results=args.results if can_write else None)
    repeats = ["--repeats", str(options.ENOUGH)]
    return ["zeroscale", "sweep", *overrides, *repeats, *options.list_given_folders(folders)]


def _list_cluster_overrides(answer: Answer) -> list[str]:
    """Return the overrides with which the advised configuration is submitted to a scheduler. They choose the launcher.
    If the advice is for GPUs, they also request GPUs for the jobs."""
    request = answer.request
    launcher, given = launchers.load_queueing(request.launcher), request.launcher_options
    named = [] if "launcher" in dict(answer.query.overrides) else [f"launcher={request.launcher}"]
    if launcher and isinstance(given, SchedulingOptions) and answer.device == "cuda":
        setup = launcher.job_setup(given)
        named += [setup.gpu_override] if setup.device == "cpu" else []
    return named


def _list_doubts(answer: Answer, measuring: Sequence[str]) -> list[str]:
    """Return the caveats of the advice, and the command that measures the advised configuration."""
    return [*list_caveats(answer), *([f"{advice_text.SURER} {shlex.join(measuring)}"] if measuring else [])]


def format_json(answer: Answer, measuring: Sequence[str]) -> str:
    """Return the advice as JSON. `measuring` are the words of a command that measures the advised configuration."""
    advice, question = answer.advice, answer.query.question
    adapters = [_build_choice(choice, answer) for choice in advice.adapters]
    plain = {
        "asked": _build_question(answer),
        "objective": question.objective,
        "candidates": answer.looked_at,
        "winner": _build_choice(advice.winner, answer),
        "engines": [_build_choice(choice, answer) for choice in advice.engines],
        "nodes": [_build_choice(choice, answer) for choice in advice.nodes],
        **({"adapters": adapters} if len(adapters) > 1 else {}),
        "perhaps_better": _build_choice(advice.perhaps, answer) if advice.perhaps else None,
        "left_out": [item._asdict() for item in answer.rejected],
        "doubts": _list_doubts(answer, measuring),
    }
    return json.dumps(plain, indent=1)


def _build_question(answer: Answer) -> dict[str, Any]:
    """Return the user's question for the JSON output: values such as tokens, deadline and price. Keys about losses and
    failures are present only if the user set them."""
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
        **({"adapter": spec.adapter.name} if describe_adapter(spec) else {}),
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
    """Return hours, node-hours and cost of the whole training. All are None if the training's length is unknown or the
    training never ends."""
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
