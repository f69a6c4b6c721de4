"""Client of Vertex AI's JobService. An error of the service is reported in one line, with the service's own message.

The client library is the extra `vertex`. It is imported only when the service is called, because the import takes
seconds and planning a sweep needs no client.
"""

import functools
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from bench.core.errors import UserError
from bench.core.scheduling import SchedulerUnavailable
from bench.launchers.vertex.options import Options, find_site

_ANSWER_S = 30.0
"""Seconds after which a call without an answer fails. Without a limit, a lost connection would block for minutes."""
_SOURCE = "Vertex AI"
_UNAVAILABLE = ("Aborted", "DeadlineExceeded", "GatewayTimeout", "InternalServerError", "RetryError",
                "ServiceUnavailable", "TooManyRequests", "Unknown")  # fmt: skip
"""Names of errors in google.api_core.exceptions after which it is unknown whether the service acted on the request."""
_REMEDIES = {
    "Forbidden": "ask for the role roles/aiplatform.user in this project, and enable aiplatform.googleapis.com",
    "PermissionDenied": "ask for the role roles/aiplatform.user in this project, and enable aiplatform.googleapis.com",
    "Unauthenticated": "log in with `gcloud auth application-default login`",
    "NotFound": "check launcher.project and launcher.region",
    "ResourceExhausted": "wait for other jobs to end, choose another region or machine type, or ask for more quota",
}
_Result = TypeVar("_Result")


class Service:
    """Custom jobs of one project and region."""

    def __init__(self, options: Options) -> None:
        site = find_site(options)
        self._parent = site.parent
        self._jobs = _connect(options.endpoint or f"{site.region}-aiplatform.googleapis.com", options.is_local)

    def build(self, name: str, labels: Mapping[str, str], spec: Mapping[str, Any]) -> Any:
        """Return a `CustomJob` object. `spec` is its `CustomJobSpec` as JSON data. The job is not created yet."""
        plain = {"displayName": name, "labels": dict(labels), "jobSpec": dict(spec)}
        try:
            return _import("google.cloud.aiplatform_v1").CustomJob.from_json(json.dumps(plain))
        except _import("google.protobuf.json_format").ParseError as error:  # such as an accelerator of a later version
            remedy = "correct the value, or install a later version of google-cloud-aiplatform"
            raise UserError("the request of a job", _shorten(error), remedy) from error

    def create(self, job: Any) -> Any:
        """Create a job in the service, and return the job with the resource name that the service gave it."""
        return self._call(self._jobs.create_custom_job, parent=self._parent, custom_job=job)

    def list(self, words: str) -> Iterator[Any]:
        """Yield all jobs that match the filter `words`, newest first."""
        request = {"parent": self._parent, "filter": words, "page_size": 100}
        pages = self._call(self._jobs.list_custom_jobs, request=request)
        yield from self._call(lambda **kwargs: list(pages))

    def cancel(self, handle: str) -> None:
        """Cancel the job with the resource name `handle`. Do nothing if the job has ended or was deleted."""
        api = _import("google.api_core.exceptions")
        try:
            self._call(self._jobs.cancel_custom_job, name=handle)
        except UserError as error:
            if not isinstance(error.__cause__, api.NotFound | api.FailedPrecondition):
                raise

    def _call(self, function: Callable[..., _Result], **arguments: Any) -> _Result:
        """Call the service once. Raise SchedulerUnavailable if it does not answer, and UserError if it refuses."""
        api, auth = _import("google.api_core.exceptions"), _import("google.auth.exceptions")
        try:
            return function(**arguments, timeout=_ANSWER_S, retry=None)
        except auth.TransportError as error:
            raise SchedulerUnavailable(_SOURCE, _shorten(error), "try again later") from error
        except auth.GoogleAuthError as error:
            raise UserError(_SOURCE, _shorten(error), _REMEDIES["Unauthenticated"]) from error
        except (api.GoogleAPICallError, api.RetryError) as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            message = _shorten(getattr(error, "message", "") or error)
            # The service uses one error for a quota of machines, which lasts, and for a quota of requests per minute.
            is_refused = "ResourceExhausted" in kinds and "per minute" not in message
            if not is_refused and any(kind in _UNAVAILABLE for kind in kinds):
                raise SchedulerUnavailable(_SOURCE, message, "try again later") from error
            remedy = next((_REMEDIES[kind] for kind in kinds if kind in _REMEDIES), "")
            raise UserError(_SOURCE, message, remedy) from error


def _shorten(error: object) -> str:
    """Return the message of an error in one line of at most 300 characters."""
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


@functools.cache
def _connect(endpoint: str, is_local: bool) -> Any:
    """Return a client for an endpoint. An endpoint on this machine is used without encryption and credentials."""
    library, auth = _import("google.cloud.aiplatform_v1"), _import("google.auth.exceptions")
    if is_local:
        transports = _import("google.cloud.aiplatform_v1.services.job_service.transports")
        channel = _import("grpc").insecure_channel(endpoint)
        return library.JobServiceClient(transport=transports.JobServiceGrpcTransport(channel=channel))
    try:
        return library.JobServiceClient(client_options={"api_endpoint": endpoint})
    except auth.GoogleAuthError as error:
        raise UserError(_SOURCE, _shorten(error), _REMEDIES["Unauthenticated"]) from error


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        rule = f"needs the package google-cloud-aiplatform ({error})"
        raise UserError("launcher=vertex", rule, "pip install 'zeroscale[vertex]'") from error
