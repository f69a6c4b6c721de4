"""What a cluster takes, as far as Slurm tells."""

import contextlib
import os
import pwd
import re
from collections.abc import Iterator, Mapping, Sequence

from bench.core.errors import UserError
from bench.core.scheduling import ClusterLimits, SchedulerUnavailable
from bench.launchers.slurm.options import Options
from bench.launchers.slurm.programs import call

_OTHER_PLACE = re.compile(r"--(partition|clusters?)\b|-[pM]")
"""Options of sbatch that choose another partition than the one that the site's file names."""


def limits(options: Options) -> ClusterLimits:
    """Return the limits of the partition, account and quality of service of `options`; none on a machine without Slurm,
    where a sweep can still be planned. Raise SchedulerUnavailable if Slurm does not answer."""
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
        named = ""  # which nobody here reads
    found = select_partitions(partitions, named)
    return ClusterLimits(
        max_array_size=int(array) if array.isdigit() else None,
        max_submit_jobs=_find_max_submit_jobs(options, known.get("ClusterName", ""), found),
        max_time_min=find_max_time_min(found),
        max_nodes=find_max_nodes(found),
        max_devices_per_node=_find_max_devices_per_node(found, nodes, options.cpus_per_device),
        max_gpus_per_node=find_max_gpus(found, nodes, options.gpus) if options.gpus else None,
    )


def read_config() -> dict[str, str]:
    """Return what `scontrol show config` says."""
    return parse_config(call("scontrol", "show", "config"))


def parse_config(text: str) -> dict[str, str]:
    """Return the `Key = value` lines of `scontrol show config`."""
    return dict(re.findall(r"^(\w+) *= (.*?) *$", text, re.MULTILINE))


Partition = Mapping[str, str]
"""The `Key=value` words of a partition."""


def select_partitions(partitions: str, named: str | None) -> list[Partition]:
    """Return the named partitions (`a,b`), or for None the default one, from `scontrol show partition --oneliner`."""
    lines = (dict(word.split("=", 1) for word in line.split() if "=" in word) for line in partitions.splitlines())
    if named is None:
        return [fields for fields in lines if fields.get("Default") == "YES"]
    return [fields for fields in lines if fields.get("PartitionName") in named.split(",")]


def find_max_time_min(found: Sequence[Partition]) -> int | None:
    """Return the shortest MaxTime of partitions: a job that is to run in any of them must fit all."""
    limits = [parse_minutes(fields.get("MaxTime", "")) for fields in found]
    return min((limit for limit in limits if limit is not None), default=None)


def find_max_nodes(found: Sequence[Partition]) -> int | None:
    """Return how many nodes a job can have in one of these partitions at the most, those counted that are down."""
    limits = []
    for fields in found:
        numbers = [int(fields[key]) for key in ("TotalNodes", "MaxNodes") if fields.get(key, "").isdigit()]
        limits.append(min(numbers, default=None))
    return None if None in limits else max((limit for limit in limits if limit is not None), default=None)


def find_max_cpus(found: Sequence[Partition], nodes: str) -> int | None:
    """Return the cores of the largest node in these partitions, from sinfo's lines `partition|cores|resources`."""
    cores = (fields[0] for fields in _list_nodes(found, nodes))
    return max((int(number) for number in cores if number.isdigit()), default=None)


def find_max_gpus(found: Sequence[Partition], nodes: str, asked: str) -> int | None:
    """Return the most GPUs of the type that `asked` names, or of any, that a node in these partitions has, from sinfo's
    lines `partition|cores|resources`; None where no node is known."""
    named = re.search(r"gpu(?:s-per-node=|:)([A-Za-z]\w*):", asked)
    counts = []
    for fields in _list_nodes(found, nodes):
        resources = re.findall(r"gpu(?::([A-Za-z][\w.-]*))?:(\d+)", fields[1] if len(fields) > 1 else "")
        counts.append(sum(int(number) for kind, number in resources if not named or not kind or kind == named[1]))
    return max(counts, default=None)


def _list_nodes(found: Sequence[Partition], nodes: str) -> Iterator[list[str]]:
    """Yield what sinfo says of each kind of node in these partitions."""
    names = {fields.get("PartitionName") for fields in found}
    for line in nodes.splitlines():
        name, *fields = line.strip().split("|")
        if name.rstrip("*") in names and fields:
            yield fields


def _find_max_devices_per_node(found: Sequence[Partition], nodes: str, cpus_per_device: int | None) -> int | None:
    cores = find_max_cpus(found, nodes)
    return None if cores is None or cpus_per_device is None else cores // cpus_per_device


def parse_minutes(text: str) -> int | None:
    """Return the whole minutes of Slurm's `days-hours:minutes:seconds`; None for UNLIMITED and its like."""
    parsed = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not parsed:
        return None
    days, hours, mins, _ = (int(part or 0) for part in parsed.groups())
    return 1440 * days + 60 * hours + mins


def _find_max_submit_jobs(options: Options, cluster: str, partitions: Sequence[Partition]) -> int | None:
    """Return the smallest limit that accounting has for this user here; None where there is no accounting."""
    found: list[int] = []
    names = {options.qos} if options.qos else set[str]()
    with contextlib.suppress(UserError, KeyError):
        user = pwd.getpwuid(os.getuid()).pw_name
        mine = [f"user={user}", f"cluster={cluster}"]
        shown = "format=Account,Partition,DefaultQOS,MaxSubmitJobs,GrpSubmitJobs"
        table = call("sacctmgr", "--noheader", "--parsable2", "show", "assoc", "where", *mine, shown)
        found += list_submit_limits(table, options.account, options.partition)
        names = names or find_default_qos(table, options.account, options.partition)
    names |= {fields["QoS"] for fields in partitions if fields.get("QoS", "N/A") not in ("N/A", "")}
    with contextlib.suppress(UserError):
        if names:
            shown = "format=Name,MaxSubmitJobsPerUser,MaxSubmitJobsPerAccount,GrpSubmitJobs"
            of_qos = ["where", f"name={','.join(sorted(names))}", shown]
            table = call("sacctmgr", "--noheader", "--parsable2", "show", "qos", *of_qos)
            found += [int(limit) for line in table.splitlines() for limit in line.split("|")[1:] if limit.isdigit()]
    return min(found, default=None)


def list_submit_limits(table: str, account: str | None, partition: str | None) -> Iterator[int]:
    """Yield the limits in sacctmgr's lines `account|partition|default QOS|limit|limit of the group` that hold for this
    account and partition; without an account those of all, since which is the default one is not asked."""
    for fields in _list_associations(table, account, partition):
        yield from (int(limit) for limit in fields[3:] if limit.isdigit())


def find_default_qos(table: str, account: str | None, partition: str | None) -> set[str]:
    """Return the QOS that jobs get which name none, from the same lines; Slurm itself calls its own `normal`."""
    return {fields[2] or "normal" for fields in _list_associations(table, account, partition)}


def _list_associations(table: str, account: str | None, partition: str | None) -> Iterator[list[str]]:
    for line in table.splitlines():
        fields = line.split("|")
        if account in (None, fields[0]) and fields[1] in ("", partition or ""):
            yield fields
