"""What the verbs share that ask for points: arguments, circumstances, and how a point and its result are told."""

import argparse
import functools
import json
import statistics
from pathlib import Path

from bench import launchers
from bench.cli import wording
from bench.config import Request
from bench.measure.environment import device_kind
from bench.record import RunRecord
from bench.spec import OBJECTIVE, Device, RunSpec, config_id


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every verb that runs points takes."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="override of conf/config.yaml")
    parser.add_argument("--dry-run", action="store_true", help="show every point and start nothing")
    parser.add_argument("--json", action="store_true", help="print JSON for another program")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="your own group files, laid out like conf/")
    parser.add_argument(
        "--results", type=Path, default=Path("results/runs"), metavar="DIR", help="default: %(default)s"
    )


def sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says how a sweep goes about its points."""
    parser.add_argument(
        "--no-prune",
        action="store_true",
        help="measure also what a smaller micro-batch or a prediction says cannot fit",
    )
    parser.add_argument("--autopilot", action="store_true", help="go on by itself until every point has its answer")
    parser.add_argument("--max-queued", type=_positive, metavar="N", help="at most N of the sweep's jobs in the queue")
    parser.add_argument("--nice", type=int, metavar="N", help="lower the priority of the jobs")
    parser.add_argument("--begin", metavar="WHEN", help="start no job before, as the scheduler takes it: 20:00")


ETIQUETTE = ("max_queued", "nice", "begin")
"""Options of a launcher with a queue that are also arguments of a command."""


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def device(asked: Request) -> str | None:
    """Return the kind of device that `asked` would run on, "cpu" or "cuda"; None where another machine decides it."""
    if asked.machine.device or launchers.load(asked.launcher).QUEUES:
        return asked.machine.device
    return _device_here()


def kind(asked: Request) -> Device:
    """Return the kind of device that `asked` is predicted for: where nobody says it, a GPU if there is one here."""
    return "cpu" if (device(asked) or _device_here()) == "cpu" else "cuda"


@functools.cache  # asked for every point, and it looks at the file system
def _device_here() -> str:
    return device_kind()


def line(asked: Request) -> str:
    """Describe a point in one line."""
    return describe(asked.spec, config_id(asked.spec))


def describe(spec: RunSpec, identity: str) -> str:
    """Describe what is measured in one line; `identity` is its config_id."""
    devices = f"{spec.nodes} × {spec.devices_per_node}"
    extra = " checkpointing" if spec.activation_checkpointing else ""
    extra += wording.layout(spec)
    extra += f"  {spec.objective}" if spec.objective != OBJECTIVE else ""
    return (
        f"{identity}  {spec.model.name:<12} {spec.engine.name:<6} {spec.precision}  {devices} devices  "
        f"micro {spec.batch.micro} × {spec.accumulation} = global {spec.global_batch}  "
        f"{wording.lengths(spec)}  {spec.data.name}{extra}"
    )


def result(record: RunRecord) -> str:
    """Describe in one line how a run ended and the median of its window, in seconds per optimizer step."""
    from bench.statistics import series_interval  # here, since it takes its time and most commands need none

    observed, outcome = record.observations, record.outcome
    if outcome.kind != "ok" or observed is None or observed.steps is None:
        return f"{outcome.kind}: {outcome.reason}"
    window = observed.steps.step_s[observed.steps.cut :]
    interval = series_interval(window)
    doubt = f" (95 % {interval[0]:.4g}–{interval[1]:.4g})" if interval else ""
    memory = [rank.peak_allocated_bytes for rank in observed.memory if rank.peak_allocated_bytes is not None]
    peak = f", {max(memory) / 2**20:.1f} MiB peak" if memory else ""
    return f"ok: {statistics.median(window):.4g} s per step{doubt}, n = {len(window)}{peak}"


def as_json(asked: Request) -> str:
    """Return a point with its machine and launcher, for another program."""
    plain = {
        "config_id": config_id(asked.spec),
        "spec": asked.spec.model_dump(mode="json", by_alias=True),
        "machine": asked.machine.model_dump(mode="json"),
        "launcher": {"name": asked.launcher, **asked.launcher_options.model_dump(mode="json")},
    }
    return json.dumps(plain, indent=1)
