"""Records and logs without the names of hosts, users, clusters and paths."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from analysis.bundle import names
from bench.errors import UserError
from bench.record import RunRecord
from bench.spec import RunSpec, config_id

_LAUNCHER = ("name", "mode", "time_limit_min", "hang_s", "startup_s", "job", "job_id", "task", "restart", "started",
             "control")  # fmt: skip
"""Of how a run was launched only this is kept: the rest is a site's own."""


class Veil(NamedTuple):
    """Names and their pseudonyms; a name is in small letters and stands for itself in any case, a path as it is."""

    pseudonyms: Mapping[str, str]
    pattern: re.Pattern[str]

    def text(self, text: str) -> str:
        """Return `text` with every name replaced."""
        bare = names.replaced(text, names.paths, self._path)
        bare = names.replaced(bare, names.lists, self._list)
        return self.pattern.sub(lambda match: self.pseudonyms[match[0].lower()], bare)

    def _path(self, path: str) -> str:
        whose, library = names.divided(path)
        return self.pseudonyms.get(whose, "/path") + library

    def _list(self, listed: str) -> str:
        """Replace a node list by its hosts; leave what only looks like one."""
        hosts = [host.lower() for host in names.nodes(listed)]
        return ",".join(map(self.pseudonyms.__getitem__, hosts)) if self.pseudonyms.keys() >= set(hosts) else listed

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
            for name in (found[0] for place in (path, text) for found in self.pattern.finditer(place)):
                raise UserError(name, f"is still in {path}", "make the bundle without --anonymous, and report this")


def veil(records: list[RunRecord], texts: list[str], here: Mapping[str, str]) -> Veil:
    """Return what takes every name away that is found in `records`, in `texts` or `here`.

    A spec that holds one, such as the path of its data, becomes another spec: its config_id is replaced by the new one.
    """
    documents = [record.model_dump(mode="json", by_alias=True) for record in records]
    found = names.pseudonyms(documents, texts, here)
    first = _veil(found)
    specs = {record.config_id: record.spec for record in records}
    changed = {old: new for old, spec in specs.items() if (new := _renamed(first, spec)) is not None}
    return _veil(found | changed)


def _veil(pseudonyms: Mapping[str, str]) -> Veil:
    words = sorted((name for name in pseudonyms if not name.startswith("/")), key=len, reverse=True)
    choice = "|".join(map(re.escape, words)) or r"(?!)"
    return Veil(pseudonyms, re.compile(rf"(?<![^\W_])(?:{choice})(?![^\W_])", re.IGNORECASE))


def _renamed(first: Veil, spec: RunSpec) -> str | None:
    """Return the config_id of a spec without its names; None where it has none."""
    new = RunSpec.model_validate(first.plain(spec.model_dump(mode="json", by_alias=True)))
    return None if config_id(new) == config_id(spec) else config_id(new)
