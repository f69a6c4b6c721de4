"""Records and logs without the names of hosts, users, clusters and paths."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from analysis.bundle import identifiers
from bench.errors import UserError
from bench.record import RunRecord
from bench.spec import RunSpec, config_id

_LAUNCHER = ("name", "mode", "time_limit_min", "hang_s", "startup_s", "job", "job_id", "task", "restart", "started",
             "control")  # fmt: skip
"""Of how a run was launched only this is kept: the rest is a site's own."""

_PART = re.compile(r"[^\W_]+")


class Anonymizer(NamedTuple):
    """Names and their pseudonyms; a name is in small letters and stands for itself in any case, a path as it is."""

    pseudonyms: Mapping[str, str]
    pattern: re.Pattern[str]  # of these and of names like them
    spaced: re.Pattern[str]  # known paths with a blank in them

    def text(self, text: str) -> str:
        """Return `text` with every name replaced."""
        if (whole := self.pseudonyms.get(text.lower())) is not None:
            return whole
        bare = self.spaced.sub(self._path, text)
        bare = identifiers.replace_matches(bare, identifiers.find_urls, self._url)
        bare = identifiers.replace_matches(bare, identifiers.find_paths, self._path)
        bare = identifiers.replace_matches(bare, identifiers.find_node_lists, self._list)
        return self.pattern.sub(self._name, bare)

    def _name(self, match: re.Match[str]) -> str:
        """Replace a name; of what is only like one, the parts that are names."""
        whole = self.pseudonyms.get(match[0].lower())
        return whole or _PART.sub(lambda part: self.pseudonyms.get(part[0].lower(), part[0]), match[0])

    def _url(self, match: re.Match[str]) -> str:
        """Leave out who asks and what for; the host is a name like any other."""
        return f"{match[1]}{match[2]}{'/path' if match[3] and match[3] != '/' else match[3] or ''}"

    def _path(self, match: re.Match[str]) -> str:
        whose, library = identifiers.split_library_path(match[0])
        return self.pseudonyms.get(whose, "/path") + library

    def _list(self, match: re.Match[str]) -> str:
        """Replace a node list by its hosts; leave what only looks like one."""
        hosts = identifiers.expand_node_list(match[0])
        known = hosts and all(host.lower() in self.pseudonyms for host in hosts)
        return ",".join(self.pseudonyms[host.lower()] for host in hosts) if known else match[0]

    def plain(self, value: Any) -> Any:
        """Return a JSON value with every name in its texts and keys replaced."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(key): self.plain(inner) for key, inner in value.items()}
        return [self.plain(inner) for inner in value] if isinstance(value, list) else value

    def record(self, record: RunRecord) -> RunRecord:
        """Return a record with every name replaced, and without its site's launcher options and the git commit."""
        plain = record.model_dump(mode="json", by_alias=True)
        around, environment = plain["circumstance"], plain["environment"]
        around["launcher"] = {key: value for key, value in around["launcher"].items() if key in _LAUNCHER}
        around["overrides"] = [text for text in around["overrides"] if not text.startswith("launcher")]
        around["network"] = {}
        if environment and environment["git"]:
            environment["git"].pop("commit", None)
        return RunRecord.model_validate(self.plain(plain))

    def check(self, files: Mapping[str, bytes]) -> None:
        """Raise UserError if a name is left in a text file or in the path of any."""
        for path, content in files.items():
            text = "" if path.endswith(".parquet") else content.decode(errors="replace")
            found = (match for place in (path, text) for match in self.pattern.finditer(place))
            for name in (match[0] for match in found if self._name(match) != match[0]):
                raise UserError(name, f"is still in {path}", "make the bundle without --anonymous, and report this")


def build_anonymizer(records: list[RunRecord], texts: list[str], local_names: Mapping[str, str]) -> Anonymizer:
    """Return what takes every name away that is found in `records`, in `texts` or `here`.

    A spec that holds one, such as the path of its data, becomes another spec: its config_id is replaced by the new one.
    """
    documents = [record.model_dump(mode="json", by_alias=True) for record in records]
    found = identifiers.assign_pseudonyms(documents, texts, local_names)
    first = _compile_anonymizer(found)
    specs = {record.config_id: record.spec for record in records}
    changed = {old: new for old, spec in specs.items() if (new := _find_new_config_id(first, spec)) is not None}
    return _compile_anonymizer(found | changed)


def _compile_anonymizer(pseudonyms: Mapping[str, str]) -> Anonymizer:
    spaced = sorted((name for name in pseudonyms if name.startswith("/") and " " in name), key=len, reverse=True)
    literally = re.compile("|".join(map(re.escape, spaced)) or r"(?!)")
    return Anonymizer(
        pseudonyms, identifiers.compile_pattern(name for name in pseudonyms if not name.startswith("/")), literally
    )


def _find_new_config_id(first: Anonymizer, spec: RunSpec) -> str | None:
    """Return the config_id of a spec without its names; None where it has none."""
    new = RunSpec.model_validate(first.plain(spec.model_dump(mode="json", by_alias=True)))
    return None if config_id(new) == config_id(spec) else config_id(new)
