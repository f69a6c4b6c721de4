"""Say before a run what memory it needs and how long a step takes: by term and by part, and how sure that is.

  zeroscale predict model=mt5_xxl engine=zero3 nodes=8 devices_per_node=8 machine=a100_80
  zeroscale predict model=mt5_xl engine=ddp,zero1,zero2,zero3 devices_per_node=8 machine=h100
  zeroscale predict study=paper

One point is told by term, several in two lines each. GB are 10^9 bytes, of the rank that needs most.
"""

import argparse
import contextlib
import json
import math
from pathlib import Path
from typing import Any

from bench import config
from bench.cli import asking
from bench.config import Point
from bench.decode import check_rank
from bench.errors import NoPrediction, UserError
from bench.predict.memory import Memory, Micro, gigabytes, host, largest_micro_batch, memory
from bench.predict.step_time import Time, step_time
from bench.study import Study

_DOUBT = """\
Exact, by what torch, transformers and DeepSpeed allocate: weights, master weights, optimizer moments, buckets,
  activations, logits and loss. Approximate: gradients under way, gathered layers and working
  memory, which are bounded at the moment when most lives."""
_DOUBT_CUDA = """
Least sure is what lies beside tensors: {base} GB for the CUDA context, libraries and NCCL, and up to {reserve} GB that
  the allocator may hold in pieces. No GPU run stands behind any of it yet."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="override of conf/config.yaml, or study=NAME")
    parser.add_argument("--json", action="store_true", help="print JSON for another program; bytes, not GB")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="your own group files, laid out like conf/")
    parser.add_argument(
        "--straggler",
        type=_factor,
        default=1.0,
        metavar="F",
        help="the slowest rank computes F times as long",
    )
    parser.add_argument(
        "--data-wait", type=_seconds, default=0.0, metavar="S", help="seconds that a step waits for its batches"
    )
    parser.add_argument(
        "--rehearsed", type=_seconds, metavar="S", help="what a step computes by `zeroscale rehearse`, on this machine"
    )


def run(args: argparse.Namespace) -> int:
    """Return 0; whether a point fits is an answer, not a failure."""
    points = _points(args)
    if args.json:
        alone = len(points) == 1  # the largest micro-batch costs as much as thirty predictions
        print(json.dumps([_plain(point, args, alone=alone) for point in points], indent=1))
    elif len(points) == 1:
        print(_alone(points[0], args))
    else:
        print("\n".join(_line(point, args) for point in points))
    return 0


def _alone(point: Point, args: argparse.Namespace) -> str:
    try:
        return "\n\n".join([_table(point), _host(point), _told(_time(point, args))])
    except NoPrediction as unknown:
        return f"{asking.line(point.asked)}\n{unknown}"


def _factor(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1 <= (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text}: not a factor of at least 1; give for example 1.1")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text}: not a number of seconds above 0; give for example 0.01")


def _points(args: argparse.Namespace) -> list[Point]:
    parsed = config.parse(args.overrides)
    named = [values for key, values in parsed if key == "study"]
    if any(len(values) != 1 for values in named):
        raise UserError("study", "a prediction is for one study", "call predict once for each")
    study = config.study(str(named[0][0]), args.config_dir) if named else Study(name="adhoc")
    overrides = [(key, values) for key, values in parsed if key != "study"]
    return config.points(study, overrides, args.config_dir, lambda asked: asked.machine.device, check_rank).points


def _memory(point: Point) -> Memory:
    return memory(point.asked.spec, asking.kind(point.asked), point.asked.machine.memory_bytes)


def _micro(point: Point) -> Micro | None:
    room = point.asked.machine.memory_bytes
    return largest_micro_batch(point.asked.spec, room, asking.kind(point.asked)) if room else None


def _fits(point: Point, needed: Memory) -> str:
    room = point.asked.machine.memory_bytes
    if room is None:
        return "size of the device unknown"
    return {True: "fits", False: "does not fit", None: "may fit"}[needed.fits(room)]


def _host(point: Point) -> str:
    spec, machine = point.asked.spec, point.asked.machine
    needed = host.host(spec, asking.kind(point.asked), machine.memory_bytes)
    return host.told(needed, spec.devices_per_node, machine.host_memory_bytes)


def _time(point: Point, args: argparse.Namespace) -> Time | UserError:
    """Return the predicted step, or what the machine's file lacks for it."""
    try:
        return step_time(
            point.asked.spec,
            point.asked.machine,
            asking.kind(point.asked),
            straggler=args.straggler,
            data_wait_s=args.data_wait,
            rehearsed_s=args.rehearsed,
        )
    except UserError as lacking:
        return lacking


def _told(time: Time | UserError) -> str:
    if isinstance(time, UserError):
        return f"How long a step takes cannot be told: {time}"
    parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in time.parts.items())
    lines = [f"A step takes {time.step_s:.3g} s, between {time.low_s:.3g} and {time.high_s:.3g}: {parts}."]
    if time.hidden_s:
        lines[0] += f" Behind them {time.hidden_s:.3g} s of communication are hidden."
    reached = "unknown" if time.mfu is None else f"{100 * time.mfu:.3g} %"
    lines.append(f"{time.tokens_per_s:,.0f} tokens/s, MFU {reached}; bound by {time.bound}.")
    return "\n".join(lines)


def _line(point: Point, args: argparse.Namespace) -> str:
    shown = asking.describe(point.asked.spec, point.config_id)
    try:
        needed = _memory(point)
    except NoPrediction as unknown:
        return f"{shown}\n    {unknown}"
    low, high = needed.device
    span = f"{gigabytes(low)}–{gigabytes(high)}" if high > low else gigabytes(low)
    time = _time(point, args)
    step = "step time unknown"
    if isinstance(time, Time):
        step = f"{time.step_s:.3g} s a step ({time.low_s:.3g}–{time.high_s:.3g}), {time.tokens_per_s:,.0f} tokens/s"
    return f"{shown}\n    {span} GB: {_fits(point, needed)}; {step}"


def _table(point: Point) -> str:
    needed = _memory(point)
    names = list(dict.fromkeys(name for phase in needed.phases for name in phase.terms))
    rows = [["", *(phase.name for phase in needed.phases)]]
    for name in names:
        cells = [gigabytes(phase.terms.get(name, 0)) for phase in needed.phases]
        if any(phase.terms.get(name, 0) for phase in needed.phases):
            rows.append([name, *cells])
    rows.append(["tensors in all", *(gigabytes(phase.total) for phase in needed.phases)])
    text = "\n".join(f"{row[0]:<18}" + "".join(f"{cell:>16}" for cell in row[1:]) for row in rows)
    return "\n\n".join(
        [f"{asking.line(point.asked)}\nGB per rank at the peak of each phase", text, _verdict(point, needed)]
    )


def _verdict(point: Point, needed: Memory) -> str:
    """Return what the device must have, what fits, and which terms to trust."""
    low, high = needed.device
    span = f"{gigabytes(low)} to {gigabytes(high)}" if high > low else gigabytes(low)
    lines = [f"A device needs {span} GB in all; {gigabytes(needed.resident)} GB stay between steps."]
    micro, room = _micro(point), point.asked.machine.memory_bytes
    if micro and room:
        lines.append(
            f"{point.asked.machine.name} has {gigabytes(room)} GB: {_fits(point, needed)}. Largest micro-batch: "
            f"{micro.surely or 'none'} surely, {micro.perhaps or 'none'} perhaps."
        )
    doubt = _DOUBT
    if asking.kind(point.asked) == "cuda":
        doubt += _DOUBT_CUDA.format(base="–".join(map(gigabytes, needed.base)), reserve=gigabytes(needed.reserve[1]))
    return "\n".join([*lines, doubt])


def _plain(point: Point, args: argparse.Namespace, *, alone: bool) -> dict[str, Any]:
    named = {"config_id": point.config_id, "point": asking.line(point.asked)}
    try:
        return named | _predicted(point, args, alone=alone)
    except NoPrediction as unknown:
        return named | dict.fromkeys(_PREDICTED) | {"memory_unknown": str(unknown), "time_unknown": str(unknown)}


_PREDICTED = (
    "phases", "resident_bytes", "init_peak_bytes", "peak_bytes", "device_bytes", "memory_bytes", "fits",
    "largest_micro_batch", "host_bytes", "time",
)  # fmt: skip


def _predicted(point: Point, args: argparse.Namespace, *, alone: bool) -> dict[str, Any]:
    needed, micro, room = _memory(point), _micro(point) if alone else None, point.asked.machine.memory_bytes
    time, on_host = _time(point, args), host.host(point.asked.spec, asking.kind(point.asked), room)
    return {
        "phases": {phase.name: phase.terms for phase in needed.phases},
        "resident_bytes": needed.resident,
        "init_peak_bytes": needed.init_peak,
        "peak_bytes": needed.peak,
        "device_bytes": {"low": needed.device[0], "high": needed.device[1]},
        "memory_bytes": room,
        "fits": needed.fits(room) if room else None,
        "largest_micro_batch": micro._asdict() if micro else None,
        "host_bytes": {"low": on_host.low, "high": on_host.high} if on_host else None,  # of a node
        "time": _plain_time(time) if isinstance(time, Time) else None,
        "time_unknown": None if isinstance(time, Time) else str(time),
    }


def _plain_time(time: Time) -> dict[str, Any]:
    told = {name: getattr(time, name) for name in ("step_s", "low_s", "high_s", "hidden_s", "parts", "bound")}
    return told | {"tokens_per_s": time.tokens_per_s, "mfu": time.mfu, "model_flops": time.flops.model}
