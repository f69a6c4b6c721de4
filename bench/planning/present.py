"""What a point that starts here finds here: refused before anything starts where the devices are not there, and a small
point with a short window where there is only a CPU and nothing else was given."""

from collections.abc import Sequence

from bench import config, launchers
from bench.config import Pair, Request
from bench.errors import UserError
from bench.measure.environment import cores, device_name, devices_here
from bench.planning import target
from bench.spec import OBJECTIVE
from bench.wording import count

_SMALL = ("precision", "sequence", "measure")
_SHORTER = 4  # than an objective's usual samples are those of the smoke study
_PROCESSES_PER_CORE = 8  # more have no time to answer each other


def check(asked: Request) -> None:
    """Raise UserError for devices that a point needs here and that are not here."""
    device = target.device(asked)
    if launchers.load(asked.launcher).QUEUES or device is None:
        return
    needed, machine = f"devices_per_node={asked.spec.devices_per_node}", asked.machine
    here, name = devices_here(device), device_name(device)
    if here == 0:
        remedy = f"choose machine=cpu, or {launchers.with_queue()}, or ask `zeroscale predict`"
        raise UserError(f"machine={machine.name}", "there is no GPU here that torch can use", remedy)
    if name is not None and not machine.accepts(name):
        rule = f"expects {' or '.join(machine.device_names)}, and {name} is here"
        raise UserError(f"machine={machine.name}", rule, "choose machine=auto, which takes what is here")
    if device == "cuda" and here is not None and asked.spec.devices_per_node > here:
        raise UserError(needed, f"here {'is' if here == 1 else 'are'} {count(here, 'GPU')}", f"give at most {here}")
    most = _PROCESSES_PER_CORE * cores()
    if device == "cpu" and asked.spec.devices_per_node > most:
        raise UserError(needed, f"too many processes for {count(cores(), 'core')}", f"give at most {most}")


def small(given: Sequence[str], asked: Request) -> list[Pair]:
    """Return overrides that make `asked` a point of the smoke study's size, where it starts on the CPU that is here.

    `given` are the keys that were given: whoever gives a part of precision, sequence or measure gets the rest of it as
    conf/config.yaml has it.
    """
    if launchers.load(asked.launcher).QUEUES or target.device(asked) != "cpu":
        return []
    left = set(_SMALL) - {key.split(".")[0] for key in given}
    smoke = config.study("smoke").base
    chosen = [(key, value) for key, value in smoke.items() if key.split(".")[0] in left]
    if asked.spec.objective == OBJECTIVE:  # the study's own
        return chosen
    others = [(key, value) for key, value in chosen if not key.startswith("sequence.")]
    lengths = asked.spec.sequence if "sequence" in left else {}
    return [*others, *((f"sequence.{kind}", max(length // _SHORTER, 1)) for kind, length in lengths.items())]
