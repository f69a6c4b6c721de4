"""Measure one point now on this machine, with real processes.

  zeroscale run
  zeroscale run model=mt5_small engine=zero3 batch.micro=2

The run uses the GPUs of this machine or, without GPUs, two processes on the CPU. devices_per_node
sets another number of devices or processes. On a CPU, the precision, sequence lengths and
measurement protocol of the smoke study are used unless you set them, so that a run takes less than
a minute. The command prints the keys that it set in this way.

If the predicted memory is more than 1.2 times the memory that is available, the run is refused,
because on a CPU it would use all memory of this machine. --no-prune starts it nevertheless.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench import api, engines
from bench.cli import options
from bench.core import store, terminal
from bench.core.errors import Interrupted, NoPrediction, UserError
from bench.core.formatting import describe_result, format_interval, format_number
from bench.core.record import RunRecord
from bench.core.spec import Parallel, RunSpec
from bench.measure import environment

if TYPE_CHECKING:
    from bench.sweep.forecast import MemoryForecast
    from bench.sweep.prediction import Prediction

STUDY = "adhoc"


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_points(parser)
    options.add_study_name(parser, STUDY)
    help_text = "also start a run whose predicted memory is far more than this machine has"
    parser.add_argument("--no-prune", action="store_true", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 if the run ended `ok`. A dry run starts nothing and returns 0."""
    busy = options.BusyWarning()
    made = api.point(args.overrides, study=args.study, config_dir=args.config_dir)
    if args.dry_run and args.json:
        print(options.format_point_json(made.composed))
        return 0
    # These overrides include the defaults chosen for a CPU.
    (predicted,) = api.predict(overrides=made.requested.circumstance.overrides, config_dir=args.config_dir)
    if not args.json:
        options.print_chosen(made.chosen)
        print(options.format_compact_point(made.composed), flush=True)
        try:
            lines = list_predictions(predicted)
        except NoPrediction as unknown:
            lines = [f"no prediction: {unknown}"]
        if args.dry_run or any("does not fit" in line for line in lines):
            print("\n".join(terminal.wrap(line, 4) for line in lines), flush=True)
        for line in list_learning_notes(made.composed.spec):
            print(terminal.wrap(line, 4), flush=True)
    if args.dry_run:
        return 0
    if not args.no_prune:
        check_far_out(predicted)
    busy.print(made.requested.circumstance.launcher)
    with terminal.progress(quiet=args.json) as follow:
        try:
            folder, record = api.measure(made, results=args.results, follow=follow)
        except Interrupted as interruption:
            print("\n".join(_describe_interruption(interruption)), file=sys.stderr)
            raise
    record, verified = _compare_with_reference(record, folder)
    given = [*options.list_given_folders(args), *([] if args.study == STUDY else ["--study", args.study])]
    if args.json:
        print(record.model_dump_json(indent=1, by_alias=True))
        # Standard output is the record alone, which has the losses but no paths.
        for line in _describe_saved(record, folder):
            print(line, file=sys.stderr)
    else:
        lines = format_answer(record, folder, args.overrides, given, verified=verified)
        print("\n".join([describe_result(record), *lines]))
    return 0 if record.outcome.kind == "ok" else 1


def _compare_with_reference(record: RunRecord, folder: Path) -> tuple[RunRecord, bool]:
    """Compare a run with the reference runs in its study's folder. Return the record, with the outcome `invalid` if the
    losses or gradient norms deviate, and True if a reference run was found."""
    if record.outcome.kind != "ok":
        return record, False
    from analysis import results  # here: pandas takes longer to import than most commands to run

    found = results.read([folder.parents[1]])
    place = found.list_places().get(folder)
    if place is None:
        return record, False
    return found.record(place), "unverified" not in found.table["flags"][place].split()


def _describe_interruption(interruption: Interrupted) -> list[str]:
    """Return lines with the outcome of an interrupted run, the steps that it had made, and how to run it again."""
    again = "next: repeat the same command, which starts a new run"
    for folder in interruption.args:
        outcome = store.read_record(folder / store.RECORD).outcome
        steps = [rank["step"] for rank in outcome.evidence.get("ranks", ()) if rank["step"] >= 0]
        made = f" at step {min(steps)}" if steps else " before its first step"
        return [f"{outcome.kind}: {outcome.reason}{made}", again]
    return [again]


def find_memory(predicted: "Prediction") -> "tuple[MemoryForecast, int | None, str] | None":
    """Return the predicted memory of a run on this machine, the bytes that the run may use (None if unknown), and a
    text that names the memory, such as `of the device`. Return None if there is no prediction."""
    from bench.sweep.forecast import MemoryForecast

    if predicted.memory is None:
        return None
    (low, high), room, where = predicted.memory.device, predicted.point.composed.machine.memory_bytes, "of the device"
    if room is None and predicted.device == "cpu" and (host := predicted.host()):
        # On a CPU all ranks share the host's memory, and each process uses memory in addition to its tensors.
        low, high, where = host.low, host.high, "of this machine, for all ranks"
        room = environment.read_host_memory_bytes()
    return MemoryForecast(low_bytes=low, high_bytes=high, tensor_bytes=0), room, where


def check_far_out(predicted: "Prediction") -> None:
    """Raise UserError if a run is predicted to exceed the memory by a wide margin. A sweep skips a point by the same
    margin. On a CPU, the run would use all memory of the machine until the kernel ends processes."""
    from bench.sweep.forecast import FAR_OUT_FACTOR

    found, spec = find_memory(predicted), predicted.point.composed.spec
    # Compiled code keeps fewer tensors for the backward pass than predicted.
    if found is None or spec.model.compile != "none":
        return
    needed, room, where = found
    if room is not None and needed.low_bytes > FAR_OUT_FACTOR * room:
        far_more = f"far more than the {format_number(room / 1e9)} GB {where.partition(',')[0]}"
        rule = f"needs at least {format_number(needed.low_bytes / 1e9)} GB, {far_more}"
        remedy = "choose a smaller model, or add --no-prune to start the run nevertheless"
        raise UserError(f"model={spec.model.name}", rule, remedy)


def list_learning_notes(spec: RunSpec) -> list[str]:
    """Return a message for each key of `spec.learning` that has no effect, or another effect than in a sweep."""
    learning, found = spec.learning, []
    if learning.checkpoint_every is not None:
        rule = "if the run is interrupted, `zeroscale sweep` with the same settings continues it; `resume` does not"
        found.append(f"learning.checkpoint_every={learning.checkpoint_every}: {rule}")
    every, end = learning.evaluate_every, learning.end_tokens
    if every is not None and end is not None and spec.count_steps(every) >= spec.count_steps(end):
        rule = f"has no effect, because the training ends after {spec.count_steps(end) * spec.tokens_per_step:,} tokens"
        found.append(f"learning.evaluate_every={every} {rule}; set fewer tokens")
    return found


def list_predictions(predicted: "Prediction") -> list[str]:
    """Return lines with the predicted memory and step time of a point, or the reason why they are unknown. Raise
    NoPrediction if the engine or the model family does not describe its costs."""
    from bench.predict.workload import describe_parameters

    found = find_memory(predicted)
    if found is None:
        return [f"no prediction: {predicted.memory_unknown}"]
    needed, room, where = found
    fits = needed.fits(room)
    span = "–".join(dict.fromkeys(format_number(n / 1e9) for n in (needed.low_bytes, needed.high_bytes)))
    known = "" if room is None else f" of {format_number(room / 1e9)} GB"
    memory = f"predicted memory: {span} GB{known} {where}: {'size unknown' if room is None else fits}"
    if fits == "does not fit":
        memory += f"; {predicted.describe_remedy() or 'choose a smaller model, batch.micro or sequence'}"
    time = f"no step time predicted: {predicted.time_unknown}"
    if step := predicted.time:
        time = f"predicted step time: {format_interval(step.step_s, step.low_s, step.high_s)} s"
    parameters = describe_parameters(predicted.point.composed.spec)
    return [*([f"parameters: {parameters}"] if parameters else []), memory, time]


def format_answer(
    record: RunRecord, folder: Path, overrides: Sequence[str], given: Sequence[str] = (), *, verified: bool = False
) -> list[str]:
    """Return the lines to print about a finished run.

    `folder` has the run's record. `overrides` and `given` are the overrides and the options of the user's command, such
    as --config-dir DIR; suggested commands repeat them. If `verified`, no reference run is suggested.
    """
    if record.outcome.kind != "ok":
        log, is_explained = folder / store.LOG, not {"refused", "reference"}.isdisjoint(record.outcome.evidence)
        return [str(folder), *([f"next: read the log {log}"] if log.exists() and not is_explained else [])]
    from analysis import flags
    from analysis.metrics import step_time
    from analysis.metrics.throughput import compute_tokens_per_s

    rate = compute_tokens_per_s(record)
    of = record.spec.sequence
    kinds = f" of {' and '.join(of)}" if len(of) > 1 else ""
    lines = [f"{rate:,.0f} tokens per second{kinds}, padding included"] if rate else []
    lines += [*_describe_trained(record), *_describe_parts(record)]
    lines += [*_describe_data(record), *_describe_evaluations(record)]
    lines += _describe_saved(record, folder)
    for title, raised, known in (
        ("flags", flags.list_flags(record), flags.FLAGS),
        ("notes", flags.list_notes(record), flags.NOTES),
    ):
        lines += [f"{title}: {', '.join(raised)}"] if raised else []
        lines += [terminal.wrap(f"{name}: the run {known[name].meaning}", 2) for name in raised]
    if "stall" in flags.list_notes(record):
        step, seconds = step_time.find_longest_step(record), step_time.compute_step_s_max(record)
        lines.append(f"  the longest step is number {step}, with {seconds:.4g} s")
    return [*lines, str(folder), *_list_next_commands(record, folder.parents[1], overrides, given, verified)]


def _describe_trained(record: RunRecord) -> list[str]:
    """Return a line with the number of trained parameters and of all parameters. Empty if all parameters are
    trained."""
    observed = record.observations
    if observed is None or observed.trainable_parameters in (None, observed.parameters):
        return []
    trained = observed.trainable_parameters
    return [f"{trained:,} of {observed.parameters:,} parameters are trained"]


def _describe_data(record: RunRecord) -> list[str]:
    """Return a line with the size of a training's data, the number of held-out documents or samples, and the number of
    epochs. Empty if the run is not a training, or if its data are a mixture of texts."""
    observed = record.observations
    data = (observed and observed.data) or {}
    each, corpus, held_out = (
        data.get("samples_per_epoch", data.get("sequences")),
        data.get("corpus"),
        data.get("held_out"),
    )
    if observed is None or not (observed.evaluations and each and corpus and held_out):
        return []
    unit = "documents" if "documents" in corpus else "samples"
    epochs = observed.evaluations[-1].step * record.spec.global_batch / each
    size = f"{corpus['tokens']:,} tokens in {corpus[unit]:,} {unit}, {held_out[unit]:,} of them held out"
    return [f"data: {size}; {format_number(epochs)} epochs"]


def _describe_evaluations(record: RunRecord) -> list[str]:
    """Return lines with the held-out loss and the quality of answers before and after a training. Empty if the run is
    not a training."""
    evaluations = (record.observations and record.observations.evaluations) or ()
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    tokens = f"after {last.step * record.spec.tokens_per_step:,} tokens"
    values = {"held-out loss": (first.loss, last.loss)}
    values |= {name: ((first.quality or {}).get(name), value) for name, value in (last.quality or {}).items()}
    texts = {name: ["not finite" if one is None else f"{one:.4g}" for one in pair] for name, pair in values.items()}
    return [f"{name.replace('_', ' ')}: {before} before, {after} {tokens}" for name, (before, after) in texts.items()]


def _describe_saved(record: RunRecord, folder: Path) -> list[str]:
    """Return a line with the path of the saved model or adapters. Empty if the run saved none."""
    name = store.MODEL if record.spec.adapter.rank is None else store.ADAPTER
    return [f"saved {name}: {folder / name}"] if (folder / name).is_dir() else []


def _describe_parts(record: RunRecord) -> list[str]:
    """Return lines with two values of each pipeline stage: the share of a step for which its ranks were idle, and its
    peak memory. Empty for a run without a pipeline."""
    from analysis.metrics.waiting import list_idle_shares

    observed, parts = record.observations, record.spec.parallel.pipeline
    idle = list_idle_shares(record)
    if observed is None or parts == 1 or not idle:
        return []
    ranks = record.spec.world_size // parts
    groups = [range(part * ranks, (part + 1) * ranks) for part in range(parts)]
    shares = ", ".join(f"{100 * statistics.mean(idle[rank] for rank in group):.0f}" for group in groups)
    lines = [f"ranks are idle for {100 * statistics.mean(idle):.0f} % of a step; by pipeline position: {shares} %"]
    # Ranks are numbered stage by stage: the first `ranks` ranks hold the first pipeline stage.
    peaks = [rank.peak_allocated_bytes for rank in observed.memory]
    if len(peaks) == record.spec.world_size and None not in peaks:
        most = ", ".join(f"{max(peaks[rank] or 0 for rank in group) / 2**20:.1f}" for group in groups)
        lines.append(f"peak memory by pipeline position: {most} MiB")
    return lines


def _list_next_commands(
    record: RunRecord, study: Path, overrides: Sequence[str], given: Sequence[str], verified: bool
) -> list[str]:
    """Return texts that each suggest a command as the next step. The first line of a text is the command's purpose. A
    reference run is suggested unless the run is `verified` or is itself a reference run."""
    page = Path("results/reports") / study.name
    commands = [(["zeroscale", "report", str(study), "--out", str(page)], "a report on all runs of this folder")]
    # `known` is None if the engine of an older record is no longer installed.
    known = engines.find_facts(record.spec)
    kept = _list_reference_overrides(record.spec, overrides)
    is_comparable = known is None or not (known.is_reference or known.deviates)
    if not verified and is_comparable and kept is not None:
        reference = ["zeroscale", "run", f"engine={engines.REFERENCE}", *kept, *given]
        # `analysis.flags.list_flags` knows this run alone, so the printed flags do not have `unverified`.
        purpose = "a reference run, to verify the losses; without it, tables have the flag unverified"
        commands.insert(0, (reference, purpose))
    return [options.format_next(what, words) for words, what in commands]


def _list_reference_overrides(spec: RunSpec, overrides: Sequence[str]) -> list[str] | None:
    """Return the overrides for the same point with the reference engine, in which every rank has a full copy of the
    model.

    With the reference engine, all ranks are data-parallel. A run with tensor or pipeline parallelism has fewer
    data-parallel ranks. Its reference run then has fewer micro-batches per rank, of the same size. Return None if the
    micro-batches of a step do not divide evenly among the ranks.
    """
    kept = [text for text in overrides if not text.startswith(("engine=", "engine."))]
    if spec.parallel == Parallel():
        return kept
    if spec.global_batch % (spec.batch.micro * spec.world_size):
        return None
    other = ("parallel.", "batch.accumulation=", "batch.global=")
    return [*(text for text in kept if not text.startswith(other)), f"batch.global={spec.global_batch}"]
