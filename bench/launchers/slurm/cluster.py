"""What a cluster takes, as far as Slurm tells."""

import contextlib
import os
import pwd
import re
from collections.abc import Iterator

from bench.errors import UserError
from bench.launchers.slurm.options import Options
from bench.launchers.slurm.programs import call
from bench.scheduling import ClusterLimits, SchedulerAway


def limits(options: Options) -> ClusterLimits:
    """Return the limits of the partition, account and quality of service of `options`; none on a machine without Slurm,
    where a sweep can still be planned. Raise SchedulerAway if Slurm does not answer."""
    try:
        known = read_config()
        partitions = call("scontrol", "show", "partition", "--oneliner")
    except SchedulerAway:
        raise
    except UserError:
        return ClusterLimits()
    array = known.get("MaxArraySize", "")
    return ClusterLimits(
        max_array_size=int(array) if array.isdigit() else None,
        max_submit_jobs=_find_max_submit_jobs(options, known.get("ClusterName", "")),
        max_time_min=find_max_time_min(partitions, options.partition),
    )


def read_config() -> dict[str, str]:
    """Return what `scontrol show config` says."""
    return parse_config(call("scontrol", "show", "config"))


def parse_config(text: str) -> dict[str, str]:
    """Return the `Key = value` lines of `scontrol show config`."""
    return dict(re.findall(r"^(\w+) *= (.*?) *$", text, re.MULTILINE))


def find_max_time_min(partitions: str, named: str | None) -> int | None:
    """Return the shortest MaxTime of the named partitions (`a,b`), or of the default one, from `scontrol show partition
    --oneliner`: a job that is to run in any of them must fit all."""
    wanted, found = set((named or "").split(",")), []
    for line in partitions.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if fields.get("PartitionName") in wanted or (not named and fields.get("Default") == "YES"):
            found.append(parse_minutes(fields.get("MaxTime", "")))
    return min((limit for limit in found if limit is not None), default=None)


def parse_minutes(text: str) -> int | None:
    """Return the whole minutes of Slurm's `days-hours:minutes:seconds`; None for UNLIMITED and its like."""
    parsed = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not parsed:
        return None
    days, hours, mins, _ = (int(part or 0) for part in parsed.groups())
    return 1440 * days + 60 * hours + mins


def _find_max_submit_jobs(options: Options, cluster: str) -> int | None:
    """Return the smallest limit that accounting has for this user here; None where there is no accounting."""
    found: list[int] = []
    with contextlib.suppress(UserError, KeyError):
        user = pwd.getpwuid(os.getuid()).pw_name
        mine = [f"user={user}", f"cluster={cluster}"]
        shown = "format=Account,Partition,MaxSubmitJobs"
        table = call("sacctmgr", "--noheader", "--parsable2", "show", "assoc", "where", *mine, shown)
        found += list_submit_limits(table, options.account, options.partition)
    with contextlib.suppress(UserError):
        if options.qos:
            of_qos = ["where", f"name={options.qos}", "format=Name,MaxSubmitJobsPerUser"]
            table = call("sacctmgr", "--noheader", "--parsable2", "show", "qos", *of_qos)
            found += [int(limit) for _, _, limit in (line.partition("|") for line in table.splitlines()) if limit]
    return min(found, default=None)


def list_submit_limits(table: str, account: str | None, partition: str | None) -> Iterator[int]:
    """Yield the limits in sacctmgr's lines `account|partition|limit` that hold for this account and partition; without
    an account those of all, since which is the default one is not asked."""
    for line in table.splitlines():
        of_account, of_partition, limit = line.split("|")
        if limit and account in (None, of_account) and of_partition in ("", partition or ""):
            yield int(limit)
