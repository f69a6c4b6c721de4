"""The supervisor of every node but the first: starts its ranks, reports them to the lead, and obeys it."""

import signal
import socket
import time
from pathlib import Path
from types import FrameType

from bench import store
from bench.record import Circumstance
from bench.spec import RunSpec
from bench.supervisor.crew import Follower, MeetingPoint
from bench.supervisor.node import POLL_S, Node


class Follow:
    """One following node of one attempt."""

    def __init__(self, folder: Path, number: int) -> None:
        spec = RunSpec.model_validate_json((folder / store.SPEC).read_bytes())
        circumstance = Circumstance.model_validate_json((folder / store.CIRCUMSTANCE).read_bytes())
        self._output: list[tuple[int, str]] = []
        self.node = Node(folder, spec, circumstance, number, self._hear)
        self.point = MeetingPoint.wait(folder, circumstance.limits.startup_s)
        self.crew = Follower(self.point, number, socket.gethostname())
        self._interrupted = False
        for sent in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sent, self._interrupt)

    def run(self) -> bool:
        """Return whether every rank of this node ended as it should."""
        stacks, told_of_loss = False, False
        try:
            self.node.start(self.point, None)
            while self.node.running and not self._interrupted:
                time.sleep(POLL_S)
                if order := self.crew.orders():
                    stacks = bool(order["stacks"])
                    break
                self._report(at_once=self.node.lost and not told_of_loss)
                told_of_loss = self.node.lost
        finally:
            self.node.end(stacks=stacks)
            self._report(done=True)
        return not self.node.lost

    def _report(self, *, at_once: bool = False, done: bool = False) -> None:
        self.node.drain()
        if self.crew.report(self.node.states(), self._output, done=done, at_once=at_once):
            self._output = []

    def _hear(self, rank: int, line: bytes) -> None:
        self._output.append((rank, line.decode(errors="replace")))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
