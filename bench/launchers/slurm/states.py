"""Job states, parsed from the output of Slurm's programs and from Slurm's completion log. There are no side effects."""

import re
import signal
from collections.abc import Iterable, Iterator
from datetime import datetime

from bench.core.errors import UserError
from bench.core.record import OutcomeKind
from bench.core.scheduling import JobState, Phase

_PENDING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_ENDED: dict[str, tuple[OutcomeKind | None, str]] = {
    "BOOT_FAIL": ("node_failure", "a node of the job did not start"),
    "CANCELLED": ("cancelled", "the job was cancelled"),
    "COMPLETED": (None, ""),
    "DEADLINE": ("timeout", "the job reached its deadline"),
    "FAILED": ("error", ""),
    "LAUNCH_FAILED": (None, ""),
    "NODE_FAIL": ("node_failure", "a node of the job failed"),
    "OUT_OF_MEMORY": ("host_oom", "the job's memory limit was reached (cgroup)"),
    "PREEMPTED": ("preempted", "the job was preempted"),
    "RECONFIG_FAIL": (None, ""),
    "REVOKED": (None, ""),
    "TIMEOUT": ("timeout", "the job reached its time limit"),
}
"""Codes in squeue's manual for the states in which a job has ended. Each code has the outcome of the job's run (None if
the state does not determine the outcome), and a description. A code that is neither here nor in `_PENDING` counts as
running. So an unknown code of a newer Slurm version does not look like the end of a job."""
_STUCK = re.compile(
    r"PartitionConfig|Partition(Node|Time)Limit|Partition(Down|Inactive)|BadConstraints|DependencyNeverSatisfied"
    r"|Invalid(Account|QOS)|(Account|QOS)NotAllowed|JobHeld(Admin|User)|launch_failed_requeued_held|.*PerJob(Limit)?"
)
"""Pattern of the reasons in squeue's manual for which a job stays pending until a user or administrator changes
something."""
_NOTHING = ("", "None", "N/A", "(null)")
_SHELL_SIGNAL = 128
"""Offset of exit codes for signals. If a signal ends a command, the shell's exit code is 128 plus the signal number."""

_SQUEUE = {
    "ArrayJobID": 12, "ArrayTaskID": 12, "State": 20, "RestartCnt": 8, "NumNodes": 8, "StartTime": 20, "EndTime": 20,
    "Reason": 256, "exit_code": 10, "Name": 256,
}  # fmt: skip
SQUEUE_FORMAT = ",".join(f"{field}:{width}" for field, width in _SQUEUE.items())
"""Columns of squeue's output. They have a fixed width, because a job name may contain any separator. The name is the
last column, because widths count bytes and not characters."""
SACCT_FORMAT = "JobID,State,NNodes,Start,End,ExitCode,Reason,JobName"
_ACCOUNTED = re.compile(
    r"(\d+)(?:_(\d+)|_\[([^]|]*)\]?)?[^|]*\|([^|]*)\|(\d*)\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|(.*)"
)
_LOGGED = re.compile(
    r"JobId=(?P<job>\d+) .*? Name=(?P<name>.*?) JobState=(?P<state>\S+) Partition=.*? StartTime=(?P<start>\S+)"
    r" EndTime=(?P<end>\S+) NodeList=\S* NodeCnt=(?P<nodes>\d+)"
)
_LOGGED_EXIT = re.compile(r" ExitCode=(\S+)")
_LOGGED_TASK = re.compile(r" ArrayJobId=(\d+) ArrayTaskId=(\d+)")


def find_phase(word: str) -> Phase:
    """Return the phase ("pending", "running" or "ended") of a job with this state code."""
    return "pending" if word in _PENDING else "ended" if word in _ENDED else "running"


def parse_squeue(text: str) -> Iterator[JobState]:
    """Yield the job states in the output of `squeue --noheader --array --Format=SQUEUE_FORMAT`.

    Raise UserError if the output is not empty and no line can be parsed.
    """
    is_parsed = False
    for line in text.splitlines():
        columns, begin = [], 0
        for width in _SQUEUE.values():
            columns.append(line[begin : begin + width].strip())
            begin += width
        job, task, state, restarts, nodes, start, end, reason, exit_code, name = columns
        if not job.isdigit():
            # The line is a heading, such as a cluster's name.
            continue
        is_parsed = True
        status = _parse_wait_status(exit_code)
        found = _build_state("squeue", line, job, _parse_number(task), name, state, nodes, start, end, status, reason)
        yield found._replace(restarts=_parse_number(restarts))
    if not is_parsed:
        _check_empty("squeue", text)


def parse_sacct(text: str) -> Iterator[JobState]:
    """Yield the job states in the output of sacct. A job that was requeued has one state for each start.

    The expected command is `sacct --noheader --parsable2 --allocations --duplicates --format=SACCT_FORMAT`. Raise
    UserError if the output is not empty and no line can be parsed.
    """
    is_parsed = False
    for line in text.splitlines():
        if found := _ACCOUNTED.fullmatch(line):
            is_parsed = True
            job, task, tasks, state, nodes, start, end, exit_code, reason, name = found.groups()
            for number in parse_tasks(tasks) if tasks else [_parse_number(task or "")]:
                status = _parse_exit_code(exit_code)
                yield _build_state("sacct", line, job, number, name, state, nodes, start, end, status, reason)
    if not is_parsed:
        _check_empty("sacct", text)


def _check_empty(program: str, text: str) -> None:
    """Raise UserError unless a program's output is empty. Call this if no line of the output could be parsed.

    If unknown output were interpreted as "no such job", zeroscale would submit every job again.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("CLUSTER:")]
    if lines:
        rule = f"its output has an unknown form: {' '.join(lines[0].split())[:80]}"
        raise UserError(program, rule, f"report it with the output of `{program} --version`")


def parse_completion_log(text: str) -> Iterator[JobState]:
    """Yield the job states in a completion log of the plug-in jobcomp/filetxt. Each start of a job has one state."""
    for line in text.splitlines():
        if found := _LOGGED.match(line):
            of_array, exit_code = _LOGGED_TASK.search(line, found.end()), _LOGGED_EXIT.search(line, found.end())
            job, task = (of_array[1], int(of_array[2])) if of_array else (found["job"], None)
            name, state, nodes, start, end = found.group("name", "state", "nodes", "start", "end")
            status = _parse_exit_code(exit_code[1]) if exit_code else (0, 0)
            yield _build_state("completion log", line, job, task, name, state, nodes, start, end, status)


def select_latest(states: Iterable[JobState]) -> dict[tuple[str, int | None], JobState]:
    """Return the latest state for each job name and array task (None without an array).

    A job that was requeued has several starts, and each earlier start counts as a restart. If two jobs have the same
    name, the job with the higher id is used.
    """
    found: dict[tuple[str, int | None], JobState] = {}
    for state in states:
        key = state.name, state.task
        before = found.get(key)
        if before and int(before.handle) > int(state.handle):
            continue
        if before and before.handle == state.handle:
            # If a job is requeued just when it ends, two lines describe the same start. They do not count as a restart.
            again = before.started_at != state.started_at
            state = state._replace(restarts=(before.restarts or 0) + again)
        found[key] = state
    return found


def parse_tasks(text: str) -> list[int]:
    """Return the task numbers in an array expression such as `3-9%2` or `0,2,8-12:2`.

    Slurm prints the pending tasks of an array in this form.
    """
    tasks: list[int] = []
    for part in text.partition("%")[0].split(","):
        if found := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part):
            tasks += range(int(found[1]), int(found[2] or found[1]) + 1, int(found[3] or 1))
    return tasks


def _build_state(
    source: str, line: str, job: str, task: int | None, name: str, state: str, nodes: str, start: str, end: str,
    exit_code: tuple[int, int], reason: str = "",
) -> JobState:  # fmt: skip
    """Return a job state from the fields of `line`. `exit_code` is the pair (exit code, signal number)."""
    word = state.split()[0].rstrip("+") if state.split() else ""  # CANCELLED, without its "by 0"
    outcome, why = _ENDED.get(word, (None, ""))
    stuck = ""
    if find_phase(word) == "pending" and _STUCK.fullmatch(reason):
        stuck = "cannot start with the resources that it requests"
        if "held" in reason.lower():
            stuck = "held until a user or administrator releases it"
    return JobState(
        handle=job,
        name=name,
        task=task,
        phase=find_phase(word),
        state=word,
        reason="" if reason in _NOTHING else reason,
        outcome=outcome,
        why=why,
        restarts=0,
        nodes=_parse_number(nodes),
        started_at=_parse_seconds(start),
        ended_at=_parse_seconds(end) if word in _ENDED else None,  # for a running job, this time is a forecast
        source=source,
        words=" ".join(line.split()),
        exit_code=exit_code[0] if word in _ENDED and not exit_code[1] else None,
        exit=describe_exit(*exit_code),
        stuck=stuck,
        follows=reason == "Dependency",
    )


def describe_exit(code: int, number: int) -> str:
    """Return a text on how a job script ended: the signal that ended it, or its exit code. Empty after success.

    `code` is the exit code, and `number` the signal number or 0. For an exit code above 128 the text also names a
    signal, because a shell uses such codes if a signal ended its command.
    """
    if number:
        return f"killed by {_name_signal(number)}"
    if code > _SHELL_SIGNAL and (name := _name_signal(code - _SHELL_SIGNAL)).startswith("SIG"):
        return f"exit code {code}, as of {name}"
    return f"exit code {code}" if code else ""


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _parse_exit_code(text: str) -> tuple[int, int]:
    """Return the exit code and signal number in a field such as `3:0` of sacct or the completion log; (0, 0) for other
    text."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _parse_wait_status(text: str) -> tuple[int, int]:
    """Return the exit code and signal number in squeue's column `exit_code`.

    Slurm 22.05 prints the status of wait(2), for example 768 for exit code 3. Slurm 24.11 prints `3:0`.
    """
    status = int(text) if text.isdigit() else 0
    found = _parse_exit_code(text) if ":" in text else (status >> 8 & 0xFF, status & 0x7F)
    # Slurm reports signal 1 for a job that never started. It does not mean SIGHUP.
    return (0, 0) if found == (0, 1) else found


def _parse_number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _parse_seconds(text: str) -> float | None:
    """Return a local time printed by Slurm as seconds since the epoch; None for words such as Unknown."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
