"""What each outcome of a run means."""

from bench.core.record import OutcomeKind

OUTCOMES: dict[OutcomeKind, str] = {
    "ok": "measured",
    "oom": "the device's memory did not suffice",
    "host_oom": "the host's memory did not suffice",
    "hang": "no step, or no end of a phase, for too long; the record keeps every rank's stacks",
    "timeout": "the time limit of the attempt, or of its job, ended it",
    "comm_error": "a collective failed: a peer was lost",
    "node_failure": "the scheduler says that a node failed",
    "preempted": "the scheduler took the nodes for another job",
    "cancelled": "somebody ended it: Ctrl-C, `zeroscale cancel`, the scheduler's own command",
    "invalid": "a loss or gradient that is not a number, or that strays from the reference's",
    "error": "a rank raised or died, for none of the reasons above",
    "pruned": "never run: a smaller micro-batch, the same otherwise, ran out of memory in two runs",
    "infeasible": "never run: its memory is predicted to exceed the device's by far",
}
