"""What the verbs share that ask for points: arguments, circumstances, and how a point and its result are told."""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.config import Request
from bench.intervals import series_interval
from bench.measure.environment import classify, device_kind, environment_id
from bench.record import Circumstance, Limits, RunRecord
from bench.spec import config_id
from bench.study import Study


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every verb that runs points takes."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="override of conf/config.yaml")
    parser.add_argument("--dry-run", action="store_true", help="show every point and start nothing")
    parser.add_argument("--json", action="store_true", help="print JSON for another program")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="your own group files, laid out like conf/")
    parser.add_argument(
        "--results", type=Path, default=Path("results/runs"), metavar="DIR", help="default: %(default)s"
    )


def here(asked: Request) -> str:
    """Return the kind of device that `asked` would run on here: "cpu" or "cuda"."""
    return asked.machine.device or device_kind()


def environment_here(asked: Request) -> str:
    """Return the environment class that `asked` would be measured in here."""
    return environment_id(classify(here(asked), asked.spec.devices_per_node))


def circumstance(
    asked: Request, study: Study, repeat: int, overrides: tuple[str, ...], started_at: str
) -> Circumstance:
    """Return the circumstances of an attempt that is about to start here."""
    options = asked.launcher_options.model_dump(mode="json")
    return Circumstance(
        study=study.name,
        question=study.question,
        repeat=repeat,
        attempt=0,
        machine=asked.machine.model_copy(update={"device": here(asked)}),  # the ranks obey, or refuse
        launcher={"name": asked.launcher, **options},
        limits=Limits(**{key: options[key] for key in Limits.model_fields if key in options}),
        overrides=overrides,
        started_at=started_at,
    )


def line(asked: Request) -> str:
    """Describe a point in one line."""
    spec = asked.spec
    devices = f"{spec.nodes} × {spec.devices_per_node}"
    extra = " checkpointing" if spec.activation_checkpointing else ""
    return (
        f"{config_id(spec)}  {spec.model.name:<12} {spec.engine.name:<6} {spec.precision}  {devices} devices  "
        f"micro {spec.batch.micro} × {spec.accumulation} = global {spec.global_batch}  "
        f"{spec.sequence.encoder}/{spec.sequence.decoder} tokens  {spec.data.name}{extra}"
    )


def result(record: RunRecord) -> str:
    """Describe in one line how a run ended and the median of its window, in seconds per optimizer step."""
    observed, outcome = record.observations, record.outcome
    if outcome.kind != "ok" or observed is None or observed.steps is None:
        return f"{outcome.kind}: {outcome.reason}"
    window = observed.steps.step_s[observed.steps.cut :]
    interval = series_interval(window)
    doubt = f" (95 % {interval[0]:.4g}–{interval[1]:.4g})" if interval else ""
    memory = [rank.peak_allocated_bytes for rank in observed.memory if rank.peak_allocated_bytes is not None]
    peak = f", {max(memory) / 2**20:.1f} MiB peak" if memory else ""
    return f"ok: {statistics.median(window):.4g} s per step{doubt}, n = {len(window)}{peak}"


@contextlib.contextmanager
def live(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Give a function that shows one changing line on a terminal, and nothing anywhere else."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.status import Status

    with Status("starting", console=Console(stderr=True)) as status:
        yield lambda text: status.update(escape(text))
