"""Tests of the testbed (a small Slurm cluster on this machine): it behaves like a cluster, produces faults on request,
and leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_testbed import PROGRAM, Testbed, wait_for

_RECEIVE = """
import socket, time
server = socket.create_server(("", 5000))
print("listening", flush=True)
link = server.accept()[0]
skip = 1 << 20  # the burst, which passes before the rate counts
while skip > 0:
    skip -= len(link.recv(1 << 16))
start, received = time.monotonic(), 0
while block := link.recv(1 << 16):
    received += len(block)
print(received * 8 / 1e6 / (time.monotonic() - start))
"""
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as link:
    link.sendall(bytes(int(sys.argv[2])))
"""


def _mbit_per_s(bed: Testbed, sender: str, receiver: str, megabytes: int) -> float:
    """Send a number of megabytes over TCP from one node to another. Return the rate in Mbit/s, measured by the
    receiver."""
    command = [sys.executable, str(PROGRAM), "exec", "--name", bed.name, receiver, "--", sys.executable, "-c", _RECEIVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout and server.stdout.readline() == "listening\n"
        sent = bed.on(sender, sys.executable, "-c", _SEND, receiver, str(megabytes * 1_000_000))
        assert sent.returncode == 0, sent.stderr
        return float(server.stdout.read())


def _gone(pid: int) -> bool:
    """Return True if a process has ended. A zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _submit(bed: Testbed, command: str, *options: str) -> str:
    return bed.slurm("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}").strip()


def _job_state(bed: Testbed, job: str) -> str:
    return bed.slurm("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()


# -- a cluster that behaves like one


def test_slurm_lists_the_nodes_and_status_prints_how_to_use_them(testbed: Testbed) -> None:
    nodes = [testbed.node(number) for number in (1, 2, 3)]
    assert testbed.slurm("sinfo", "-h", "-N", "-o", "%N %T").splitlines() == [f"{node} idle" for node in nodes]
    status, printed = testbed.status, testbed("status").stdout
    assert status["controller_up"] and list(status["nodes"]) == nodes
    assert f"export SLURM_CONF={status['slurm_conf']}" in printed and all(node in printed for node in nodes)


def test_each_node_has_its_own_name_and_resolves_the_others(testbed: Testbed) -> None:
    nodes = [testbed.node(number) for number in (1, 2, 3)]
    assert sorted(testbed.slurm("srun", "-N3", "hostname").split()) == nodes
    resolved = testbed.slurm("srun", "-N3", "getent", "hosts", nodes[1]).splitlines()
    assert [line.split() for line in resolved] == [[testbed.status["nodes"][nodes[1]]["address"], nodes[1]]] * 3


def test_batch_job_starts_ranks_on_its_nodes_and_is_in_the_completion_log(testbed: Testbed, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    job = _submit(testbed, f"srun hostname > {names}; scontrol show hostnames >> {names}", "--nodes=2")
    log = Path(testbed.status["completion_log"])
    wait_for(lambda: f"JobId={job} " in (log.read_text() if log.exists() else ""))
    line = next(line for line in log.read_text().splitlines() if line.startswith(f"JobId={job} "))
    assert "JobState=COMPLETED" in line and "NodeCnt=2" in line
    assert sorted(names.read_text().split()) == sorted([testbed.node(1), testbed.node(2)] * 2)


# -- faults on demand


@pytest.mark.timed
def test_link_has_the_requested_rate_and_the_rate_can_be_changed(testbed: Testbed) -> None:
    one, two, three = (testbed.node(number) for number in (1, 2, 3))
    assert _mbit_per_s(testbed, one, two, megabytes=12) == pytest.approx(100, rel=0.15)
    testbed("link", two, "--rate", "40mbit")
    try:
        assert testbed.status["nodes"][two]["link"]["rate_mbit"] == 40
        assert _mbit_per_s(testbed, one, two, megabytes=6) == pytest.approx(40, rel=0.15)
        assert _mbit_per_s(testbed, two, one, megabytes=6) == pytest.approx(40, rel=0.15), "also what it sends"
        assert _mbit_per_s(testbed, one, three, megabytes=12) == pytest.approx(100, rel=0.15), (
            "other links keep their rate"
        )
        testbed("link", "all", "--rate", "none")
        assert _mbit_per_s(testbed, one, two, megabytes=40) > 400
        assert testbed.status["nodes"][two]["link"]["rate_mbit"] is None
    finally:
        testbed("link", "all", "--rate", "100mbit")


@pytest.mark.thorough
def test_disconnected_link_makes_a_node_unreachable_until_it_is_reconnected(testbed: Testbed) -> None:
    one, two = testbed.node(1), testbed.node(2)
    knock = [sys.executable, "-c", f"import socket; socket.create_connection(('{two}', 6818))"]
    testbed("link", two, "--down")
    try:
        assert testbed.status["nodes"][two]["link"]["up"] is False
        assert testbed.on(one, "timeout", "2", *knock).returncode == 124, "a cut shows as silence, not as an error"
    finally:
        testbed("link", two, "--up")
    assert testbed.on(one, "timeout", "60", *knock).returncode == 0


@pytest.mark.thorough
def test_lost_node_is_declared_down_and_can_return(testbed: Testbed, tmp_path: Path) -> None:
    silent, crashed = testbed.node(2), testbed.node(3)
    here = f"{tmp_path}/$SLURMD_NODENAME"  # each node has its own file, because two jobs write at the same time
    write_pid = f"echo $$ > {here}.new; mv {here}.new {here}; exec sleep 300"
    jobs = {node: _submit(testbed, write_pid, f"--nodelist={node}", "--no-requeue") for node in (silent, crashed)}
    wait_for(lambda: all((tmp_path / node).exists() for node in jobs))
    testbed("slurmd", silent, "stop")
    testbed("slurmd", crashed, "crash")
    assert not _gone(int((tmp_path / silent).read_text())), "without its slurmd a job goes on"
    assert _gone(int((tmp_path / crashed).read_text())), "a crash takes the jobs along"
    assert not any(testbed.status["nodes"][node]["slurmd"] for node in jobs)
    wait_for(lambda: all(testbed.state(node).startswith("down") for node in jobs))
    assert {_job_state(testbed, job) for job in jobs.values()} == {"NODE_FAIL"}
    for node in jobs:
        testbed("slurmd", node, "start")
    wait_for(lambda: all(testbed.state(node) == "idle" for node in jobs))


@pytest.mark.thorough
def test_running_job_survives_a_restart_of_the_controller(testbed: Testbed) -> None:
    job = _submit(testbed, "sleep 300")
    wait_for(lambda: _job_state(testbed, job) == "RUNNING")
    testbed("controller", "stop")
    assert testbed.status["controller_up"] is False and testbed("status", code=1)
    testbed("controller", "restart")
    assert _job_state(testbed, job) == "RUNNING"
    testbed.slurm("scancel", job)


def test_unknown_node_and_missing_option_are_refused(testbed: Testbed) -> None:
    for words in (["slurmd", "n9", "stop"], ["link", "n9", "--down"], ["exec", "n9", "--", "true"]):
        assert "n9: no such node; choose from" in testbed(*words, code=2).stderr
    assert "needs --rate" in testbed("link", testbed.node(1), code=2).stderr


# -- nothing else is changed, and nothing is left over


@pytest.mark.thorough
def test_second_up_is_refused_and_does_not_change_the_first_testbed(testbed: Testbed) -> None:
    assert "already exists" in testbed.up(code=2).stderr
    elsewhere = testbed.up("--dir", f"{testbed.folder}-second", code=2)
    assert "exists already" in elsewhere.stderr and not Path(f"{testbed.folder}-second").exists()
    assert testbed.slurm("srun", "-N3", "hostname")


@pytest.mark.thorough
def test_down_removes_one_of_two_testbeds_completely(testbed: Testbed, other_testbed: Testbed) -> None:
    other_testbed.up("--nodes", "1", "--conf", "MaxArraySize=10", "--max-time", "30")
    assert other_testbed.slurm("srun", "hostname").strip() == other_testbed.node(1)
    assert other_testbed.slurm("sinfo", "-h", "-o", "%l").strip() == "30:00"
    assert "MaxArraySize            = 10\n" in other_testbed.slurm("scontrol", "show", "config")
    _submit(other_testbed, "setsid sleep 300 & sleep 300")  # the first process is in a session of its own
    wait_for(lambda: other_testbed.state(other_testbed.node(1)) == "mixed")

    lists = [subprocess.check_output(["ip", "netns", "pids", other_testbed.node(n)], text=True) for n in (0, 1)]
    pids = [int(pid) for pid in "".join(lists).split()]
    assert len(pids) >= 5
    other_testbed("down")
    assert other_testbed.leftovers() == [] and all(map(_gone, pids))
    assert "nothing to take down" in other_testbed("down").stdout
    assert testbed.slurm("srun", "-N3", "hostname"), "the other one goes on"


@pytest.mark.thorough
def test_failed_up_leaves_nothing_behind_and_prints_the_reason(other_testbed: Testbed) -> None:
    failed = other_testbed.up("--nodes", "2", "--conf", "SelectType=select/nonsense", code=1)
    assert "Can't find plugin for select/nonsense" in failed.stderr and "slurmctld" in failed.stderr.splitlines()[-1]
    assert other_testbed.leftovers() == []
    assert "--rate 400mbot: must be" in other_testbed.up("--rate", "400mbot", code=2).stderr
    assert other_testbed.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.thorough
def test_killed_up_can_be_taken_down(other_testbed: Testbed, number: signal.Signals) -> None:
    command = [sys.executable, str(PROGRAM), "up", "--name", other_testbed.name, "--subnet", other_testbed.subnet]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: "slurmctld" in _processes(other_testbed))
        process.send_signal(number)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number == signal.SIGKILL:  # after SIGTERM the program itself removes the testbed
        pids = _processes(other_testbed)
        other_testbed("down")
        assert all(_gone(process["pid"]) for process in pids.values())
    assert other_testbed.leftovers() == []


def _processes(bed: Testbed) -> dict[str, dict[str, int]]:
    """Return the daemons in the testbed's ledger (state.json) by name, each with its process id. Empty if there is no
    ledger."""
    try:
        found: dict[str, dict[str, int]] = json.loads((bed.folder / "state.json").read_text())["processes"]
    except FileNotFoundError:
        return {}
    return found


@pytest.mark.thorough
def test_reused_pid_of_another_process_is_not_killed(other_testbed: Testbed) -> None:
    other_testbed.up("--nodes", "1")
    ledger = other_testbed.folder / "state.json"
    with subprocess.Popen(["sleep", "60"]) as bystander:
        state = json.loads(ledger.read_text())
        state["processes"]["munged"]["pid"] = bystander.pid  # the start time is still that of munged
        ledger.write_text(json.dumps(state))
        other_testbed("down")
        time.sleep(0.1)
        assert bystander.poll() is None
        bystander.kill()
    assert other_testbed.leftovers() == []


def test_up_requires_root(slurm_possible: None, other_testbed: Testbed) -> None:
    # In a new user namespace, root has no privileges, but can still read Python and this checkout.
    command = ["unshare", "--user", sys.executable, str(PROGRAM), "up", "--name", other_testbed.name]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2 and "needs root; use sudo" in refused.stderr
    assert other_testbed.leftovers() == []
