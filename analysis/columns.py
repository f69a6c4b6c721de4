"""Columns of the run table and of tables derived from it: their meanings, units and types.

Columns that are read directly from a record are defined here, computed columns in `analysis/metrics`. An unknown value
is missing, never 0 or -1.

Public tables have units and meanings of their columns in `frame.attrs["units"]` and `frame.attrs["meanings"]`. pandas
keeps these for selections and copies of a table. A single column has the `attrs` of its whole table.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from analysis.metrics import Better, load_metrics
from analysis.observed import find_job, find_slowest_link, find_slowest_rank, get_host, get_tokens, remember_latest
from bench.core.files import read_engine_preset
from bench.core.formatting import describe_adapter
from bench.core.point_fields import flatten
from bench.core.record import Evaluation, Observations, RunRecord
from bench.core.spec import LENGTHS, OBJECTIVE, EngineSpec

if TYPE_CHECKING:  # importing pandas is slow, and processes that read records do not need it
    from pandas import DataFrame

Kind = Literal["text", "integer", "number", "truth"]


class Column(NamedTuple):
    """One column of the run table.

    `value` computes the column's cell from a record, and `kind` is the type of its cells. `unit` is empty for a column
    without a unit. `better` is "more" or "less" if larger or smaller values are better.
    """

    name: str
    meaning: str
    value: Callable[[RunRecord], Any]
    kind: Kind = "text"
    unit: str = ""
    better: Better = "neither"


class ColumnMeaning(NamedTuple):
    """The meaning and unit of a column of any public table."""

    meaning: str
    unit: str = ""


ORDER = (
    "config_id", "environment_id", "device", "machine", "allocation", "repeat", "attempt", "study", "model",
    "parameters", "engine", "options", "precision", "activation_checkpointing", "data", "seed", "nodes",
    "devices_per_node", "world_size", "micro", "accumulation", "global_batch", "encoder_length", "decoder_length",
    "encoder_tokens", "decoder_tokens", "padding_tokens", "evidence", "outcome", "sample_s", "step_s", "step_s_low",
    "step_s_high", "step_s_p95", "step_s_p99", "step_s_max", "longest_step", "n_steps", "samples_per_s", "tokens_per_s",
    "tokens_per_s_low", "tokens_per_s_high", "effective_tokens_per_s", "encoder_tokens_per_s", "decoder_tokens_per_s",
    "padding_tokens_per_s", "model_tflops_per_device", "hardware_tflops_per_device", "mfu", "hfu",
    "peak_allocated_bytes", "peak_allocated_spread_bytes", "peak_reserved_bytes", "init_peak_bytes", "resident_bytes",
    "peak_rss_bytes", "data_wait_s", "data_wait_share", "compute_s", "slowest_over_median", "moved_bytes",
    "idle_share",
    "energy_j_per_million_tokens", "cost_per_million_tokens", "slowest_rank", "slowest_host", "slowest_link_node",
    "reason", "flags", "notes",
)  # fmt: skip
"""Names of the columns of the run table, in order. Metrics that are not listed here are inserted before `reason`,
sorted by name."""
LATER = {
    "objective": OBJECTIVE, "lengths": None, "tensor": 1, "pipeline": 1, "stages_per_rank": 1, "adapter": "none",
    "trainable_parameters": None,
}  # fmt: skip
"""Optional columns, each with its default for records that were written before the field existed. A table has the
column only if at least one run has a value other than the default."""
LEARNED = (
    "learning_rate", "tokens_trained", "trained_s", "validation_loss", "exact_match_before", "exact_match",
    "token_f1_before", "token_f1",
)  # fmt: skip
"""Optional columns for trainings. A table has `learning_rate` if at least one run is a training, and each of the others
only if at least one training reached its end."""
QUALITIES = LEARNED[LEARNED.index("validation_loss") :]
"""Columns of LEARNED with the held-out loss and the quality of answers."""
LEARNED_TIMES = ("trained_s",)
"""Columns of LEARNED whose values depend on background load."""
SHOWN = (
    "config_id", "machine", "model", "engine", "options", "adapter", "precision", "world_size", "micro",
    "encoder_length", "decoder_length", "learning_rate", "seed", "evidence", "outcome", "tokens_trained", *QUALITIES,
    "sample_s", "step_s", "tokens_per_s", "compute_s", "mfu", "peak_allocated_bytes",
    "cost_per_million_tokens", "flags",
)  # fmt: skip
"""Columns that `zeroscale table` shows by default if any run has a value, and some only if their values differ."""
SHOWN_WHERE_DIFFERENT = ("machine", "options", "encoder_length", "decoder_length", "seed")


def list_columns() -> dict[str, Column]:
    """Return the columns that every run table has, by name and in order."""
    known = {column.name: column for column in _FACTS}
    for metric in load_metrics().values():
        kind: Kind = "integer" if metric.whole else "number"
        known[metric.name] = Column(metric.name, metric.label, metric.value, kind, metric.unit, metric.better)
    new = sorted(known.keys() - set(ORDER))  # metrics that ORDER does not list, such as those of plug-ins
    return {name: known[name] for name in (*ORDER[:-3], *new, *ORDER[-3:])}


def list_all_columns() -> dict[str, Column]:
    """Return all columns of run tables by name. Columns that every table has come first, optional columns last."""
    return list_columns() | {column.name: column for column in (*_LATER, *_LEARNED)}


def _read(path: str, meaning: str, kind: Kind = "text", unit: str = "") -> Column:
    """Return the column that holds a field of the record. `path` is the dotted path of the field. Its last part is the
    name of the column."""
    return Column(path.rpartition(".")[2], meaning, attrgetter(path), kind, unit)


def _get_allocation(record: RunRecord) -> str | None:
    around, submitted = find_job(record.environment), record.circumstance.launcher.get("job")
    if around is None or not around.allocation or submitted in (None, around.job_id):
        return around.allocation if around else None
    # a rebuilt cluster numbers its jobs from 1 again, so the id of the submitted job is appended
    return f"{around.allocation}.{submitted}"


def _count_tokens(record: RunRecord, kind: str) -> float | None:
    """Return the number of tokens of one kind, such as "encoder", per step and over all ranks; None if samples have no
    tokens of this kind."""
    if counted := get_tokens(record):
        return counted.of(kind)
    # A run without steps has no count. The spec's lengths give the same number, because both include padding.
    length = record.spec.sequence.get(kind)
    return None if length is None else float(record.spec.global_batch * length)


def _count_trainable(observed: Observations | None) -> int | None:
    """Return the number of trained parameters; None if it is unknown, or if all parameters are trained."""
    if observed is None or observed.trainable_parameters == observed.parameters:
        return None
    return observed.trainable_parameters


@remember_latest
def _format_options(engine: EngineSpec) -> str | None:
    """Return the options that differ from the engine's preset file, as `name=value`; None if no option differs."""
    preset = dict(flatten(read_engine_preset(engine.name)))
    changed = (f"{name}={value}" for name, value in flatten(engine.options) if preset.get(name, ...) != value)
    return ", ".join(changed) or None


def _format_lengths(record: RunRecord) -> str | None:
    """Return the tokens per sample of each kind as text. None if the samples have only encoder or decoder tokens,
    because these kinds have columns of their own."""
    lengths = record.spec.sequence
    return None if {*lengths} <= {*LENGTHS} else ", ".join(f"{length} {kind}" for kind, length in lengths.items())


def _find_slowest_host(record: RunRecord) -> str | None:
    rank = find_slowest_rank(record)
    return None if rank is None else get_host(record, rank // record.spec.devices_per_node)


def _find_slowest_link_node(record: RunRecord) -> str | None:
    node = find_slowest_link(record)
    return None if node is None else get_host(record, node) or str(node)


def _of_evaluation(value: Callable[[RunRecord, Evaluation], Any], place: int = -1) -> Callable[[RunRecord], Any]:
    """Return a function that computes a column's value from an evaluation in a record, by default the last. The value
    is None unless the run is a training that ended ok."""

    def find(record: RunRecord) -> Any:
        found = record.observations.evaluations if record.observations and record.outcome.kind == "ok" else None
        return value(record, found[place]) if found else None

    return find


def _build_quality_columns(name: str, meaning: str) -> tuple[Column, Column]:
    """Return two columns of a quality measure, such as exact match: its value before the first step, and its value at
    the end of a training."""

    def read(_: RunRecord, evaluation: Evaluation) -> float | None:
        return (evaluation.quality or {}).get(name)

    before, at_end = f"{meaning}, before the first step", f"{meaning}, at the end of a training"
    return (
        Column(f"{name}_before", before, _of_evaluation(read, 0), "number", better="more"),
        Column(name, at_end, _of_evaluation(read), "number", better="more"),
    )


_TOKENS = "tokens per optimizer step over all ranks, padding included"
_LENGTH = "tokens per sample, padding included"
_FACTS = (
    _read("config_id", "identifier of the configuration: hash of the settings that are measured"),
    Column(
        "environment_id",
        "identifier of the environment class: hash of device, CPU limits and software versions",
        lambda r: r.environment and r.environment.environment_id,
    ),
    Column(
        "device",
        "name of the device, as the driver or the operating system reports it",
        lambda r: r.environment and r.environment.classification.device,
    ),
    Column("machine", "requested type of node, a file of conf/machine", lambda r: r.circumstance.machine.name),
    Column("allocation", "job in which the run was made; runs of one job are not independent", _get_allocation),
    _read("circumstance.repeat", "index of the repeat of this configuration, from 0", "integer"),
    _read(
        "circumstance.attempt",
        "index of the attempt at this repeat, from 0; a failed attempt may be followed by another",
        "integer",
    ),
    _read("circumstance.study", "study that the run belongs to"),
    Column("model", "name of the model, a file of conf/model", lambda r: r.spec.model.name),
    Column(
        "parameters",
        "number of parameters: counted in the built model, or as published if no model was built",
        lambda r: r.observations.parameters if r.observations else r.spec.model.parameters,
        "integer",
    ),
    Column(
        "engine", "training engine, such as ddp, zero3 or fsdp; a file of conf/engine", lambda r: r.spec.engine.name
    ),
    Column(
        "options",
        "options of the engine that differ from its file in conf/engine",
        lambda r: _format_options(r.spec.engine),
    ),
    _read("spec.precision", "number format of weights and activations in both passes"),
    _read("spec.activation_checkpointing", "true if activations are recomputed in the backward pass", "truth"),
    Column("data", "data source, a file of conf/data", lambda r: r.spec.data.name),
    _read("spec.seed", "random seed of initial weights and data", "integer"),
    _read("spec.nodes", "number of nodes", "integer"),
    _read("spec.devices_per_node", "devices used on each node; a device runs one rank", "integer"),
    _read("spec.world_size", "number of ranks on all nodes", "integer"),
    _read("spec.batch.micro", "micro-batch: samples per forward pass of a rank", "integer", "samples"),
    _read("spec.accumulation", "micro-batches per optimizer step of a rank", "integer"),
    _read("spec.global_batch", "samples per optimizer step over all ranks", "integer", "samples"),
    Column("encoder_length", f"encoder {_LENGTH}", lambda r: r.spec.sequence.get("encoder"), "integer", "tokens"),
    Column("decoder_length", f"decoder {_LENGTH}", lambda r: r.spec.sequence.get("decoder"), "integer", "tokens"),
    Column("encoder_tokens", f"encoder {_TOKENS}", partial(_count_tokens, kind="encoder"), "number", "tokens"),
    Column("decoder_tokens", f"decoder {_TOKENS}", partial(_count_tokens, kind="decoder"), "number", "tokens"),
    Column(
        "padding_tokens",
        "padding tokens of all kinds per optimizer step over all ranks; mean over the window of timed steps",
        lambda r: counted.padding if (counted := get_tokens(r)) else None,
        "number",
        "tokens",
    ),
    _read("evidence", "origin of the numbers: measured, rehearsed (one real rank, simulated collectives) or predicted"),
    Column("outcome", "end of the run: ok, or the kind of failure, such as oom or hang", lambda r: r.outcome.kind),
    Column("slowest_rank", "slowest rank, if it is much slower than the other ranks", find_slowest_rank, "integer"),
    Column("slowest_host", "name of the host of slowest_rank", _find_slowest_host),
    Column(
        "slowest_link_node",
        "name or index of the node with the slowest link, if it is much slower than the other links",
        _find_slowest_link_node,
    ),
    _read("outcome.reason", "cause of the outcome; empty if the outcome is ok"),
    # these two are filled by `analysis.reading.rows`; `analysis.results` adds the flag `unverified`
    Column("flags", "reasons to doubt the run: names of flags, separated by spaces", lambda r: ""),
    Column("notes", "remarks on the interval of the step time: names of notes, separated by spaces", lambda r: ""),
)

_LATER = (
    _read("spec.objective", "training objective, a file of conf/objective"),
    Column("lengths", "tokens per sample of each kind; empty if all are encoder or decoder tokens", _format_lengths),
    _read("spec.parallel.tensor", "tensor parallelism: ranks that share each matrix", "integer"),
    _read("spec.parallel.pipeline", "pipeline parallelism: ranks among which the layers are divided", "integer"),
    _read("spec.parallel.stages_per_rank", "pipeline stages on each rank", "integer"),
    Column(
        "adapter",
        "adapter, such as LoRA, or frozen parameters; none if all parameters are trained",
        lambda r: describe_adapter(r.spec) or "none",
    ),
    Column(
        "trainable_parameters",
        "number of trained parameters; empty if all parameters are trained",
        lambda r: _count_trainable(r.observations),
        "integer",
    ),
)

_LEARNED = (
    Column(
        "learning_rate",
        "highest learning rate of a training (`optimizer.lr`)",
        lambda r: None if r.spec.learning.tokens is None else r.spec.optimizer.lr,
        "number",
    ),
    Column(
        "tokens_trained",
        "number of tokens that were trained on, padding included",
        _of_evaluation(lambda record, last: last.step * record.spec.tokens_per_step),
        "integer",
        "tokens",
    ),
    Column(
        "trained_s",
        "duration of all optimizer steps of a training, without evaluations and checkpoints",
        _of_evaluation(lambda record, last: last.trained_s),
        "number",
        "s",
    ),
    Column(
        "validation_loss",
        "mean loss per target token of held-out data, at the end of a training",
        _of_evaluation(lambda record, last: last.loss),
        "number",
        "nats",
        "less",
    ),
    *_build_quality_columns(
        "exact_match", "fraction of held-out prompts whose generated answer equals the reference answer"
    ),
    *_build_quality_columns(
        "token_f1", "F1 score of the words of generated answers (as in SQuAD), mean over held-out prompts"
    ),
)


# ---------------------------------------- documentation of public tables

UNITS, MEANINGS = "units", "meanings"
_ENDS = {"_low": "lower end of the interval of", "_high": "upper end of the interval of"}
_SIDES = {
    "base_": "at the smallest measured node count",
    "one_": "of the first engine",
    "other_": "of the second engine",
}

_DERIVED_MEANINGS = {
    "variant": "settings without a column of their own in which the engine's configurations in this set differ",
    "n": "sample size: allocations with a run that ended ok; a run outside of any job counts as an allocation",
    "runs": "number of runs, all attempts included",
    "seeds": "number of seeds with a held-out loss; repeats of one seed are not independent",
    "untimed": "number of attempts of unknown duration; their costs are unknown",
    "finished": "number of repeats that ended ok; runs with different seeds are different repeats",
    "reached": "number of repeats in which an evaluation's held-out loss was at most that of --loss",
    "device_hours": "device-hours of all attempts of known duration, from the start of their processes to their end",
    "start_share": "fraction of recorded device-hours that passed before the first step",
    "failed_share": "fraction of device_hours that attempts took that did not end ok",
    "cost": "cost of device_hours: all attempts of known duration",
    "cost_per_run": "median cost of a repeat that ended ok, with its failed attempts",
    "cost_to_loss": (
        "median cost of a repeat until its held-out loss was at most that of --loss, with its failed attempts"
    ),
    "interval_kind": (
        "kind of the intervals of step_s and tokens_per_s: within the run, between repeats, or range of repeats"
    ),
    "interval_level": "probability that the intervals of step_s and tokens_per_s contain the medians",
    "interval_n": "number of steps or repeats from which the interval of step_s is computed",
    "question": "model, ranks and further settings that are equal in all configurations compared here",
    "standing": (
        "verdict on sample_s: fastest, equal within 3 %, tied (no detectable difference), slower, busy, failed, or "
        "too few repeats to tell"
    ),
    "ratio": (
        "seconds per sample divided by those of the fastest configuration or, in a table of crossovers, of the second "
        "engine"
    ),
    "ratio_kind": "kind of the intervals of the row's ratios: within the runs, or between repeats",
    "ratio_level": "probability that an interval of a ratio contains the true ratio",
    "ratio_n": "number of steps or repeats, both sides added, from which the intervals of the ratios are computed",
    "pareto": (
        "comparison with the fastest configuration that needs no more memory: front (not slower), tied, dominated "
        "(slower), or too few repeats to tell"
    ),
    "memory_ratio": "seconds per sample, divided by those of the fastest configuration that needs no more memory",
    "memory_verdict": "verdict on memory_ratio, such as slower or no detectable difference",
    "law": "strong (equal global batch at all node counts) or weak (equal work per device) scaling",
    "batch": "micro-batch of the curve: the same at all node counts, or the fastest at each node count",
    "curve": "name of the curve: engine, micro-batch and work per step",
    "micros": "micro-batches requested at this node count, failed ones included",
    "tied_micros": "other micro-batches at this node count that are not detectably slower than that of the row",
    "base_nodes": "smallest measured node count of the curve",
    "speedup": "samples per second divided by those at base_nodes",
    "efficiency": "speedup divided by nodes / base_nodes; 1 is ideal",
    "serial_fraction": "serial fraction of the work by Karp and Flatt, computed from speedup; for strong scaling only",
}
_DERIVED_UNITS = {
    "device_hours": "h", "start_share": "of 1", "failed_share": "of 1", "cost": "currency", "cost_per_run": "currency",
    "cost_to_loss": "currency", "micros": "samples", "tied_micros": "samples",
}  # fmt: skip
DERIVED = {name: ColumnMeaning(text, _DERIVED_UNITS.get(name, "")) for name, text in _DERIVED_MEANINGS.items()}
"""Meanings and units of the columns of derived tables that the run table does not have."""


def describe(name: str) -> ColumnMeaning | None:
    """Return the meaning and unit of a column of any public table; None if no table has it."""
    if column := list_all_columns().get(name):
        return ColumnMeaning(column.meaning, column.unit)
    if name in DERIVED:
        return DERIVED[name]
    for end, words in _ENDS.items():
        if name.endswith(end) and (whole := describe(name.removesuffix(end))):
            return ColumnMeaning(f"{words} {name.removesuffix(end)}", whole.unit)
    for side, words in _SIDES.items():
        if name.startswith(side) and (bare := describe(name.removeprefix(side))):
            return ColumnMeaning(f"{bare.meaning}, {words}", bare.unit)
    return None


def annotate(frame: "DataFrame") -> "DataFrame":
    """Return a copy of a table with the units and meanings of its columns in `attrs`."""
    known = {str(name): found for name in frame.columns if (found := describe(str(name)))}
    carrying = frame.copy(deep=False)
    carrying.attrs = {
        UNITS: {name: one.unit for name, one in known.items()},
        MEANINGS: {name: one.meaning for name, one in known.items()},
    }
    return carrying


def tabulate_columns(frame: "DataFrame | None" = None) -> "DataFrame":
    """Return a table of the unit and meaning of each column of `frame`, or of every run table if `frame` is None."""
    import pandas as pd

    names = list_all_columns() if frame is None else map(str, frame.columns)
    known = [(name, describe(name) or ColumnMeaning("")) for name in names]
    cells = {"unit": [one.unit for _, one in known], "meaning": [one.meaning for _, one in known]}
    return pd.DataFrame(cells, index=pd.Index([name for name, _ in known], name="column"))
