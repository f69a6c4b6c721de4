"""Measure what this machine really does, and write it as a file of conf/machine.

  zeroscale calibrate                                       # the processor here, or its GPUs if there are any
  zeroscale calibrate machine=h200 --seconds 120            # starts from the published numbers, and replaces them
  zeroscale calibrate machine=cpu --ranks 4 --only matmul,collectives
  sbatch --nodes=4 --wrap "zeroscale calibrate machine=testbed_400mbit"     # between nodes too: one start, no srun

What: matmul by shape and precision, attention, memory copy, launches, the link to the host, what ranks on one
processor cost each other (contention), and all-reduce, all-gather and reduce-scatter by payload and number of ranks.
Nothing else should run meanwhile. OMP_NUM_THREADS is obeyed; without it ranks share the cores, as in a run.

The file lands in my/machine/, from where `--config-dir my machine=NAME` takes it. A measured number replaces a
published one and says so.
"""

import argparse
import contextlib
import math
import os
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from bench import models
from bench.calibrate import (
    ELSEWHERE,
    CalibrationRequest,
    Part,
    build_machine,
    format_calibration,
    format_yaml,
    starting,
)
from bench.calibrate.rates import list_products
from bench.cli import options
from bench.config import compose
from bench.config.compose import Request
from bench.core import job_context, store, terminal
from bench.core.errors import UserError, suggest_nearest
from bench.core.machine import Machine
from bench.core.network import Stacks
from bench.core.record import Network
from bench.core.scheduling import SchedulingOptions
from bench.core.spec import ModelSpec
from bench.measure.environment import count_local_devices, find_device_kind

PARTS: tuple[Part, ...] = get_args(Part)
_RANKS = 2  # on a processor alone: fewer would leave contention and collectives out


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_overrides(parser, "machine=NAME, to start from; launcher=NAME")
    parser.add_argument("--name", metavar="NAME", help="the machine's new name; default: <machine>_calibrated")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: my/machine/NAME.yaml")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument("--ranks", type=int, metavar="N", help="per node; default: its GPUs; 2 without, 1 on several")
    parser.add_argument("--seconds", type=float, default=90.0, metavar="S", help="to measure for; default: %(default)g")
    parser.add_argument("--only", metavar="PARTS", help=f"some of {','.join(PARTS)}")
    options.add_json(parser, "print the machine as JSON")
    options.add_config_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 once the file is written."""
    request = _build_request(args)
    name = _find_name(args, request)
    path: Path = args.out or Path("my/machine") / f"{name}.yaml"
    _check_path(path, name, force=args.force)
    with terminal.progress(quiet=args.json) as follow:
        measured = starting.measure(request, path.parent, follow)
    machine = build_machine(request.machine, measured, name)
    try:
        store.write_atomically(path, format_yaml(machine).encode())
    except OSError as error:
        raise store.build_unwritable_error(path, error) from error
    print(machine.model_dump_json(indent=1) if args.json else f"{format_calibration(machine)}\n{path}")
    return 0


def _build_request(args: argparse.Namespace) -> CalibrationRequest:
    """Return what is to be measured; UserError for whatever cannot be."""
    request = _compose_request(args)
    device: Any = request.machine.device or find_device_kind()
    here = job_context.find_job(os.environ).context
    if here.processes > 1:
        each = f"each of its {here.processes} processes would measure for itself"
        raise UserError(f"job {here.job_id}", each, "start it once, without srun or its like")
    if not 0 < args.seconds < math.inf:
        raise UserError(f"--seconds {args.seconds:g}", "not a time to measure in", "give a positive number")
    options = request.launcher_options
    return CalibrationRequest(
        machine=request.machine,
        device=device,
        nodes=here.nodes,
        ranks_per_node=_count_ranks(args.ranks, device, here.nodes),
        seconds=args.seconds,
        parts=_select_parts(args.only, device),
        products=list_products(_list_networks(args.config_dir)),
        network=options.network if isinstance(options, SchedulingOptions) else Network(),
    )


def _compose_request(args: argparse.Namespace) -> Request:
    """Return what the overrides ask for; UserError for one that says nothing of a machine."""
    pairs = compose.parse_single(args.overrides)
    for key, value in pairs:
        if key.split(".")[0] not in ("machine", "launcher"):
            raise UserError(f"{key}={value}", "a calibration is of a machine, not of a point", "give machine=NAME")
    return compose.compose_request(
        [*pairs, ("devices_per_node", 1)], args.config_dir
    )  # of the machine, whatever a point has


def _count_ranks(given: int | None, device: str, nodes: int) -> int:
    """Return the processes per node: one per GPU, or as many as a run on a processor would have."""
    if given is not None and given < 1:
        raise UserError(f"--ranks {given}", "not a positive number", "one is the least")
    if device == "cpu":
        return given or (_RANKS if nodes == 1 else 1)
    count = given or count_local_devices(device)
    if not count:
        raise UserError("--ranks", "the GPUs of this node cannot be counted", "say how many there are")
    return count


def _select_parts(only: str | None, device: str) -> tuple[Part, ...]:
    """Return what is measured, in the order of PARTS."""
    here = [part for part in PARTS if part != ELSEWHERE[device]]
    if only is None:
        return tuple(here)
    wanted = only.split(",")
    for word in wanted:
        if word not in PARTS:
            raise UserError(f"--only {word}", "no such part", suggest_nearest(word, PARTS))
        if word not in here:
            raise UserError(f"--only {word}", f"nothing of the kind is measured on a {device} machine", "leave it out")
    return tuple(part for part in here if part in wanted)


def _list_networks(config_dir: Path | None) -> list[Stacks]:
    """Return the networks of all models in conf/model and the user's own, as far as their families describe them."""
    folders = [root / "model" for root in (compose.find_conf_folder(), config_dir) if root]
    files = [path for folder in folders for path in sorted(folder.glob("*.yaml"))]
    found = []
    for path in files:
        with contextlib.suppress(yaml.YAMLError, ValidationError, UserError):  # not whole, or not what was asked for
            tree = yaml.safe_load(path.read_text())
            if isinstance(tree, dict) and "shape" in tree:
                known = {name: tree[name] for name in ("name", "family", "shape") if name in tree}
                found.append(models.build_network(ModelSpec.model_validate(known)))
    return [network for network in found if network is not None]


def _find_name(args: argparse.Namespace, calibration: CalibrationRequest) -> str:
    """Return the machine's new name, which is its file's; UserError for one that would not be found."""
    old = calibration.device if calibration.machine.name == "auto" else calibration.machine.name
    name: str = args.name or (args.out.stem if args.out else f"{old}_calibrated")
    try:
        Machine(name=name)
    except ValidationError as error:
        rule = "a name is made of letters, digits, '.', '_' and '-', and begins with a letter or digit"
        raise UserError(f"--name {name}", rule, "choose another") from error
    if (compose.find_conf_folder() / "machine" / f"{name}.yaml").exists():
        raise UserError(f"--name {name}", "a machine of conf/machine, which is found first", "choose another name")
    return name


def _check_path(path: Path, name: str, *, force: bool) -> None:
    """Raise UserError where the file cannot be, before anything is measured."""
    if path.name != f"{name}.yaml":
        rule = f"machine={name} looks for {name}.yaml"
        raise UserError(f"--out {path}", rule, "give it that name, or another --name")
    if path.is_dir() or (path.exists() and not force):
        raise UserError(str(path), "is there already", "give --force to overwrite it, or another --out")
