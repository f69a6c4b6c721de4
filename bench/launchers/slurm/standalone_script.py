"""A job script that starts without this package, with what a site's file says of the cluster."""

from collections.abc import Sequence
from pathlib import Path

from bench.errors import UserError
from bench.launchers.slurm.options import Options
from bench.launchers.slurm.script import load_template
from bench.launching import StandaloneScript
from bench.spec import Device, RunSpec

_TEMPLATE = Path(__file__).with_name("standalone.sh.j2")
_GPUS = "--gpus-per-node={devices}"
"""How GPUs are asked for where the site's file does not say it."""


def standalone(command: Sequence[str], spec: RunSpec, options: Options, device: Device) -> StandaloneScript:
    """Return the script that runs a command of Python's on every device of a job; UserError for a site whose jobs run
    in a container."""
    if options.container:
        rule = "the job script that is handed over starts no container"
        raise UserError("launcher.container", rule, "leave it out, and start job.sh inside of one")
    gpus = options.gpus or (_GPUS if device == "cuda" else None)
    before, _, after = options.network.rendezvous_host.partition("{host}")
    text = load_template(_TEMPLATE).render(
        spec=spec,
        site=options,
        command=command,
        name=f"{spec.model.name}-{spec.engine.name}",
        gpus=gpus and gpus.replace("{devices}", str(spec.devices_per_node)),
        cpus=options.cpus_per_device and options.cpus_per_device * spec.devices_per_node,
        python=options.python or ("python3",),
        variables={**_build_socket_variables(options), **options.environment},
        before=before,
        after=after,
    )
    alone = "; without Slurm, on one node: `bash job.sh`" if spec.nodes == 1 else ""
    return StandaloneScript(text, f"`sbatch job.sh` in this folder{alone}")


def _build_socket_variables(options: Options) -> dict[str, str]:
    interface = options.network.interface
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
