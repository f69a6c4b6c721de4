"""Measure the speed of this machine, and write the result as a file like those of conf/machine.

  zeroscale calibrate                                       # the processor here, or its GPUs
  zeroscale calibrate machine=h200 --seconds 120            # replaces the published numbers
  zeroscale calibrate machine=cpu --ranks 4 --only matmul,collectives
  sbatch --nodes=4 --wrap "zeroscale calibrate machine=testbed_400mbit"     # between nodes too

The command measures matmul by shape and precision (with its gradients), attention, memory copies,
kernel launches, the link between device and host, and contention between ranks on one processor. On
a GPU it also measures the sustained rate of large products. Between ranks it measures all-reduce,
all-gather and reduce-scatter by payload and number of ranks. The machine should be idle during the
measurement. OMP_NUM_THREADS is obeyed; without it ranks share the cores, as in a run. In a job of
several nodes, start the command once and without srun.

The file is written to my/machine/; `--config-dir my machine=NAME` uses it. A measured number
replaces a published number, and the file marks it as measured.
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
from bench.core import plugins, store, terminal
from bench.core.errors import UserError, suggest_nearest
from bench.core.files import find_conf_folder
from bench.core.job_environment import read_job
from bench.core.network import Stacks
from bench.core.record import Network
from bench.core.scheduling import JobContext, SchedulingOptions
from bench.core.spec import ModelSpec
from bench.measure.environment import count_local_devices, find_device_kind
from bench.sweep import inputs

PARTS: tuple[Part, ...] = get_args(Part)
_RANKS = 2  # on one node without GPUs: contention and collectives need two


def arguments(parser: argparse.ArgumentParser) -> None:
    help_text = "machine=NAME: machine file with the published numbers; launcher=NAME: network settings"
    options.add_overrides(parser, help_text)
    parser.add_argument("--name", metavar="NAME", help="name of the new machine file; default: <machine>_calibrated")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write; default: my/machine/NAME.yaml")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    help_text = "ranks per node; default: one per GPU; on CPUs, 2 on a single node and 1 on each of several nodes"
    parser.add_argument("--ranks", type=options.positive("--ranks"), metavar="N", help=help_text)
    help_text = "seconds of all measurements together; default: %(default)g"
    parser.add_argument("--seconds", type=float, default=90.0, metavar="S", help=help_text)
    help_text = f"comma list of the parts to measure, from {','.join(PARTS)}; default: all"
    parser.add_argument("--only", metavar="PARTS", help=help_text)
    options.add_json(parser, "print the machine as JSON")
    options.add_config_dir(parser)


def run(args: argparse.Namespace) -> int:
    """Measure this machine, write its file, and return 0. Raise UserError if this is not possible."""
    request = _build_request(args)
    name = _find_name(args, request)
    path: Path = args.out or Path("my/machine") / f"{name}.yaml"
    if path.name != f"{name}.yaml":
        rule = f"the file of machine={name} must be called {name}.yaml"
        raise UserError(f"--out {path}", rule, "rename it, or set another --name")
    if path.is_dir() or (path.exists() and not args.force):
        raise UserError(str(path), "already exists", "add --force to overwrite it, or set another --out")
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
    """Return the requested measurements. Raise UserError for a measurement that this machine cannot make."""
    pairs = compose.parse_single(args.overrides)
    for key, value in pairs:
        if key.split(".")[0] not in ("machine", "launcher"):
            rule = "a calibration has no other overrides than machine and launcher"
            raise UserError(f"{key}={value}", rule, "remove it")
    # A calibration does not use devices_per_node, so any number will do.
    request = compose.compose_request([*pairs, ("devices_per_node", 1)], args.config_dir)
    device: Any = request.machine.device or find_device_kind()
    here = read_job(os.environ) or JobContext()
    if here.processes > 1:
        each = f"each of its {here.processes} processes would start its own calibration"
        # SkyPilot, for example, starts a command on every node and has no launcher here that could start it once.
        has_launcher = here.system in plugins.list_names(plugins.LAUNCHER)
        remedy = "start the command once, without srun or mpirun" if has_launcher else "start it in a job of one node"
        raise UserError(f"job {here.job_id}", each, remedy)
    if not 0 < args.seconds < math.inf:
        raise UserError(f"--seconds {args.seconds:g}", "must be above 0", "set for example --seconds 90")
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


def _count_ranks(given: int | None, device: str, nodes: int) -> int:
    """Return the number of processes per node: one per GPU, or the default number of CPU ranks."""
    if device == "cpu":
        return given or (_RANKS if nodes == 1 else 1)
    local = count_local_devices(device)
    if count := given or local:
        return count
    if local == 0:
        rule = "the machine has GPUs, but this computer has none that torch can use"
        raise UserError("machine", rule, "calibrate on the machine itself, or choose machine=cpu")
    raise UserError("--ranks", "the GPUs of this node cannot be counted", "set --ranks to their number")


def _select_parts(only: str | None, device: str) -> tuple[Part, ...]:
    """Return the names of the selected measurements, such as `matmul`, in the order of PARTS."""
    here = [part for part in PARTS if part not in ELSEWHERE[device]]
    wanted = here if only is None else only.split(",")
    for word in wanted:
        if word not in PARTS:
            raise UserError(f"--only {word}", "no such part", suggest_nearest(word, PARTS))
        if word not in here:
            raise UserError(f"--only {word}", f"cannot be measured on a {device} machine", "remove it")
    return tuple(part for part in here if part in wanted)


def _list_networks(config_dir: Path | None) -> list[Stacks]:
    """Return the description of the layers of every model in conf/model and in the user's folder. Models whose family
    does not describe its layers are omitted."""
    folders = [root / "model" for root in (find_conf_folder(), config_dir) if root]
    found = []
    for path in (path for folder in folders for path in sorted(folder.glob("*.yaml"))):
        # Skip a file that no run could use either.
        with contextlib.suppress(yaml.YAMLError, ValidationError, UserError):
            tree = yaml.safe_load(path.read_text())
            if isinstance(tree, dict) and "shape" in tree:
                known = {name: tree[name] for name in ("name", "family", "shape") if name in tree}
                found.append(models.build_network(ModelSpec.model_validate(known)))
    return [network for network in found if network is not None]


def _find_name(args: argparse.Namespace, calibration: CalibrationRequest) -> str:
    """Return the name of the calibrated machine, which is also the name of its file. Raise UserError for a name with
    which `machine=NAME` would not find this file."""
    old = calibration.device if calibration.machine.name == "auto" else calibration.machine.name
    name: str = args.name or (args.out.stem if args.out else f"{old}_calibrated")
    inputs.check_name("--name", name)
    # A user's file with the name of a shipped file is refused when it is used. Fail now, before 90 s of measuring.
    if (find_conf_folder() / "machine" / f"{name}.yaml").exists():
        raise UserError(f"--name {name}", "a machine of conf/machine has this name", "choose another name")
    return name
