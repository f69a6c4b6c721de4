"""Lists of nodes as schedulers write them, such as `gpu[01-03,7],login1`: whether a host is on one."""

import re
from collections.abc import Sequence

_ENTRY = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_NUMBERS = re.compile(r"\[([^\]]*)\]")


def find_foreign(hosts: Sequence[str], nodelist: str) -> tuple[str, ...]:
    """Return which of a run's hosts, the first node's first, are not on the list of nodes of its allocation.

    The first node's is the one that the list came from. Where that is not on it, hosts have other names than the
    scheduler's nodes, and nothing can be said.
    """
    if not hosts or not is_listed(hosts[0], nodelist):
        return ()
    return tuple(host for host in hosts if not is_listed(host, nodelist))


def is_listed(host: str, nodelist: str) -> bool:
    """Whether a host is on a list of nodes; domains are left out of account."""
    return any(_is_entry_of(_strip_domain(host), _strip_domain(entry)) for entry in _ENTRY.findall(nodelist))


def _strip_domain(name: str) -> str:
    return name.partition(".")[0].lower()


def _is_entry_of(host: str, entry: str) -> bool:
    """Whether an entry such as `rack[1-2]n[01-16]` means a host. It is not expanded: it may mean millions."""
    literal = map(re.escape, _NUMBERS.split(entry)[::2])
    found = re.fullmatch(r"(\d+)".join(literal), host)
    return found is not None and all(map(_is_within, found.groups(), _NUMBERS.findall(entry)))


def _is_within(number: str, ranges: str) -> bool:
    """Whether ranges such as `01-03,7` hold a number, written with as many zeros as theirs."""
    for one in ranges.split(","):
        low, _, high = one.partition("-")
        if low.isdigit() and int(low) <= int(number) <= int(high or low) and number == str(int(number)).zfill(len(low)):
            return True
    return False
