"""The names in a set of runs that say whose it is: hosts, users, clusters, accounts, jobs, addresses, paths.

Each gets a pseudonym that is the same wherever it stands. They are found in the fields that hold them and, by their
form, in any text; a common word such as the user `root` or the partition `gpu` tells nothing and stays.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.errors import UserError
from bench.record import RunRecord

_FIELDS = {
    "host": "host", "hosts": "host", "nodes": "host", "nodelist": "host", "SLURM_JOB_NODELIST": "host",
    "partition": "partition", "SLURM_JOB_PARTITION": "partition",
    "cluster": "cluster", "SLURM_CLUSTER_NAME": "cluster",
    "account": "account", "qos": "qos", "reservation": "reservation", "constraint": "constraint",
    "user": "user", "job": "job", "job_id": "job", "SLURM_JOB_NAME": "job", "container": "image", "image": "image",
}  # fmt: skip
"""Keys whose text is a name, or a list of names."""

_FORMS = (
    ("user", r"(?<![A-Za-z])(?:UserId|User|User_?Name|GroupId|LogName)=([\w.-]+)"),
    ("user", r"(?<![A-Za-z])(?:e?uid|e?gid|groups)=\d+\(([\w.-]+)\)"),
    ("user", r",\d+\(([\w.-]+)\)"),  # of groups, in what `id` prints
    ("account", r"(?<![A-Za-z])Account=([\w.-]+)"),
    ("partition", r"(?<![A-Za-z])Partition=([\w.,-]+)"),
    ("qos", r"(?<![A-Za-z])QOS=([\w.-]+)"),
    ("reservation", r"(?<![A-Za-z])Reservation(?:Name)?=([\w.-]+)"),
    ("constraint", r"(?<![A-Za-z])(?:Constraint|Features)=([\w.-]+)"),
    ("cluster", r"(?<![A-Za-z])(?:Cluster|Clusters|Cluster_?Name)=([\w.-]+)"),
    ("job", r"(?<![A-Za-z])Job[-_]?Name=([\w.-]+)"),
    ("host", r"(?:NodeList|BatchHost|HostName|NodeName|Submit_Host|Master_Addr)=([\w.,\[\]-]+)"),
    ("user", r"/(?:home|Users|users)/([\w.-]+)"),
    ("user", r"(?<!\w)~([A-Za-z_][\w.-]*)"),
    ("user", r"(?<![\w.+-])([\w.+-]{1,64})@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}\b"),
    ("domain", r"(?<=@)([\w-]{1,63}(?:\.[\w-]{1,63}){1,8})\b"),
    ("domain", r"(?<=://)(?:[^\s/@]{1,256}@)?([A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8})(?![\w.-])"),
    ("address", r"(?<![\w.])(?!\A[\d.]+\Z)((?!127\.)\d{1,3}(?:\.\d{1,3}){3})(?![\w.]{0,64}\d)"),
    ("address", r"(?<![\w:])((?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{1,4})(?![\w:])"),
    ("device", r"\b((?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b"),
)
"""What a name looks like in any text, in small letters or not. Each form begins at one place and has an end, so that a
long line takes no longer than many short ones."""

_COMMON = frozenset({
    "root", "localhost", "localdomain", "user", "users", "home", "node", "host", "main", "gpu", "cpu", "cuda", "debug",
    "test", "batch", "normal", "default", "short", "long", "compute", "interactive", "all", "high", "low", "none",
    "null", "auto", "true", "false", "job", "step", "rank",
})  # fmt: skip
_PUBLIC = re.compile(
    r"(?:[\w-]+\.)*(?:github\.com|githubusercontent\.com|huggingface\.co|pytorch\.org|python\.org|pypi\.org|nvidia\.com"
    r"|deepspeed\.ai|readthedocs\.io|pydantic\.dev|arxiv\.org|docker\.io|example\.com)",
    re.IGNORECASE,
)
"""Hosts of addresses that stand in the messages of libraries."""

_ENDINGS = frozenset({
    "cfg", "conf", "csv", "err", "gz", "json", "log", "out", "parquet", "pid", "py", "sh", "sock", "tar", "tmp", "toml",
    "txt", "yaml", "yml",
})  # fmt: skip
"""Of files, which may be called after a host."""

_INSIDE = r"[^\s\"'`:;,|<>()\[\]{}*?\\]"  # a path
_PATH = re.compile(
    rf"(?:(?<![\w./<])|(?<=\s-[A-Za-z])|(?<=file://)|(?<=<)(?=/[^\s/>]+/))/(?!/){_INSIDE}{{3,}}"
    r"(?: [^\s\"'`:;,|<>()\[\]{}*?\\/=-][^\s\"'`:;,|<>()\[\]{}*?\\/=]*/" + rf"{_INSIDE}*){{0,4}}"
    r"|(?<=[\"'])/(?!/)[^\"'\n]{3,}(?=[\"'])"
)
_URL = re.compile(
    r"(?<![A-Za-z0-9+.-])((?!file:)[A-Za-z][A-Za-z0-9+.-]{1,20}://)(?:[^\s/@]{1,256}@)?([^\s/\"'<>()]+)(/[^\s\"'<>()]*)?"
)
_ADDRESS = re.compile(r"[\d.]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*")
_LIST = re.compile(r"(?<![\w-])([A-Za-z][\w-]{0,62})\[([\d,-]{1,4096})\]", re.ASCII)
_SYSTEM = re.compile(r"/(usr|lib|lib64|bin|sbin|etc|proc|sys|dev|__w)(/|$)")
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages)/.*$|/(?:bench|analysis)/[\w/]{1,200}\.py$")
_MAX_NAMES = 100_000
"""Hosts in one list, and names in all."""


def find_paths(text: str) -> Iterator[re.Match[str]]:
    """Yield the absolute paths in a text that are not the operating system's own."""
    if " " in text and text.startswith("/") and not re.search(r"[\n:]", text):  # one path, blanks and all
        whole = re.match(r".*[^/.\s]", text)
        return iter([whole] if whole and not _SYSTEM.match(text) else [])
    return (match for match in _PATH.finditer(text) if not _SYSTEM.match(match[0]))


def find_urls(text: str) -> Iterator[re.Match[str]]:
    """Yield the addresses of resources in a text: scheme with ://, host with port, path."""
    return _URL.finditer(text)


def find_node_lists(text: str) -> Iterator[re.Match[str]]:
    """Yield what may be a scheduler's node list in a text."""
    return _LIST.finditer(text)


def replace_matches(
    text: str, find: Callable[[str], Iterable[re.Match[str]]], new: Callable[[re.Match[str]], str]
) -> str:
    """Return `text` with what is found in it replaced."""
    pieces, end = [], 0
    for match in find(text):
        pieces += [text[end : match.start()], new(match)]
        end = match.end()
    return "".join([*pieces, text[end:]])


def split_library_path(path: str) -> tuple[str, str]:
    """Return the part of a path that says whose it is, and the part that is a library's or zeroscale's."""
    library = _LIBRARY.search(path)
    whose = path[: library.start()] if library else path.rstrip("./")
    return whose, path[len(whose) :]


def assign_pseudonyms(documents: Sequence[Any], texts: Sequence[str], local_names: Mapping[str, str]) -> dict[str, str]:
    """Return every name in JSON `documents` and in `texts` with its pseudonym, names in small letters; `here` are names
    of this machine with their kinds. UserError for more names than can be told apart."""
    strings = list(dict.fromkeys([*texts, *(text for document in documents for text in _list_strings(document))]))
    found = {name.lower(): kind for name, kind in local_names.items()}
    for kind, name in dict.fromkeys((*_find_in_fields(documents), *_find_by_form(strings))):
        for part, its_kind in _split_name(kind, name):
            found.setdefault(part.lower(), its_kind)
        if len(found) > _MAX_NAMES:
            rule = f"one of more than {_MAX_NAMES} names that would have to be replaced"
            raise UserError(name[:80], rule, "leave out the run that holds them, or --anonymous")
    common = _COMMON | _list_schema_words() | {word for document in documents for word in _list_chosen_names(document)}
    for host in _find_similar_hosts([name for name, kind in found.items() if kind == "host"], strings):
        found.setdefault(host, "host")
    hosts = [name for name, kind in found.items() if kind == "host" and name not in common]
    for domain in _find_domains(hosts, strings):
        found.setdefault(domain, "domain")
    kept = {name: kind for name, kind in found.items() if name not in common and len(name) > 1 and not name.isdigit()}
    roots = {split_library_path(match[0])[0] for text in strings for match in find_paths(text)}
    return _number_pseudonyms(kept | dict.fromkeys(sorted(roots), "/path"))


def _number_pseudonyms(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return pseudonyms such as host1, none of which is a name itself."""
    counts: dict[str, int] = {}
    given: dict[str, str] = {}
    for name, kind in sorted(kinds.items()):
        counts[kind] = counts.get(kind, 0) + 1
        while f"{kind}{counts[kind]}" in kinds:
            counts[kind] += 1
        given[name] = f"{kind}{counts[kind]}"
    return given


def _find_in_fields(value: Any, kind: str | None = None) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _find_in_fields(inner, _FIELDS.get(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _find_in_fields(inner, kind)
    elif isinstance(value, str) and value and kind:
        yield kind, value


def _find_by_form(strings: Iterable[str]) -> Iterator[tuple[str, str]]:
    forms = [(kind, re.compile(form, re.IGNORECASE)) for kind, form in _FORMS]
    return ((kind, match[1]) for text in strings for kind, form in forms for match in form.finditer(text))


def _split_name(kind: str, name: str) -> Iterator[tuple[str, str]]:
    """Take a list of nodes apart, a host's name from its domain, and the name of an image from how it is fetched."""
    if kind == "image":
        yield from ((part, kind) for part in _split_image(name) if not part.startswith("/"))
    elif kind == "domain":
        yield from ((part, kind) for part in _split_domain(name))
    elif kind == "host":
        for part in re.split(r",(?![^\[]*\])", name):
            host, _, domain = part.partition(".") if not _ADDRESS.fullmatch(part) else (part, "", "")
            yield from ((one, kind) for one in (expand_node_list(host) or [host]))
            yield from ((one, "domain") for one in _split_domain(domain))
    else:
        yield name.strip(".-"), kind


def _split_image(name: str) -> list[str]:
    bare = name.partition("://")[2] or name
    return [name, bare, re.sub(r"[@:][^/]*$", "", bare)]


def _split_domain(name: str) -> list[str]:
    """Return a domain and those that it lies in, but for the last label: `c.lab.org` and `lab.org`."""
    labels = name.strip(".").split(".")
    if _PUBLIC.fullmatch(name):
        return []
    return [name.strip("."), *(".".join(labels[start:]) for start in range(1, len(labels) - 1))] if labels[0] else []


def _find_domains(hosts: Sequence[str], strings: Iterable[str]) -> Iterator[str]:
    """Yield the domains that known hosts are followed by in `strings`; a file called after a host has none."""
    label = "[A-Za-z0-9][A-Za-z0-9-]{0,62}"
    full = re.compile(
        rf"{compile_pattern(hosts).pattern}\.((?:{label}\.){{0,6}}[A-Za-z][A-Za-z0-9-]{{1,62}})", re.IGNORECASE
    )
    for domain in dict.fromkeys(match[1].lower() for text in strings for match in full.finditer(text)):
        if domain.rpartition(".")[2] not in _ENDINGS:
            yield from _split_domain(domain)


def compile_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Return what matches all of `names`, in any case, between other letters and digits, and names that differ from
    them in their numbers only: there may be many thousand of those."""
    similar = {re.sub(r"[0-9]+", "0", name): None for name in sorted(names, key=len, reverse=True)}
    choice = "|".join(re.escape(name).replace("0", "[0-9]+") for name in similar) or r"(?!)"
    return re.compile(rf"(?<![^\W_])(?:{choice})(?![^\W_])", re.IGNORECASE)


@functools.lru_cache(maxsize=1024)
def expand_node_list(listed: str) -> tuple[str, ...]:
    """Return the hosts of a node list such as `node[01-03,7]`; none for what is no list, or one of more than exist."""
    match = _LIST.fullmatch(listed)
    if not match:
        return ()
    ranges = [(item[1], item[2] or item[1]) for item in re.finditer(r"(\d+)(?:-(\d+))?", match[2])]
    if any(len(end) > 9 for ends in ranges for end in ends):
        return ()
    if sum(int(last) - int(first) + 1 for first, last in ranges) > _MAX_NAMES:
        return ()
    numbers = (f"{n:0{len(first)}d}" for first, last in ranges for n in range(int(first), int(last) + 1))
    return tuple(f"{match[1]}{number}" for number in numbers)


def _find_similar_hosts(hosts: Iterable[str], strings: Iterable[str]) -> set[str]:
    """Return what known hosts are called without their number, and names in `strings` that differ only in it."""
    bases = {base for name in hosts if len(base := name.rstrip("0123456789")) > 2 and base != name}
    if not bases:
        return set()
    choice = "|".join(map(re.escape, sorted(bases)))
    similar = re.compile(rf"(?<![^\W_])(?:{choice})(?:\d+|\[[\d,-]{{1,4096}}\])(?![^\W_])", re.IGNORECASE)
    found = {match.lower() for text in strings for match in similar.findall(text)}
    return bases | {host for name in found for host in (expand_node_list(name) or [name])}


@functools.cache
def _list_schema_words() -> frozenset[str]:
    """Return the words that a record's schema itself is made of."""
    schema = RunRecord.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    fields = {name: field for part in parts for name, field in part.get("properties", {}).items()}
    enum_texts = {word for field in fields.values() for word in _list_strings({"": field.get("enum", ())})}
    return frozenset(word.lower() for word in (*fields, *enum_texts))


def _list_chosen_names(document: Any) -> Iterator[str]:
    """Yield what a spec names that is a file of zeroscale's."""
    spec = document.get("spec", {}) if isinstance(document, Mapping) else {}
    for part, name in (("model", "family"), ("engine", "backend"), ("data", "source")):
        if name in spec.get(part, {}):
            yield spec[part][name]


def _list_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _list_strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _list_strings(inner)
