"""The watch over one node's ranks, from their start to a record."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from bench import store
from bench.measure.channel import PULSE, STACKS_SIGNAL, Pulse
from bench.record import Circumstance, Outcome, RunRecord
from bench.spec import RunSpec
from bench.supervisor.ranks import Log, RankProcess
from bench.supervisor.verdict import Ending, Stop, verdict

_POLL_S = 0.2
_ECHO_S = 1.0  # after the first loss the others may still say what they know
_TERMINATE_S = 3.0  # between SIGTERM and SIGKILL
_STACKS_S = 2.0  # for every rank to print its stacks
_HEARTBEAT_S = 2.0
_STACKS_CHARACTERS = 6000


class Node:
    """Supervises the ranks of one node for one attempt."""

    def __init__(self, folder: Path, node_rank: int = 0) -> None:
        self.folder, self.node_rank = folder, node_rank
        self.spec = RunSpec.model_validate_json((folder / store.SPEC).read_bytes())
        self.circumstance = Circumstance.model_validate_json((folder / store.CIRCUMSTANCE).read_bytes())
        self.limits = self.circumstance.limits
        self.log = Log(folder / store.LOG)
        self.pulse = Pulse.create(self.spec.devices_per_node)
        self.begin = time.monotonic()
        self.ranks: list[RankProcess] = []
        self.stop: Stop | None = None
        self.why = ""
        self._heartbeat_at = -_HEARTBEAT_S
        self._oom_kills = _kernel_oom_kills()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupted)

    def run(self) -> RunRecord:
        """Start the ranks, watch them to their end, and return the record, which is on the disk by then."""
        try:
            self._start()
            self._watch()
        finally:
            self._end()
        record = store.conclude(self.folder, self._outcome())
        self._show("ended", at_once=True)
        return record

    def _start(self) -> None:
        per_node = self.spec.devices_per_node
        with socket.create_server(("127.0.0.1", 0), backlog=self.spec.world_size) as listener:
            environment = self._environment(listener.getsockname()[1])
            for local_rank in range(per_node):
                rank = self.node_rank * per_node + local_rank
                own = {"LOCAL_RANK": str(local_rank)}
                inherit: tuple[int, ...] = (self.pulse.descriptor,)
                if rank == 0:
                    own["ZEROSCALE_LISTENER"] = str(listener.fileno())
                    inherit += (listener.fileno(),)
                command = [sys.executable, "-m", "bench.worker", str(self.folder)]
                self.pulse.write(local_rank, "start", -1)
                self.ranks.append(RankProcess(rank, command, environment | own, inherit))

    def _environment(self, port: int) -> dict[str, str]:
        """The ranks' environment: the user's own, and what he did not choose himself."""
        threads = max(1, len(os.sched_getaffinity(0)) // self.spec.devices_per_node)
        chosen = {
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": "lo",  # one node: a host name that does not resolve must not matter
        }
        given = {
            "WORLD_SIZE": str(self.spec.world_size),
            "LOCAL_WORLD_SIZE": str(self.spec.devices_per_node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            PULSE: str(self.pulse.descriptor),
            "ZEROSCALE_STARTED_AT": str(time.time()),
            "PYTHONUNBUFFERED": "1",
        }
        if self.circumstance.machine.device == "cpu":
            given["CUDA_VISIBLE_DEVICES"] = ""  # no library may take a GPU that the run is not about
        return chosen | dict(os.environ) | given

    def _watch(self) -> None:
        """Return when every rank has ended, or when one is lost and the others have said what they know."""
        lost_at: float | None = None
        while not self.stop and any(rank.exit_code is None for rank in self.ranks):
            time.sleep(_POLL_S)
            self._drain()
            now = time.monotonic()
            self._check_limits(now)
            self._show("running")
            if lost_at is None and any(rank.exit_code for rank in self.ranks):
                lost_at = now
            if lost_at is not None and now > lost_at + _ECHO_S:
                return

    def _check_limits(self, now: float) -> None:
        """Stop the run if its time is over or if a rank has been silent for too long."""
        limit_min = self.limits.time_limit_min
        if limit_min is not None and now - self.begin > 60 * limit_min:
            self._stop("timeout", f"the time limit of {limit_min:g} min was reached")
            return
        beats = [self.pulse.read(local_rank) for local_rank in range(len(self.ranks))]
        for rank, beat in zip(self.ranks, beats, strict=True):
            silent_s = now - beat.at
            limit_s = self.limits.hang_s if beat.phase == "steps" else self.limits.startup_s
            if rank.exit_code is None and silent_s > limit_s:
                # In a hang everybody waits for the rank that is furthest behind; the silent one may be a victim.
                behind = min(range(len(beats)), key=lambda i: (beats[i].step, beats[i].at))
                where = Ending(0, None, False, None, beats[behind].phase, beats[behind].step).where
                self._stop(
                    "hang", f"no step for {silent_s:.0f} s; furthest behind is rank {self.ranks[behind].rank} {where}"
                )
                return

    def _end(self) -> None:
        """End whatever still runs: ask, then insist; collect the stacks of a run that hangs first."""
        if self.stop == "hang":
            for rank in self.ranks:
                rank.listening = True
                rank.signal(STACKS_SIGNAL)
            self._wait(_STACKS_S)
        for rank in self.ranks:
            if rank.exit_code is None:
                rank.stopped = True
                rank.signal(signal.SIGTERM)
                rank.signal(signal.SIGCONT)  # a stopped process would never hear it
        self._wait(_TERMINATE_S)
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)  # with it go loader processes that outlived their rank
            rank.process.wait()
        self._drain()

    def _outcome(self) -> Outcome:
        """Decide what the end was, for a run that left no record of its own."""
        outcome = verdict(self._endings(), self.stop, self.why, _kernel_oom_kills() - self._oom_kills)
        stacks = {
            str(rank.rank): rank.heard.decode(errors="replace")[-_STACKS_CHARACTERS:]
            for rank in self.ranks
            if rank.heard
        }
        if stacks:
            outcome = outcome.model_copy(update={"evidence": outcome.evidence | {"stacks": stacks}})
        return outcome

    def _endings(self) -> list[Ending]:
        beats = [self.pulse.read(local_rank) for local_rank in range(len(self.ranks))]
        return [
            Ending(rank.rank, rank.exit_code, rank.stopped, rank.failure, beat.phase, beat.step)
            for rank, beat in zip(self.ranks, beats, strict=True)
        ]

    def _stop(self, stop: Stop, why: str) -> None:
        self.stop, self.why = self.stop or stop, self.why or why

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._stop("cancelled", f"interrupted by {signal.Signals(number).name}")

    def _wait(self, seconds: float) -> None:
        """Give the ranks some time to end."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(rank.exit_code is None for rank in self.ranks):
            time.sleep(_POLL_S / 5)
            self._drain()

    def _drain(self) -> None:
        for rank in self.ranks:
            rank.drain(self.log)

    def _show(self, state: str, at_once: bool = False) -> None:
        """Keep heartbeat.json fresh, for whoever asks how the run is doing."""
        now = time.monotonic()
        if not at_once and now - self._heartbeat_at < _HEARTBEAT_S:
            return
        self._heartbeat_at = now
        beats = [self.pulse.read(local_rank) for local_rank in range(len(self.ranks))]
        shown: dict[str, Any] = {
            "state": state,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "supervisor": os.getpid(),
            "ranks": [
                {"rank": rank.rank, "pid": rank.process.pid, "phase": beat.phase, "step": beat.step,
                 "silent_s": round(now - beat.at, 1)}
                for rank, beat in zip(self.ranks, beats, strict=True)
            ],
        }  # fmt: skip
        with contextlib.suppress(OSError):
            store.write_atomically(self.folder / store.HEARTBEAT, json.dumps(shown, indent=1).encode())


def _kernel_oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended on this host since it booted."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0
