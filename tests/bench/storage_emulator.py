"""Emulated bucket of Google Cloud Storage on this machine, for tests with the real client gcsfs."""

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

BUCKET = "bucket"


class StorageEmulator:
    """Server on the loopback interface with an empty bucket. Clients find it if the environment variable
    STORAGE_EMULATOR_HOST is set to `url`.

    An upload with the condition ifGenerationMatch=0 must not replace an existing object. The package
    gcp-storage-emulator ignores this condition, so this class checks the condition. The server handles one request
    after another, so that two uploads of one object cannot both pass the check.
    """

    def __init__(self) -> None:
        """Start the server, or skip the test if gcsfs or the emulator is not installed."""
        pytest.importorskip("gcsfs")
        storage = pytest.importorskip("gcp_storage_emulator.storage")
        emulator = pytest.importorskip("gcp_storage_emulator.server")
        self._server = _create_server(storage.Storage, emulator)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def set_away(self, *, away: bool) -> None:
        """If `away` is true, answer every request with status 503, as an overloaded service does. Otherwise answer
        normally again."""
        self._server.RequestHandlerClass.keywords["states"]["away"] = away  # type: ignore[attr-defined]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def emulated_bucket() -> Iterator[tuple[str, StorageEmulator]]:
    """Context manager that runs a storage emulator. It yields the URL of the emulated bucket, and the emulator. Until
    the context ends, gcsfs connects to the emulator in this process and in its child processes."""
    emulator = StorageEmulator()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STORAGE_EMULATOR_HOST", emulator.url)
            yield f"gs://{BUCKET}", emulator
    finally:
        emulator.stop()


def _create_server(storage_class: Any, emulator: Any) -> http.server.HTTPServer:
    class Storage(storage_class):  # type: ignore[misc]
        only_new = False

        def create_file(self, bucket: str, name: str, *more: Any) -> Any:
            if self.only_new and name in self.objects.get(bucket, {}):
                raise FileExistsError(name)
            return super().create_file(bucket, name, *more)

    class Handler(emulator.RequestHandler):  # type: ignore[misc]
        def __init__(self, storage: Storage, *request: Any, states: dict[str, bool]) -> None:
            self._states = states
            super().__init__(storage, *request)

        def handle_one_request(self) -> None:
            # A client that cancels a request is no error of the test.
            try:
                super().handle_one_request()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def parse_request(self) -> bool:
            parsed = bool(super().parse_request())
            if parsed and self._states["away"]:
                self._answer(503)
                return False
            self.storage.only_new = parsed and "ifGenerationMatch=0" in self.path
            return parsed

        def do_POST(self) -> None:
            try:
                super().do_POST()
            except FileExistsError:
                self._answer(412)

        def do_PUT(self) -> None:
            try:
                super().do_PUT()
            except FileExistsError:
                self._answer(412)

        def _answer(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            self.close_connection = True

    storage = Storage(use_memory_fs=True)
    emulator.buckets.create_bucket(BUCKET, storage)
    handler = functools.partial(Handler, storage, states={"away": False})
    return http.server.HTTPServer(("127.0.0.1", 0), handler)
