"""Stand-in for the JobService of Vertex AI on this machine. It starts the command of every replica as a process, with
the environment that the service documents.

It supports only custom jobs. The messages of failed jobs are those that users have reported, since the service
documents no messages. A test can make the service refuse calls, lose its answers, or take machines away from a job.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.launchers.vertex.planning import WORK_FOLDER

# The modules of the tests that import this module are skipped without the extra `vertex`.
types = pytest.importorskip("google.cloud.aiplatform_v1.types")
grpc, empty_pb2 = pytest.importorskip("grpc"), pytest.importorskip("google.protobuf.empty_pb2")

_SERVICE = "google.cloud.aiplatform.v1.JobService"
_ENDED = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED")
_POLL_S = 0.05
_VARIABLES = re.compile(r"SLURM_.*|CLUSTER_SPEC|RANK|WORLD_SIZE|MASTER_.*|GCE_.*")
_FILTER = re.compile(r'display_name(=|:)"([^"]*)"|labels\.([a-z_-]+)(=)"?([a-z0-9_-]*)"?')
QUOTA = "The following quota metrics exceed quota limits: aiplatform.googleapis.com/custom_model_training_cpus"
STOCKOUT = "Resources are insufficient in region: us-central1. STOCKOUT: a Spot VM of workerpool1-0 was preempted."
LOST = "Internal error occurred. The machine of replica workerpool1-0 was lost."


class Fault(NamedTuple):
    """Fault that is injected into one call of the service: after a delay, the caller gets this error."""

    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    message: str = "the service is away"
    acts: bool = False  # True: the service acts on the request, and its answer is lost
    delay_s: float = 0.0  # seconds until the answer


class Replica:
    """The process that stands for one machine of a job. Each replica has its own folder for files, because the machines
    of a job share no file system."""

    def __init__(self, name: str, folder: Path, command: list[str], environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True)
        self.name, self.output = name, folder / "output.txt"
        command = [word.replace(WORK_FOLDER, str(folder / "work")) for word in command]
        command[0] = sys.executable if command[0] == "python3" else command[0]
        kept = {key: value for key, value in os.environ.items() if not _VARIABLES.fullmatch(key)}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=kept | environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to all processes in the replica's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class VertexServer:
    """Stand-in for the JobService. Its address is `endpoint`, and `jobs` has its jobs by resource name.

    With `runs=False` no process is started, and a test sets the states of jobs by `set_state`.
    """

    def __init__(
        self, folder: Path, *, runs: bool = True, grace_s: float = 5.0, environment: Mapping[str, str]
    ) -> None:
        self.folder, self.runs, self.grace_s, self.environment = folder, runs, grace_s, dict(environment)
        self.jobs: dict[str, Any] = {}
        self.replicas: dict[str, list[Replica]] = {}
        self.faults: dict[str, deque[Fault]] = {"Create": deque(), "List": deque(), "Cancel": deque()}
        self.calls: list[str] = []
        self.hidden_s = 0.0
        """For this number of seconds after its creation, a job is missing in lists of jobs."""
        self._lock, self._is_over = threading.RLock(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._server = grpc.server(ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, self._list_handlers()),))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        """Stop the service, and end all processes of its jobs."""
        self._server.stop(None).wait()
        self._is_over.set()
        for name in self.replicas:
            self._end_replicas(name, 0.0)
        for thread in self._threads:
            thread.join()

    def find(self, state: str | None = None) -> list[Any]:
        """Return the jobs, oldest first; with `state`, only those in this state."""
        with self._lock:
            jobs = sorted(self.jobs.values(), key=lambda job: job.create_time.timestamp())
            return [job for job in jobs if state in (None, _get_state(job))]

    def set_state(self, name: str, state: str, message: str = "", *, after_s: float = 0.0) -> None:
        """Set the state of a job as the service would. By default, the recorded time of this change is the current
        time. If `after_s` is given, the recorded time is `after_s` seconds after the job's start, or after the job's
        creation if the job has not started."""
        with self._lock:
            job = self.jobs[name]
            if _get_state(job) in _ENDED:
                return
            job.state = types.JobState[f"JOB_STATE_{state}"]
            now = datetime.now(UTC) if not after_s else datetime.fromtimestamp(_get_time(job) + after_s, UTC)
            if state == "RUNNING":
                job.start_time = now
            if state in _ENDED:
                job.end_time = now
            if message:
                job.error = {"code": 13, "message": message}

    def lose_machine(self, name: str, number: int, message: str, *, warns: bool = False) -> None:
        """Take machine `number` of a job away, so that the job fails with `message`. If `warns` is true, the machine's
        processes get SIGTERM first, as on a Spot VM."""
        replica = self.replicas[name][number]
        if warns:
            replica.kill(signal.SIGTERM)
            _wait_until(lambda: replica.process.poll() is not None, self.grace_s)
        with self._lock:
            self.set_state(name, "FAILED", message)
            replica.kill()
        self._end_replicas(name, self.grace_s)

    def _list_handlers(self) -> dict[str, Any]:
        def build(kind: str, method: Callable[[Any, Any], Any], request: Any, response: Callable[[Any], bytes]) -> Any:
            def answer(message: Any, context: Any) -> Any:
                return self._answer(kind, method, message, context)

            return grpc.unary_unary_rpc_method_handler(
                answer, request_deserializer=request.deserialize, response_serializer=response
            )

        empty = empty_pb2.Empty.SerializeToString
        return {
            "CreateCustomJob": build("Create", self._create, types.CreateCustomJobRequest, types.CustomJob.serialize),
            "ListCustomJobs": build(
                "List", self._list, types.ListCustomJobsRequest, types.ListCustomJobsResponse.serialize
            ),
            "CancelCustomJob": build("Cancel", self._cancel, types.CancelCustomJobRequest, empty),
        }

    def _answer(self, kind: str, method: Callable[[Any, Any], Any], request: Any, context: Any) -> Any:
        with self._lock:
            self.calls.append(kind)
            fault = self.faults[kind].popleft() if self.faults[kind] else None
        if fault is None:
            return method(request, context)
        if fault.acts:
            method(request, context)
        time.sleep(fault.delay_s)
        context.abort(fault.code, fault.message)
        return None

    def _create(self, request: Any, context: Any) -> Any:
        with self._lock:
            number = len(self.jobs) + 1
            job = types.CustomJob(request.custom_job)
            job.name = f"{request.parent}/customJobs/{number}"
            job.state, job.create_time = types.JobState.JOB_STATE_QUEUED, datetime.now(UTC)
            if job.job_spec.worker_pool_specs[0].replica_count != 1:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first worker pool must have one replica")
            self.jobs[job.name] = job
            if self.runs:
                thread = threading.Thread(target=self._run, args=(job.name,))
                self._threads.append(thread)
                thread.start()
            return types.CustomJob(job)

    def _list(self, request: Any, context: Any) -> Any:
        found = _FILTER.fullmatch(request.filter)
        if not found:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the filter {request.filter} is not supported")
        old = time.time() - self.hidden_s
        jobs = [job for job in reversed(self.find()) if _matches(job, found) and job.create_time.timestamp() <= old]
        begin, size = int(request.page_token or 0), min(request.page_size or 100, 3)  # several pages for a few jobs
        rest = str(begin + size) if begin + size < len(jobs) else ""
        return types.ListCustomJobsResponse(custom_jobs=jobs[begin : begin + size], next_page_token=rest)

    def _cancel(self, request: Any, context: Any) -> Any:
        with self._lock:
            if request.name not in self.jobs:
                context.abort(grpc.StatusCode.NOT_FOUND, "the custom job does not exist")
            if _get_state(self.jobs[request.name]) in _ENDED:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the custom job has ended")
            self.set_state(request.name, "CANCELLING" if self.runs else "CANCELLED")
        return empty_pb2.Empty()

    def _run(self, name: str) -> None:
        """Run a job: start its replicas, and update its state until all of them have ended."""
        job = self.jobs[name]
        self.set_state(name, "PENDING")
        self.replicas[name] = list(self._start(job))
        self.set_state(name, "RUNNING")
        ends_at = time.time() + job.job_spec.scheduling.timeout.total_seconds()
        while _get_state(job) not in _ENDED and not self._is_over.wait(_POLL_S):
            codes = [replica.process.poll() for replica in self.replicas[name]]
            failed = [index for index, code in enumerate(codes) if code]
            if _get_state(job) == "CANCELLING" or time.time() > ends_at:
                self._end_replicas(name, self.grace_s)
                self.set_state(name, "CANCELLED")
            elif failed:
                replica, code = self.replicas[name][failed[0]], codes[failed[0]] or 0
                status = code if code > 0 else 128 - code
                message = f"The replica {replica.name} exited with a non-zero status of {status}."
                self._end_replicas(name, self.grace_s)
                self.set_state(name, "FAILED", message)
            elif codes[0] == 0:  # the job ends with its primary replica
                _wait_until(lambda: all(one.process.poll() is not None for one in self.replicas[name]), self.grace_s)
                self._end_replicas(name, self.grace_s)
                self.set_state(name, "SUCCEEDED")

    def _start(self, job: Any) -> Iterator[Replica]:
        pools = list(job.job_spec.worker_pool_specs)
        hosts = {
            f"workerpool{index}": [f"127.0.0.{index + 1}:{2222 + number}" for number in range(pool.replica_count)]
            for index, pool in enumerate(pools)
        }
        nodes = sum(pool.replica_count for pool in pools)
        for index, pool in enumerate(pools):
            for number in range(pool.replica_count):
                kind = f"workerpool{index}"
                cluster = {"cluster": hosts, "environment": "cloud", "task": {"type": kind, "index": number}}
                environment = self.environment | {
                    "CLUSTER_SPEC": json.dumps(cluster),
                    "CLOUD_ML_JOB_ID": job.name.rpartition("/")[2],
                    "MASTER_ADDR": hosts["workerpool0"][0].partition(":")[0],
                    "MASTER_PORT": "2222",
                    "RANK": str(index + number),
                    "WORLD_SIZE": str(nodes),  # the number of machines, unlike torch's variable of this name
                }
                command = [*pool.container_spec.command, *pool.container_spec.args]
                folder = self.folder / job.name.rpartition("/")[2] / f"{kind}-{number}"
                yield Replica(f"{kind}-{number}", folder, command, environment)

    def _end_replicas(self, name: str, grace_s: float) -> None:
        """End all processes of a job by SIGTERM, and by SIGKILL after the grace period."""
        replicas = self.replicas[name]
        for replica in replicas:
            if replica.process.poll() is None:
                replica.kill(signal.SIGTERM)
        _wait_until(lambda: all(replica.process.poll() is not None for replica in replicas), grace_s)
        for replica in replicas:
            replica.kill()
            replica.process.wait()


def _get_state(job: Any) -> str:
    return str(job.state.name).removeprefix("JOB_STATE_")


def _get_time(job: Any) -> float:
    return float((job.start_time if "start_time" in job else job.create_time).timestamp())


def _matches(job: Any, found: "re.Match[str]") -> bool:
    operator, name, key, _, value = found.groups()
    if key:
        return bool(job.labels.get(key) == value)
    if operator == "=":
        return bool(job.display_name == name)
    return bool(re.fullmatch(re.escape(name).replace(r"\*", ".*"), job.display_name))


def _wait_until(is_reached: Callable[[], bool], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not is_reached() and time.monotonic() < until:
        time.sleep(_POLL_S)
