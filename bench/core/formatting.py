"""Text for points (configurations), results, counts and durations."""

import statistics
from typing import Any

from bench.core.quantities import LEAST_RUNS
from bench.core.record import MemoryShortage, RunRecord
from bench.core.spec import OBJECTIVE, RunSpec


def describe_point(spec: RunSpec, identity: str) -> str:
    """Return a one-line description of a configuration. `identity` is its config_id."""
    extra = " checkpointing" if spec.activation_checkpointing else ""
    extra += "  compiled blocks" if spec.model.compile == "blocks" else ""
    extra += "".join(f"  {words}" for words in list_layout(spec))
    extra += f"  {adapter}" if (adapter := describe_adapter(spec)) else ""
    extra += f"  {spec.objective}" if spec.objective != OBJECTIVE else ""
    return (
        f"{identity}  {spec.model.name:<12} {spec.engine.name:<6} {spec.precision}  "
        f"{spec.nodes} × {spec.devices_per_node} devices  "
        f"micro {spec.batch.micro} × {spec.accumulation} = global {spec.global_batch}  "
        f"{describe_lengths(spec)}  {spec.data.name}{extra}"
    )


def describe_choice(spec: RunSpec) -> str:
    """Return as text the settings that `zeroscale advise` chooses, except the engine: nodes, layout, batch,
    checkpointing and adapter."""
    batch = f"micro-batch {spec.batch.micro} × accumulation {spec.accumulation} = global {spec.global_batch}"
    layout = "".join(f", {words}" for words in list_layout(spec))
    again = f"{'' if spec.activation_checkpointing else 'no '}checkpointing"
    adapter = f", {spec.adapter.name}" if describe_adapter(spec) else ""
    return f"{format_count(spec.nodes, 'node')}{layout}, {batch}, {again}{adapter}"


def describe_result(record: RunRecord) -> str:
    """Return a one-line result of a run: its outcome and the median step time of its measurement window in seconds."""
    from bench.core.statistics import series_interval  # imported here: it imports scipy, which is slow

    observed, outcome = record.observations, record.outcome
    if outcome.kind != "ok" or observed is None or observed.steps is None:
        return f"{outcome.kind}: {outcome.reason}"
    window = observed.steps.step_s[observed.steps.cut :]
    interval = series_interval(window)
    interval_text = f" (95 % {interval[0]:.4g}–{interval[1]:.4g})" if interval else ""
    memory = [rank.peak_allocated_bytes for rank in observed.memory if rank.peak_allocated_bytes is not None]
    peak = f", {max(memory) / 2**20:.1f} MiB peak" if memory else ""
    return f"ok: {statistics.median(window):.4g} s per step{interval_text}, n = {len(window)}{peak}"


def describe_quiet_remedy(repeats: int) -> str:
    """Return a remedy for measurements on a busy machine: more repeats on a quiet machine. `repeats` is the number of
    repeats so far. All repeats so far may be disturbed. The remedy therefore adds as many repeats as a comparison
    needs."""
    # --repeats is a total: a sweep adds repeats up to it, and does not replace disturbed runs.
    added = f"--repeats {repeats + LEAST_RUNS} launcher.quiet_within_s=600"
    return f"to add repeats without background load, run the same sweep command again with {added}"


QUIET_SEARCH_REMEDY = (
    "for a search on a quiet machine, repeat the search command with launcher.quiet_within_s=600 and another "
    "--results DIR"
)
"""Like `describe_quiet_remedy`, for the trials of a search, which are not repeated."""


def describe_shortage(shortage: MemoryShortage) -> str:
    """Return a one-line description of the memory that ran out: the size of the failed request and the use of the
    memory, in GiB."""
    gib = {name: f"{count / 2**30:.3g}" for name, count in shortage if name.endswith("_bytes") and count is not None}
    wanted = {"requested_bytes": "{} GiB requested", "lacking_bytes": "{} lacking", "free_bytes": "{} free"}
    if shortage.lacking_bytes == 0 and shortage.where == "host":
        wanted["lacking_bytes"] = "refused although more was free, as by a limit of ulimit or of a control group"
    filled = {
        "total_bytes": "{} in total",
        "live_bytes": "{} in live tensors",
        "reserved_bytes": "{} reserved",
        "resident_bytes": "{} resident",
        "others_bytes": "{} used by other processes",
    }
    parts = [
        ", ".join(text.format(gib[name]) for name, text in some.items() if name in gib) for some in (wanted, filled)
    ]
    return f"{shortage.where} memory: {'; '.join(filter(None, parts))}"


def describe_lengths(spec: RunSpec) -> str:
    """Return the sequence length of each kind of token, such as `512/114 tokens`, in the order of the objective."""
    return f"{'/'.join(map(str, spec.sequence.values()))} tokens"


def list_layout(spec: RunSpec) -> list[str]:
    """Return the parallel layout, such as `["tensor 2", "pipeline 4"]`. Empty if every rank has a copy of the model."""
    parallel = spec.parallel
    parts = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "stages": parallel.stages_per_rank}
    words = [f"{name} {number}" for name, number in parts.items() if number > 1]
    return [*words, *["sequence-parallel"] * parallel.sequence]


def describe_adapter(spec: RunSpec) -> str:
    """Return the adapters and frozen parts of a configuration, such as `lora rank=16 alpha=32`: all settings that
    differ from their defaults. Empty if all parameters are trained."""
    plain = spec.adapter.model_dump(mode="json", exclude_defaults=True)
    name = plain.pop("name", "")
    return " ".join([*([name] if name else []), *(f"{key}={format_value(value)}" for key, value in plain.items())])


def format_value(value: Any) -> str:
    """Return a plain value as it is written in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def list_overrides(spec: RunSpec) -> list[str]:
    """Return, as overrides, the settings that `zeroscale advise` chooses, except the engine: nodes, layout, batch,
    checkpointing and adapter."""
    batch = [f"batch.micro={spec.batch.micro}", f"batch.accumulation={spec.accumulation}"]
    shares = spec.parallel.model_dump(exclude_defaults=True, exclude={"sequence"})
    layout = [f"parallel.{name}={number}" for name, number in shares.items()]
    again = f"activation_checkpointing={str(spec.activation_checkpointing).lower()}"
    adapter = [f"adapter={spec.adapter.name}"] if describe_adapter(spec) else []
    return [f"nodes={spec.nodes}", *layout, *batch, again, *adapter]


def format_count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits. From 1,000 on, it is an integer with thousands separators."""
    # Round before the comparison, so that 999.7 becomes 1,000 and not 1e+03.
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:.{digits}g}" if rounded < 1000 else f"{rounded:,.0f}"


def format_interval(value: float, low: float, high: float) -> str:
    """Return a value with its interval, such as `1.2 (1.1–1.3)`, each with three significant digits."""
    return f"{format_number(value)} ({format_number(low)}–{format_number(high)})"


TIMES = 9.0
"""Relative difference from which `format_extra` returns a ratio, which is then easier to read than a percentage. A
difference of 9 is ten times as much."""


def format_extra(share: float, unit: str) -> str:
    """Return an increase of time or cost as text, such as `+12 % time` for a `share` of 0.12. `share` is the increase
    divided by the original time or cost. `unit` names the quantity, such as `time`. If `share` is at least `TIMES`, the
    text is a ratio to the original, such as `130 times as long`."""
    if share < TIMES:
        return f"{format_percent(share)} {unit}"
    return f"{format_number(1 + share)} times {'as long' if unit == 'time' else f'the {unit}'}"


def format_percent(share: float) -> str:
    """Return a relative difference as a signed percentage: 0.123 becomes `+12 %`."""
    return f"{100 * share:+.{0 if abs(share) >= 0.1 else 1}f} %"
