"""Node 0's supervisor: watches the whole run and sees that it ends with a record."""

import json
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from bench.core import store
from bench.core.record import Circumstance, RunRecord
from bench.core.scheduling import Span
from bench.core.spec import RunSpec
from bench.runtime.node import POLL_S, NodeRanks, count_supervisors
from bench.runtime.outcome import (
    AsyncWriter,
    HeartbeatWriter,
    PauseTotals,
    RankState,
    StopReason,
    classify_outcome,
    format_furthest_behind,
    format_now,
    note_pause,
)
from bench.runtime.process import RankLog, StartRank, install_handlers, start_process
from bench.runtime.transport import CoordinatorServer, Rendezvous

_LAST_FAILURES_S = 1.5  # after the first loss the others may still say what they know; the members report once a second
_AGENTS_END_S = 17.0  # for the members to end their ranks
_HEARTBEAT_S, _HEARTBEAT_FAR_S = 2.0, 10.0  # on one machine; on a file system that many others use
_WRITING_S = 2.0  # for a file system to take what is said last


class RunCoordinator:
    """Leads one attempt."""

    def __init__(
        self,
        folder: Path,
        *,
        announce: Callable[[Rendezvous], None] | None = None,
        scheduled: bool = False,
        ends_at: float | None = None,
        is_lost: Callable[[], str] | None = None,
        handle_signals: bool = True,
        span: Span = "node",
        start: StartRank = start_process,
    ) -> None:
        """`announce` tells the other supervisors where this one is, instead of a file in the folder. `scheduled`: after
        an interruption there is a scheduler to ask why, so that no record is written then; `ends_at` is when its
        allocation ends, in seconds since the epoch; `is_lost` says why it is none of its scheduler's any more, or
        nothing."""
        self.folder = folder
        self.spec = RunSpec.model_validate_json((folder / store.SPEC).read_bytes())
        self.circumstance = Circumstance.model_validate_json((folder / store.CIRCUMSTANCE).read_bytes())
        self.limits = self.circumstance.limits
        self.announce = announce or (lambda rendezvous: rendezvous.write(folder))
        self.scheduled, self.ends_at, self.is_lost = scheduled, ends_at, is_lost
        self.server = CoordinatorServer(
            count_supervisors(self.spec, span, self.circumstance), self._address(), self.limits.silence_s
        )
        self.log = RankLog(folder / store.LOG)
        self.node = NodeRanks(folder, self.spec, self.circumstance, 0, self.log.write, span, start)
        self.heartbeat = HeartbeatWriter(folder, _HEARTBEAT_FAR_S if scheduled else _HEARTBEAT_S)
        self.stop: StopReason | None = None
        self.why = ""
        self._lost_at: float | None = None
        self._begin = self._resumed_at = time.monotonic()
        self._paused = PauseTotals()  # of the longest paused node
        # Asking `is_lost` reads the study's folder, and a shared file system may not answer for minutes.
        self._asking, self._lost_reason = AsyncWriter(), ""
        self._interrupted_by: signal.Signals | None = None
        if handle_signals:
            install_handlers(self.interrupt)

    def run(self) -> RunRecord | None:
        """Start the ranks, watch all of them to their end, and return the record, which is on the disk by then; None if
        the run was interrupted and the scheduler is to be asked why."""
        try:
            self._start()
            self._watch()
        except Exception as error:
            if not self._interrupted_by:  # else whoever sent the signal may have ended what it failed of
                traceback.print_exc()
            self._stop("error", f"the supervisor failed: {type(error).__name__}: {error}")
        self._blame_lost_node()
        interrupted = self._was_interrupted()
        if interrupted:
            self._note_interruption()
        self._end()
        try:
            if self.scheduled and interrupted and not (self.folder / store.RECORD).exists():
                return None
            outcome = classify_outcome(self.states(), self.stop, self.why)
            return store.finalize(self.folder, note_pause(outcome, self._paused), paused_s=self._paused.in_steps_s)
        finally:
            self.heartbeat.end(self.states(), _WRITING_S)
            self.server.close()
            self.node.close()

    def interrupt(self, number: int) -> None:
        """End the run because of a signal. A signal handler may call this, at any time."""
        self._interrupted_by = self._interrupted_by or signal.Signals(number)
        self._stop("cancelled", f"interrupted by {self._interrupted_by.name}")

    def states(self) -> list[RankState]:
        """Return how every rank of the run is, as far as its node has told."""
        agents = (agent for _, agent in sorted(self.server.agents.items()))
        return [*self.node.states(), *(state for agent in agents for state in agent.ranks)]

    def _start(self) -> None:
        with socket.create_server(
            ("" if self._has_other_nodes else "127.0.0.1", 0), backlog=self.spec.world_size
        ) as listener:
            port = listener.getsockname()[1]
            rendezvous = Rendezvous(self.server.host, port, self.server.port, self.server.token)
            if self.server.nodes > 1:
                self.announce(rendezvous)
            self.node.start(rendezvous, listener)

    def _watch(self) -> None:
        """Return when every rank has ended, or when one is lost and the others have said what they know."""
        while not self.stop and (self._are_lost_ranks_terminated() or not self._all_ended()):
            time.sleep(POLL_S)
            self._look_for_pauses()
            self._listen()
            self._check_limits()
            if self.heartbeat.due:
                self.heartbeat.show("running", self.states())
                self._asking.start(self._ask_whether_lost)
            if self._lost_reason:
                self._stop("node_failure", self._lost_reason)
            if self._lost_at is None and any(state.exit_code for state in self.states()):
                self._lost_at = time.monotonic()
            if self._lost_at is not None and time.monotonic() > self._lost_at + _LAST_FAILURES_S:
                return

    def _ask_whether_lost(self) -> None:
        self._lost_reason = self.is_lost() if self.is_lost else ""

    def _look_for_pauses(self) -> None:
        """Begin all limits of silence anew after a pause of this node or another."""
        if paused_s := self.node.look_for_pauses():
            self.server.forgive_silence(paused_s)
            self._begin += paused_s
        paused = self.node.pauses.totals.combine(self.server.paused)
        if paused_s or self.server.paused.all_s > self._paused.all_s:
            self._resumed_at = time.monotonic()
        self._paused = self._paused.combine(paused)

    def _all_ended(self) -> bool:
        expected = self.server.nodes - 1
        agents = self.server.agents.values()
        return not self.node.running and len(agents) == expected and all(agent.done for agent in agents)

    def _listen(self) -> None:
        self.node.drain()
        for rank, line in self.server.poll():
            self.log.write(rank, line)

    def _check_limits(self) -> None:
        """Stop the run if its time is over, a node is gone, or a rank has been silent for too long."""
        limit_min = self.limits.time_limit_min
        if limit_min is not None and time.monotonic() - self._begin > 60 * limit_min:
            self._stop("timeout", f"the time limit of {limit_min:g} min was reached")
        if number := self.server.interrupted_by:
            self.interrupt(number)
        if gone := self.server.lost() or self.server.find_absent(self.limits.startup_s):
            self._stop("node_failure", gone)
        states = self.states()
        for state in states:
            limit_s = self.limits.hang_s if state.ended_steps else self.limits.startup_s
            silent_s = min(state.silent_s, time.monotonic() - self._resumed_at)
            if state.exit_code is None and silent_s > limit_s:
                self._stop("hang", f"no step for {silent_s:.0f} s; {format_furthest_behind(states)}")

    def _end(self) -> None:
        """End whatever still runs, on every node, and wait for the other nodes' last words."""
        stacks = self.stop == "hang"
        self.server.request_stop(stacks=stacks)
        self.node.end(stacks=stacks)
        until = time.monotonic() + _AGENTS_END_S
        while time.monotonic() < until and not all(m.done or m.line.closed for m in self.server.agents.values()):
            time.sleep(POLL_S)
            self._listen()
        self._listen()
        self.log.close(_WRITING_S)
        (self.folder / store.RENDEZVOUS).unlink(missing_ok=True)

    def _stop(self, stop: StopReason, why: str) -> None:
        """Note why the run is to end, unless a rank that was lost ends it already: that came first."""
        if self._lost_at is None:
            self.stop, self.why = self.stop or stop, self.why or why

    def _are_lost_ranks_terminated(self) -> bool:
        """Whether the ranks that are lost were asked to end by somebody else, or failed of a peer that was. A scheduler
        signals ranks and supervisors alike, and a rank may be the first to hear it: the same signal may be on its way
        here."""
        lost = [state for state in self.states() if state.exit_code and not state.stopped]
        own = [state for state in lost if not state.failure or state.failure["outcome"] != "comm_error"]
        return bool(own) and all(state.exit_code in (-signal.SIGTERM, -signal.SIGINT) for state in own)

    def _blame_lost_node(self) -> None:
        """Stop for a node that left or fell silent, where all that the lost ranks report is that they lost a peer."""
        lost = [state for state in self.states() if state.exit_code and not state.stopped]
        is_echo = lost and all(state.failure and state.failure["outcome"] == "comm_error" for state in lost)
        if is_echo and not self.stop and (left := self.server.find_left(self.limits.silence_s / 4)):
            self.stop, self.why = "node_failure", f"{left}; {len(lost)} ranks lost their peers"

    def _was_interrupted(self) -> bool:
        """Whether the run ends because of a signal."""
        if self._interrupted_by and not self.stop and self._are_lost_ranks_terminated():
            self._lost_at = None
            self.interrupt(self._interrupted_by)
        return self.stop == "cancelled"

    def _note_interruption(self) -> None:
        """Write at once where an interrupted run was: whoever sent the signal may soon end this process as well."""
        assert self._interrupted_by
        ranks = [{"rank": state.rank, "phase": state.phase, "step": state.step} for state in self.states()]
        left_s = None if self.ends_at is None else round(self.ends_at - time.time())
        note = {"signal": self._interrupted_by.name, "at": format_now(), "left_s": left_s, "ranks": ranks}
        note["warning_s"] = self.circumstance.launcher.get("warning_s")
        content = json.dumps(note, indent=1).encode()
        writing = AsyncWriter()
        writing.start(lambda: store.write_atomically(self.folder / store.INTERRUPTED, content))
        writing.wait(_WRITING_S)

    def _address(self) -> str:
        """Return where the ranks and the other supervisors find this one."""
        return self.circumstance.network.address(socket.gethostname()) if self._has_other_nodes else "127.0.0.1"

    @property
    def _has_other_nodes(self) -> bool:
        """Whether there are other nodes to be met."""
        return self.spec.nodes > 1 and self.circumstance.rehearsed_rank is None
