"""Node 0's supervisor: watches the whole run and sees that it ends with a record."""

import contextlib
import json
import os
import signal
import socket
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from bench import store
from bench.record import Circumstance, RunRecord
from bench.spec import RunSpec
from bench.supervisor.crew import Lead, MeetingPoint
from bench.supervisor.log import Log
from bench.supervisor.node import POLL_S, Node
from bench.supervisor.verdict import RankState, Stop, furthest_behind, verdict

_ECHO_S = 1.5  # after the first loss the others may still say what they know; the members report once a second
_HEARTBEAT_S = 2.0
_PARTING_S = 8.0  # for the members to end their ranks


class Supervisor:
    """Leads one attempt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = RunSpec.model_validate_json((folder / store.SPEC).read_bytes())
        self.circumstance = Circumstance.model_validate_json((folder / store.CIRCUMSTANCE).read_bytes())
        self.limits = self.circumstance.limits
        self.log = Log(folder / store.LOG)
        host = self.circumstance.network.address(socket.gethostname()) if self.spec.nodes > 1 else "127.0.0.1"
        self.crew = Lead(self.spec.nodes, host)
        self.node = Node(folder, self.spec, self.circumstance, 0, self.log.write)
        self.stop: Stop | None = None
        self.why = ""
        self._lost_at: float | None = None
        self._begin = time.monotonic()
        self._heartbeat_at = -_HEARTBEAT_S
        self._oom_kills = _kernel_oom_kills()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupted)

    def run(self) -> RunRecord:
        """Start the ranks, watch all of them to their end, and return the record, which is on the disk by then."""
        try:
            self._start()
            self._watch()
        except Exception as error:
            self._stop("error", f"the supervisor failed: {type(error).__name__}: {error}")
            traceback.print_exc()
        self._end()
        outcome = verdict(self.states(), self.stop, self.why, _kernel_oom_kills() - self._oom_kills)
        record = store.conclude(self.folder, outcome)
        self._show("ended", at_once=True)
        return record

    def states(self) -> list[RankState]:
        """Return how every rank of the run is, as far as its node has told."""
        members = (member for _, member in sorted(self.crew.members.items()))
        return [*self.node.states(), *(state for member in members for state in member.ranks)]

    def _start(self) -> None:
        loopback = "127.0.0.1" if self.spec.nodes == 1 else ""
        with socket.create_server((loopback, 0), backlog=self.spec.world_size) as listener:
            port = listener.getsockname()[1]
            point = MeetingPoint(self.crew.host, port, self.crew.port, self.crew.token)
            if self.spec.nodes > 1:
                point.write(self.folder)
            self.node.start(point, listener)

    def _watch(self) -> None:
        """Return when every rank has ended, or when one is lost and the others have said what they know."""
        while not self.stop and not self._all_ended():
            time.sleep(POLL_S)
            self._listen()
            self._check_limits()
            self._show("running")
            if self._lost_at is None and any(state.exit_code for state in self.states()):
                self._lost_at = time.monotonic()
            if self._lost_at is not None and time.monotonic() > self._lost_at + _ECHO_S:
                return

    def _all_ended(self) -> bool:
        expected = self.spec.nodes - 1
        members = self.crew.members.values()
        return not self.node.running and len(members) == expected and all(member.done for member in members)

    def _listen(self) -> None:
        self.node.drain()
        for rank, line in self.crew.poll():
            self.log.write(rank, line)

    def _check_limits(self) -> None:
        """Stop the run if its time is over, a node is gone, or a rank has been silent for too long."""
        limit_min = self.limits.time_limit_min
        if limit_min is not None and time.monotonic() - self._begin > 60 * limit_min:
            self._stop("timeout", f"the time limit of {limit_min:g} min was reached")
        if gone := self.crew.lost() or self.crew.absent(self.limits.startup_s):
            self._stop("node_failure", gone)
        states = self.states()
        for state in states:
            limit_s = self.limits.hang_s if state.step >= 0 else self.limits.startup_s
            if state.exit_code is None and state.silent_s > limit_s:
                self._stop("hang", f"no step for {state.silent_s:.0f} s; {furthest_behind(states)}")

    def _end(self) -> None:
        """End whatever still runs, on every node, and wait for the other nodes' last words."""
        stacks = self.stop == "hang"
        self.crew.order(stacks=stacks)
        self.node.end(stacks=stacks)
        until = time.monotonic() + _PARTING_S
        while time.monotonic() < until and not all(m.done or m.line.closed for m in self.crew.members.values()):
            time.sleep(POLL_S)
            self._listen()
        self._listen()
        (self.folder / store.RENDEZVOUS).unlink(missing_ok=True)

    def _stop(self, stop: Stop, why: str) -> None:
        """Note why the run is to end, unless a rank that was lost ends it already: that came first."""
        if self._lost_at is None:
            self.stop, self.why = self.stop or stop, self.why or why

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._stop("cancelled", f"interrupted by {signal.Signals(number).name}")

    def _show(self, state: str, at_once: bool = False) -> None:
        """Keep heartbeat.json fresh, for whoever asks how the run is doing."""
        now = time.monotonic()
        if not at_once and now - self._heartbeat_at < _HEARTBEAT_S:
            return
        self._heartbeat_at = now
        shown = {
            "state": state,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "supervisor": os.getpid(),
            "ranks": [
                {"rank": s.rank, "pid": s.pid, "phase": s.phase, "step": s.step, "silent_s": round(s.silent_s, 1)}
                for s in self.states()
            ],
        }
        with contextlib.suppress(OSError):
            store.write_atomically(self.folder / store.HEARTBEAT, json.dumps(shown, indent=1).encode())


def _kernel_oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended on this host since it booted."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0
