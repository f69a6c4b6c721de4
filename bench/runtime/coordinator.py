"""Coordinator: the supervisor of node 0. It monitors the ranks of all nodes. If the ranks of a run wrote no record, the
coordinator writes it."""

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from bench.core import store
from bench.core.files import read_json
from bench.core.record import Circumstance, RunRecord
from bench.core.scheduling import Span
from bench.core.spec import RunSpec
from bench.measure.failures import DRILL_VARIABLE
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
    format_signal,
    note_pause,
)
from bench.runtime.process import RankLog, StartRank, install_handlers, start_process
from bench.runtime.transport import CoordinatorServer, Rendezvous

# Seconds after the first loss of a rank in which other ranks can report their failures. Agents (the supervisors of the
# other nodes) report once a second.
_LAST_FAILURES_S = 1.5
_AGENTS_END_S = 17.0  # time for the agents to end their ranks
# Seconds between two writes of the heartbeat file: for local runs, and for scheduled runs, whose file system many users
# share.
_HEARTBEAT_S, _HEARTBEAT_FAR_S = 2.0, 10.0
# Seconds in which the last writes must finish. If the file system stalls for longer, they are lost.
_WRITING_S = 2.0


class RunCoordinator:
    """Supervisor on node 0 that controls all nodes of one attempt (one try at a run)."""

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
        """Create the coordinator of the attempt in `folder`.

        `announce` sends node 0's address to the other supervisors. By default the address is written into the folder.
        If `scheduled` is true, this class writes no record for an interrupted run. `zeroscale status` or `resume`
        writes it later, with the reason from the scheduler. `ends_at` is the end of the allocation in seconds since the
        epoch. `is_lost` returns why the allocation no longer belongs to this job, for example because the job was
        requeued. It returns an empty string if the allocation still belongs to this job. `span` is "node" if each node
        has one supervisor, and "device" if each rank has one. The function `start` starts the process of a rank.
        """
        self.folder = folder
        self.spec = RunSpec.model_validate_json((folder / store.SPEC).read_bytes())
        self.circumstance = Circumstance.model_validate_json((folder / store.CIRCUMSTANCE).read_bytes())
        self.limits = self.circumstance.limits
        self._has_other_nodes = self.spec.nodes > 1 and self.circumstance.rehearsed_rank is None
        self.announce = announce or (lambda rendezvous: rendezvous.write(folder))
        self.scheduled, self.ends_at, self.is_lost = scheduled, ends_at, is_lost
        host = self.circumstance.network.address(socket.gethostname()) if self._has_other_nodes else "127.0.0.1"
        supervisors = count_supervisors(self.spec, span, self.circumstance)
        self.server = CoordinatorServer(supervisors, host, self.limits.silence_s)
        self.log = RankLog(folder / store.LOG)
        self.node = NodeRanks(folder, self.spec, self.circumstance, 0, self.log.write, span, start)
        self.heartbeat = HeartbeatWriter(folder, _HEARTBEAT_FAR_S if scheduled else _HEARTBEAT_S)
        self.stop: StopReason | None = None
        self.why = ""
        self._lost_at: float | None = None
        self._begin = self._resumed_at = time.monotonic()
        self._paused = PauseTotals()  # longest pauses of any node
        # `is_lost` is called in another thread, because it reads the study's folder, and a shared file system may
        # stall.
        self._asking, self._lost_reason = AsyncWriter(), ""
        self._interrupted_by: signal.Signals | None = None
        # A job with many points has one process for all points, which installs its own signal handlers.
        if handle_signals:
            install_handlers(self.interrupt)

    def run(self) -> RunRecord | None:
        """Run all ranks until they end, write the record, and return it.

        Return None if a scheduled run was interrupted before it had a record. The record is then written later, with
        the scheduler's reason.
        """
        try:
            self._start()
            self._watch()
        except Exception as error:
            # If a signal interrupted the run, it may have caused this exception.
            if not self._interrupted_by:
                traceback.print_exc()
            self._stop("error", f"the supervisor failed: {type(error).__name__}: {error}")
        self._blame_lost_node()
        if self._interrupted_by and not self.stop and self._are_lost_ranks_terminated():
            self._lost_at = None
            self.interrupt(self._interrupted_by)
        interrupted = self.stop == "cancelled"
        if interrupted:
            self._note_interruption()
        self._end()
        try:
            if self.scheduled and interrupted and not (self.folder / store.RECORD).exists():
                return None
            outcome = note_pause(classify_outcome(self.states(), self.stop, self.why), self._paused)
            if drill := os.environ.get(DRILL_VARIABLE):  # the cause may be the injected fault
                outcome = outcome.model_copy(update={"evidence": outcome.evidence | {"drill": drill}})
            return store.finalize(self.folder, outcome, paused_s=self._paused.in_steps_s)
        finally:
            self.heartbeat.end(self.states(), _WRITING_S)
            self.server.close()
            self.node.close()

    def interrupt(self, number: int) -> None:
        """End the run because of a signal with this number. A signal handler may call this at any time."""
        self._interrupted_by = self._interrupted_by or signal.Signals(number)
        self._stop("cancelled", f"interrupted by {format_signal(self._interrupted_by.name)}")

    def states(self) -> list[RankState]:
        """Return the state of every rank of the run. For other nodes this is the state in the node's last report."""
        agents = (agent for _, agent in sorted(self.server.agents.items()))
        return [*self.node.states(), *(state for agent in agents for state in agent.last.ranks)]

    def _start(self) -> None:
        address = "" if self._has_other_nodes else "127.0.0.1"
        with socket.create_server((address, 0), backlog=self.spec.world_size) as listener:
            port = listener.getsockname()[1]
            rendezvous = Rendezvous(self.server.host, port, self.server.port, self.server.token)
            if self.server.nodes > 1:
                self.announce(rendezvous)
            self.node.start(rendezvous, listener)

    def _watch(self) -> None:
        """Monitor the run until every rank has ended, the run has to stop, or a rank is lost.

        After the loss of a rank, other ranks get a short time to report their failures.
        """
        while not self.stop and (self._are_lost_ranks_terminated() or not self._all_ended()):
            time.sleep(POLL_S)
            self._detect_pauses()
            self._receive()
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

    def _detect_pauses(self) -> None:
        """Detect pauses of this node and of other nodes. After a pause, the time limits for silent ranks and for silent
        nodes start again, because a paused rank or node sends nothing."""
        if paused_s := self.node.detect_pauses():
            self.server.forgive_silence(paused_s)
            self._begin += paused_s
        others = self.server.paused
        if paused_s or others.all_s > self._paused.all_s:
            self._resumed_at = time.monotonic()
        self._paused = self._paused.combine(self.node.pauses.totals, others)

    def _all_ended(self) -> bool:
        agents = self.server.agents.values()
        return (
            not self.node.running and len(agents) == self.server.nodes - 1 and all(agent.last.done for agent in agents)
        )

    def _receive(self) -> None:
        self.node.drain()
        for rank, line in self.server.poll():
            self.log.write(rank, line)

    def _check_limits(self) -> None:
        """Stop the run if it exceeds its time limit, if a node is lost, or if a rank has been silent for too long."""
        limit_min = self.limits.time_limit_min
        if limit_min is not None and time.monotonic() - self._begin > 60 * limit_min:
            self._stop("timeout", f"the time limit of {limit_min:g} min was reached")
        if number := self.server.interrupted_by:
            self.interrupt(number)
        if lost := self.server.lost() or self.server.find_absent(self.limits.startup_s):
            self._stop("node_failure", lost)
        states = self.states()
        for state in states:
            limit_s = self.limits.hang_s if state.ended_steps else self.limits.startup_s
            silent_s = min(state.silent_s, time.monotonic() - self._resumed_at)
            if state.exit_code is None and silent_s > limit_s:
                self._stop("hang", f"no step for {silent_s:.0f} s; {format_furthest_behind(states)}")

    def _end(self) -> None:
        """End all running ranks on every node, and wait for the last reports of the other nodes."""
        stacks = self.stop == "hang"
        self.server.request_stop(stacks=stacks)
        self.node.end(stacks=stacks)
        until, agents = time.monotonic() + _AGENTS_END_S, self.server.agents.values()
        while time.monotonic() < until and not all(agent.last.done or agent.line.closed for agent in agents):
            time.sleep(POLL_S)
            self._receive()
        self._receive()
        self.log.close(_WRITING_S)
        (self.folder / store.RENDEZVOUS).unlink(missing_ok=True)

    def _stop(self, stop: StopReason, why: str) -> None:
        """Store the reason why the run has to end. If a reason is already stored, that first reason is kept. If a rank
        was already lost, do nothing."""
        if self._lost_at is None:
            self.stop, self.why = self.stop or stop, self.why or why

    def _list_lost(self) -> list[RankState]:
        return [state for state in self.states() if state.exit_code and not state.stopped]

    def _are_lost_ranks_terminated(self) -> bool:
        """Return True if SIGTERM or SIGINT ended all lost ranks. Ranks that reported a communication error are ignored,
        because the loss of another rank may have caused this error.

        A scheduler sends signals to ranks and supervisors at the same time. A rank may receive the signal before this
        process does, and then looks lost, although the run was only interrupted.
        """
        own = [state for state in self._list_lost() if not state.failure or state.failure["outcome"] != "comm_error"]
        return bool(own) and all(state.exit_code in (-signal.SIGTERM, -signal.SIGINT) for state in own)

    def _blame_lost_node(self) -> None:
        """Stop the run with the outcome `node_failure` if the loss of a node explains why all lost ranks failed.

        This is assumed under two conditions. Every lost rank has reported a communication error. In addition, a node
        has ended its ranks by itself, or has sent no report for a while.
        """
        lost = self._list_lost()
        # If all lost ranks reported communication errors, the cause may be a node whose reports do not arrive.
        is_echo = lost and all(state.failure and state.failure["outcome"] == "comm_error" for state in lost)
        if is_echo and not self.stop and (left := self.server.find_left(self.limits.silence_s / 4)):
            self.stop, self.why = "node_failure", f"{left}; {len(lost)} ranks lost their peers"

    def _note_interruption(self) -> None:
        """Immediately write the progress of an interrupted run and the name of the signal to the file
        `interrupted.json`, because the scheduler may soon kill this process as well.

        Exception: the name of a signal may be in the file already. If a user interrupts a zeroscale command, this
        command writes the name of its signal to the file, and then sends SIGTERM to this supervisor. The name in the
        file is then kept.
        """
        assert self._interrupted_by
        name = (read_json(self.folder / store.INTERRUPTED) or {}).get("signal", self._interrupted_by.name)
        self.why = f"interrupted by {format_signal(name)}"
        note = {
            "signal": name,
            "at": format_now(),
            "left_s": None if self.ends_at is None else round(self.ends_at - time.time()),
            "ranks": [{"rank": state.rank, "phase": state.phase, "step": state.step} for state in self.states()],
            "warning_s": self.circumstance.launcher.get("warning_s"),
        }
        content = json.dumps(note, indent=1).encode()
        writing = AsyncWriter()
        writing.start(lambda: store.write_atomically(self.folder / store.INTERRUPTED, content))
        writing.wait(_WRITING_S)
