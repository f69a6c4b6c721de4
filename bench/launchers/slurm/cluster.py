"""Calls of Slurm's command-line programs, and the limits of a cluster as reported by these programs."""

import contextlib
import logging
import os
import pwd
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from bench.core import job_environment
from bench.core.errors import UserError
from bench.core.scheduling import ClusterLimits, SchedulerUnavailable
from bench.launchers.slurm.options import Options

_LOGGER = logging.getLogger(__name__)
_UNAVAILABLE = re.compile(
    r"unable to (contact|establish)|timed out|connection (refused|reset)|zero bytes were transmitted|not connected"
    r"|standby mode|no route to host",
    re.IGNORECASE,
)
"""Pattern of error messages that mean that Slurm is unavailable. Other error messages mean that Slurm refused the
request."""
# Variables of Slurm that are passed on even if this process runs in a job. They do not describe that job, but select a
# cluster and a method of authentication.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
# Maximum seconds for a program. Most of Slurm's programs fail by themselves after seconds. If the queue is full, sbatch
# fails after two minutes.
_ANSWER_S = 200.0
# Seconds after which a warning is logged. A healthy controller answers faster.
_NOTICE_S = 5.0
_OTHER_ACCOUNT = re.compile(r"--account\b|-A")
_OTHER_PLACE = re.compile(r"--(partition|clusters?)\b|-[pM]")
"""Pattern of sbatch options that select a partition or cluster. They take precedence over the option `partition` of the
site file."""


def build_user_environment() -> dict[str, str]:
    """Return the environment variables of this process, without the variables that describe the job in which it runs.

    Otherwise `srun` and `sbatch` would use the number of tasks or the memory of the current job as options of the new
    job. The variable ZEROSCALE_JOB is removed as well. A launcher from a plug-in sets this variable to describe the
    current job, and the new job would inherit this description.
    """
    environment = {key: value for key, value in os.environ.items() if key != job_environment.OWN}
    if "SLURM_JOB_ID" not in environment:
        return environment
    return {key: value for key, value in environment.items() if not key.startswith("SLURM") or key in _KEPT}


def call(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run one of Slurm's programs and return its output.

    `environment` has the environment variables of the program. If it is None, the program gets the variables of this
    process, except those that describe the current job or change the format of the output. A warning is logged if the
    program takes longer than 5 s. Raise SchedulerUnavailable if Slurm does not answer. Raise UserError with the
    program's own message if it refuses the request.
    """
    if environment is None:
        # The user's settings for these programs would change the format of their output.
        personal = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")
        environment = {key: value for key, value in build_user_environment().items() if not key.startswith(personal)}
        environment |= {"SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=pipe, text=True, errors="surrogateescape"
        )
    except FileNotFoundError as error:
        remedy = "run the command on a login node of the cluster, or load the module that provides it"
        raise UserError(command[0], "this program of Slurm is not installed on this machine", remedy) from error
    with process:
        output, errors = _wait(process, command[0])
    if process.returncode == 0:
        return output
    lines = [line.removeprefix(f"{command[0]}: ").removeprefix("error: ").strip() for line in errors.splitlines()]
    message = "; ".join(dict.fromkeys(filter(None, lines))) or f"exit code {process.returncode}"
    if _UNAVAILABLE.search(message):
        raise SchedulerUnavailable(command[0], message, "try again later")
    raise UserError(command[0], message)


def _wait(process: subprocess.Popen[str], program: str) -> tuple[str, str]:
    """Return the standard output and standard error of a process of `program`. Kill the process if it takes too long,
    or on Ctrl-C."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=min(_NOTICE_S, _ANSWER_S))
        _LOGGER.warning("%s has not answered for %.0f s; still waiting; stop with Ctrl-C", program, _NOTICE_S)
        return process.communicate(timeout=max(0.0, _ANSWER_S - _NOTICE_S))
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise SchedulerUnavailable(program, f"no answer within {_ANSWER_S:.0f} s", "try again later") from error
    except BaseException:
        process.kill()
        raise


def limits(options: Options) -> ClusterLimits:
    """Return the limits that the partition, account and quality of service (QOS) in `options` impose on jobs.

    On a machine without Slurm all limits are unknown, so a sweep can still be planned there. Raise SchedulerUnavailable
    if Slurm does not answer.
    """
    try:
        known = read_config()
        partitions = call("scontrol", "show", "partition", "--oneliner")
        nodes = call("sinfo", "--noheader", "--all", "--exact", "--format=%P|%c|%G")
    except SchedulerUnavailable:
        raise
    except UserError:
        return ClusterLimits()
    array, named = known.get("MaxArraySize", ""), options.partition or os.environ.get("SBATCH_PARTITION")
    if any(_OTHER_PLACE.match(option) for option in options.extra):
        # This option names a partition or cluster and is not parsed here, so the limits are unknown.
        named = ""
    found = select_partitions(partitions, named)
    # A job with more devices than a node has cores for would wait in the queue forever.
    cores, cpus_per_device = find_max_cpus(found, nodes), options.cpus_per_device
    return ClusterLimits(
        max_array_size=int(array) if array.isdigit() else None,
        max_submit_jobs=_find_max_submit_jobs(options, known.get("ClusterName", ""), found),
        max_time_min=find_max_time_min(found),
        max_nodes=find_max_nodes(found),
        max_devices_per_node=cores // cpus_per_device if cores is not None and cpus_per_device else None,
        max_gpus_per_node=find_max_gpus(found, nodes, options.gpus) if options.gpus else None,
    )


def read_config() -> dict[str, str]:
    """Return the configuration parameters of Slurm by name, from `scontrol show config`."""
    return parse_config(call("scontrol", "show", "config"))


def parse_config(text: str) -> dict[str, str]:
    """Return the parameters in the output of `scontrol show config`, which has lines `Key = value`."""
    return dict(re.findall(r"^(\w+) *= (.*?) *$", text, re.MULTILINE))


Partition = Mapping[str, str]
"""Fields of a partition, from the `Key=value` words of scontrol."""


def select_partitions(partitions: str, named: str | None) -> list[Partition]:
    """Return the partitions in the output of `scontrol show partition --oneliner` whose names are in `named`.

    `named` is a comma-separated list. If `named` is None, the default partition is returned.
    """
    lines = (dict(word.split("=", 1) for word in line.split() if "=" in word) for line in partitions.splitlines())
    if named is None:
        return [fields for fields in lines if fields.get("Default") == "YES"]
    return [fields for fields in lines if fields.get("PartitionName") in named.split(",")]


def find_max_time_min(found: Sequence[Partition]) -> int | None:
    """Return the shortest time limit (MaxTime) of these partitions in minutes; None if none has a limit.

    The shortest limit counts, because Slurm may start a job in any of these partitions.
    """
    limits = (_parse_minutes(fields.get("MaxTime", "")) for fields in found)
    return min((limit for limit in limits if limit is not None), default=None)


def find_max_nodes(found: Sequence[Partition]) -> int | None:
    """Return the largest number of nodes that a job can have in any of these partitions; None if unknown.

    Nodes that are down are included in the numbers of nodes.
    """
    limits = []
    for fields in found:
        numbers = [int(fields[key]) for key in ("TotalNodes", "MaxNodes") if fields.get(key, "").isdigit()]
        if not numbers:
            return None
        limits.append(min(numbers))
    return max(limits, default=None)


def find_max_cpus(found: Sequence[Partition], nodes: str) -> int | None:
    """Return the number of cores of the largest node in these partitions; None if unknown.

    `nodes` is output of sinfo with lines `partition|cores|resources`.
    """
    return max((int(fields[0]) for fields in _list_nodes(found, nodes) if fields[0].isdigit()), default=None)


def find_max_gpus(found: Sequence[Partition], nodes: str, gpus: str) -> int | None:
    """Return the largest number of GPUs per node in these partitions; None if no node is known.

    `nodes` is output of sinfo with lines `partition|cores|resources`. If the sbatch option `gpus` contains a GPU type,
    only GPUs of this type are counted.
    """
    named = re.search(r"gpu(?:s-per-node=|:)([A-Za-z]\w*):", gpus)
    counts = []
    for fields in _list_nodes(found, nodes):
        resources = re.findall(r"gpu(?::([A-Za-z][\w.-]*))?:(\d+)", fields[1] if len(fields) > 1 else "")
        counts.append(sum(int(number) for kind, number in resources if not named or not kind or kind == named[1]))
    return max(counts, default=None)


def _list_nodes(found: Sequence[Partition], nodes: str) -> Iterator[list[str]]:
    """Yield the fields [cores, resources] of each line of `nodes` that belongs to one of the partitions `found`.
    `nodes` is output of sinfo with lines `partition|cores|resources`."""
    names = {fields.get("PartitionName") for fields in found}
    for line in nodes.splitlines():
        name, *fields = line.strip().split("|")
        # sinfo marks the default partition with a star.
        if name.rstrip("*") in names and fields:
            yield fields


def _parse_minutes(text: str) -> int | None:
    """Return the whole minutes of a time in Slurm's format `days-hours:minutes:seconds`; None for words such as
    UNLIMITED."""
    parsed = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not parsed:
        return None
    days, hours, mins, _ = (int(part or 0) for part in parsed.groups())
    return 1440 * days + 60 * hours + mins


def _find_max_submit_jobs(options: Options, cluster: str, partitions: Sequence[Partition]) -> int | None:
    """Return the maximum number of submitted jobs that Slurm's accounting allows this user; None without a limit."""
    found: list[int] = []
    names = {options.qos} if options.qos else set[str]()
    show = ("sacctmgr", "--noheader", "--parsable2", "show")
    with contextlib.suppress(UserError, KeyError):
        user = pwd.getpwuid(os.getuid()).pw_name
        shown = "format=Account,Partition,DefaultQOS,MaxSubmitJobs,GrpSubmitJobs"
        table = call(*show, "assoc", "where", f"user={user}", f"cluster={cluster}", shown)
        account = _find_account(options, user, cluster)
        found += list_submit_limits(table, account, options.partition)
        names = names or find_default_qos(table, account, options.partition)
    names |= {fields["QoS"] for fields in partitions if fields.get("QoS", "N/A") not in ("N/A", "")}
    with contextlib.suppress(UserError):
        if names:
            shown = "format=Name,MaxSubmitJobsPerUser,MaxSubmitJobsPerAccount,GrpSubmitJobs"
            table = call(*show, "qos", "where", f"name={','.join(sorted(names))}", shown)
            found += [int(limit) for line in table.splitlines() for limit in line.split("|")[1:] if limit.isdigit()]
    return min(found, default=None)


def _find_account(options: Options, user: str, cluster: str) -> str | None:
    """Return the account to which Slurm charges a job with these options; None if it is unknown."""
    if options.account or any(map(_OTHER_ACCOUNT.match, options.extra)):  # an account in `extra` is not parsed
        return options.account
    if named := os.environ.get("SBATCH_ACCOUNT"):
        return named
    show = ("sacctmgr", "--noheader", "--parsable2", "show", "user", "where")
    with contextlib.suppress(UserError):
        return call(*show, f"name={user}", f"cluster={cluster}", "format=DefaultAccount").strip() or None
    return None


def list_submit_limits(table: str, account: str | None, partition: str | None) -> Iterator[int]:
    """Yield the limits on the number of submitted jobs for this account and partition. `table` is output of sacctmgr.

    A line is `account|partition|default QOS|limit|limit of the group`. If `account` is None, the job's account is
    unknown, and the limits of all accounts are included.
    """
    for fields in _list_associations(table, account, partition):
        yield from (int(limit) for limit in fields[3:] if limit.isdigit())


def find_default_qos(table: str, account: str | None, partition: str | None) -> set[str]:
    """Return the names of the possible qualities of service (QOS) of a job for which the user sets no QOS.

    `table` is output of sacctmgr with lines `account|partition|default QOS|limit|limit of the group`. If `account` is
    None, the lines of all accounts count. For a line without a default QOS, the name is Slurm's own default, `normal`.
    """
    return {fields[2] or "normal" for fields in _list_associations(table, account, partition)}


def _list_associations(table: str, account: str | None, partition: str | None) -> Iterator[list[str]]:
    for line in table.splitlines():
        fields = line.split("|")
        if account in (None, fields[0]) and fields[1] in ("", partition or ""):
            yield fields
