"""The job script of a handover, with what a site's file says of the cluster."""

from pathlib import Path
from typing import Literal

from bench.errors import UserError
from bench.launchers.slurm.options import Options
from bench.launchers.slurm.script import template
from bench.spec import RunSpec

FILES = Path(__file__).with_name("files")
GPUS = "--gpus-per-node={devices}"
"""How GPUs are asked for where the site's file does not say it."""


def job_script(spec: RunSpec, site: Options, device: Literal["cpu", "cuda"], steps: int | None) -> str:
    """Return the text of job.sh; UserError for a site whose jobs run in a container."""
    if site.container:
        rule = "the job script that is handed over starts no container"
        raise UserError("launcher.container", rule, "leave it out, and start job.sh inside of one")
    gpus = site.gpus or (GPUS if device == "cuda" else None)
    before, _, after = site.network.rendezvous_host.partition("{host}")
    return template(FILES / "job.sh.j2").render(
        spec=spec,
        site=site,
        steps=steps,
        name=f"{spec.model.name}-{spec.engine.name}",
        gpus=gpus and gpus.replace("{devices}", str(spec.devices_per_node)),
        cpus=site.cpus_per_device and site.cpus_per_device * spec.devices_per_node,
        python=site.python or ("python3",),
        variables={**_sockets(site), **site.environment},
        before=before,
        after=after,
    )


def _sockets(site: Options) -> dict[str, str]:
    interface = site.network.interface
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
