"""The names in a set of runs that say whose it is: hosts, users, clusters, accounts, jobs, addresses, paths.

Each gets a pseudonym that is the same wherever it stands. They are found in the fields that hold them and, by their
form, in any text; a common word such as the user `root` or the partition `gpu` tells nothing and stays.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.record import RunRecord

_FIELDS = {
    "host": "host", "hosts": "host", "nodes": "host", "nodelist": "host", "SLURM_JOB_NODELIST": "host",
    "partition": "partition", "SLURM_JOB_PARTITION": "partition", "SLURM_CLUSTER_NAME": "cluster",
    "account": "account", "qos": "qos", "reservation": "reservation", "constraint": "constraint",
    "user": "user", "job": "job", "SLURM_JOB_NAME": "job",
}  # fmt: skip
"""Keys whose text is a name, or a list of names."""

_FORMS = (
    ("user", r"\b(?:UserId|User|GroupId|user|USER|LOGNAME)=([\w.-]+)"),
    ("account", r"\b(?:Account|account)=([\w.-]+)"),
    ("partition", r"\b(?:Partition|partition)=([\w.-]+)"),
    ("job", r"\b(?:JobName|job-name)=([\w.-]+)"),
    ("host", r"\b(?:\w*NodeList|BatchHost)=([\w.,\[\]-]+)"),
    ("user", r"/(?:home|Users|users)/([\w.-]+)"),
    ("user", r"(?<!\w)~([A-Za-z_][\w.-]*)"),
    ("user", r"\b([\w.+-]+)@[\w-]+(?:\.[\w-]+)+\b"),
    ("domain", r"\b[\w.+-]+@([\w-]+(?:\.[\w-]+)+)\b"),
    ("address", r"(?<![\w.])(?!\A[\d.]+\Z)((?!127\.)\d{1,3}(?:\.\d{1,3}){3})(?![\w.]*\d)"),
    ("address", r"(?<![\w:])((?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{1,4})(?![\w:])"),
    ("device", r"\b((?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b"),
)

_COMMON = frozenset({
    "root", "localhost", "localdomain", "user", "users", "home", "node", "host", "main", "gpu", "cpu", "cuda", "debug",
    "test", "batch", "normal", "default", "short", "long", "compute", "interactive", "all", "high", "low", "none",
    "null", "auto", "true", "false", "job", "step", "rank",
})  # fmt: skip
_PATH = re.compile(r"(?:(?<![\w.~/<-])|(?<=\s-[A-Za-z])|(?<=file://))/(?!/)[^\s\"'`:;,|<>()\[\]{}*?\\]{3,}")
_ADDRESS = re.compile(r"[\d.]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*")
_LIST = re.compile(r"([A-Za-z][\w-]*)\[([\d,-]+)\]", re.ASCII)
_SYSTEM = re.compile(r"/(usr|lib|lib64|bin|sbin|etc|proc|sys|dev|__w)(/|$)")
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages)/.*$|/(?:bench|analysis)/[\w/]+\.py$")


def paths(text: str) -> Iterator[re.Match[str]]:
    """Yield the absolute paths in a text that are not the operating system's own."""
    if " " in text and text.startswith("/") and not re.search(r"[\n:]", text):  # one path, blanks and all
        whole = re.match(r".*[^/.\s]", text)
        return iter([whole] if whole and not _SYSTEM.match(text) else [])
    return (match for match in _PATH.finditer(text) if not _SYSTEM.match(match[0]))


def lists(text: str) -> Iterator[re.Match[str]]:
    """Yield what may be a Slurm node list in a text."""
    return _LIST.finditer(text)


def replaced(text: str, find: Callable[[str], Iterable[re.Match[str]]], new: Callable[[str], str]) -> str:
    """Return `text` with what is found in it replaced."""
    pieces, end = [], 0
    for match in find(text):
        pieces += [text[end : match.start()], new(match[0])]
        end = match.end()
    return "".join([*pieces, text[end:]])


def divided(path: str) -> tuple[str, str]:
    """Return the part of a path that says whose it is, and the part that is a library's or zeroscale's."""
    library = _LIBRARY.search(path)
    whose = path[: library.start()] if library else path.rstrip("./")
    return whose, path[len(whose) :]


def pseudonyms(documents: Sequence[Any], texts: Sequence[str], here: Mapping[str, str]) -> dict[str, str]:
    """Return every name in JSON `documents` and in `texts` with its pseudonym, names in small letters; `here` are names
    of this machine with their kinds."""
    strings = list(dict.fromkeys([*texts, *(text for document in documents for text in _strings(document))]))
    found = {name.lower(): kind for name, kind in here.items()}
    for kind, name in (*_of_fields(documents), *_of_forms(strings)):
        for part, its_kind in _parts(kind, name):
            found.setdefault(part.lower(), its_kind)
    common = _COMMON | _schema() | {word for document in documents for word in _chosen(document)}
    for host in _neighbours([name for name, kind in found.items() if kind == "host"], strings):
        found.setdefault(host, "host")
    kept = {name: kind for name, kind in found.items() if name not in common and len(name) > 1 and not name.isdigit()}
    roots = {divided(match[0])[0] for text in strings for match in paths(text)}
    return _numbered(kept | dict.fromkeys(sorted(roots), "/path"))


def _numbered(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return pseudonyms such as host1, none of which is a name itself."""
    counts: dict[str, int] = {}
    given: dict[str, str] = {}
    for name, kind in sorted(kinds.items()):
        counts[kind] = counts.get(kind, 0) + 1
        while f"{kind}{counts[kind]}" in kinds:
            counts[kind] += 1
        given[name] = f"{kind}{counts[kind]}"
    return given


def _of_fields(value: Any, kind: str | None = None) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _of_fields(inner, _FIELDS.get(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _of_fields(inner, kind)
    elif isinstance(value, str) and value and kind:
        yield kind, value


def _of_forms(strings: Iterable[str]) -> Iterator[tuple[str, str]]:
    forms = [(kind, re.compile(form)) for kind, form in _FORMS]
    return ((kind, match[1]) for text in strings for kind, form in forms for match in form.finditer(text))


def _parts(kind: str, name: str) -> Iterator[tuple[str, str]]:
    """Take a Slurm node list apart, and a host's name from its domain."""
    for part in re.split(r",(?![^\[]*\])", name) if kind == "host" else [name.strip(".-")]:
        host, _, domain = part.partition(".") if kind == "host" and not _ADDRESS.fullmatch(part) else (part, "", "")
        yield from ((one, kind) for one in (nodes(host) or [host]))
        if domain:
            yield domain, "domain"


def nodes(listed: str) -> list[str]:
    """Return the hosts of a node list such as `node[01-03,7]`; none for what is no list."""
    match = _LIST.fullmatch(listed)
    return [f"{match[1]}{number}" for number in _expanded(match[2])] if match else []


def _expanded(numbers: str) -> Iterator[str]:
    for item in re.findall(r"\d+(?:-\d+)?", numbers):
        first, _, last = item.partition("-")
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1))


def _neighbours(hosts: Iterable[str], strings: Iterable[str]) -> set[str]:
    """Return what known hosts are called without their number, and names in `strings` that differ only in it."""
    bases = {base for name in hosts if len(base := name.rstrip("0123456789")) > 2 and base != name}
    if not bases:
        return set()
    choice = "|".join(map(re.escape, sorted(bases)))
    alike = re.compile(rf"(?<![^\W_])(?:{choice})(?:\d+|\[[\d,-]+\])(?![^\W_])", re.IGNORECASE)
    found = {match.lower() for text in strings for match in alike.findall(text)}
    return bases | {host for name in found for host in (nodes(name) or [name])}


def _schema() -> set[str]:
    """Return the words that a record's schema itself is made of."""
    schema = RunRecord.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    fields = {name: field for part in parts for name, field in part.get("properties", {}).items()}
    words = {word for field in fields.values() for word in _strings({"": field.get("enum", ())})}
    return {word.lower() for word in (*fields, *words)}


def _chosen(document: Any) -> Iterator[str]:
    """Yield what a spec names that is a file of zeroscale's."""
    spec = document.get("spec", {}) if isinstance(document, Mapping) else {}
    for part, name in (("model", "family"), ("engine", "backend"), ("data", "source")):
        if name in spec.get(part, {}):
            yield spec[part][name]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)
