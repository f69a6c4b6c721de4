"""Number of trials that a search needs, and processor time of its proposals, in searches simulated with published step
times.

  python -m tests.benchmarks.search [--seeds 60] [--trials 120] [--samplers gp tpe] [--predictions off none]

The simulation uses 720 published step times of GPT on 2 to 8 A100, and their predictions. The step times come from
results/published/gpt_single_node_a100.csv and its held-out rows. Each model width has a search space (grid) of its own.
The points of a grid differ in the number of layers, the degrees of tensor, pipeline and data parallelism, micro-batch
and accumulation. The objective is the throughput per GPU, in layers × samples per second.

In each simulated search, every published step time is multiplied by a random factor. The 95 % interval of these factors
is as wide as the median 95 % interval of the runs in results/measured/two_cores.zip/step_time. The result of a search
is its number of trials until it tries a point whose published throughput is within 2 % of the grid's best.

Two thirds of the published step times were used to develop the prediction formulas, so the predictions are unusually
good. Therefore every sampler is also run with worse predictions. With `off`, predictions are wrong by a random factor
for each technique (log-normal, standard deviation 0.5). With `rough`, predictions are also wrong by a random factor for
each point (standard deviation 0.3). With `none`, there are no predictions.

Two more benchmarks follow. The first simulates successive halving on recorded trainings. The second measures the
processor time of one proposal after 1,000 trials.
"""

import argparse
import csv
import importlib
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.core import store
from bench.core.errors import UserError
from bench.core.machine import Machine
from bench.core.quantities import MeasuredStep, RunQuantities, derive_quantities
from bench.core.spec import RunSpec
from bench.core.study import SAMPLERS, SearchSection
from bench.sweep.definition import SweepPoint, Trial
from bench.sweep.forecast import Forecast, StepForecast
from bench.sweep.policy import TrialResult
from bench.sweep.search.planning import build_proposer, build_sampler
from bench.sweep.search.space import CandidatePool, SearchSpace, format_key

RESULTS = Path(__file__).parents[2] / "results"
FILES = ("gpt_times.csv", "gpt_times_aside.csv")
WHAT = re.compile(
    r"width (?P<width>\d+), (?P<layers>\d+) layers, tensor (?P<tensor>\d+), pipeline (?P<pipeline>\d+), "
    r"data (?P<data>\d+), micro-batch (?P<micro>\d+) × (?P<accumulation>\d+)"
)
CLOSE = 0.02
TECHNIQUES = ("ddp", "tensor", "pipeline")
MACHINE = Machine(name="a100", device="cuda")
REPLAYED = ("gp", "tpe", "random")
PREDICTIONS = ("published", "off", "rough", "none")


class Row(NamedTuple):
    """A published step: the values of its layout, and its predicted and measured time in seconds per layer."""

    values: dict[str, Any]
    predicted_s: float
    measured_s: float

    @property
    def rate(self) -> float:
        """Throughput of the row's layout: layers × samples per second and GPU. The models of a grid differ in their
        number of layers, and a layer takes about the same work in each of them."""
        at = self.values
        gpus = at["tensor"] * at["pipeline"] * at["data"]
        return float(at["micro"] * at["accumulation"] * at["data"] / self.measured_s / gpus)


class Replay(NamedTuple):
    """Result of one search that was simulated with published step times."""

    close_after: int | None  # trials until one was close to the best; None if none was
    trials: int
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--trials", type=int, default=120, help="of a replay, at the most; random: all points")
    parser.add_argument("--samplers", nargs="*", default=REPLAYED, choices=SAMPLERS)
    parser.add_argument("--predictions", nargs="*", default=PREDICTIONS, choices=PREDICTIONS)
    parser.add_argument("--skip", nargs="*", default=(), choices=("steps", "trainings", "proposals"))
    args = parser.parse_args()
    if "steps" not in args.skip:
        compare_on_steps(args.samplers, args.predictions, args.seeds, args.trials)
    if "trainings" not in args.skip:
        compare_on_trainings(args.seeds)
    for sampler in SAMPLERS if "proposals" not in args.skip else ():
        print(f"a proposal by {sampler} at 1,000 trials of 2,000 points: {time_proposal(sampler):.3f} s", flush=True)


def compare_on_steps(samplers: Sequence[str], predictions: Sequence[str], seeds: int, trials: int) -> None:
    noise = read_noise()
    print(f"noise of a run: {100 * noise:.2g} %, half the width of the median interval of recorded runs")
    print(f"seeds 0 to {seeds - 1}")
    for width, rows in read_grids().items():
        close = sum(row.rate >= (1 - CLOSE) * max(one.rate for one in rows.values()) for row in rows.values())
        print(f"width {width}: {len(rows)} points, {close} of them within {100 * CLOSE:g} % of the best")
        for sampler in samplers:
            for given in predictions if sampler != "random" else ("none",):
                replays = [replay(rows, sampler, given, seed, noise, trials) for seed in range(seeds)]
                print(f"  {sampler:<7}{given:<10} {describe(replays, len(rows))}", flush=True)


def describe(replays: Sequence[Replay], points: int) -> str:
    """Summarise simulated searches of a grid of `points` points in one line of text. The line has two numbers of
    trials: until a point close to the best was tried, and until the search stopped."""
    found = sorted(one.close_after for one in replays if one.close_after is not None)
    middle, slow = (_find_quantile(found, len(replays), part) for part in (0.5, 0.95))
    share = "" if middle is None else f" ({100 * middle / points:.1f} % of the grid)"
    return (
        f"close after {middle or 'more'} trials{share}, in 95 % of replays after {slow or 'more'}, "
        f"not found in {100 * (1 - len(found) / len(replays)):.0f} %; ended after "
        f"{statistics.median(one.trials for one in replays):g}; "
        f"{statistics.mean(one.cpu_s / one.trials for one in replays):.3f} CPU s a proposal"
    )


def _find_quantile(found: list[int], replays: int, part: float) -> int | None:
    """Return the cost (trials or tokens) within which the fraction `part` of all simulated searches succeeded. `found`
    has the sorted costs of the successful searches. `replays` is the number of all searches. Return None if less than
    the fraction `part` of the searches succeeded."""
    place = math.ceil(part * replays) - 1
    return found[place] if place < len(found) else None


def read_noise() -> float:
    """Return the typical noise of a run: half the width of the 95 % interval of its median step time, divided by the
    step time. It is the median over recorded runs."""
    records = (store.read_record(path) for path in store.find_records([RESULTS / "measured/two_cores.zip/step_time"]))
    steps = (found.median for record in records if (found := derive_quantities(record)))
    return statistics.median((step.high_s - step.low_s) / step.s / 2 for step in steps if step.low_s and step.high_s)


def read_grids() -> dict[int, dict[str, Row]]:
    """Return the published steps by model width. The published steps of a width are a dict with one row for each
    layout. A key of this dict is a text with the values of the layout (see `format_key`)."""
    grids: dict[int, dict[str, Row]] = {}
    for name in FILES:
        with (RESULTS / "predictions" / name).open(newline="") as file:
            for line in csv.DictReader(file):
                match = WHAT.fullmatch(line["what"])
                assert match, line["what"]
                values = {key: int(text) for key, text in match.groupdict().items()}
                width, layers = values.pop("width"), values["layers"]
                row = Row(values, float(line["predicted"]) / layers, float(line["truth"]) / layers)
                grids.setdefault(width, {})[format_key(values)] = row
    return grids


def replay(rows: Mapping[str, Row], sampler: str, given: str, seed: int, noise: float, most: int) -> Replay:
    """Simulate a search on published step times and return its result. `rows` has the published steps by layout (see
    `read_grids`). Step times are multiplied by a random factor, whose 95 % interval is ± `noise`. `given` selects the
    predictions (see PREDICTIONS). The search has at most `most` trials, except for random search, which stops after its
    first point close to the best."""
    generator, best = random.Random(seed), max(row.rate for row in rows.values())
    measured = {key: row.measured_s * generator.lognormvariate(0, noise / 1.96) for key, row in rows.items()}
    factors = {technique: generator.lognormvariate(0, 0.5) for technique in TECHNIQUES}
    rough = {key: generator.lognormvariate(0, 0.3) for key in rows}
    fields = next(iter(rows.values())).values
    section = SearchSection.model_validate(
        {
            "objective": "samples_per_node_hour",
            "space": {field: sorted({row.values[field] for row in rows.values()}) for field in fields},
            "seed": seed,
            "sampler": sampler,
            "trials": len(rows) if sampler == "random" else min(most, len(rows)),
        }
    )

    def build(values: Mapping[str, Any]) -> SweepPoint:
        row = rows.get(format_key(values))
        if row is None:
            raise UserError(format_key(values), "was not published", "try another")
        factor = factors[find_technique(values)] if given in ("off", "rough") else 1.0
        factor *= rough[format_key(values)] if given == "rough" else 1.0
        return build_point(values, None if given == "none" else factor * row.predicted_s)

    pool = CandidatePool(section, _RowSpace(section, rows), build, MACHINE)
    proposer = build_sampler(pool)
    results: list[TrialResult] = []
    close_after, begin = None, time.process_time()
    while proposal := proposer.propose(results):
        key = proposal.point.config_id
        results.append(build_result(len(results), proposal.point, proposal.values, measured[key], noise))
        if close_after is None and rows[key].rate >= (1 - CLOSE) * best:
            close_after = len(results)
            if sampler == "random":
                break
    return Replay(close_after, len(results), time.process_time() - begin)


class _RowSpace(SearchSpace):
    """Search space that has only the layouts with a published step time as candidates, because not every combination of
    the fields' values was published. `rows` has one published step per layout."""

    def __init__(self, section: SearchSection, rows: Mapping[str, Row]) -> None:
        super().__init__(section)
        self._rows = rows

    def list_candidates(self, seed: int, most: int = 0) -> list[dict[str, Any]]:
        return [row.values for row in self._rows.values()]

    def list_all(self, most: int = 0) -> list[dict[str, Any]]:
        return self.list_candidates(0)


def find_technique(values: Mapping[str, Any]) -> str:
    """Return the name of the technique that divides the model among the ranks, from the values of a published row. The
    name is `ddp` if the model is not divided."""
    return "pipeline" if values["pipeline"] > 1 else "tensor" if values["tensor"] > 1 else "ddp"


def build_point(values: Mapping[str, Any], predicted_s: float | None) -> SweepPoint:
    """Return a sweep's point for a row of published values. If `predicted_s` is not None, it is the point's predicted
    step time. The point has one node for each GPU of the row. The point's engine has the name of the row's technique.
    """
    gpus = values["tensor"] * values["pipeline"] * values["data"]
    spec = {
        "model": {"name": "gpt", "family": "gpt", "shape": {}},
        "engine": {"name": find_technique(values), "backend": "pipeline"},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": values["micro"], "accumulation": values["accumulation"]},
        "parallel": {"tensor": values["tensor"], "pipeline": values["pipeline"]},
        "nodes": gpus,
    }
    step = None if predicted_s is None else StepForecast(low_s=predicted_s, s=predicted_s, high_s=predicted_s)
    plain = RunSpec.model_validate(spec).model_dump(mode="json", by_alias=True)
    return build_spec_point(format_key(values), plain, gpus, Forecast(step=step))


def build_spec_point(
    config_id: str, spec: dict[str, Any], nodes: int = 1, forecast: Forecast | None = None
) -> SweepPoint:
    return SweepPoint(
        config_id=config_id,
        line="",
        machine="a100",
        nodes=nodes,
        devices_per_node=1,
        time_limit_min=None,
        forecast=forecast,
        overrides=(),
        spec=spec,
    )


def build_result(number: int, point: SweepPoint, values: Mapping[str, Any], step_s: float, noise: float) -> TrialResult:
    """Return the result of a trial that ended `ok` with the step time `step_s`. The interval of the step time is
    `step_s` × (1 ± `noise`)."""
    batch = point.spec["batch"]
    step = MeasuredStep(step_s, step_s * (1 - noise), step_s * (1 + noise))
    quantities = RunQuantities(step, step, batch["global"], None, point.nodes)
    return TrialResult(Trial(number=number, point=point, values=dict(values)), "ok", quantities)


class Training(NamedTuple):
    """A recorded training: the values in which it differs from the other trainings, its spec, and a dict with its
    validation loss after each number of tokens."""

    values: dict[str, Any]
    spec: dict[str, Any]
    losses: dict[int, float]


class Halving(NamedTuple):
    """Result of one simulated search by successive halving."""

    tokens_to_best: int | None  # tokens trained until the best training was complete; None if it was never completed
    tokens: int  # tokens trained in the whole search


def compare_on_trainings(seeds: int) -> None:
    """Print the number of training tokens that successive halving needs until the best recorded training is complete.
    Tokens of all trainings are counted. The project's method is compared with Optuna's pruners. With each seed, the
    trainings are tried in another random order."""
    trainings = read_trainings()
    whole = max(trainings[0].losses)
    rungs = [tokens for tokens in trainings[0].losses if whole % tokens == 0 and (whole // tokens).bit_count() == 1]
    print(f"{len(trainings)} trainings of {whole:,} tokens; rungs at {', '.join(f'{one:,}' for one in rungs)}")
    ways: dict[str, Callable[[list[Training]], Halving]] = {
        "rungs": lambda ordered: replay_rungs(ordered, rungs, 1),
        "rungs, brackets 3": lambda ordered: replay_rungs(ordered, rungs, 3),
        "SuccessiveHalvingPruner": lambda ordered: replay_pruner(ordered, rungs, "SuccessiveHalvingPruner"),
        "HyperbandPruner": lambda ordered: replay_pruner(ordered, rungs, "HyperbandPruner"),
        "all to the end": lambda ordered: replay_pruner(ordered, rungs, "NopPruner"),
    }
    for way, halve in ways.items():
        begin = time.process_time()
        replays = [halve(random.Random(seed).sample(trainings, len(trainings))) for seed in range(seeds)]
        found = sorted(one.tokens_to_best for one in replays if one.tokens_to_best is not None)
        middle, slow = (_find_quantile(found, seeds, part) for part in (0.5, 0.95))
        print(
            f"  {way:<24}best after {(middle or math.nan) / 1e6:.2f} million tokens, in 95 % after "
            f"{(slow or math.nan) / 1e6:.2f}; not trained to its end in {100 * (1 - len(found) / seeds):.0f} %; "
            f"{statistics.median(one.tokens for one in replays) / 1e6:.2f} million in all; "
            f"{(time.process_time() - begin) / seeds:.3f} CPU s a search",
            flush=True,
        )


def read_trainings() -> list[Training]:
    """Return the recorded trainings, all of which ran for their full number of tokens."""
    found = []
    for path in store.find_records([RESULTS / "measured/search_learning/whole"]):
        record = store.read_record(path)
        spec, tokens = record.spec, record.spec.global_batch * record.spec.tokens_per_sample
        assert record.observations
        losses = {one.step * tokens: one.loss for one in record.observations.evaluations if one.step}
        values = {"optimizer.lr": spec.optimizer.lr, "learning.warmup_tokens": spec.learning.warmup_tokens}
        found.append(Training(values, spec.model_dump(mode="json", by_alias=True), losses))
    return found


def replay_rungs(ordered: Sequence[Training], rungs: Sequence[int], brackets: int) -> Halving:
    """Simulate the project's successive halving on recorded trainings, and return the result. Trainings are compared
    when they have been trained for one of the numbers of tokens in `rungs`. With several `brackets` (Hyperband), some
    trainings skip the first comparisons. Surviving trainings resume from their checkpoints, so no tokens are trained
    twice."""
    whole = rungs[-1]
    section = SearchSection.model_validate(
        {
            "objective": "validation_loss",
            "space": {"training": list(range(len(ordered)))},
            "sampler": "grid",
            "trials": 1_000,
            "rungs": {"least": rungs[0], "factor": 2, "brackets": brackets},
        }
    )

    def build(values: Mapping[str, Any]) -> SweepPoint:
        training, stop = ordered[values["training"]], values.get("learning.stop_after")
        learning = training.spec["learning"] | {"tokens": whole, "stop_after": stop}
        return build_spec_point(format_key(values), training.spec | {"learning": learning})

    proposer = build_proposer(CandidatePool(section, SearchSpace(section), build, MACHINE))
    best = min(ordered, key=lambda one: one.losses[whole])
    results, trained, tokens, to_best = list[TrialResult](), dict[int, int](), 0, None
    while proposal := proposer.propose(results):
        number = proposal.values["training"]
        end = proposal.point.spec["learning"]["stop_after"] or whole
        tokens += end - trained.get(number, 0)
        trained[number] = end
        if ordered[number] is best and end == whole:
            to_best = tokens
        trial = Trial(number=len(results), point=proposal.point, values=proposal.values)
        quantities = RunQuantities(
            MeasuredStep(0.1), MeasuredStep(0.1), 1, None, 1, validation_loss=ordered[number].losses[end]
        )
        results.append(TrialResult(trial, "ok", quantities))
    return Halving(to_best, tokens)


def replay_pruner(ordered: Sequence[Training], rungs: Sequence[int], name: str) -> Halving:
    """Simulate a search on the recorded trainings with Optuna's pruner `name`, and return the result. The pruner can
    end a training early when it has been trained for one of the numbers of tokens in `rungs`. Such a training is never
    resumed."""
    whole, unit = rungs[-1], rungs[0]
    optuna: Any = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds = {
        "SuccessiveHalvingPruner": lambda: optuna.pruners.SuccessiveHalvingPruner(1, 2),
        "HyperbandPruner": lambda: optuna.pruners.HyperbandPruner(1, whole // unit, 2),
        "NopPruner": optuna.pruners.NopPruner,
    }
    study = optuna.create_study(study_name="replay", pruner=kinds[name]())
    best, tokens, to_best = min(ordered, key=lambda one: one.losses[whole]), 0, None
    for training in ordered:
        trial, trained = study.ask(), 0
        for end in rungs:
            tokens, trained = tokens + end - trained, end
            trial.report(training.losses[end], end // unit)
            if trial.should_prune():
                break
        pruned = trained < whole or trial.should_prune()
        if training is best and trained == whole:
            to_best = tokens
        state = optuna.trial.TrialState.PRUNED if pruned else optuna.trial.TrialState.COMPLETE
        study.tell(trial, training.losses[trained], state=state) if not pruned else study.tell(trial, state=state)
    return Halving(to_best, tokens)


def time_proposal(sampler: str) -> float:
    """Return the processor seconds that a sampler needs to propose the next point after 1,000 trials. It is the median
    of five proposals after a warm-up."""
    space = {"layers": list(range(1, 21)), "micro": list(range(1, 21)), "accumulation": [1, 2, 3, 4, 5]}
    section = SearchSection.model_validate(
        {"objective": "samples_per_s", "space": space, "sampler": sampler, "trials": 5_000, "gain": 0}
    )
    generator = random.Random(0)

    def build(values: Mapping[str, Any]) -> SweepPoint:
        return build_point({"tensor": 1, "pipeline": 1, "data": 1, **values}, generator.uniform(1, 2))

    pool = CandidatePool(section, SearchSpace(section), build, MACHINE)
    proposer = build_proposer(pool)
    chosen = random.Random(1).sample(pool.list_all(), 1_000)
    results = [
        build_result(number, one.point, one.values, generator.uniform(1, 2), 0.01) for number, one in enumerate(chosen)
    ]
    times = []
    for _ in range(6):
        begin = time.process_time()
        assert proposer.propose(results)
        times.append(time.process_time() - begin)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
