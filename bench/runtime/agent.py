"""The supervisor of every node but the first: starts its ranks, reports them to the lead, and obeys it."""

import socket
import time
from pathlib import Path

from bench import store
from bench.record import Circumstance
from bench.runtime import signals
from bench.runtime.node import POLL_S, NodeRanks
from bench.runtime.process import StartRank, start_process
from bench.runtime.transport import AgentClient, Rendezvous
from bench.scheduling import Span
from bench.spec import RunSpec


class NodeAgent:
    """One following node of one attempt."""

    def __init__(
        self,
        folder: Path,
        number: int,
        rendezvous: Rendezvous | None = None,
        *,
        span: Span = "node",
        start: StartRank = start_process,
        handle_signals: bool = True,
    ) -> None:
        """`number` is this supervisor's among those of the run. Without a `point` it waits for the lead's file."""
        spec = RunSpec.model_validate_json((folder / store.SPEC).read_bytes())
        circumstance = Circumstance.model_validate_json((folder / store.CIRCUMSTANCE).read_bytes())
        self._output: list[tuple[int, str]] = []
        self.node = NodeRanks(folder, spec, circumstance, number, self._collect_output, span, start)
        self.rendezvous = rendezvous or Rendezvous.wait(folder, circumstance.limits.startup_s)
        self.client = AgentClient(self.rendezvous, number, socket.gethostname(), circumstance.limits.agent_silence_s)
        self._interrupted_by: int | None = None
        if handle_signals:
            signals.install_handlers(self.interrupt)

    def run(self) -> bool:
        """Return whether every rank of this node ended as it should."""
        try:
            self.node.start(self.rendezvous, None)
            stacks = self._watch()
            if self._interrupted_by:
                self._report()  # before it ends its ranks, so that the lead does not take that for a loss
            self.node.end(stacks=stacks)
            self._report(done=True)
        except BaseException:
            self.node.end(stacks=False)  # and says nothing more: the lead sees a node that is lost
            raise
        finally:
            self.client.close()
            self.node.close()
        return not self.node.lost

    def interrupt(self, number: int) -> None:
        """End this node's ranks because of a signal; the lead hears of it. A signal handler may call this."""
        self._interrupted_by = number

    def _watch(self) -> bool:
        """Return when the ranks have ended or are to be ended; True if they are to print their stacks first."""
        is_loss_reported = False
        while self.node.running and not self._interrupted_by:
            time.sleep(POLL_S)
            paused = self.node.look_for_pauses() > 0
            if paused:
                self.client.forgive_silence()
            if order := self.client.stop_request():
                return bool(order["stacks"])
            self.node.drain()
            if self.client.due() or paused or (self.node.lost and not is_loss_reported):
                self._report()
                is_loss_reported = self.node.lost
        return False

    def _report(self, *, done: bool = False) -> None:
        paused = self.node.pauses.totals
        self.client.report(
            self.node.states(), self._output, done=done, interrupted_by=self._interrupted_by, paused=paused
        )
        self._output = []

    def _collect_output(self, rank: int, line: bytes) -> None:
        self._output.append((rank, line.decode(errors="replace")))
