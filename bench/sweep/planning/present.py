"""What a point that starts here finds here: refused before anything starts where the devices are not there, and a small
point with a short window where there is only a CPU and nothing else was given."""

from collections.abc import Sequence

from bench import launchers
from bench.config import compose
from bench.config.compose import Request
from bench.errors import UserError
from bench.formatting import format_count
from bench.measure.environment import count_cores, count_local_devices, read_device_name
from bench.spec import OBJECTIVE
from bench.study import Pair
from bench.sweep.planning import target

_SMALL = ("precision", "sequence", "measure")
_SHORTER = 4  # than an objective's usual samples are those of the smoke study
_PROCESSES_PER_CORE = 8  # more have no time to answer each other


def check_devices(composed: Request) -> None:
    """Raise UserError for devices that a point needs here and that are not here."""
    device = target.find_device(composed)
    if launchers.load(composed.launcher).QUEUES or device is None:
        return
    needed, machine = f"devices_per_node={composed.spec.devices_per_node}", composed.machine
    local_devices, name = count_local_devices(device), read_device_name(device)
    if local_devices == 0:
        remedy = f"choose machine=cpu, or {launchers.format_queueing()}, or ask `zeroscale predict`"
        raise UserError(f"machine={machine.name}", "there is no GPU here that torch can use", remedy)
    if name is not None and not machine.accepts(name):
        rule = f"expects {' or '.join(machine.device_names)}, and {name} is here"
        raise UserError(f"machine={machine.name}", rule, "choose machine=auto, which takes what is here")
    if device == "cuda" and local_devices is not None and composed.spec.devices_per_node > local_devices:
        raise UserError(
            needed,
            f"here {'is' if local_devices == 1 else 'are'} {format_count(local_devices, 'GPU')}",
            f"give at most {local_devices}",
        )
    max_processes = _PROCESSES_PER_CORE * count_cores()
    if device == "cpu" and composed.spec.devices_per_node > max_processes:
        raise UserError(
            needed, f"too many processes for {format_count(count_cores(), 'core')}", f"give at most {max_processes}"
        )


def choose_small(given: Sequence[str], composed: Request) -> list[Pair]:
    """Return overrides that make `composed` a point of the smoke study's size, if it starts on this machine's CPU.

    `given` are the keys that the user set. If they include a part of precision, sequence or measure, the rest of it
    stays as in conf/config.yaml.
    """
    if launchers.load(composed.launcher).QUEUES or target.find_device(composed) != "cpu":
        return []
    left = set(_SMALL) - {key.split(".")[0] for key in given}
    smoke = compose.read_study("smoke").base
    chosen = [(key, value) for key, value in smoke.items() if key.split(".")[0] in left]
    if composed.spec.objective == OBJECTIVE:  # the study's own
        return chosen
    others = [(key, value) for key, value in chosen if not key.startswith("sequence.")]
    lengths = composed.spec.sequence if "sequence" in left else {}
    return [*others, *((f"sequence.{kind}", max(length // _SHORTER, 1)) for kind, length in lengths.items())]
