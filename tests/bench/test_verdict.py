"""Tests of the outcome of a run (such as `oom`), which follows from how its ranks ended. Each line of the parameters is
one case."""

import errno
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.core.formatting import describe_shortage
from bench.core.record import MemoryShortage, Outcome, OutcomeKind
from bench.measure.control_group import count_oom_kills
from bench.measure.failures import Refused, classify_error
from bench.runtime.outcome import (
    Moment,
    PauseTotals,
    PauseWatch,
    RankState,
    classify_outcome,
    format_furthest_behind,
    note_pause,
)
from bench.sweep import jobs
from bench.sweep.allocation.leader import NodeHealth


def ending(rank: int, code: int | None, outcome: str | None = None, stopped: bool = False, **more: Any) -> RankState:
    failure: dict[str, Any] | None = None
    if outcome:
        failure = {"outcome": outcome, "exception": "SomeError", "message": "what\nand why", "traceback": "…"}
    return RankState(rank, code, stopped, failure, "steps", 7, **more)


def test_loss_after_a_pause_is_not_attributed_to_node_or_point() -> None:
    lost = Outcome(kind="node_failure", reason="node 1 (n2) closed its connection")
    assert note_pause(lost, PauseTotals()) is lost
    noted = note_pause(lost, PauseTotals(15.2, 15.2))
    assert noted.kind == "preempted" and noted.paused_s == 15.2
    assert noted.reason == "paused for 15 s, and then node_failure: node 1 (n2) closed its connection"
    hang = note_pause(Outcome(kind="hang", reason="no step for 300 s"), PauseTotals(15.2, 0.0))
    assert hang.kind == "hang" and hang.paused_s == 15.2


def looked(moments: list[Moment]) -> PauseWatch:
    watch = PauseWatch(iter([Moment(0.0, 0.0), *moments]).__next__)
    for _ in moments:
        watch.sample((), in_steps=True)
    return watch


def test_gap_is_a_pause_unless_the_supervisor_was_busy_or_starved() -> None:
    assert looked([Moment(0.2, 0.0), Moment(15.4, 0.1)]).totals.all_s == pytest.approx(15.1)
    assert looked([Moment(0.2, 0.0), Moment(15.4, 14.9)]).totals == PauseTotals(), "a busy machine"
    watch = PauseWatch(iter([Moment(0.0, 0.0), Moment(0.2, 0.0), Moment(8.4, 0.0)]).__next__)
    assert (watch.sample((), in_steps=True), watch.sample((), in_steps=False)) == (0.0, pytest.approx(8.2))
    assert watch.totals.in_steps_s == pytest.approx(8.2), "the pause was in the window's last step"
    assert looked([Moment(1.9, 0.0), Moment(3.8, 0.0)]).totals == PauseTotals(), "a slow poll, twice"


def test_node_with_a_rank_that_cannot_be_ended_is_excluded_at_once(tmp_path: Path) -> None:
    health, run = NodeHealth(tmp_path), tmp_path / "0a1b2c3d4e" / "0.0"
    health.examine(None, [], run)
    assert health.format_excluded() is None and jobs.read_exclusions(tmp_path) == []
    health.examine(None, [ending(1, None, stopped=True, survived=True, pid=77, host="gpu3")], run)
    assert health.format_excluded() == "gpu3: the process 77 of rank 1 cannot be killed"
    assert [(found.host, found.runs) for found in jobs.read_exclusions(tmp_path)] == [("gpu3", ("0a1b2c3d4e/0.0",))]


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
def test_outcome_is_the_failure_that_no_other_failure_explains(
    endings: list[RankState], kind: OutcomeKind, reason: str
) -> None:
    outcome = classify_outcome(endings, None, "")
    assert (outcome.kind, outcome.reason) == (kind, reason)


def test_memory_shortage_has_a_field_and_a_one_line_reason() -> None:
    """A device has 80 GiB. The allocator reserved 64 GiB, of which tensors use 60. Other processes use 12 GiB, and 2
    GiB are free. An allocation of 5 GiB fails."""
    in_gib = {"where": "device", "requested_bytes": 5, "lacking_bytes": 3, "free_bytes": 2, "total_bytes": 80,
            "live_bytes": 60, "reserved_bytes": 64, "others_bytes": 12}  # fmt: skip
    in_bytes = {name: value * 2**30 if isinstance(value, int) else value for name, value in in_gib.items()}
    short = ending(1, 1, "oom")
    short = short._replace(failure=(short.failure or {}) | {"shortage": in_bytes})
    outcome = classify_outcome([ending(0, 1, "comm_error"), short], None, "")
    assert outcome.shortage == MemoryShortage(rank=1, **in_bytes)
    assert outcome.reason == (
        "rank 1 in steps at step 7: SomeError: device memory: 5 GiB requested, 3 lacking, 2 free; 80 in total, "
        "60 in live tensors, 64 reserved, 12 used by other processes"
    )
    assert Outcome.model_validate_json(outcome.model_dump_json()) == outcome
    assert "shortage" not in Outcome(kind="oom").model_dump(), "records without one read as before"


def test_refused_memory_that_was_free_is_no_shortage() -> None:
    bytes_of = {"requested_bytes": 3 * 2**28, "lacking_bytes": 0, "free_bytes": 7 * 2**27}
    text = describe_shortage(MemoryShortage(rank=0, where="host", **bytes_of))
    assert text.startswith("host memory: 0.75 GiB requested, refused although more was free, as by a limit of ulimit")
    assert "0 lacking" not in text and text.endswith(", 0.875 free")


def test_out_of_memory_kills_are_attributed_to_their_host_only() -> None:
    outcome = classify_outcome(
        [ending(0, 1, "comm_error", host="a", oom_kills=2), ending(1, KILLED, host="b")], None, ""
    )
    assert (outcome.kind, outcome.reason) == ("error", KILLED_WHERE)
    assert outcome.evidence["oom_kills"] == {"a": 2}


def test_ranks_ended_by_the_supervisor_are_no_evidence() -> None:
    outcome = classify_outcome([ending(0, KILLED, stopped=True), ending(1, 1, "host_oom")], None, "")
    assert [rank["rank"] for rank in outcome.evidence["ranks"]] == [1]


def test_stop_by_the_supervisor_is_the_outcome() -> None:
    outcome = classify_outcome([ending(0, KILLED, stopped=True)], "hang", "no step for 5 s")
    assert (outcome.kind, outcome.reason) == ("hang", "no step for 5 s")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "oom"),
        (torch.AcceleratorError("CUDA error: out of memory"), "oom"),
        (RuntimeError("CUDA driver error: out of memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (dist.DistBackendError("NCCL error … Cuda failure 2 'out of memory'"), "oom"),
        (dist.DistBackendError("NCCL error … ibv_reg_mr failed with error Cannot allocate memory"), "comm_error"),
        (RuntimeError("Call to ibv_create_qp failed with error Cannot allocate memory"), "comm_error"),
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:1] bad_alloc: Cannot allocate memory"), "comm_error"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host_oom"),
        (torch.AcceleratorError("Caught AcceleratorError in pin memory thread for device 0.\n…\n"
                                "CUDA error: out of memory"), "host_oom"),
        (MemoryError(), "host_oom"),
        (dist.DistBackendError("NCCL"), "comm_error"),
        (ConnectionResetError("peer"), "comm_error"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory"), "host_oom"),
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), "comm_error"),
        (RuntimeError("shape '[2]' is invalid"), "error"),
        (ValueError("CUDA out of memory"), "error"),  # the message alone is no evidence: the exception has another type
        (Refused("another machine"), "error"),
    ],
)  # fmt: skip
def test_exception_is_classified_by_type_and_message(error: BaseException, kind: OutcomeKind) -> None:
    assert classify_error(error)[0] == kind


def test_failed_pinning_of_host_memory_is_no_device_shortage() -> None:
    """CUDA reports the same message if device memory runs out and if pinned host memory runs out. The function that
    raised the error shows which of the two it was."""

    def pin_memory() -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")

    with pytest.raises(torch.AcceleratorError) as caught:
        pin_memory()
    assert classify_error(caught.value) == ("host_oom", "raised while host memory was pinned")


LOSES_ITS_LOADER = """
import multiprocessing, os, signal
from torch.utils.data import DataLoader
from bench.measure.failures import classify_error
batches = iter(DataLoader(range(10**9), num_workers=1, multiprocessing_context="fork"))
signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises wherever the process stands just then
try:
    next(batches)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    while True:
        next(batches)
except Exception as error:
    print(*(classify_error(error, kills)[0] for kills in (0, 1)), flush=True)
    os._exit(0)
"""


@pytest.mark.processes
def test_killed_loader_is_host_oom_if_the_kernel_ran_out_of_memory() -> None:
    """The kernel counts the processes that its out-of-memory killer has ended. If this count rose during the run, the
    killer is taken as the cause of the end of the data loader's process."""
    done = subprocess.run([sys.executable, "-c", LOSES_ITS_LOADER], capture_output=True, text=True, check=False)
    assert done.stdout == "error host_oom\n", done.stderr
    handled = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    assert [classify_error(handled, kills)[0] for kills in (0, 1)] == ["error", "host_oom"]
    assert classify_error(RuntimeError("anything else"), oom_kills=1)[0] == "error"


@pytest.mark.parametrize(
    ("others_bytes", "kind"), [(None, "oom"), (0, "oom"), (2**27, "oom"), (2**28, "error"), (40_000_000_000, "error")]
)
def test_out_of_memory_next_to_another_process_is_not_final(others_bytes: int | None, kind: str) -> None:
    """If other processes also use the device's memory, a run that is out of memory has the outcome `error`, after which
    the point may run again. The outcome `oom` would be final. Other processes with less than 256 MiB in total are
    ignored, because a display server or a monitoring tool may use as much."""
    found, rule = classify_error(RuntimeError("CUDA out of memory. Tried to allocate 1 GiB"), 0, others_bytes)
    assert found == kind
    assert ("of other processes on the device" in rule) == (kind == "error")
    assert classify_error(MemoryError(), 0, others_bytes)[0] == "host_oom", "the device's memory is not the host's"


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/memory.events": "oom 3\noom_kill 2\n"}, 2),
        ({"proc/self/cgroup": "0::/../job\n", "sys/fs/cgroup/memory.events": "oom_kill 4\n"}, 4),
        ({"proc/self/cgroup": "4:cpu,memory:/a\n0::/\n", "proc/vmstat": "oom_kill 9\n"}, 9),
        ({"proc/self/cgroup": "4:memory:/a\n0::/\n", "sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill 5\n",
          "proc/vmstat": "oom_kill 9\n"}, 5),
        ({"proc/vmstat": "nr_free_pages 1\noom_kill 7\n"}, 7),
        ({}, 0),
    ],
)  # fmt: skip
def test_out_of_memory_kills_are_counted_in_the_own_control_group(
    files: dict[str, str], kills: int, tmp_path: Path
) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert count_oom_kills(tmp_path) == kills


def test_real_failed_allocation_is_host_oom() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert classify_error(caught.value)[0] == "host_oom"


def test_hang_names_the_ranks_furthest_behind() -> None:
    def at(rank: int, phase: str, step: int) -> RankState:
        return RankState(rank, None, False, None, phase, step)

    assert (
        format_furthest_behind([at(0, "steps", 4), at(1, "fetch", 4)]) == "furthest behind: rank 1 in fetch at step 4"
    )
    assert (
        format_furthest_behind([at(0, "steps", 5), at(1, "steps", 4)]) == "furthest behind: rank 1 in steps at step 4"
    )
    text = format_furthest_behind([at(rank, "steps", 4) for rank in range(10)])
    assert text == "furthest behind: ranks 0, 1, 2, 3, 4, 5, 6, 7, … in steps at step 4"


@pytest.mark.parametrize(("number", "full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_full_disk_decides_the_outcome_over_other_failures(number: int, full: bool) -> None:
    error = OSError(number, "as the kernel says", "rank.json")
    rank = ending(1, 1, "error")
    failed = rank._replace(failure={**(rank.failure or {}), "exception": "OSError", "message": str(error)})
    outcome = classify_outcome([ending(0, 1, "comm_error"), failed], None, "")
    assert outcome.kind == "error" and outcome.evidence.get("disk_full", False) is full
    assert outcome.reason.startswith("the disk of the results is full") is full


def test_message_of_a_user_error_is_the_reason_of_the_outcome() -> None:
    message = f"data.files=a.jsonl: {'long ' * 99}rule; remedy"
    failed = ending(1, 1, "error")
    assert failed.failure is not None
    failed.failure.update(exception="UserError", message=message)
    outcome = classify_outcome([ending(0, 1, "comm_error"), failed], None, "")
    assert outcome.reason == f"rank 1 {failed.where}: {message}"
    assert outcome.evidence["refused"] and "refused" not in classify_outcome([ending(0, 1, "error")], None, "").evidence
