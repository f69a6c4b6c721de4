"""Submission and cancellation of Vertex AI's custom jobs (jobs that run a container), and queries of the states of many
jobs at once."""

import json
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.core import store, study_store
from bench.core.errors import UserError
from bench.core.formatting import format_count
from bench.core.object_store import ObjectStore
from bench.core.scheduling import ClusterLimits, JobState, LaunchPlan, SchedulerUnavailable
from bench.core.study_store import StudyStore
from bench.launchers.vertex import states
from bench.launchers.vertex.options import Options, find_site
from bench.launchers.vertex.planning import FILE, STUDY_LABEL, build_labels, build_store_url, build_study_label
from bench.launchers.vertex.service import Service

_LOGGER = logging.getLogger(__name__)
# Pauses between tries after a call of which it is unknown whether the service acted on it.
_PAUSES_S = (2.0, 4.0, 8.0, 16.0)


def submit(launch: LaunchPlan, options: Options) -> str:
    """Write the job's request to its folder and copy the job's definition to the object store. Then create the job, and
    return its resource name.

    If the service does not answer, look for a job with this name before requesting the job again. So the job is not
    created twice. Raise UserError with the service's message if the service refuses the job.
    """
    for path, text in launch.files.items():
        store.write_atomically(path, text.encode())
    site, folder = find_site(options), launch.folder
    study = StudyStore(ObjectStore(build_store_url(folder, site.bucket)), folder.parent.parent)
    study.push_job(folder)
    spec = json.loads(launch.files[folder / FILE])
    service = Service(options)
    try:
        return _create(service, folder, spec, options)
    except SchedulerUnavailable:
        raise
    except UserError:
        study.withdraw_job(folder)
        raise


def _create(service: Service, folder: Path, spec: dict[str, Any], options: Options) -> str:
    """Create the job with this request, unless it exists. Return its resource name. Raise UserError if the job could
    exceed the budget."""
    name = folder.name
    nodes = sum(int(pool["replicaCount"]) for pool in spec["workerPoolSpecs"])
    labels = build_labels(name, nodes, folder, options)
    unavailable: SchedulerUnavailable | None = None
    for pause_s in (0.0, *_PAUSES_S):
        if unavailable:
            _LOGGER.warning("%s; next try in %g s; stop with Ctrl-C", unavailable, pause_s)
            time.sleep(pause_s)
        try:
            found = _list_named(service, name)
            if not found:
                requested = service.build(name, labels, spec)
                _check_budget(service, requested, options)
                found = [service.create(requested)]
            # A list may lack a job that was created a moment ago. Then the repeated call has created a second job.
            if unavailable:
                found = _list_named(service, name) or found
            job, *later = found
            for one in later:
                service.cancel(one.name)
            # Another submitter may have created a job meanwhile. If the two jobs together exceed the budget, the later
            # job is cancelled.
            _check_budget(service, job, options)
            return str(job.name)
        except SchedulerUnavailable as error:
            unavailable = error
    assert unavailable
    raise unavailable


def _list_named(service: Service, name: str) -> list[Any]:
    """Return all jobs with this display name, oldest first."""
    found = [job for job in service.list(f'display_name="{name}"') if job.display_name == name]
    return sorted(found, key=_get_age)


def _check_budget(service: Service, job: Any, options: Options) -> None:
    """Raise UserError if a job could exceed the budget of its study. If the job was already created, cancel it
    first."""
    if options.budget is None or options.price_per_node_hour is None:
        return
    others = [one for one in _list_study(service, job.labels[STUDY_LABEL]) if one.display_name != job.display_name]
    if job.name:
        others = [one for one in others if _get_age(one) < _get_age(job)]
    now, price = time.time(), options.price_per_node_hour
    earlier, own = states.compute_cost(others, price, now), states.compute_cost([job], price, now)
    if earlier.total + own.total > options.budget:
        if job.name:
            service.cancel(job.name)
        parts = f"{earlier.spent:.2f} is spent, other jobs may cost {earlier.reserved:.2f} more"
        rule = f"{parts}, and this job may cost {own.total:.2f} until its time limit"
        remedy = "wait for the end of other jobs, lower launcher.job_max_min, or raise launcher.budget"
        raise UserError(f"launcher.budget={options.budget:g}", rule, remedy)


def _list_study(service: Service, label: str) -> Iterable[Any]:
    """Return all jobs of the study with this label, including jobs that have ended."""
    return service.list(f"labels.{STUDY_LABEL}={label}")


def _get_age(job: Any) -> tuple[float, str]:
    """Return a key that sorts jobs by age, oldest first."""
    return job.create_time.timestamp(), job.name


def ask(names: Collection[str], options: Options) -> dict[tuple[str, int | None], JobState]:
    """Return the states of all jobs with these names. The keys are (name, None), since there are no job arrays. A job
    that is not in the result is unknown to the service."""
    # The names of a study's jobs have a common prefix, so one request returns all of them.
    service, prefixes = Service(options), {name.rsplit("-", 2)[0] for name in names}
    listed = (job for prefix in prefixes for job in service.list(f'display_name:"{prefix}*"'))
    jobs = [job for job in listed if job.display_name in names]
    jobs.sort(key=_get_age, reverse=True)  # the oldest job of a name counts
    return {(job.display_name, None): states.build_state(job) for job in jobs}


def cancel_all(handles: Iterable[str], options: Options) -> None:
    """Cancel jobs by their resource names. A job that has already ended is not an error."""
    service = Service(options)
    for handle in dict.fromkeys(handles):
        service.cancel(handle)


def limits(options: Options) -> ClusterLimits:
    """Return no limits. The service does not report a project's quotas; it refuses a job that exceeds a quota."""
    return ClusterLimits()


def spread(command: Sequence[str], nodes: int) -> list[str]:
    """Return the command unchanged if `nodes` is 1. Raise UserError for several nodes, because Vertex AI cannot start a
    command on the other nodes of a running job."""
    if nodes != 1:
        rule = "launcher=vertex cannot start processes on the other nodes of a running job"
        raise UserError(f"nodes={nodes}", rule, "measure the link between nodes on another cluster")
    return [*command]


def sync(folder: Path, options: Options) -> None:
    """Exchange files between a study's folder and its copy in the object store. Cancel the study's jobs if its budget
    is spent."""
    url = f"{find_site(options).bucket}/{folder.resolve().name}"
    study_store.sync(folder, url)
    if options.budget is None or options.price_per_node_hour is None:
        return
    service = Service(options)
    jobs = list(_list_study(service, build_study_label(url)))
    cost = states.compute_cost(jobs, options.price_per_node_hour, time.time())
    live = [job.name for job in jobs if states.read_use(job).is_live]
    if live and cost.spent >= options.budget:
        count = format_count(len(live), "job")
        _LOGGER.warning("%.2f of the budget of %g is spent; cancelling %s", cost.spent, options.budget, count)
        cancel_all(live, options)
