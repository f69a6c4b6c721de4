"""Pack the records of a study into one anonymous archive, to publish or to send for a review.

  zeroscale pack results/runs/paper
  zeroscale pack results/runs/paper --out for-review.zip
  zeroscale pack results/runs/paper --whole --out kept.zip

The archive holds `RUN/record.json` for every record. `table`, `report` and the other reading commands
read it, packed or unpacked. A record that cannot be read is named on standard error and is not in the
archive; the exit code is then 1.

Only the fields of an allow-list are copied: numbers, versions, times, and texts that zeroscale
defines, such as the name of a field, of a choice or of a model in conf/. Other names become
pseudonyms: hosts `host1-…`, jobs `job1-…`, your own models `model1-…`. Logs, reasons, paths,
environment variables, site options, container images, git commits and free texts are not copied.

`--whole` makes a private archive, with every file of one results folder unchanged, including names.
"""

import argparse
import functools
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from analysis.cli import add_paths, report_missing, reporting_unwritable
from bench.core import plugins
from bench.core.errors import UserError
from bench.core.files import find_conf_folder, is_folder, open_folder, pack, read_whole
from bench.core.record import RunRecord
from bench.core.scheduling import find_foreign
from bench.core.spec import RunSpec, config_id
from bench.core.store import RECORD, to_json, write_atomically

_log = logging.getLogger(__name__)

_OUT = object()
"""Marks the value of a field that is not copied into the archive."""
_PACKAGES = (
    "torch", "cuda", "hip", "nccl", "rccl", "driver", "deepspeed", "transformers", "tokenizers", "datasets", "numpy",
    "pyarrow", "hydra-core", "triton", "python", "zeroscale",
)  # fmt: skip
_VERSION = re.compile(r"\d{1,5}(\.\d{1,5}){0,4}((a|b|rc|\.post|\.dev)\d{1,8})?(\+(cpu|cu\d{2,3}|rocm[\d.]{1,8}))?")
_MORE_WORDS = (
    "adhoc", "all_gather", "all_reduce", "all_to_all", "backward", "broadcast", "checkpoint", "cpu", "cuda", "decoder",
    "decoder_padding", "encoder", "encoder_padding", "forward", "gather", "gloo", "imports", "local", "mpi", "nccl",
    "quiet", "recv", "reduce", "rendezvous", "scatter", "send", "slurm", "sockets", "start", "tokens",
    "tokens_padding", "update",
)  # fmt: skip
"""Keys and values that zeroscale writes into records but that appear in no schema and in no file of conf/."""


def arguments(parser: argparse.ArgumentParser) -> None:
    add_paths(parser)
    out = Path("results/packs/records.zip")
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help="archive to write; default: %(default)s")
    whole = "pack every file of one folder unchanged, with all names; for private use only"
    parser.add_argument("--whole", action="store_true", help=whole)


def run(args: argparse.Namespace) -> int:
    """Return exit code 0 once the archive is written, or 1 if a record is not in it. Standard error names this
    record."""
    from analysis import reading, results

    incomplete = False
    if args.whole:
        packed = _read_whole(args.paths)
    else:
        found = reading.find_rows(args.paths)
        results.warn(found)
        records = found.read_records().values()
        packed = pack_records(records)
        incomplete = bool(found.skipped) or len(packed) < len(records)
    if not packed:
        raise report_missing(args.paths)
    with reporting_unwritable(args.out):
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out, pack(packed))
    print(args.out)
    return int(incomplete)


def _read_whole(paths: Sequence[Path]) -> dict[str, bytes]:
    """Return all files of the only folder in `paths`. The folder may be in an archive. Raise UserError if `paths` is
    not exactly one folder."""
    if len(paths) != 1:
        raise UserError("--whole", f"packs exactly one folder, but {len(paths)} are given", "give one results folder")
    if not is_folder(paths[0]):
        raise UserError(str(paths[0]), "no such folder", "give one results folder")
    with open_folder(paths[0]) as folder:
        return read_whole(folder)


_Rename = Callable[[str, Any], str]
"""Function that returns a pseudonym such as `host1-3fa9c2`, given the kind of name (`host`) and the name itself. Equal
names get equal pseudonyms within an archive."""
_Rule = Callable[[Any, _Rename], Any]
"""Function that takes a field's value, which is never None, and returns the value or part of it that may be published.
It returns `_OUT` if no part may be published."""


def pack_records(records: Iterable[RunRecord]) -> dict[str, bytes]:
    """Return the contents of the archive's files by path.

    Names that a plug-in defines, such as those of its options, are not copied. If the copy of a record is invalid
    without these names, the record is omitted, with a warning.
    """
    found = list(records)
    # The suffix makes pseudonyms of two archives differ. It is a hash of values that the archive publishes anyway, so
    # it does not help to test a guessed name.
    published = [(one.circumstance.started_at, one.observations and one.observations.steps) for one in found]
    suffix = hashlib.sha256(repr(published).encode()).hexdigest()[:6]
    numbers: dict[str, dict[str, str]] = {}

    def rename(kind: str, value: Any) -> str:
        known = numbers.setdefault(kind, {})
        return known.setdefault(json.dumps(value, sort_keys=True), f"{kind}{len(known) + 1}-{suffix}")

    files: dict[str, bytes] = {}
    times: Counter[str] = Counter()
    for record in found:
        try:
            packed = _pack(record, rename)
        except ValidationError:
            _log.warning(
                "%s is not in the archive: its record is invalid without the names of a plug-in", record.config_id
            )
            continue
        run_id = f"{packed.config_id}-{packed.circumstance.repeat}.{packed.circumstance.attempt}"
        times[run_id] += 1  # the same run on another machine, or of another study
        folder = run_id if times[run_id] == 1 else f"{run_id}_{times[run_id]}"
        files[f"{folder}/{RECORD}"] = to_json(packed)
    return files


def _copy(value: Any, rename: _Rename) -> Any:
    """Return a copy of a value that keeps its numbers, booleans, and strings that zeroscale defines. Any other string
    is omitted. A list that contains such a string is omitted as a whole. `rename` has no effect here; all rules have
    this parameter."""
    if isinstance(value, Mapping):
        inner = {key: _copy(item, rename) for key, item in value.items() if key in list_own_words()}
        return {key: item for key, item in inner.items() if item is not _OUT}
    if isinstance(value, list):
        items = [_copy(item, rename) for item in value]
        return _OUT if any(item is _OUT for item in items) else items
    return _OUT if isinstance(value, str) and value not in list_own_words() else value


def _copy_versions(value: Any, rename: _Rename) -> Any:
    """Copy the versions of known packages. A version that is not a plain version number becomes None."""
    texts = {package: value[package] for package in _PACKAGES if package in value}
    return {package: text if _VERSION.fullmatch(text or "") else None for package, text in texts.items()}


def _copy_form(pattern: str) -> _Rule:
    """Return a rule that copies a string only if it matches `pattern`. Patterns are so narrow that no name, such as
    that of a host, matches."""
    return lambda value, rename: value if re.fullmatch(pattern, value) else _OUT


def _name(kind: str) -> _Rule:
    """Return the rule by which `pack` anonymises a text. A word that zeroscale itself defines, such as the name of an
    engine, is copied. Any other text is replaced by a pseudonym. `kind` is the kind of thing that the text names, such
    as "host"; it is part of the pseudonym."""
    return lambda value, rename: value if value in list_own_words() else rename(kind, value)


def _mark(value: Any, rename: _Rename) -> Any:
    """Replace a text by a fixed text, which shows only that there was a text."""
    return "removed by zeroscale pack"


_COPIED = (
    "evidence", "spec", "circumstance.repeat", "circumstance.attempt", "circumstance.machine",
    "circumstance.launcher.name", "circumstance.limits", "circumstance.network.expects", "circumstance.step_limit_s",
    "circumstance.rehearsed_rank", "circumstance.shapes_only", "environment.classification", "environment.git.dirty",
    "outcome.kind", "outcome.shortage", "outcome.evidence.paused_s", "observations",
)  # fmt: skip
KEPT: Mapping[str, _Rule] = {
    **dict.fromkeys(_COPIED, _copy),
    "spec.model.family": _name("family"),
    "spec.engine.backend": _name("backend"),
    "spec.data.source": _name("source"),
    "spec.objective": _name("objective"),
    "spec.sequence": lambda lengths, rename: {_name("tokens")(kind, rename): n for kind, n in lengths.items()},
    "circumstance.study": _name("study"),
    "circumstance.machine.name": _name("machine"),
    "circumstance.goes_on_from": _copy_form(r"[0-9a-f]{10}"),
    "circumstance.started_at": _copy_form(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)"),
    "environment.environment_id": lambda name, rename: (
        name if re.fullmatch(r"[0-9a-f]{8}", name) else rename("environment", name)
    ),
    "environment.classification.device": _name("device"),
    "environment.classification.versions": _copy_versions,
    "environment.versions": _copy_versions,
    "environment.hosts": lambda hosts, rename: [rename("host", host) for host in hosts],
    "observations.tokens": lambda tokens, rename: tokens if _copy(tokens, rename) == tokens else _OUT,
    "observations.link.backend": _name("backend"),
    "observations.known_busy": _mark,
    "observations.uninspected": _mark,
    "observations.drill": _mark,
    "observations.data": lambda data, rename: {"content": rename("content", data)},
}
"""Every copied field of a record, with its rule. A rule applies to its field and to all fields nested in it. If two
rules apply to a field, the later one wins.

In addition, `config_id` is recomputed, and the scheduler's job gets a pseudonym.
"""


def _pack(record: RunRecord, rename: _Rename) -> RunRecord:
    """Return a copy of the record with only the fields of `KEPT`. `rename` returns the pseudonym of a name that must
    not be published, such as that of a host."""
    plain: Any = record.model_dump(mode="json", by_alias=True)
    packed: Any = {"schema_version": record.schema_version}
    for path, rule in KEPT.items():
        *parents, field = path.split(".")
        # A section that is null in the record has no fields to copy.
        source = functools.reduce(lambda inner, parent: inner.get(parent) or {}, parents, plain)
        if field in source:
            target = functools.reduce(lambda inner, parent: inner.setdefault(parent, {}), parents, packed)
            target[field] = None if source[field] is None else rule(source[field], rename)
            if target[field] is _OUT:
                del target[field]
    # If a field of a model, engine or data set was not copied, its name would be wrong, so it gets a pseudonym.
    for part in ("model", "engine", "data"):
        given, kept = plain["spec"][part], packed["spec"][part]
        if any(
            kept.get(field, _OUT) != value for field, value in given.items() if (part, field) != ("model", "source")
        ):
            kept["name"] = rename(part, given)
    if job := _pack_job(record, rename):
        packed["environment"]["job"] = job
    packed["config_id"] = config_id(RunSpec.model_validate(packed["spec"]))
    return RunRecord.model_validate(packed)


def _pack_job(record: RunRecord, rename: _Rename) -> dict[str, str] | None:
    """Return the id and hosts of the scheduler job in which a run was executed, as pseudonyms. None without a job.

    The hosts are listed only if the run also used a host outside the job's allocation, so that the flag
    `foreign_hosts` can still be derived.
    """
    from analysis.columns import list_columns
    from analysis.observed import find_job

    environment, job = record.environment, find_job(record.environment)
    if environment is None or job is None:
        return None
    allocation, foreign = list_columns()["allocation"].value(record), find_foreign(environment.hosts, job.nodelist)
    own = [rename("host", host) for host in environment.hosts if host not in foreign] if foreign else []
    return {"job_id": rename("job", allocation) if allocation else "", "nodelist": ",".join(own)}


@functools.cache
def list_own_words() -> frozenset[str]:
    """Return all strings that zeroscale itself defines: fields and choices of its records and plug-ins, and texts in
    some folders of conf/. Folders that describe a site, such as conf/launcher, are not read."""
    documents: list[Any] = [_MORE_WORDS, RunRecord.model_json_schema()]
    kinds: tuple[tuple[plugins.Kind[Any], str], ...] = (
        (plugins.ENGINE, "Options"), (plugins.FAMILY, "Shape"), (plugins.DATA, "Options"),
    )  # fmt: skip
    for kind, part in kinds:
        for word, plugin in plugins.list_usable(kind):
            if plugin.__name__.startswith(f"{kind.package}."):  # not that of another installed package
                documents += [word, getattr(plugin, part).model_json_schema()]
    for group in ("data", "engine", "machine", "model", "objective"):
        for file in (find_conf_folder() / group).glob("*.yaml"):
            documents += [file.stem, yaml.safe_load(file.read_text(encoding="utf-8"))]
    documents += [file.stem for file in (find_conf_folder() / "study").glob("*.yaml")]
    return frozenset(_list_texts(documents))


def _list_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _list_texts(inner)
    yield from value if isinstance(value, Mapping) else ()
