"""From evidence to outcome, one case a line."""

import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.measure.failures import Refused, outcome_of
from bench.record import OutcomeKind
from bench.supervisor.verdict import RankState, furthest_behind, verdict


def ending(rank: int, code: int | None, outcome: str | None = None, stopped: bool = False, **more: Any) -> RankState:
    told: dict[str, Any] | None = None
    if outcome:
        told = {"outcome": outcome, "exception": "SomeError", "message": "what\nand why", "traceback": "…"}
    return RankState(rank, code, stopped, told, "steps", 7, **more)


KILLED = -signal.SIGKILL
KILLED_WHERE = "rank 1 was killed by SIGKILL in steps at step 7"


@pytest.mark.parametrize(
    ("endings", "kind", "reason"),
    [
        ([ending(0, 1, "comm_error"), ending(1, KILLED)], "error", KILLED_WHERE),
        ([ending(0, 1, "error"), ending(1, KILLED)], "error", KILLED_WHERE),
        ([ending(0, 1, "comm_error"), ending(1, KILLED, oom_kills=1)], "host_oom",
         "rank 1 was killed by SIGKILL by the kernel's out-of-memory killer in steps at step 7"),
        ([ending(0, 1, "comm_error"), ending(1, 1, "oom")], "oom", "rank 1 in steps at step 7: SomeError: what"),
        ([ending(0, 1, "error"), ending(1, 1, "oom")], "oom", "rank 1 in steps at step 7: SomeError: what"),
        ([ending(0, 1, "comm_error"), ending(1, None, stopped=True)], "comm_error",
         "rank 0 in steps at step 7: SomeError: what"),
        ([ending(0, 3), ending(1, KILLED, stopped=True)], "error", "rank 0 exited with 3 in steps at step 7"),
        ([ending(0, 0), ending(1, 0)], "error", "every rank ended, and none wrote a record"),
    ],
)  # fmt: skip
def test_the_cause_is_what_cannot_be_a_consequence(endings: list[RankState], kind: OutcomeKind, reason: str) -> None:
    outcome = verdict(endings, None, "")
    assert (outcome.kind, outcome.reason) == (kind, reason)


def test_out_of_memory_kills_are_told_by_host_and_blamed_on_their_own_alone() -> None:
    outcome = verdict([ending(0, 1, "comm_error", host="a", oom_kills=2), ending(1, KILLED, host="b")], None, "")
    assert (outcome.kind, outcome.reason) == ("error", KILLED_WHERE)
    assert outcome.evidence["oom_kills"] == {"a": 2}


def test_ranks_that_the_supervisor_ended_are_no_evidence() -> None:
    outcome = verdict([ending(0, KILLED, stopped=True), ending(1, 1, "host_oom")], None, "")
    assert [rank["rank"] for rank in outcome.evidence["ranks"]] == [1]


def test_a_stop_by_the_supervisor_is_the_outcome() -> None:
    outcome = verdict([ending(0, KILLED, stopped=True)], "hang", "no step for 5 s")
    assert (outcome.kind, outcome.reason) == ("hang", "no step for 5 s")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "oom"),
        (torch.AcceleratorError("CUDA error: out of memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (dist.DistBackendError("NCCL error … Cuda failure 2 'out of memory'"), "oom"),
        (MemoryError(), "host_oom"),
        (dist.DistBackendError("NCCL"), "comm_error"),
        (ConnectionResetError("peer"), "comm_error"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory"), "host_oom"),
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), "comm_error"),
        (RuntimeError("shape '[2]' is invalid"), "error"),
        (ValueError("CUDA out of memory"), "error"),  # the words alone, in another type, are no evidence
        (Refused("another machine"), "error"),
    ],
)  # fmt: skip
def test_an_exception_is_evidence_by_its_type_and_its_own_message(error: BaseException, kind: OutcomeKind) -> None:
    assert outcome_of(error)[0] == kind


def test_a_real_allocation_that_fails_is_host_oom() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert outcome_of(caught.value)[0] == "host_oom"


def test_a_hang_names_the_ranks_that_the_others_wait_for() -> None:
    def at(rank: int, phase: str, step: int) -> RankState:
        return RankState(rank, None, False, None, phase, step)

    assert furthest_behind([at(0, "steps", 4), at(1, "fetch", 4)]) == "furthest behind: rank 1 in fetch at step 4"
    assert furthest_behind([at(0, "steps", 5), at(1, "steps", 4)]) == "furthest behind: rank 1 in steps at step 4"
    told = furthest_behind([at(rank, "steps", 4) for rank in range(10)])
    assert told == "furthest behind: ranks 0, 1, 2, 3, 4, 5, 6, 7, … in steps at step 4"
