"""Tests of parsing the output of Slurm's programs.

The output was recorded on three versions: Slurm 22.05 with accounting (folder recorded/), 24.11.5 of Debian 13
(recorded/24.11), and 26.05.5 of Debian sid without accounting (recorded/26.05). Some output was copied from the
manuals. Versions 23.11, 24.05 and 25.05 have no recordings: no package was available, and output published on the web
has other columns.

All versions get the same commands, which request columns by name. JSON output is not used, because its format changed:
a state became a list in 23.11, and `nodes` became an object in 24.05. In the requested columns, versions after 22.05
differ only in the form of squeue's exit codes and unknown times. The parser supports both forms. Output in an unknown
format is refused.
"""

import time
from pathlib import Path

import pytest

from bench.core.errors import UserError
from bench.core.scheduling import JobState
from bench.launchers.slurm import cluster, states
from bench.launchers.slurm.states import find_phase, select_latest

RECORDED = Path(__file__).parent / "recorded"
ARRAY = [("smoke-array", task) for task in range(6)]


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


@pytest.fixture(autouse=True)
def _in_the_time_zone_of_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


# -- the same job in three sources


def test_squeue_lists_pending_running_and_ended_jobs() -> None:
    found = select_latest(states.parse_squeue(recorded("squeue.txt")))
    assert {key: state.state for key, state in found.items()} == {
        ("smoke-cancelled", None): "CANCELLED",
        ("smoke-array", 2): "COMPLETED",
        ("smoke-array", 3): "COMPLETED",
        ("smoke-array", 4): "RUNNING",
        ("smoke-array", 5): "RUNNING",
        **{("smoke-later", task): "PENDING" for task in (0, 2, 5, 6, 7)},
        ("smoke-node", None): "PENDING",
        ("smoke-timeout", None): "RUNNING",
        ("smoke-requeued", None): "RUNNING",
    }
    later = found["smoke-later", 5]
    assert (later.handle, later.task, later.reason, later.nodes, later.restarts) == ("20", 5, "BeginTime", 1, 0)
    assert later.words == "20 5 PENDING 0 1 2026-11-21T13:56:38 2026-11-21T14:01:38 BeginTime 0 smoke-later"


def test_sacct_has_the_final_states_of_jobs() -> None:
    found = select_latest(states.parse_sacct(recorded("sacct.txt")))
    assert {key: state.state for key, state in found.items()} == {
        **dict.fromkeys(ARRAY, "COMPLETED"),
        ("smoke-array", 1): "FAILED",
        ("smoke-ok", None): "COMPLETED",
        ("smoke-cancelled", None): "CANCELLED",
        ("smoke-timeout", None): "TIMEOUT",
        ("smoke-requeued", None): "COMPLETED",
        ("smoke-node", None): "NODE_FAIL",
        ("preempted-no-requeue", None): "PREEMPTED",
        ("preempted-requeue", None): "CANCELLED",  # later
    }
    assert found["smoke-cancelled", None].words.startswith("17|CANCELLED by 0|")


def test_sacct_and_the_completion_log_agree() -> None:
    accounted, logged = (
        {
            key: (state.handle, state.state, state.restarts, state.nodes, state.started_at, state.ended_at)
            for key, state in select_latest(found).items()
        }
        for found in (
            states.parse_sacct(recorded("sacct.txt")),
            states.parse_completion_log(recorded("completion.log")),
        )
    )
    assert accounted == logged
    assert {state.source for state in states.parse_completion_log(recorded("completion.log"))} == {"completion log"}


def test_requeued_job_has_its_number_of_restarts() -> None:
    restarts = {key: state.restarts for key, state in select_latest(states.parse_sacct(recorded("sacct.txt"))).items()}
    again = [name for (name, _), number in restarts.items() if number == 1]
    assert again == ["smoke-requeued", "preempted-requeue"] and set(restarts.values()) == {0, 1}


def test_times_are_seconds_since_the_epoch_and_an_expected_end_is_no_end() -> None:
    found = select_latest(states.parse_squeue(recorded("squeue.txt")))
    assert found["smoke-cancelled", None].started_at == 1795265799  # date -ud 2026-11-21T12:56:39 +%s
    assert found["smoke-cancelled", None].ended_at == 1795265807
    assert found["smoke-timeout", None].ended_at is None and found["smoke-later", 0].ended_at is None


# -- a newer Slurm


def test_output_of_slurm_24_is_parsed_like_that_of_22() -> None:
    expected = {
        ("smoke-ok", None): "COMPLETED",
        ("smoke-cancelled", None): "CANCELLED",
        **dict.fromkeys(ARRAY, "COMPLETED"),
        ("smoke-array", 1): "FAILED",
        ("smoke-timeout", None): "TIMEOUT",
        ("smoke-requeued", None): "COMPLETED",
        ("smoke-preempted", None): "COMPLETED",
        ("smoke-node", None): "NODE_FAIL",
        ("urgent", None): "COMPLETED",
    }
    queued = select_latest(states.parse_squeue(recorded("24.11/squeue.txt")))
    later = {key: state for key, state in queued.items() if key[0] == "smoke-later"}
    assert {task for _, task in later} == {0, 2, 5, 6, 7} and {state.state for state in later.values()} == {"PENDING"}
    accounted = select_latest(states.parse_sacct(recorded("24.11/sacct.txt")))
    logged = select_latest(states.parse_completion_log(recorded("24.11/completion.log")))
    queued = {key: queued[key] for key in queued.keys() - later.keys()}
    for told in (queued, accounted, logged):
        assert {key: state.state for key, state in told.items()} == expected
    facts = [
        {
            key: (state.handle, state.restarts, state.nodes, state.started_at, state.ended_at)
            for key, state in told.items()
        }
        for told in (queued, accounted, logged)
    ]
    assert facts[0] == facts[1] == facts[2]
    assert {name for (name, _), state in accounted.items() if state.restarts} == {"smoke-requeued", "smoke-preempted"}


def test_all_three_sources_of_slurm_24_have_the_exit_code() -> None:
    queued = select_latest(states.parse_squeue(recorded("24.11/squeue.txt")))
    accounted = select_latest(states.parse_sacct(recorded("24.11/sacct.txt")))
    logged = select_latest(states.parse_completion_log(recorded("24.11/completion.log")))
    for told in (queued, accounted, logged):
        failed, good = told["smoke-array", 1], told["smoke-array", 0]
        assert (failed.exit, failed.exit_code, good.exit, good.exit_code) == ("exit code 1", 1, "", 0)


def test_output_of_slurm_26_is_parsed_like_that_of_22() -> None:
    ended = {
        ("smoke-ok", None): ("COMPLETED", 0, ""),
        ("smoke-cancelled", None): ("CANCELLED", 0, ""),
        **dict.fromkeys(ARRAY, ("COMPLETED", 0, "")),
        ("smoke-array", 1): ("FAILED", 0, "exit code 1"),
        ("smoke-75", None): ("FAILED", 0, "exit code 75"),
        ("smoke-timeout", None): ("TIMEOUT", 0, ""),
        ("smoke-requeued", None): ("COMPLETED", 1, ""),
    }
    queued = select_latest(states.parse_squeue(recorded("26.05/squeue.txt")))
    pending = {key: state for key, state in queued.items() if state.pending}
    assert set(pending) == {
        *(("smoke-later", task) for task in (0, 2, 5, 6, 7)),
        ("smoke-node", None),
        ("smoke-preempted", None),
    }
    assert {state.ended_at for state in pending.values()} == {None}
    # A reason of this length is cut off, and there is no space between it and the next column.
    assert pending["smoke-preempted", None].reason.startswith("Nodes required for job are DOWN, DRAINED or reserved")
    logged = select_latest(states.parse_completion_log(recorded("26.05/completion.log")))
    for told in ({key: queued[key] for key in queued.keys() - pending.keys()}, logged):
        told = {key: state._replace(exit="" if state.outcome != "error" else state.exit) for key, state in told.items()}
        assert {key: (state.state, state.restarts, state.exit) for key, state in told.items()} == ended
    assert queued["smoke-75", None].exit_code == logged["smoke-75", None].exit_code == 75


def test_limits_of_slurm_26_are_parsed() -> None:
    known = cluster.parse_config(recorded("26.05/config.txt"))
    assert (known["SLURM_VERSION"], known["JobCompType"], known["MaxArraySize"]) == (
        "26.05.5",
        "jobcomp/filetxt",
        "1001",
    )
    found = cluster.select_partitions(recorded("26.05/partitions.txt"), None)
    assert (cluster.find_max_time_min(found), cluster.find_max_nodes(found)) == (None, 3)


def test_output_in_an_unknown_format_is_refused_in_one_line() -> None:
    """If output in an unknown format counted as an empty list of jobs, zeroscale would submit all points again."""
    for parse, program in ((states.parse_squeue, "squeue"), (states.parse_sacct, "sacct")):
        with pytest.raises(UserError, match=f"^{program}: its output has an unknown form: Job of root; report"):
            list(parse("Job of  root\n  runs\n"))
        assert list(parse("")) == list(parse("CLUSTER: one\n")) == []


def test_limits_of_slurm_24_are_parsed() -> None:
    known = cluster.parse_config(recorded("24.11/config.txt"))
    assert (known["MaxArraySize"], known["ClusterName"], known["JobCompType"]) == ("1001", "n", "jobcomp/filetxt")
    assert known["SLURM_VERSION"] == "24.11.5"
    assert cluster.find_max_time_min(cluster.select_partitions(recorded("24.11/partitions.txt"), None)) == 120


# -- output of other Slurm versions and sites


@pytest.mark.parametrize("word", ["PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"])
def test_pending_states_are_live_and_not_running(word: str) -> None:
    state = JobState("1", "a", None, find_phase(word), word)
    assert (state.pending, state.running, state.live) == (True, False, True)


@pytest.mark.parametrize("word", ["RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STAGE_OUT", "A_NEWER_WORD"])
def test_states_of_jobs_that_have_started_or_are_unknown_count_as_running(word: str) -> None:
    state = JobState("1", "a", None, find_phase(word), word)
    assert (state.pending, state.running, state.live) == (False, True, True)


@pytest.mark.parametrize("word", ["COMPLETED", "FAILED", "OUT_OF_MEMORY", "PREEMPTED", "NODE_FAIL", "DEADLINE"])
def test_final_states_are_neither_pending_nor_running(word: str) -> None:
    state = JobState("1", "a", None, find_phase(word), word)
    assert (state.pending, state.running, state.live) == (False, False, False)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("12|CANCELLED by 1004|2|2026-01-02T03:04:05|2026-01-02T03:05:05|0:15|None|a", [("12", None, "CANCELLED")]),
        ("12|CANCELLED+|2|2026-01-02T03:04:05|2026-01-02T03:05:05|0:15|None|a", [("12", None, "CANCELLED")]),
        ("12_[3-5%2]|PENDING|1|Unknown|Unknown|0:0|Priority|a", [("12", n, "PENDING") for n in (3, 4, 5)]),
        ("12_[0,7]|PENDING|1|Unknown|Unknown|0:0|Dependency|a", [("12", n, "PENDING") for n in (0, 7)]),
        ("12_4|RUNNING|1|2026-01-02T03:04:05|Unknown|0:0|None|a|b", [("12", 4, "RUNNING")]),
        ("12+0|COMPLETED|1|2026-01-02T03:04:05|2026-01-02T03:05:05|0:0||a", [("12", None, "COMPLETED")]),
        ("", []),
        ("12|FAILED|1|Unknown|Unknown|1:0|None|a\nthe rest of a name with a line break", [("12", None, "FAILED")]),
    ],
)
def test_sacct_lines_of_other_versions_and_sites(line: str, told: list[tuple[str, int | None, str]]) -> None:
    assert [(state.handle, state.task, state.state) for state in states.parse_sacct(line)] == told


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("3", [3]), ("0-3", [0, 1, 2, 3]), ("0,2,5-7%2", [0, 2, 5, 6, 7]), ("8-14:3", [8, 11, 14]), ("", [])],
)
def test_pending_array_tasks_are_expanded(text: str, tasks: list[int]) -> None:
    assert states.parse_tasks(text) == tasks


def test_latest_of_two_jobs_of_one_name_is_selected() -> None:
    older, younger = (JobState(number, "a", None, "running", "RUNNING") for number in ("9", "10"))
    assert select_latest([older, younger]) == select_latest([younger, older]) == {("a", None): younger}


def test_ten_thousand_jobs_are_parsed_within_a_second() -> None:
    line = recorded("squeue.txt").splitlines()[0]
    text = "\n".join(f"{number:<12}{line[12:]}" for number in range(10_000))
    begin = time.process_time()  # CPU time of this process, so that background load does not matter
    assert len(list(states.parse_squeue(text))) == 10_000
    assert time.process_time() - begin < 1.0


# -- limits


def test_array_size_and_completion_log_are_parsed_from_the_config() -> None:
    known = cluster.parse_config(recorded("config.txt"))
    assert known["MaxArraySize"] == "10" and known["ClusterName"] == "lr"
    assert (known["JobCompType"], known["JobCompLoc"]) == ("jobcomp/filetxt", "/var/log/slurm/jobcomp.log")


def test_time_limit_is_that_of_the_partition() -> None:
    told = recorded("partitions.txt")  # one partition, the default, with MaxTime=1-02:00:00
    told += "PartitionName=gpu Default=NO MaxTime=04:30:00 State=UP\nPartitionName=long Default=NO MaxTime=UNLIMITED\n"

    def limit(named: str | None) -> int | None:
        return cluster.find_max_time_min(cluster.select_partitions(told, named))

    assert limit(None) == limit("main") == 26 * 60
    assert limit("main,gpu") == 270
    assert limit("long") is None and limit("nobody") is None


@pytest.mark.parametrize(
    ("account", "partition", "expected"), [(None, None, [25, 10]), ("proj", None, [25]), ("proj", "gpu", [25, 4])]
)
def test_job_limit_is_that_of_the_account(account: str | None, partition: str | None, expected: list[int]) -> None:
    told = "proj||long|25|\nproj|gpu|long|4|\nroot|||10|\nroot|gpu|||\n"
    assert list(cluster.list_submit_limits(told, account, partition)) == expected


def test_group_limit_and_default_qos_are_parsed_from_the_account() -> None:
    told = "proj||long|25|12\nroot|||10|\n"
    assert list(cluster.list_submit_limits(told, "proj", None)) == [25, 12]
    assert cluster.find_default_qos(told, "proj", None) == {"long"}
    assert cluster.find_default_qos(told, None, None) == {"long", "normal"}


def test_gpus_are_counted_by_type() -> None:
    found = cluster.select_partitions("PartitionName=gpu Default=YES State=UP\n", None)
    nodes = "gpu*|64|gpu:a100:4(S:0-1)\ngpu*|64|gpu:a100:8,gpu:v100:2\ngpu*|2|(null)\nother|64|gpu:16\n"
    assert cluster.find_max_cpus(found, nodes) == 64
    assert cluster.find_max_gpus(found, nodes, "--gres=gpu:{devices}") == 10
    assert cluster.find_max_gpus(found, nodes, "--gres=gpu:a100:{devices}") == 8
    assert cluster.find_max_gpus(found, nodes, "--gpus-per-node=v100:{devices}") == 2
    assert cluster.find_max_gpus(found, "gpu*|2|(null)\n", "--gres=gpu:{devices}") == 0
    assert cluster.find_max_gpus(found, "", "--gres=gpu:{devices}") is None


def test_largest_job_and_node_of_a_partition_are_found() -> None:
    told = recorded("partitions.txt")  # two nodes
    told += "PartitionName=gpu TotalNodes=40 MaxNodes=4 State=UP\nPartitionName=all TotalNodes=60 MaxNodes=UNLIMITED\n"

    def most(named: str | None) -> int | None:
        return cluster.find_max_nodes(cluster.select_partitions(told, named))

    assert (most(None), most("gpu"), most("main,gpu"), most("all")) == (2, 4, 4, 60)
    assert most("nobody") is None and most("") is None
    nodes = "main*|2\ngpu|64\ngpu|128\n"  # sinfo marks the default partition with a star
    found = cluster.select_partitions(told, "main,gpu")
    assert cluster.find_max_cpus(found, nodes) == 128 and cluster.find_max_cpus(found[:1], nodes) == 2
    assert cluster.find_max_cpus([], nodes) is None


# -- descriptions of ended and pending jobs


@pytest.mark.parametrize(
    ("code", "number", "words"),
    [
        (0, 0, ""),
        (1, 0, "exit code 1"),
        (137, 0, "exit code 137, as of SIGKILL"),  # 128 + 9
        (127, 0, "exit code 127"),
        (0, 9, "killed by SIGKILL"),
        (255, 0, "exit code 255"),
        (0, 126, "killed by signal 126"),
    ],
)
def test_exit_codes_are_described(code: int, number: int, words: str) -> None:
    assert states.describe_exit(code, number) == words


def queued_line(exit_code: int | str, state: str = "FAILED", reason: str = "NonZeroExitCode") -> JobState:
    """Write a line of squeue's output for a job with this exit code, state and reason. Return the job's state that the
    parser reads from this line."""
    values = {
        "ArrayJobID": 7,
        "ArrayTaskID": "N/A",
        "State": state,
        "Reason": reason,
        "exit_code": exit_code,
        "Name": "s",
    }
    columns = [column.split(":") for column in states.SQUEUE_FORMAT.split(",")]
    [found] = states.parse_squeue("".join(f"{values.get(field, 'N/A')!s:<{width}}" for field, width in columns))
    return found


@pytest.mark.parametrize(
    ("status", "words"),
    [(35072, "exit code 137, as of SIGKILL"), (256, "exit code 1"), (9, "killed by SIGKILL"), (0, ""), (1, ""),
     ("137:0", "exit code 137, as of SIGKILL"), ("1:0", "exit code 1"), ("0:9", "killed by SIGKILL"), ("0:1", "")],
)  # fmt: skip
def test_squeues_exit_code_is_a_wait_status_or_code_and_signal(status: int | str, words: str) -> None:
    assert queued_line(status).exit == words


def test_all_three_sources_have_the_exit_code() -> None:
    accounted = select_latest(states.parse_sacct(recorded("sacct.txt")))["smoke-array", 1]
    logged = select_latest(states.parse_completion_log(recorded("completion.log")))["smoke-array", 1]
    assert accounted.exit == logged.exit == queued_line(256).exit == "exit code 1"
    assert accounted.exit_code == logged.exit_code == queued_line(256).exit_code == 1


@pytest.mark.parametrize(
    ("reason", "stuck"),
    [
        ("PartitionConfig", "cannot start with the resources that it requests"),
        ("PartitionNodeLimit", "cannot start with the resources that it requests"),
        ("QOSMaxNodePerJobLimit", "cannot start with the resources that it requests"),
        ("JobHeldUser", "held until a user or administrator releases it"),
        ("Priority", ""),
        ("Resources", ""),
        ("BeginTime", ""),
        ("QOSMaxJobsPerUserLimit", ""),
        ("ReqNodeNotAvail, UnavailableNodes:n1", ""),
    ],
)
def test_reasons_that_need_the_user_are_described(reason: str, stuck: str) -> None:
    assert queued_line(0, "PENDING", reason).stuck == stuck
    assert queued_line(0, "RUNNING", reason).stuck == ""


def test_reason_none_is_empty() -> None:
    assert queued_line(0, "PENDING", "None").reason == ""


def test_longest_reason_of_squeue_is_not_cut() -> None:
    """squeue cuts each value to the width of its column."""
    reason = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
    values = {"ArrayJobID": "7", "State": "PENDING", "Reason": reason, "Name": "a"}
    columns = (column.split(":") for column in states.SQUEUE_FORMAT.split(","))
    line = "".join(f"{values.get(name, 'N/A'):<{width}.{width}}" for name, width in columns)
    assert [state.reason for state in states.parse_squeue(line)] == [reason]
