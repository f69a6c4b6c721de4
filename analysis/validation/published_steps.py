"""Published training steps of several sources compared with predictions, by class of software (how much its kernels are
optimized).

`results/published/published_steps.csv` gives the configuration of each step as overrides of config keys. Some constants
of the predictions, such as the pace of a class of software, were chosen to fit published step times. A seeded random
draw held out some sources before any of these constants was chosen. The step times of the held-out sources were not
used for the choice.
"""

import functools
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import yaml

from analysis.claims.sources import read_published
from analysis.table import group_by
from analysis.validation import PredictionComparison
from analysis.validation.published_runs import PublishedRun, PublishedStep, compare_published, read_nemo_runs
from bench.core.files import find_conf_folder
from bench.core.machine import Machine
from bench.core.spec import RunSpec
from bench.predict.workload import SOFTWARE, USUAL

SEED, SET_ASIDE = 20260, 2
"""Seed of the random draw of held-out sources, and the number of held-out sources. The draw of held-out traces uses
the same seed."""
DRAWN_FROM = ("BigScience BLOOM", "Databricks MI250", "IBM fms-fsdp", "MosaicML llm-foundry", "torchtitan")
"""Sources that were known at the time of the draw. Sources that came later are not held out: constants were chosen on
them."""


class SourceErrors(NamedTuple):
    """Errors of the predicted step times for one published source, in percent, and the number of step times that this
    source published."""

    steps: int
    mean: float  # mean of absolute errors
    bias: float  # mean of signed errors
    inside: float  # percent of steps in the predicted interval


def compare() -> list[PredictionComparison]:
    """Return three comparisons of predicted with published step times. The first is for held-out sources, the second is
    by cross-validation, and the third is for the sources on which constants were chosen. Cross-validation predicts each
    source with a constant chosen on the other sources of its class of software."""
    runs, aside = read_runs(), draw_sources_aside()
    blind, chosen = ([run.predict_step() for run in runs if (run.source in aside) is away] for away in (True, False))
    left_out = predict_left_out([run for run in runs if run.software.name != USUAL.name])
    return [
        compare_published("published_steps_aside", blind, sources=" and ".join(sorted(aside))),
        compare_published("published_steps_left_out", left_out),
        compare_published("published_steps", chosen),
    ]


def list_sources() -> Iterator[tuple[str, str, str, SourceErrors]]:
    """Yield the errors of the predictions for each source and each way of prediction, as a tuple: source, class of
    software (how much its kernels are optimized), way and errors.

    A source is predicted in three ways. The first uses its class of software. The second uses the same class, but with
    a pace (a factor on predicted times) that was fitted to the other sources of this class, without the source itself.
    The third uses the class `usual`, the default of `predict`. Sources of the class `usual` have the first way only.
    """
    runs = read_runs()
    classed = [run for run in runs if run.software.name != USUAL.name]
    ways = {
        "its class": [run.predict_step() for run in runs],
        "its class, the source left out": predict_left_out(classed),
        "usual": [run.predict_step(USUAL) for run in classed],
    }
    for way, found in ways.items():
        for source, errors in summarise_sources(found).items():
            yield source, next(run.software.name for run in runs if run.source == source), way, errors


def draw_sources_aside() -> frozenset[str]:
    """Return the names of the held-out sources, drawn at random with a fixed seed. The published step times of these
    sources are only compared with predictions. No constant of the predictions was chosen on these times."""
    return frozenset(random.Random(SEED).sample(DRAWN_FROM, SET_ASIDE))


def read_runs() -> list[PublishedRun]:
    """Return all published runs with a step time. They come from `results/published/published_steps.csv`, where
    overrides of config keys describe a run, and from NVIDIA's two tables of T5-3B and mT5-3B. If a source prints
    several runs of one configuration, their labels are numbered."""
    runs = [
        PublishedRun(
            f"{row['source']}: {row['model']} on {row['gpus']} {row['gpu']}, {row['sharding']}, "
            f"{_describe_batch(row['overrides'])}",
            *build_question(row["overrides"]), SOFTWARE[row["software"]], float(row["step_s"]), row["source"],
        )
        for row in read_published("published_steps").rows
    ]  # fmt: skip
    for run in (*read_nemo_runs("t5_3b"), *read_nemo_runs("mt5_3b")):
        runs.append(run._replace(what=f"{run.source}: {run.what}"))
    seen: Counter[str] = Counter()
    for place, run in enumerate(runs):
        seen[run.what] += 1
        if seen[run.what] > 1:
            runs[place] = run._replace(what=f"{run.what}, run {seen[run.what]}")
    return runs


def predict_left_out(runs: Sequence[PublishedRun]) -> list[PublishedStep]:
    """Return each step with a prediction that uses no step of its own source. The pace of its class of software, a
    factor on predicted times, comes from the other sources of the class."""
    unpaced: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        ratio = run.predict_step(run.software._replace(pace=1.0)).predicted_s / run.step_s
        unpaced.setdefault((run.software.name, run.source), []).append(ratio)
    ratios = {key: statistics.geometric_mean(steps) for key, steps in unpaced.items()}
    found = []
    for run in runs:
        others = [ratio for key, ratio in ratios.items() if key[0] == run.software.name and key[1] != run.source]
        found.append(run.predict_step(run.software._replace(pace=1 / statistics.geometric_mean(others))))
    return found


def summarise_sources(found: Sequence[PublishedStep]) -> dict[str, SourceErrors]:
    """Return the errors of the predictions by name of the source."""
    summaries = {}
    for source, steps in group_by(found, lambda one: one.run.source).items():
        errors, inside = [one.error for one in steps], 100 * statistics.fmean(one.inside for one in steps)
        summaries[source] = SourceErrors(
            len(steps), statistics.fmean(map(abs, errors)), statistics.fmean(errors), inside
        )
    return summaries


def build_question(overrides: str) -> tuple[RunSpec, Machine]:
    """Compose the spec and the machine of a run from overrides, without Hydra. For the same overrides,
    `zeroscale predict` composes the same spec and machine.

    Overrides select files of config groups (`model=…`) and set single keys (`batch.micro=…`). A test compares the
    result with that of Hydra. Hydra would take a minute for all published runs.
    """
    given = _split(overrides)
    groups = {name: dict(_read_group(name, given.pop(name))) for name in ("model", "engine", "machine")}
    plain: dict[str, Any] = {
        "model": {**groups["model"], "shape": dict(groups["model"]["shape"])},
        "data": {"name": "synthetic", "source": "synthetic"},
    }
    options, machine = {k: v for k, v in groups["engine"].items() if k not in ("name", "backend")}, groups["machine"]
    for key, text in given.items():
        first, *rest = key.split(".")
        where = {"engine": options, "machine": machine}.get(first, plain)
        path = rest if first in ("engine", "machine") else [first, *rest]
        for name in path[:-1]:
            where[name] = dict(where.get(name, {}))  # a copy, since the group file is cached
            where = where[name]
        where[path[-1]] = yaml.safe_load(text) if "e" not in text or not text[0].isdigit() else float(text)
    plain["engine"] = {"name": groups["engine"]["name"], "backend": groups["engine"]["backend"], "options": options}
    plain["precision"] = "bf16"
    return RunSpec.model_validate(plain), Machine.model_validate(machine)


def _split(overrides: str) -> dict[str, str]:
    return dict(text.removeprefix("+").split("=", 1) for text in overrides.split())


@functools.cache
def _read_group(group: str, name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((find_conf_folder() / group / f"{name}.yaml").read_text(encoding="utf-8")))


def _describe_batch(overrides: str) -> str:
    given = _split(overrides)
    return f"{given['sequence.tokens']} tokens, micro-batch {given['batch.micro']} × {given['batch.accumulation']}"
