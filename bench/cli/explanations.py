"""What every name means that tables, reports, records and the config use: one list, from where each is defined."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from analysis.columns import Column, list_all_columns
from analysis.figures import list_figures
from analysis.flags import FLAGS, NO_MEASUREMENT, NOTES, OUTCOMES
from bench.config.reference.config import GROUPS, KeySection, list_group_files, list_sections
from bench.core.files import find_conf_folder
from bench.core.record import FINAL


class Explanation(NamedTuple):
    """One meaning of a name."""

    name: str
    kind: str  # of what it is the name, such as "column"
    meaning: str
    details: tuple[tuple[str, str], ...] = ()  # what else is known of it, by label


def list_explanations() -> Iterator[Explanation]:
    """Yield the meaning of every column, flag, note, outcome, figure, config key and file of conf/."""
    yield from (_explain_column(column) for column in list_all_columns().values())
    for name, flag in FLAGS.items():
        never = (("counts", "in no summary"),) if name in NO_MEASUREMENT else ()
        yield Explanation(name, "flag", f"the run {flag.meaning}", never)
    yield from (Explanation(name, "note", f"the run {note.meaning}") for name, note in NOTES.items())
    for kind, meaning in OUTCOMES.items():
        yield Explanation(kind, "outcome", meaning, (("tried again", "no" if kind in FINAL else "yes"),))
    yield from (Explanation(one.name, "figure", one.title) for one in list_figures())
    for section in list_sections():
        yield from _explain_keys(section)
    for group in GROUPS:
        yield from (_explain_file(group, name) for name in list_group_files(group))


def _explain_column(column: Column) -> Explanation:
    better = "" if column.better == "neither" else column.better
    details = (("unit", column.unit), ("better is", better))
    return Explanation(column.name, "column", column.meaning, tuple(one for one in details if one[1]))


def _explain_keys(section: KeySection) -> Iterator[Explanation]:
    """Yield the keys of a section; those of a study are told from a run's by their file."""
    kind = "key of a study file" if section.group == "study" else "config key"
    if section.plugin:
        kind += f" of {section.group} {section.plugin}"
    for key in section.keys:
        details = (("type", key.type.replace("`", "")), ("default", key.default))
        yield Explanation(key.path, kind, key.meaning, tuple(one for one in details if one[1]))


def _explain_file(group: str, name: str) -> Explanation:
    """Return what a file of conf/ says of itself: the comment at its top, or its source."""
    file = find_conf_folder() / group / f"{name}.yaml"
    text = file.read_text(encoding="utf-8")
    comments = re.match(r"(?:#[^\n]*\n)*", text)
    lines = [line.strip("# ") for line in comments[0].splitlines()] if comments else []
    source = re.search(r'^source: "?(.*?)"?$', text, flags=re.MULTILINE)
    meaning = " ".join(lines) or (f"by {source[1]}" if source and source[1] else "")
    return Explanation(f"{group}={name}", f"file of conf/{group}", meaning)
