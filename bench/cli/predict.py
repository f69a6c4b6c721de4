"""Predict memory and step time of a point before it runs.

  zeroscale predict model=mt5_xxl engine=zero3 nodes=8 devices_per_node=8 machine=a100_80
  zeroscale predict model=mt5_xl engine=ddp,zero1,zero2,zero3 devices_per_node=8 machine=h100
  zeroscale predict study=paper
  zeroscale predict model=mt5_xl engine=zero3 devices_per_node=8 machine=h100 --page prediction.html

For a single point, the command prints all terms of memory and step time. For several points, it
prints two lines per point. Memory is printed for the rank that needs the most, in GB (10^9 bytes).
An uncertain number is followed by its interval, from the best case to the worst. For a point that
does not fit in memory, no step time is predicted. Instead, the command prints changes with which
the point would fit.
"""

import argparse
import contextlib
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bench import api, engines
from bench.cli import options
from bench.core import terminal
from bench.core.errors import NoPrediction
from bench.core.formatting import format_count, format_interval
from bench.core.network import count_parameters, count_trained_parameters
from bench.predict.advice import format_hours
from bench.predict.goodput import FailureTerms, Goodput, compute_checkpoint_bytes, predict_goodput
from bench.predict.memory import (
    LARGEST_MICRO_BATCH,
    LargestMicroBatch,
    MemoryPrediction,
    format_gigabytes,
    format_host_memory,
)
from bench.predict.step_time import StepTime
from bench.predict.step_time.compute import HOST_WORK, describe_assumed_rate
from bench.predict.workload import describe_parameters, format_class, get_network
from bench.sweep.prediction import Prediction

_DOUBT = (
    "Computed exactly from the allocations of torch, transformers and DeepSpeed: weights, master weights, optimizer "
    "moments, buckets, activations, logits and loss. Upper bounds: gradients in flight, gathered layers and working "
    "memory."
)
_DOUBT_CUDA = (
    "Main uncertainty: {base} GB for the CUDA context, libraries and NCCL, and up to {reserve} GB of fragmentation in "
    "the allocator. On H200s, tensors of 13 runs took 0.1 to 1.7 % more than predicted. While memory is free, the "
    "allocator may keep 10 GB more than this range. `zeroscale rehearse … --shapes-only` imitates the allocator."
)


def _parse_number(accept: Callable[[float], bool], rule: str) -> Callable[[str], float]:
    """Return an argparse type for finite numbers that `accept` allows; `rule` describes them in the error message."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if accept(number := float(text)) and number < math.inf:
                return number
        raise argparse.ArgumentTypeError(f"{text}: must be {rule}")

    return parse


_FACTOR = _parse_number(lambda number: number >= 1, "a factor of at least 1; set for example 1.1")
_SECONDS = _parse_number(lambda number: number > 0, "a number of seconds above 0; set for example 0.01")
_RATE = _parse_number(lambda number: number > 0, "a number of bytes per second above 0; set for example 2e9")


def arguments(parser: argparse.ArgumentParser) -> None:
    help_text = "setting of a config key, study=NAME, or software=eager|usual|fused (how optimised the software is)"
    options.add_overrides(parser, help_text)
    options.add_json(parser, f"{options.JSON}; memory is in bytes")
    options.add_config_dir(parser)
    options.add_page(parser)
    help_text = "computing time of the slowest rank divided by the computing time of the other ranks; default: 1"
    parser.add_argument("--straggler", type=_FACTOR, default=1.0, metavar="F", help=help_text)
    help_text = "seconds per step in which ranks wait for data; default: 0"
    parser.add_argument("--data-wait", type=_SECONDS, default=0.0, metavar="S", help=help_text)
    help_text = "measured computing seconds of a step, from `zeroscale rehearse`; replaces the predicted ones"
    parser.add_argument("--rehearsed", type=_SECONDS, metavar="S", help=help_text)
    help_text = "bytes per second of checkpoint writes; adds the goodput, the share of time left after failures (GPUs)"
    parser.add_argument("--storage", type=_RATE, metavar="B", help=help_text)


class PredictionAnswer(NamedTuple):
    """Text of a prediction for its HTML page. For several points (configurations), the text `memory` has only the
    number of points that fit and the number that do not, and `time` is empty."""

    memory: Sequence[str]
    time: Sequence[str]
    caveats: Sequence[str]
    command: str


def run(args: argparse.Namespace) -> int:
    """Return the exit code. It is 0 also for a point that does not fit in memory, because that is a valid
    prediction."""
    if args.page:
        options.check_page(args.page)
    found = api.predict(
        overrides=args.overrides,
        config_dir=args.config_dir,
        straggler=args.straggler,
        data_wait_s=args.data_wait,
        rehearsed_s=args.rehearsed,
    )
    if args.json:
        alone = len(found) == 1  # the largest micro-batch costs as much as 30 predictions
        print(json.dumps([_build_json(one, args.storage, alone=alone) for one in found], indent=1))
    elif len(found) == 1:
        print(_format_single(found[0], args.storage))
    else:
        print("\n".join(_format_lines(one, args.storage) for one in found))
        for line in _list_rate_doubts(found):
            print(terminal.wrap(line))
    if args.page:
        from analysis.answer_page import render_prediction_page

        page = render_prediction_page(found, _build_answer(found, args.storage, _format_command(args)))
        options.write_page(args.page, page, quiet=args.json)
    return 0


def _build_answer(found: Sequence[Prediction], storage: float | None, command: str) -> PredictionAnswer:
    """Return the text of a prediction for its HTML page, with each statement in one unwrapped line."""
    memory, time = [], []
    if len(found) == 1:
        (one,) = found
        try:
            memory = [*_list_needed(one, one.memory), _format_host(one)] if one.memory else [one.memory_unknown]
            time = [*_list_time(one), *_list_goodput(one, storage)]
        except NoPrediction as error:
            memory = [str(error)]
    else:
        fits = Counter(one.describe_fit() if one.memory else "unknown" for one in found)
        counts = "; ".join(f"{fit}: {format_count(number, 'point')}" for fit, number in fits.items())
        memory = [f"{counts[0].upper()}{counts[1:]}."]
    known = next((one for one in found if one.memory), None)
    caveats = _list_doubts(known, known.memory) if known and known.memory else []
    if len(found) > 1:
        caveats = [*caveats, *_list_rate_doubts(found)]
    return PredictionAnswer(memory, time, caveats, command)


def _format_command(args: argparse.Namespace) -> str:
    """Return the `zeroscale predict` command that repeats this prediction."""
    numbers = {"--straggler": args.straggler if args.straggler != 1 else None, "--data-wait": args.data_wait}
    numbers |= {"--rehearsed": args.rehearsed, "--storage": args.storage}
    given = [word for option, number in numbers.items() if number for word in (option, f"{number:g}")]
    given += ["--config-dir", str(args.config_dir)] if args.config_dir else []
    return shlex.join(["zeroscale", "predict", *args.overrides, *given])


def _format_single(one: Prediction, storage: float | None) -> str:
    shown, unknown = options.format_compact_point(one.point.composed), one.memory_unknown
    if one.memory:
        try:
            head = f"{shown}\nGB per rank at the peak of each phase"
            memory = [*_list_needed(one, one.memory), *_list_doubts(one, one.memory)]
            texts = [memory, [_format_host(one)], [*_list_time(one), *_list_goodput(one, storage)]]
            wrapped = ("\n".join(map(terminal.wrap, lines)) for lines in texts)
            return "\n\n".join([head, _format_table(one.memory), *wrapped])
        except NoPrediction as error:
            unknown = str(error)
    return f"{shown}\n{terminal.wrap(unknown)}"


def _format_host(one: Prediction) -> str:
    return format_host_memory(
        one.host(), one.point.composed.spec.devices_per_node, one.point.composed.machine.host_memory_bytes
    )


def _list_time(one: Prediction) -> list[str]:
    """Return lines on the predicted step time. If none is predicted, return the reason, and changes with which the
    point would fit in memory."""
    time = one.time
    if time is None:
        remedies = [f"Changes that make it fit: {remedy}."] if (remedy := one.describe_remedy()) else []
        return [f"No step time is predicted: {one.time_unknown}.", *remedies]
    parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in time.parts.items())
    lines = [f"A step takes {format_interval(time.step_s, time.low_s, time.high_s)} s: {parts}."]
    if time.hidden_s:
        lines[0] += f" Another {time.hidden_s:.3g} s of communication overlap with computing."
    lines.append(f"{_format_rates(time)}; bound by {time.bound}.")
    return lines + _list_rate_doubts([one])


def _list_rate_doubts(found: Sequence[Prediction]) -> list[str]:
    """Return lines on the assumptions of the predicted step times, each line once. An assumption is a rate that a
    machine file does not state, the degree to which the training software is optimised, or that an engine does no work
    on the host."""
    lines: dict[str, None] = {}
    for one in found:
        machine, precision = one.point.composed.machine, one.point.composed.spec.precision
        if one.time and one.rehearsed_s is None:
            lines |= dict.fromkeys(filter(None, [describe_assumed_rate(machine, precision, one.device)]))
        if one.time and one.by_class:
            lines[format_class(one.software)] = None
    on_host = dict.fromkeys(
        one.point.composed.spec.engine.name
        for one in found
        if one.time and one.rehearsed_s is None and engines.facts(one.point.composed.spec).works_on_host
    )
    return [*lines, *(f"Not certain for {name}: {HOST_WORK}." for name in on_host)]


def _list_goodput(one: Prediction, storage: float | None) -> list[str]:
    """Return a line on the goodput: the share of a long job's time spent on steps that are not repeated after a
    failure. Empty if the goodput is unknown or the point does not fit in memory."""
    goodput = _predict_goodput(one, storage)
    if goodput is None or one.fits is False:
        return []
    share = format_interval(*(100 * part for part in (goodput.share, goodput.low, goodput.high)))
    every = [format_hours(seconds / 3600) for seconds in (goodput.interval_s, goodput.mtbf_s)]
    return [f"Goodput {share} %: a checkpoint every {every[0]}, a failure every {every[1]}, from {goodput.source}."]


def _predict_goodput(one: Prediction, storage: float | None) -> Goodput | None:
    """Return the goodput of a point. Return None if `storage` (bytes per second of checkpoint writes) is None. Also
    return None on CPUs, for which no failure rate is published."""
    spec = one.point.composed.spec
    if storage is None or one.device == "cpu":
        return None
    size = compute_checkpoint_bytes(count_trained_parameters(get_network(spec)), spec.precision)
    return predict_goodput(spec.world_size, FailureTerms(size / storage))


def _format_rates(time: StepTime) -> str:
    """Return tokens per second and MFU as text, with the intervals that follow from the interval of the step time."""
    share = [time.step_s / seconds for seconds in (time.step_s, time.high_s, time.low_s)]
    tokens = format_interval(*(time.tokens_per_s * one for one in share))
    mfu = time.mfu
    reached = "unknown" if mfu is None else f"{format_interval(*(100 * mfu * one for one in share))} %"
    return f"{tokens} tokens/s, MFU {reached}"


def _format_lines(one: Prediction, storage: float | None) -> str:
    shown = options.format_compact_point(one.point.composed)
    if one.memory is None:
        return f"{shown}\n{terminal.wrap(one.memory_unknown, 4)}"
    goodput = _predict_goodput(one, storage)
    kept = f", goodput {100 * goodput.share:.3g} %" if goodput else ""
    return f"{shown}\n{terminal.wrap(f'{one.describe()}{kept}', 4)}"


def _format_table(needed: MemoryPrediction) -> str:
    names = list(dict.fromkeys(name for phase in needed.phases for name in phase.terms))
    rows = [["", *(phase.name for phase in needed.phases)]]
    for name in names:
        cells = [format_gigabytes(phase.terms.get(name, 0)) for phase in needed.phases]
        if any(phase.terms.get(name, 0) for phase in needed.phases):
            rows.append([name, *cells])
    rows.append(["all tensors", *(format_gigabytes(phase.total) for phase in needed.phases)])
    phases = range(1, len(needed.phases) + 1)
    return terminal.align(rows, right=phases, least=(18, *(16 for _ in phases)), gap=0)


def _list_needed(one: Prediction, needed: MemoryPrediction) -> list[str]:
    """Return lines on the memory that a device needs and on the largest micro-batch that fits."""
    low, high = needed.device
    span = f"{format_gigabytes(low)} to {format_gigabytes(high)}" if high > low else format_gigabytes(low)
    parameters = describe_parameters(one.point.composed.spec)
    lines = [f"Parameters: {parameters}."] if parameters else []
    lines += [f"A device needs {span} GB in total; {format_gigabytes(needed.resident)} GB remain between steps."]
    micro, machine = one.largest_micro_batch(), one.point.composed.machine
    if micro and machine.memory_bytes:
        has = f"{machine.name} has {format_gigabytes(machine.memory_bytes)} GB"
        lines.append(f"{has}: {one.describe_fit()}. {_format_largest(micro)}")
    return lines


def _format_largest(micro: LargestMicroBatch) -> str:
    if not micro.perhaps:
        return "No micro-batch fits with these settings."
    if not micro.surely:
        return f"No micro-batch surely fits; the largest micro-batch that may fit is {micro.perhaps}."
    if micro.surely >= LARGEST_MICRO_BATCH:
        return f"Largest micro-batch: at least {micro.surely} (larger ones are not tried)."
    return f"Largest micro-batch: {micro.surely} surely fits, {micro.perhaps} may fit."


def _list_doubts(one: Prediction, needed: MemoryPrediction) -> list[str]:
    """Return caveats on the accuracy of the memory prediction."""
    if one.device != "cuda":
        return [_DOUBT]
    base, reserve = "–".join(map(format_gigabytes, needed.base)), format_gigabytes(needed.reserve[1])
    return [_DOUBT, _DOUBT_CUDA.format(base=base, reserve=reserve)]


def _build_json(one: Prediction, storage: float | None, *, alone: bool) -> dict[str, Any]:
    named = {"config_id": one.point.config_id, "point": options.format_point(one.point.composed)}
    unknown = one.memory_unknown
    if one.memory:
        try:
            return named | _build_predicted(one, one.memory, storage, alone=alone)
        except NoPrediction as error:
            unknown = str(error)
    return named | dict.fromkeys(_PREDICTED) | {"memory_unknown": unknown, "time_unknown": unknown}


_PREDICTED = (
    "phases", "resident_bytes", "init_peak_bytes", "peak_bytes", "device_bytes", "memory_bytes", "fits",
    "largest_micro_batch", "host_bytes", "time", "goodput", "would_fit",
)  # fmt: skip


def _build_predicted(
    one: Prediction, needed: MemoryPrediction, storage: float | None, *, alone: bool
) -> dict[str, Any]:
    micro, on_host = one.largest_micro_batch() if alone else None, one.host()
    network = get_network(one.point.composed.spec)
    parameters = {"trained": count_trained_parameters(network), "total": count_parameters(network)}
    goodput = _predict_goodput(one, storage)
    return {
        **({} if network.trains_all else {"parameters": parameters}),
        "phases": {phase.name: phase.terms for phase in needed.phases},
        "resident_bytes": needed.resident,
        "init_peak_bytes": needed.init_peak,
        "peak_bytes": needed.peak,
        "device_bytes": {"low": needed.device[0], "high": needed.device[1]},
        "memory_bytes": one.point.composed.machine.memory_bytes,
        "fits": one.fits,
        "largest_micro_batch": micro._asdict() if micro else None,
        "host_bytes": {"low": on_host.low, "high": on_host.high} if on_host else None,  # of a node
        "time": _build_time(one.time, one.software.name) if one.time else None,
        "time_unknown": None if one.time else one.time_unknown,
        "would_fit": one.describe_remedy() or None if alone else None,
        "goodput": goodput._asdict() if goodput else None,
    }


def _build_time(time: StepTime, software: str) -> dict[str, Any]:
    names = ("step_s", "low_s", "high_s", "hidden_s", "parts", "bound", "tokens_per_s", "mfu")
    return {name: getattr(time, name) for name in names} | {"model_flops": time.flops.model, "software": software}
