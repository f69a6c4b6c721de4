"""The request for a custom job of Vertex AI, made from the launcher's options. There are no side effects.

The request is a `CustomJobSpec`, as `gcloud ai custom-jobs create --config` reads it:
https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.core.errors import UserError
from bench.core.processes import build_module_command
from bench.core.scheduling import LaunchPlan, Work
from bench.core.study_store import build_log_path
from bench.launchers.vertex.options import DIGEST, START_S, Options, Site, find_accelerators, find_site

FILE = "custom_job.json"
"""Name of the file with the request, in the folder of a job."""
JOB_LABEL, STUDY_LABEL, PRICE_LABEL = "zeroscale-job", "zeroscale-study", "zeroscale-thousandths-per-hour"
ALLOCATION = "bench.sweep.allocation"
WORK_FOLDER = "/tmp/zeroscale"
"""Folder on each node for the node's copy of the study."""
_MAX_NAME = 128  # characters of a display name
_MAX_LABEL = 63  # characters of a label's value


def plan(work: Work, options: Options) -> LaunchPlan:
    """Return a plan with the text of the job's request, which belongs into the folder of `work`, and with the gcloud
    command that submits the request."""
    if work.after:
        rule = "a Vertex AI job cannot wait for another job"
        raise UserError("--autopilot", rule, "remove it, set launcher.max_queued, and run `zeroscale resume` later")
    if len(work.name) > _MAX_NAME:
        rule = f"the name of a Vertex AI job has at most {_MAX_NAME} characters"
        raise UserError(work.name, rule, "choose a shorter name for the study")
    site, folder = find_site(options), work.folder.absolute()
    path = folder / FILE
    labels = ",".join(f"{key}={value}" for key, value in build_labels(work.name, work.nodes, folder, options).items())
    command = ["gcloud", "ai", "custom-jobs", "create", f"--project={site.project}", f"--region={site.region}"]
    command += [f"--display-name={work.name}", f"--labels={labels}", f"--config={path}"]
    environment = {}
    if options.endpoint:
        scheme = "http" if options.is_local else "https"
        environment["CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM"] = f"{scheme}://{options.endpoint}/"
    text = json.dumps(_build_spec(work, options, site), indent=1) + "\n"
    return LaunchPlan(tuple(command), environment, folder, {path: text})


def build_store_url(folder: Path, bucket: str) -> str:
    """Return the URL of a study in the object store. `folder` is the folder of a job of the study. The study's folder
    is two levels above `folder`."""
    return f"{bucket.rstrip('/')}/{folder.parent.parent.name}"


def build_labels(name: str, nodes: int, folder: Path, options: Options) -> dict[str, str]:
    """Return the labels of a job. They identify the job and its study, and contain the price of the whole job."""
    site = find_site(options)
    labels = {
        **options.labels,
        JOB_LABEL: _build_label_value(name),
        STUDY_LABEL: build_study_label(build_store_url(folder, site.bucket)),
    }
    if options.price_per_node_hour is not None:
        labels[PRICE_LABEL] = str(math.ceil(1000 * options.price_per_node_hour * nodes))
    return labels


def build_study_label(url: str) -> str:
    """Return a label value for the study with this URL in the object store. The value differs between studies. If the
    same study is in two object stores, the value also differs between the stores."""
    return f"{_build_label_value(url.rpartition('/')[2])[:40]}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _build_label_value(text: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "_", text.lower())[-_MAX_LABEL:]


def find_log(folder: Path, handle: str, task: int | None) -> Path:
    """Return the path of the log of a job's first node. The job writes the log to the object store."""
    return build_log_path(folder, task)


def _build_spec(work: Work, options: Options, site: Site) -> dict[str, Any]:
    nodes = work.nodes if work.devices_per_node else 1
    kind, count = find_accelerators(options, site.machine_type, work.devices_per_node)
    machine: dict[str, Any] = {"machineType": site.machine_type}
    if kind is not None:
        machine |= {"acceleratorType": kind, "acceleratorCount": count}
    first, *arguments = _build_command(work, options, site)
    pool = {
        "machineSpec": machine,
        "replicaCount": "1",
        "diskSpec": {"bootDiskSizeGb": options.boot_disk_gb},  # the default of the type differs between machines
        "containerSpec": {
            "imageUri": site.image,
            "command": [first],
            "args": arguments,
            "env": [{"name": DIGEST, "value": site.image}],
        },
    }
    # The service requires exactly one machine in the first pool. Its process coordinates the other machines.
    pools = [pool] if nodes == 1 else [pool, pool | {"replicaCount": str(nodes - 1)}]
    scheduling: dict[str, Any] = {
        # The nodes of a job find each other once, at its start, so a worker that the service restarts later could not
        # join them. `zeroscale resume` submits a new job instead.
        "disableRetries": True,
        "strategy": "SPOT" if options.spot else "STANDARD",
    }
    if limit_min := work.time_limit_min or options.time_limit_min:
        scheduling["timeout"] = f"{math.ceil(60 * limit_min) + START_S}s"
    spec: dict[str, Any] = {"workerPoolSpecs": pools, "scheduling": scheduling}
    return spec | ({"serviceAccount": options.service_account} if options.service_account else {})


def _build_command(work: Work, options: Options, site: Site) -> Sequence[str]:
    """Return the command that each node runs. A command that runs points (configurations) reads them from the object
    store, because the nodes cannot read `work.folder`."""
    arguments = work.arguments
    if work.module == ALLOCATION:
        url = build_store_url(work.folder.absolute(), site.bucket)
        arguments = ("--store", url, "--work", WORK_FOLDER, work.name)
    return build_module_command(work.module, *arguments, python=options.python)
