"""The columns of the run table: what each means and its unit, in one place.

Facts are read off a record and documented here; quantities are derived, in `analysis/metrics`, and
documented there. Unknown is missing, never 0 or -1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from analysis.metrics import Better, Metric, load_metrics
from analysis.observed import find_job, find_slowest_link, find_slowest_rank, get_host, get_tokens, remember_latest
from bench.core.files import read_engine_preset
from bench.core.point_fields import flatten
from bench.core.record import Evaluation, RunRecord
from bench.core.spec import LENGTHS, OBJECTIVE, EngineSpec

Kind = Literal["text", "integer", "number", "truth"]


class Column(NamedTuple):
    """One column of the run table; `unit` is empty for what has none."""

    name: str
    meaning: str
    unit: str
    kind: Kind
    value: Callable[[RunRecord], Any]
    better: Better = "neither"


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
"""The columns in order; a metric that is not named here comes before `reason`, by its name."""

LATER = {"objective": OBJECTIVE, "lengths": None, "tensor": 1, "pipeline": 1, "stages_per_rank": 1}
"""Columns that a table has only where some run is no longer as all of the first were: what it was in all of those."""

LEARNED = ("tokens_trained", "trained_s", "validation_loss")
"""Columns that a table has only where some run was trained to its end."""
LEARNED_TIMES = ("trained_s",)
"""Those of them that depend on what else the machine did."""

SHOWN = (
    "config_id", "model", "engine", "options", "precision", "world_size", "micro", "encoder_length", "decoder_length",
    "evidence", "outcome", "tokens_trained", "validation_loss", "sample_s", "step_s", "tokens_per_s", "compute_s",
    "mfu", "peak_allocated_bytes", "cost_per_million_tokens", "flags",
)  # fmt: skip
"""What people look at first, where any run has a value for it; the next ones where they differ."""

SHOWN_WHERE_DIFFERENT = ("options", "encoder_length", "decoder_length")


def list_columns() -> dict[str, Column]:
    """Return every column that each run table has by name, in order."""
    known = {column.name: column for column in _FACTS} | {
        m.name: _build_metric_column(m) for m in load_metrics().values()
    }
    new = sorted(known.keys() - set(ORDER))
    return {name: known[name] for name in (*ORDER[:-3], *new, *ORDER[-3:])}


def list_all_columns() -> dict[str, Column]:
    """Return the same, and then the columns that some run tables have besides."""
    return list_columns() | {column.name: column for column in (*_LATER, *_LEARNED)}


def _build_metric_column(metric: Metric) -> Column:
    kind: Kind = "integer" if metric.whole else "number"
    return Column(metric.name, metric.label, metric.unit, kind, metric.value, metric.better)


def _get_environment_id(record: RunRecord) -> str | None:
    return record.environment.environment_id if record.environment else None


def _get_device(record: RunRecord) -> str | None:
    return record.environment.classification.device if record.environment else None


def _get_allocation(record: RunRecord) -> str | None:
    around, submitted = find_job(record.environment), record.circumstance.launcher.get("job")
    if around is None or not around.allocation or submitted in (None, around.job_id):
        return around.allocation if around else None
    return f"{around.allocation}.{submitted}"  # a cluster that was built anew begins to count at 1 again


def _get_parameters(record: RunRecord) -> int | None:
    return record.observations.parameters if record.observations else record.spec.model.parameters


def _count_tokens(record: RunRecord, kind: str) -> float | None:
    """Return the tokens of one kind; None where a sample has none such."""
    if counted := get_tokens(record):
        return counted.of(kind)
    length = record.spec.sequence.get(kind)  # a run that made no step would have had these: lengths include padding
    return None if length is None else float(record.spec.global_batch * length)


_encoder_tokens, _decoder_tokens = (partial(_count_tokens, kind=kind) for kind in ("encoder", "decoder"))


def _get_length(record: RunRecord, kind: str) -> int | None:
    return record.spec.sequence.get(kind)


_get_encoder_length, _get_decoder_length = (partial(_get_length, kind=kind) for kind in ("encoder", "decoder"))


@remember_latest
def _format_options(engine: EngineSpec) -> str | None:
    """Return the options of the engine in one line, as they are given; None where all are those of its file."""
    preset = dict(flatten(read_engine_preset(engine.name)))
    changed = (f"{name}={value}" for name, value in flatten(engine.options) if preset.get(name, ...) != value)
    return ", ".join(changed) or None


def _count_padding_tokens(record: RunRecord) -> float | None:
    counted = get_tokens(record)
    return counted.padding if counted else None


def _format_lengths(record: RunRecord) -> str | None:
    """Return the tokens of a sample by kind; None where the columns of the table tell them."""
    lengths = record.spec.sequence
    return None if {*lengths} <= {*LENGTHS} else ", ".join(f"{length} {kind}" for kind, length in lengths.items())


def _find_slowest_host(record: RunRecord) -> str | None:
    rank = find_slowest_rank(record)
    return None if rank is None else get_host(record, rank // record.spec.devices_per_node)


def _find_slowest_link_node(record: RunRecord) -> str | None:
    node = find_slowest_link(record)
    return None if node is None else get_host(record, node) or str(node)


def _get_last_evaluation(record: RunRecord) -> Evaluation | None:
    """Return the evaluation behind the last step of a training that ended well."""
    found = record.observations.evaluations if record.observations and record.outcome.kind == "ok" else None
    return found[-1] if found else None


def _count_tokens_trained(record: RunRecord) -> int | None:
    last = _get_last_evaluation(record)
    return last.step * record.spec.tokens_per_step if last else None


def _get_trained_s(record: RunRecord) -> float | None:
    last = _get_last_evaluation(record)
    return last.trained_s if last else None


def _get_validation_loss(record: RunRecord) -> float | None:
    last = _get_last_evaluation(record)
    return last.loss if last else None


_FACTS = (
    Column("config_id", "what was measured: hash of the spec", "", "text", lambda r: r.config_id),
    Column("environment_id", "what it ran on: hash of device and versions", "", "text", _get_environment_id),
    Column("device", "the device's own name", "", "text", _get_device),
    Column("machine", "node type asked for, a file of conf/machine", "", "text", lambda r: r.circumstance.machine.name),
    Column("allocation", "Slurm job that it ran in: those of one are not independent", "", "text", _get_allocation),
    Column("repeat", "repeat of this configuration, from 0", "", "integer", lambda r: r.circumstance.repeat),
    Column("attempt", "attempt at this repeat, from 0", "", "integer", lambda r: r.circumstance.attempt),
    Column("study", "study that the run belongs to", "", "text", lambda r: r.circumstance.study),
    Column("model", "model, a file of conf/model", "", "text", lambda r: r.spec.model.name),
    Column("parameters", "counted on the built model; published, where none was built", "", "integer", _get_parameters),
    Column("engine", "engine, a file of conf/engine", "", "text", lambda r: r.spec.engine.name),
    Column(
        "options",
        "of the engine, where they are not as its file in conf/engine has them",
        "",
        "text",
        lambda r: _format_options(r.spec.engine),
    ),
    Column("precision", "of weights and activations in forward and backward", "", "text", lambda r: r.spec.precision),
    Column(
        "activation_checkpointing",
        "activations are recomputed in backward",
        "",
        "truth",
        lambda r: r.spec.activation_checkpointing,
    ),
    Column("data", "data source, a file of conf/data", "", "text", lambda r: r.spec.data.name),
    Column("seed", "of weights and data", "", "integer", lambda r: r.spec.seed),
    Column("nodes", "nodes", "", "integer", lambda r: r.spec.nodes),
    Column("devices_per_node", "devices of each node, one rank each", "", "integer", lambda r: r.spec.devices_per_node),
    Column("world_size", "ranks in all", "", "integer", lambda r: r.spec.world_size),
    Column("micro", "samples per device and forward pass", "samples", "integer", lambda r: r.spec.batch.micro),
    Column("accumulation", "forward passes per optimizer step", "", "integer", lambda r: r.spec.accumulation),
    Column("global_batch", "samples per optimizer step", "samples", "integer", lambda r: r.spec.global_batch),
    Column("encoder_length", "tokens of a sample, padding included", "tokens", "integer", _get_encoder_length),
    Column("decoder_length", "tokens of a sample, padding included", "tokens", "integer", _get_decoder_length),
    Column("encoder_tokens", "per optimizer step, all ranks, with padding", "tokens", "number", _encoder_tokens),
    Column("decoder_tokens", "per optimizer step, all ranks, with padding", "tokens", "number", _decoder_tokens),
    Column(
        "padding_tokens", "contained in the two before; mean over the window", "tokens", "number", _count_padding_tokens
    ),
    Column("evidence", "measured, rehearsed (one real rank) or predicted", "", "text", lambda r: r.evidence),
    Column("outcome", "how the run ended", "", "text", lambda r: r.outcome.kind),
    Column("slowest_rank", "rank that the others wait for, if one stands out", "", "integer", find_slowest_rank),
    Column("slowest_host", "the host of that rank", "", "text", _find_slowest_host),
    Column(
        "slowest_link_node", "node whose link is slow, if one stands out: its host", "", "text", _find_slowest_link_node
    ),
    Column("reason", "why it ended so; empty when ok", "", "text", lambda r: r.outcome.reason),
    Column("flags", "doubts about the row, separated by spaces", "", "text", lambda r: ""),  # analysis.table fills it
    Column(
        "notes", "how wide or how well known the interval of its step time is", "", "text", lambda r: ""
    ),  # analysis.reading fills it
)

_LATER = (
    Column("objective", "what is learned, a file of conf/objective", "", "text", lambda r: r.spec.objective),
    Column("lengths", "tokens per sample by kind, where no column before has them", "", "text", _format_lengths),
    Column("tensor", "ranks that share each matrix", "", "integer", lambda r: r.spec.parallel.tensor),
    Column("pipeline", "ranks that the layers are divided among", "", "integer", lambda r: r.spec.parallel.pipeline),
    Column("stages_per_rank", "parts of the layers on each", "", "integer", lambda r: r.spec.parallel.stages_per_rank),
)

_LEARNED = (
    Column("tokens_trained", "that a training has seen, padding included", "tokens", "integer", _count_tokens_trained),
    Column("trained_s", "its optimizer steps, evaluations and checkpoints left out", "s", "number", _get_trained_s),
    Column(
        "validation_loss",
        "mean per target token of held-out text, at its end",
        "nats",
        "number",
        _get_validation_loss,
        "less",
    ),
)
