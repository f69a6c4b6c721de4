"""One node's ranks of a calibration: started together, and ended together whatever happens."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from bench.calibrate.request import REQUEST, CalibrationRequest
from bench.measure.channel import LISTENER
from bench.measure.environment import choose_openmp_variables
from bench.processes import build_module_command
from bench.runtime.process import start_process
from bench.runtime.transport import Rendezvous

_POLL_S = 0.1
_STARTUP_S = 300.0  # between the first node's start and the others'


def run(folder: Path, number: int) -> bool:
    """Run the ranks of node `number` to their end; return whether all of them ended well. An exception, of a signal's
    handler say, ends them."""
    request = CalibrationRequest.model_validate_json((folder / REQUEST).read_bytes())
    far = request.nodes > 1
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / f"ranks.{number}.log").open("wb"))
        listener = None
        if number == 0:
            address = ("" if far else "127.0.0.1", 0)
            listener = stack.enter_context(socket.create_server(address, backlog=request.world_size))
            host = request.network.address(socket.gethostname()) if far else "127.0.0.1"
            Rendezvous(host, listener.getsockname()[1], 0, "").write(folder)
        rendezvous = Rendezvous.wait(folder, _STARTUP_S)
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(_kill_ranks, ranks)
        for local in range(request.ranks_per_node):
            environment = _build_environment(request, rendezvous) | {"LOCAL_RANK": str(local)}
            environment["RANK"] = str(number * request.ranks_per_node + local)
            first = {LISTENER: listener.fileno()} if listener and local == 0 else {}
            command = build_module_command("bench.calibrate.rank", str(folder))
            ranks.append(start_process(command, environment, first, log.fileno()))
        return _wait_for_ranks(ranks)


def _wait_for_ranks(ranks: list[subprocess.Popen[bytes]]) -> bool:
    """Wait until every rank has ended, or one as none should: its peers would wait for it."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes) or None not in codes:
            return not any(codes)
        time.sleep(_POLL_S)


def _kill_ranks(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


def _build_environment(request: CalibrationRequest, rendezvous: Rendezvous) -> dict[str, str]:
    """The ranks' environment: the user's own, and what a run would get, where he did not choose."""
    chosen = choose_openmp_variables(request.device, request.ranks_per_node)
    if request.nodes == 1:
        chosen["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve must not matter
    elif interface := request.network.interface:
        chosen |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    given = {"MASTER_ADDR": rendezvous.host, "MASTER_PORT": str(rendezvous.ranks_port), "PYTHONUNBUFFERED": "1"}
    if request.device == "cpu":
        given["CUDA_VISIBLE_DEVICES"] = ""
    return chosen | dict(os.environ) | given
