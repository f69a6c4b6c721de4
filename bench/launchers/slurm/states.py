"""How Slurm's programs and its completion log say how jobs are. Pure: text in, states out."""

import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import NamedTuple

_PENDING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
}  # fmt: skip
"""Job state codes of squeue's manual. A word that is in neither set counts as running: a newer Slurm's word must not
look like a death."""


class JobState(NamedTuple):
    """A job, or one task of a job array, as Slurm knows it."""

    job_id: str  # as scancel takes it: "12", and "12_3" for a task
    name: str
    task: int | None
    state: str  # Slurm's word, such as CANCELLED without its "by 0"
    reason: str = ""
    restarts: int | None = None  # how often it was put back into the queue
    nodes: int | None = None
    started_at: float | None = None  # seconds since the epoch; of a pending one, when Slurm expects it to
    ended_at: float | None = None
    source: str = ""  # squeue, sacct or completion log
    words: str = ""  # the source's own line

    @property
    def pending(self) -> bool:
        return self.state in _PENDING

    @property
    def running(self) -> bool:
        return self.live and not self.pending

    @property
    def live(self) -> bool:
        """Whether it has not ended: it waits, runs, or is being cleared away."""
        return self.state not in _ENDED

    @property
    def number(self) -> int:
        return int(self.job_id.partition("_")[0])


_SQUEUE = {
    "ArrayJobID": 12, "ArrayTaskID": 12, "State": 20, "RestartCnt": 8, "NumNodes": 8, "StartTime": 20, "EndTime": 20,
    "Reason": 64, "exit_code": 10, "Name": 256,
}  # fmt: skip
SQUEUE_FORMAT = ",".join(f"{field}:{width}" for field, width in _SQUEUE.items())
"""Columns of fixed width: a name may hold any separator, and comes last because widths are bytes, not letters."""
SACCT_FORMAT = "JobID,State,NNodes,Start,End,ExitCode,Reason,JobName"


def squeue(text: str) -> Iterator[JobState]:
    """Yield what `squeue --noheader --array --Format=SQUEUE_FORMAT` says."""
    for line in text.splitlines():
        columns, begin = {}, 0
        for field, width in _SQUEUE.items():
            columns[field] = line[begin : begin + width].strip()
            begin += width
        if not columns["ArrayJobID"].isdigit():
            continue  # a heading, such as a cluster's name
        task = int(columns["ArrayTaskID"]) if columns["ArrayTaskID"].isdigit() else None
        yield _state(
            columns["ArrayJobID"],
            task,
            columns["Name"],
            columns["State"],
            reason=columns["Reason"],
            restarts=_number(columns["RestartCnt"]),
            nodes=_number(columns["NumNodes"]),
            times=(columns["StartTime"], columns["EndTime"]),
            source="squeue",
            words=line,
        )


def sacct(text: str) -> Iterator[JobState]:
    """Yield what `sacct --noheader --parsable2 --allocations --duplicates --format=SACCT_FORMAT` says: of a job that
    was put back into the queue, every start."""
    for line in text.splitlines():
        if found := _ACCOUNTED.fullmatch(line):
            _, _, _, state, nodes, start, end, reason, name = found.groups()
            tasks = tasks_of(found[3]) if found[3] else [int(found[2]) if found[2] else None]
            for task in tasks:
                yield _state(
                    found[1],
                    task,
                    name,
                    state,
                    reason=reason,
                    restarts=0,
                    nodes=_number(nodes),
                    times=(start, end),
                    source="sacct",
                    words=line,
                )


_ACCOUNTED = re.compile(r"(\d+)(?:_(\d+)|_\[([^]|]*)\]?)?[^|]*\|([^|]*)\|(\d*)\|([^|]*)\|([^|]*)\|[^|]*\|([^|]*)\|(.*)")
_LOGGED = re.compile(
    r"JobId=(?P<job>\d+) .*? Name=(?P<name>.*?) JobState=(?P<state>\S+) Partition=.*? StartTime=(?P<start>\S+)"
    r" EndTime=(?P<end>\S+) NodeList=\S* NodeCnt=(?P<nodes>\d+)"
)
_LOGGED_TASK = re.compile(r" ArrayJobId=(\d+) ArrayTaskId=(\d+)")


def completion_log(text: str) -> Iterator[JobState]:
    """Yield what the file of Slurm's jobcomp/filetxt says, every start of a job."""
    for line in text.splitlines():
        if found := _LOGGED.match(line):
            of_array = _LOGGED_TASK.search(line, found.end())
            yield _state(
                of_array[1] if of_array else found["job"],
                int(of_array[2]) if of_array else None,
                found["name"],
                found["state"],
                restarts=0,
                nodes=int(found["nodes"]),
                times=(found["start"], found["end"]),
                source="completion log",
                words=line,
            )


def latest(states: Iterable[JobState]) -> dict[tuple[str, int | None], JobState]:
    """Return the last state of each name and task. Earlier starts of the same job count as restarts; of two jobs of one
    name the younger is meant."""
    found: dict[tuple[str, int | None], JobState] = {}
    for state in states:
        key = state.name, state.task
        before = found.get(key)
        if before and before.number > state.number:
            continue
        if before and before.number == state.number:
            # A job that is put back just as it ends has two lines for one start.
            again = before.started_at != state.started_at
            state = state._replace(restarts=(before.restarts or 0) + again)
        found[key] = state
    return found


def tasks_of(text: str) -> list[int]:
    """Return the tasks that `3-9%2` or `0,2,8-12:2` means: those of an array that wait together."""
    tasks: list[int] = []
    for part in text.partition("%")[0].split(","):
        if found := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part):
            tasks += range(int(found[1]), int(found[2] or found[1]) + 1, int(found[3] or 1))
    return tasks


def _state(
    job: str,
    task: int | None,
    name: str,
    state: str,
    *,
    restarts: int | None,
    nodes: int | None,
    times: tuple[str, str],
    source: str,
    words: str,
    reason: str = "",
) -> JobState:
    word = state.split()[0].rstrip("+") if state.split() else ""
    told = JobState(job if task is None else f"{job}_{task}", name, task, word, reason, restarts, nodes)
    started_at, ended_at = map(_seconds, times)
    return told._replace(
        started_at=started_at,
        ended_at=None if told.live else ended_at,  # of a live one it is a forecast
        source=source,
        words=" ".join(words.split()),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _seconds(text: str) -> float | None:
    """Return Slurm's local time in seconds since the epoch; None for words such as Unknown."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
