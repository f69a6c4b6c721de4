"""Questions: groups of summary rows whose configurations are compared, and names for how these configurations differ.

Terms, each with a section below:

question        A group of rows with equal values in the columns `QUESTION`: the same work on equal hardware. Its rows
                differ in engine, layout, batch and activation checkpointing, and are ranked by time.
early failures  Attempts that failed before their environment was recorded. If another row of the same configuration
                and machine has a known environment, the attempt was retried and its row is dropped. Otherwise the row
                joins the rows of the same question, and may be compared with rows of any environment.
engines         The engines of two specs may be compared if all options that both engines have are equal.
variants        Fields in which configurations differ. Fields that have a column in the summary are omitted.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import pandas as pd

from analysis.columns import LATER
from analysis.summary import Row
from analysis.table import group_by, list_rows
from bench.core.files import read_engine_preset
from bench.core.formatting import format_count
from bench.core.point_fields import flatten, is_shown
from bench.core.spec import LENGTHS, EngineSpec, RunSpec, canonical
from bench.engines import find_facts

Question = dict[str, Any]
Fields = Mapping[str, Mapping[str, str]]
"""Fields of specs as text: by config_id, then by field name."""

_PLACE = ("model", "nodes", "devices_per_node")
_LENGTHS = {f"{kind}_length": f"{kind}_tokens" for kind in LENGTHS}
_MORE = ("machine", "environment_id", "evidence", "precision", "data", *_LENGTHS, "objective", "lengths", "adapter")
QUESTION = (*_PLACE, *_MORE)
"""Columns whose values are equal in all rows of a question. Its rows may differ in engine, layout, batch and activation
checkpointing."""
_PROTOCOL = "measure."


# ---------------------------------------- questions


def group_by_question(summary: pd.DataFrame) -> list[tuple[Question, list[Row]]]:
    """Return the rows of a summary grouped by question, in the order in which questions first appear.

    A question is a group of configurations that do the same work on equal hardware. If a point was predicted to be
    infeasible and was not measured, its row joins the measured rows of the same question.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    rows = drop_retried([add_lengths(row) for row in list_rows(summary)])
    ran = {(row["config_id"], row["machine"]) for row in rows if row["evidence"] != "predicted"}
    # a measured row replaces the prediction that its point is infeasible
    rows = [row for row in rows if row["evidence"] != "predicted" or (row["config_id"], row["machine"]) not in ran]
    for row, environment_id in assign_environments(rows, _build_question_key):
        key = tuple((row | {"environment_id": environment_id})[name] for name in QUESTION)
        measured = tuple("measured" if part == "predicted" else part for part in key)
        groups.setdefault(measured if measured in groups else key, []).append(row)
    return [(dict(zip(QUESTION, key, strict=True)), rows) for key, rows in groups.items()]


def _build_question_key(row: Row) -> tuple[Any, ...]:
    """Return the key by which rows are grouped into questions: the values in the columns `QUESTION`. The environment is
    always None in the key, because predictions have no environment. So a prediction has the same key as the
    measurements of its configuration, and belongs to the same question."""
    asked = row | {"environment_id": None, "evidence": "rehearsed" if row["evidence"] == "rehearsed" else "measured"}
    return tuple(asked[name] for name in QUESTION)


def add_lengths(row: Row) -> Row:
    """Return the row with two additions: the tokens per sample, computed from the tokens per step, and default values
    for optional columns that the row lacks."""
    counted = {name: row[tokens] for name, tokens in _LENGTHS.items()}
    lengths = {name: None if count is None else count / row["global_batch"] for name, count in counted.items()}
    return LATER | row | lengths


def name_question(question: Question, all_questions: Sequence[Question]) -> str:
    """Return the name of a question, which is a group of configurations that do the same work on equal hardware. The
    name states model and ranks, and how the question differs from the questions about the same model among
    `all_questions`."""
    return " · ".join([question["model"], format_ranks(question), *describe_differences(question, all_questions)])


def format_ranks(question: Question | Row) -> str:
    """Return the number of ranks as text, such as "8 ranks", or "2 × 8 ranks" for two nodes. `question` is any row or
    question with the values `nodes` and `devices_per_node`."""
    nodes, devices = question["nodes"], question["devices_per_node"]
    return f"{nodes} × {devices} ranks" if nodes > 1 else format_count(devices, "rank")


def describe_differences(question: Question, all_questions: Sequence[Question]) -> list[str]:
    """Return texts of those values of a question (such as precision) that differ between questions about the same
    model. Ranks are not among these values."""
    texts = []
    for part in _MORE:
        # The environment class contains the devices per node, so it may differ merely because the ranks differ.
        # Therefore it is only compared among questions with equal ranks.
        same_parts = _PLACE if part == "environment_id" else ("model",)
        rivals = [other for other in all_questions if all(other[same] == question[same] for same in same_parts)]
        if (value := question[part]) is not None and len({other[part] for other in rivals}) > 1:
            text = "no adapter" if (part, value) == ("adapter", "none") else str(value)
            texts.append(f"{part.removesuffix('_length')} {value:g}" if part.endswith("_length") else text)
    return texts


def describe_choice(row: Row) -> str:
    """Return a name that distinguishes a row's configuration from others that do the same work on equal hardware:
    engine, layout, options and micro-batch."""
    return f"{describe_series(row)}, micro {row['micro']}"


def describe_series(row: Row) -> str:
    """Return a name that distinguishes a row's configuration from others that do the same work on equal hardware, but
    does not contain the micro-batch.

    A `protocol` column, if present, distinguishes rows that differ only in the measurement protocol (`tell_apart`).
    """
    parts = [row["engine"]]
    if row["accumulation"] > 1:
        parts.append(f"× {row['accumulation']} accumulated")
    if row["activation_checkpointing"]:
        parts.append("checkpointed")
    if (adapter := row.get("adapter", "none")) != "none":
        parts.append(f"+ {adapter.split()[0]}")  # such as lora, without its rank
    if apart := ", ".join(filter(None, (row["variant"], row.get("protocol")))):
        parts.append(f"({apart})")
    return " ".join(parts)


# ---------------------------------------- early failures


def has_failed_early(row: Row) -> bool:
    """Return True if a row has neither measured values nor a known environment. This is also true for predicted
    rows."""
    return row["environment_id"] is None and not row["n"]


def drop_retried(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, except attempts that failed before their environment was recorded and were tried again. If a
    real run failed, a rehearsal of the same configuration is not another try."""

    def build_key(row: Row) -> tuple[str, str, bool]:
        return row["config_id"], row["machine"], row["evidence"] == "rehearsed"

    known = {build_key(row) for row in rows if row["environment_id"] is not None}
    return [row for row in rows if not has_failed_early(row) or build_key(row) not in known]


def assign_environments(rows: Iterable[Row], question_of: Callable[[Row], Hashable]) -> list[tuple[Row, str | None]]:
    """Return each row with its environment class (hash of device and software versions). Rows with a known class come
    first.

    If all attempts of a row failed before their environment was recorded, the row gets the class of another row of the
    same question: the first row with measured values and a known class. If there is no such row, it gets the class of
    the first row with a known class. If no row of the question has a known class, the class is None. `question_of`
    returns the key of a row's question.
    """
    # stable sorts keep the order of rows among those with a known and among those with an unknown environment
    ordered = sorted(rows, key=lambda row: row["environment_id"] is None)
    first: dict[Hashable, str | None] = {}
    for row in sorted(ordered, key=lambda row: (row["environment_id"] is None, row["n"] == 0)):
        first.setdefault(question_of(row), row["environment_id"])
    known = [first[question_of(row)] if has_failed_early(row) else row["environment_id"] for row in ordered]
    return list(zip(ordered, known, strict=True))


def may_be_same(one: str | None, other: str | None) -> bool:
    """Return True if two environment classes (hashes of device and software versions) are equal, or could be equal
    because one of them is unknown (None)."""
    return one is None or other is None or one == other


# ---------------------------------------- engines


def differ_in_engine(one: RunSpec, other: RunSpec) -> bool:
    """Return True if two specs differ only in the engine and their engines may be compared (`may_be_compared`)."""
    return dump_without_engine(one) == dump_without_engine(other) and may_be_compared(one, other)


def may_be_compared(one: RunSpec, other: RunSpec) -> bool:
    """Return True if the engines of two specs have equal options, apart from options that only one engine has.

    If only one of two ZeRO stages used offload, the comparison would show the effect of offload instead of that of the
    stage. The same is true for different bucket sizes.

    If only one spec has an option, the engine of the other spec may lack the option, or the other spec may leave it at
    its default. The preset file of the option's engine decides. If this file lists the option, the option has no
    default, so the other engine must lack it. Otherwise the option counts as different.
    """
    ours, theirs = _list_options(one), _list_options(other)
    # an option that only one of the engines has counts as unequal
    unequal = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    own_names = {name for name in read_engine_preset(one.engine.name) if name not in theirs}
    own_names |= {name for name in read_engine_preset(other.engine.name) if name not in ours}
    return unequal <= own_names


def dump_without_engine(spec: RunSpec) -> str:
    """Return a spec without its engine, as canonical text."""
    return canonical(spec.model_copy(update={"engine": EngineSpec(name="any", backend="any")}))


def list_own_options(spec: RunSpec, other: RunSpec) -> dict[str, Any]:
    """Return the options of a spec's engine whose values differ from the engine's preset file. Options that the spec
    `other` also has are excluded."""
    preset, ours, theirs = read_engine_preset(spec.engine.name), _list_options(spec), _list_options(other)
    return {name: value for name, value in ours.items() if name not in theirs and preset.get(name, ...) != value}


def describe_engine(spec: RunSpec, other: RunSpec) -> str:
    """Return the name of a spec's engine, with the options whose values differ from the engine's preset file. Options
    that the spec `other` also has are excluded."""
    options_text = ", ".join(f"{name}={value}" for name, value in list_own_options(spec, other).items())
    return f"{spec.engine.name} ({options_text})" if options_text else spec.engine.name


def _list_options(spec: RunSpec) -> Mapping[str, Any]:
    """Return the options of a spec's engine, except options that distinguish engines, such as the ZeRO stage."""
    facts = find_facts(spec)
    distinguishing = facts.distinguishing if facts else frozenset()
    return {name: value for name, value in spec.engine.options.items() if name not in distinguishing}


# ---------------------------------------- variants


def describe_variants(specs: Mapping[str, RunSpec]) -> dict[str, str]:
    """Return, by config_id, the fields and values that distinguish configurations of the same model, engine and data.

    Fields that have a column in the summary are omitted. So are fields of the measurement protocol, which
    `describe_protocol` and `tell_apart` describe. The text is empty if no field remains.
    """
    return {
        member: ", ".join(
            f"{name.removeprefix('engine.options.').removeprefix('model.')}={value}" for name, value in fields.items()
        )
        for member, fields in _list_variant_fields(specs).items()
    }


def list_varied(specs: Mapping[str, RunSpec]) -> dict[str, tuple[str, ...]]:
    """Return the fields by which `describe_variants` distinguishes configurations, each with its sorted values."""
    values = _list_distinct(pair for fields in _list_variant_fields(specs).values() for pair in fields.items())
    return {name: tuple(sorted(found, key=_build_number_key)) for name, found in values.items()}


def _list_distinct(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the distinct values of each field, given pairs of a field's name and its value."""
    groups = group_by(dict.fromkeys(pairs), itemgetter(0))
    return {name: [value for _, value in members] for name, members in groups.items()}


def _build_number_key(text: str) -> tuple[bool, float, str]:
    """Return a sort key for a text. Numbers come first, sorted by value; all other texts follow."""
    try:
        return False, float(text), text
    except ValueError:
        return True, 0.0, text


def _list_variant_fields(specs: Mapping[str, RunSpec]) -> dict[str, dict[str, str]]:
    """Return, by config_id, the fields that distinguish configurations of the same model, engine and data, with their
    values as text. Fields that have a column in the summary and fields of the measurement protocol are omitted."""
    fields = {
        config_id: {name: "null" if value is None else str(value) for name, value in flatten(spec)}
        for config_id, spec in specs.items()
    }
    found: dict[str, dict[str, str]] = {config_id: {} for config_id in specs}
    groups = group_by(specs, lambda one: (specs[one].model.name, specs[one].engine.name, specs[one].data.name))
    for members in groups.values():
        names = _list_differing(members, fields)
        differ = [name for name in names if not (is_shown(name) or name.startswith(_PROTOCOL))]
        found |= {member: {name: fields[member].get(name, "default") for name in differ} for member in members}
    return found


def describe_protocol(specs: Iterable[RunSpec]) -> str:
    """Return the fields of the measurement protocol in which configurations differ, with their values; empty if all are
    equal."""
    values = _list_distinct((name, str(value)) for spec in specs for name, value in flatten(spec.measure))
    return "; ".join(f"{name} {', '.join(found)}" for name, found in values.items() if len(found) > 1)


def tell_apart(rows: Sequence[Row], specs: Mapping[str, RunSpec], name: Callable[[Row], Hashable]) -> list[Row]:
    """Return all rows of a summary with an additional column `protocol`, which distinguishes rows that have the same
    name. `name` is a function that returns the name of a row. For rows whose name is unique, the column is empty.

    For rows with the same name, the column states one field of the measurement protocol that has a different value in
    each of these rows. If there is no such field, the column states all protocol fields in which these rows differ.
    Tables show the column. Figures join rows of equal name to one series.
    """
    texts: dict[str, str] = {}
    for group in group_by(rows, name).values():
        members = list(dict.fromkeys(row["config_id"] for row in group))
        fields = {member: {one: str(value) for one, value in flatten(specs[member].measure)} for member in members}
        texts |= describe_differing_fields(members, fields)
    return [row | {"protocol": texts.get(row["config_id"], "")} for row in rows]


def describe_differing_fields(members: Sequence[str], fields: Fields) -> dict[str, str]:
    """Return, by config_id, a text that distinguishes the configurations `members`. The text is the name and value of
    the first field that has a different value in each configuration. If there is no such field, the text lists all
    fields that differ."""
    differ = _list_differing(members, fields)
    # one field is enough if its values are distinct
    sufficient = [one for one in differ if len({fields[member].get(one) for member in members}) == len(members)]
    return {
        member: ", ".join(f"{one}={fields[member].get(one, 'default')}" for one in sufficient[:1] or differ)
        for member in members
    }


def _list_differing(members: Sequence[str], fields: Fields) -> list[str]:
    names = dict.fromkeys(name for member in members for name in fields[member])
    return [name for name in names if len({fields[member].get(name) for member in members}) > 1]
